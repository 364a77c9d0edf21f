"""The critic and the reward model: a kit's backbone with a value head instead of its output layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from lmm_r1.errors import UserError
from lmm_r1.host.models import GatheredParameters, Init
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import read_tensors
from lmm_r1.models.actor import KitModule
from lmm_r1.models.adapters import merged_state_dict
from lmm_r1.models.loading import DTYPES, LoadSettings, is_sharded, load_model
from lmm_r1.models.packed.packing import ModelSample, stacked
from lmm_r1.models.packed.sequence_parallel import running

_MODEL = "model."  # in front of the names of the backbone's weights in the module's own state dict


class KitValueModel(KitModule, torch.nn.Module):
    """A value for every response token (critic), or one for every sample, at its last token (reward model).

    Replaces the model of OpenRLHF's `get_llm_for_sequence_regression`. It has no output layer, computes no logits, and
    keeps only the hidden states of the last layer.
    """

    saves_itself = True

    def __init__(
        self,
        path: str,
        model_type: Literal["critic", "reward"],
        settings: LoadSettings,
        *,
        value_head_prefix: str,
        normalize_reward: bool = False,
        ds_config: Mapping[str, Any] | None = None,
        empty: bool = False,
    ) -> None:
        """Args: see `load_model`; `value_head_prefix` names a value head that the checkpoint's config does not name."""
        super().__init__()
        checkpoint = Checkpoint(path, trust_remote_code=settings.trust_remote_code)
        checkpoint.kit.check("critic", flag="a value head")
        with _head_expected(checkpoint, default=value_head_prefix):
            loaded = load_model(path, settings, ds_config=ds_config, empty=empty)
        drop_output_layer(loaded.model)
        self.model = loaded.model
        self._note(loaded)
        # The name in the checkpoint; the module here is always `head`.
        self.head_name = head_name(self.model_config, default=value_head_prefix)
        weight = None
        if not empty:
            weight = stored_weight(
                path, name=self.head_name, config=self.model_config, required=model_type == "reward"
            )
        self.head = make_head(
            self.model_config, weight=weight, dtype=DTYPES[settings.param_dtype], ds_config=ds_config
        )
        self.normalize_reward = normalize_reward
        # OpenRLHF writes them into the config of the reward models that it trains.
        self.mean: float = getattr(self.model_config, "mean", 0.0)
        self.std: float = getattr(self.model_config, "std", 1.0)

    def forward(
        self,
        samples: Sequence[ModelSample],
        *,
        of_samples: bool = False,
        return_output: bool = False,
        ring_attn_group: dist.ProcessGroup | None = None,
    ) -> Any:
        """Return a value per response token, (B, A), or a reward per sample, (B,).

        The value in column t is that of the token before the one whose log-prob stands in column t of the policy's.

        Args:
            of_samples: return rewards.
            return_output: also return the backbone's output.
            ring_attn_group: the ranks that get the same samples and share their tokens; every rank returns all values.
        """
        wanted = stacked(samples, lambda sample: sample.last if of_samples else sample.loss_mask)
        run = self._run_packed if self.packing_samples else self._run_padded
        values, output = run(samples, wanted=wanted, group=ring_attn_group)
        if of_samples:
            values = values.sum(dim=1)
            values = values if self.training else self._normalized(values)
        else:
            values = self._normalized(values) * wanted.to(values)
        return (values, output) if return_output else values

    def _normalized(self, values: torch.Tensor) -> torch.Tensor:
        return (values - self.mean) / self.std if self.normalize_reward else values

    def _run_padded(
        self, samples: Sequence[ModelSample], *, wanted: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, Any]:
        """Return the values of wanted tokens, (B, A), 0 elsewhere, and the backbone's output."""
        inputs = self._padded_inputs(samples, group=group)
        output = self.kit.backbone_of(self.model)(**inputs, use_cache=False)
        places = wanted.to(inputs["input_ids"].device).nonzero(as_tuple=True)
        values = self.head(output.last_hidden_state[places])
        return values.new_zeros(wanted.shape).index_put(places, values), output

    def _run_packed(
        self, samples: Sequence[ModelSample], *, wanted: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, Any]:
        """As `_run_padded`, on a packed sequence, whose tokens the ranks of `group` share."""
        share, inputs = self._packed_inputs(samples, wanted=wanted, group=group)
        with running(share, model=self.model, kit=self.kit):
            output = self.kit.backbone_of(self.model)(**inputs, use_cache=False)
        values = share.gather(self.head(output.last_hidden_state[0, share.sources]))  # (K,)
        return share.sequence.scatter(values), output

    def save(self, folder: str | Path, *, processor: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Write a checkpoint that loads again as a critic or reward model, with adapters merged in.

        Args:
            weights: the whole state dict of this module, which itself may hold only shards.
        """
        inner = {name.removeprefix(_MODEL): value for name, value in weights.items() if name.startswith(_MODEL)}
        head = {f"{self.head_name}.weight": weights["head.weight"]}
        self.model.config.value_head_prefix = self.head_name
        self.model.save_pretrained(folder, state_dict={**merged_state_dict(self.model, inner), **head})
        processor.save_pretrained(Path(folder))


@contextmanager
def _head_expected(checkpoint: Checkpoint, *, default: str) -> Iterator[None]:
    """Let transformers report missing and unexpected weights, except the output layer and the value head."""
    model_class = checkpoint.kit.model_class_of(checkpoint.config)
    head = re.escape(head_name(checkpoint.config, default=default))
    expected = {
        "_keys_to_ignore_on_load_missing": r"(^|\.)lm_head\.",
        "_keys_to_ignore_on_load_unexpected": rf"(^|\.){head}\.weight$",
    }
    before = {name: getattr(model_class, name) for name in expected}
    for name, pattern in expected.items():
        setattr(model_class, name, [*(before[name] or ()), pattern])
    try:
        yield
    finally:
        for name, patterns in before.items():
            setattr(model_class, name, patterns)


def drop_output_layer(model: PreTrainedModel) -> None:
    """Remove a model's output layer; embeddings that share its weight stay."""
    output_layer = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is output_layer)
    parent, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(parent), own_name, None)


class ValueHead(torch.nn.Linear):
    """Gives one number per hidden state, in single precision or better."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values (...) of hidden states (..., H)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(dtype), self.weight.to(dtype)).squeeze(-1)


def head_name(config: PretrainedConfig, *, default: str) -> str:
    """Return the name of a checkpoint's value head, from its config (OpenRLHF writes it there) or the default."""
    return getattr(config, "value_head_prefix", default)


def make_head(
    config: PretrainedConfig, *, weight: torch.Tensor | None, dtype: torch.dtype, ds_config: Mapping[str, Any] | None
) -> ValueHead:
    """Return the head with the stored weight (1, H), or with a random one of OpenRLHF's size; sharded under ZeRO-3."""
    size = config.get_text_config().hidden_size
    if weight is None:
        weight = torch.empty(1, size).normal_(mean=0.0, std=1 / (size + 1))
    if not is_sharded(ds_config):
        head = ValueHead(size, dtype=dtype)
        head.weight.data.copy_(weight)
        return head
    with Init(config_dict_or_path=ds_config):
        head = ValueHead(size, dtype=dtype)
    # Every rank has drawn a weight of its own: that of rank 0 counts.
    with GatheredParameters([head.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            head.weight.data.copy_(weight)
    return head


def stored_weight(path: str, *, name: str, config: PretrainedConfig, required: bool) -> torch.Tensor | None:
    """Return the weight (1, H) of a checkpoint's value head, None where it has none; `path` is a folder or a hub name.

    Raises UserError for a head that gives something else than one value per token, and where a required one is missing.
    """
    key = f"{name}.weight"
    weight = read_tensors(path, lambda stored: stored == key).get(key)
    if weight is None and required:
        raise UserError(
            f"{path}: this checkpoint has no value head (no weight {name}.weight); give a trained reward model, or the "
            "name of its head with --ds.value_head_prefix"
        )
    expected = (1, config.get_text_config().hidden_size)
    if weight is not None and tuple(weight.shape) != expected:
        raise UserError(
            f"{path}: {name}.weight has the shape {tuple(weight.shape)}, and a value head has {expected}; "
            "name another layer with --ds.value_head_prefix or take another checkpoint"
        )
    return weight
