"""A run's models, which take everything architectural from the kit: OpenRLHF's `Actor`, critics and reward models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from lmm_r1 import cpu
from lmm_r1.errors import UserError
from lmm_r1.host.models import Actor, GatheredParameters, HostedModel, Init
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.lmm_kits.checkpoint import read_tensors, settle_ends
from lmm_r1.models.adapters import ADAPTER_FOLDER, adapted_layers, merged_state_dict, save_adapter
from lmm_r1.models.distillation import Distillation, DistilledOutcomes, KeptInputs, TeacherTokens, WantedTokens
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.models.load_balancing import Routers, routers_of
from lmm_r1.models.loading import (
    DTYPES,
    LoadedModel,
    LoadSettings,
    check_buffers,
    enable_checkpointing,
    is_sharded,
    load_model,
)
from lmm_r1.models.output_layer import LayerOutcomes, TokenDistribution, TokenOutcomes, token_outcomes
from lmm_r1.models.packed.packing import BatchInputs, ModelSample, stacked
from lmm_r1.models.packed.sequence_parallel import SequenceShare, bare, check_not_shared, group_size, running, share_of

if TYPE_CHECKING:
    from lmm_r1.host.models import DeepSpeedEngine


class KitModule(HostedModel):
    """The mix-in that holds a kit's model; OpenRLHF's Actor is the other part of a policy."""

    kit: LmmKit
    model: PreTrainedModel | DeepSpeedEngine
    """The kit's model, or DeepSpeed's engine around it."""
    __call__: Callable[..., Any]

    def _note(self, loaded: LoadedModel) -> None:
        self.kit = loaded.kit
        self.packing_samples = loaded.packs_samples
        self.share_prefix = loaded.share_prefix
        self.trains_vision = loaded.trains_vision
        self.checkpointed_layers = loaded.checkpointed_layers
        self.plain_buffers = loaded.plain_buffers
        self.features = loaded.features
        # DeepSpeed's engine may show its own config under `.config`.
        self.model_config = loaded.model.config
        # Counted since a caller last set it to 0, including padding and repeated prompts.
        self.computed_tokens = 0

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool] | None = None) -> None:
        """Compute activations again in the backward pass, except those of a frozen vision tower."""
        enable_checkpointing(
            self.model,
            kit=self.kit,
            trains_vision=self.trains_vision,
            layers=self.checkpointed_layers,
            settings=gradient_checkpointing_kwargs,
        )

    @contextmanager
    def keeping_buffers(self) -> Iterator[None]:
        loaded = self.model
        yield
        check_buffers(loaded, self.plain_buffers, when="prepared by DeepSpeed")

    def vision_weights(self) -> list[torch.nn.Parameter]:
        # The kit's names are those of the model within the policy or value model.
        prefixes = (*self.kit.vision_prefixes, *self.kit.projector_prefixes)
        return [weight for name, weight in self.model.named_parameters() if prefixes and name.startswith(prefixes)]

    def settle_ends(self, processor: Any) -> None:
        settle_ends(bare(self.model), kit=self.kit, processor=processor)

    def forget_features(self) -> None:
        """Use kept features only if the weights, which may have been loaded anew, are still the same."""
        if self.features is not None:
            self.features.forget()

    @contextmanager
    def computing_images(self) -> Iterator[None]:
        """Run all images of the passes within through the vision tower."""
        with nullcontext() if self.features is None else self.features.paused():
            yield

    def take_feature_counts(self) -> FeatureCounts:
        """Return how often image features were needed and computed since the last call."""
        return FeatureCounts() if self.features is None else self.features.take_counts()

    @property
    def _inputs(self) -> BatchInputs:
        dtype = next(self.model.parameters()).dtype
        return BatchInputs(kit=self.kit, config=self.model_config, dtype=dtype, device=cpu.device())

    def _padded_inputs(
        self, samples: Sequence[ModelSample], *, group: dist.ProcessGroup | None
    ) -> dict[str, torch.Tensor]:
        """Return the model's arguments for samples padded on the right, which may have one more row.

        Raises UserError if ranks share the sequences of this model.
        """
        check_not_shared(self.model, group=group)
        inputs = self._inputs.padded(samples)
        self.computed_tokens += inputs["input_ids"].numel()
        return inputs

    def _packed_inputs(
        self, samples: Sequence[ModelSample], *, wanted: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[SequenceShare, dict[str, torch.Tensor | None]]:
        """Return this process's share of samples as a packed sequence, and the model's arguments for all of it."""
        sequence, inputs = self._inputs.packed(
            samples, wanted=wanted, share_prefix=self.share_prefix, multiple_of=group_size(group)
        )
        self.computed_tokens += sequence.token_ids.numel()
        return share_of(sequence, group=group), inputs


MakeOutcomes = Callable[[torch.Tensor, WantedTokens], LayerOutcomes]
"""Returns what the output layer computes, given its targets and which of them are wanted."""


class KitActor(KitModule, Actor):
    """A causal model whose loading, positions and media tensors come from its kit.

    Replaces OpenRLHF's `Actor`. With `ban_media_tokens` the log-probs are those of the distribution that the rollout
    samples from, in which media tokens and ids beyond the tokenizer are banned.
    """

    def __init__(
        self,
        path: str,
        settings: LoadSettings,
        *,
        temperature: float = 1.0,
        ban_media_tokens: bool = False,
        ds_config: Mapping[str, Any] | None = None,
        empty: bool = False,
    ) -> None:
        """Args: see `load_model`; `temperature` is the rollout's."""
        loaded = load_model(path, settings, ds_config=ds_config, empty=empty)
        if hasattr(loaded.model.config, "value_head_prefix"):
            raise UserError(
                f"{path}: this is a critic or reward model, which has no output layer to generate with; "
                "give the checkpoint of a policy"
            )
        super().__init__(loaded.model, temperature=temperature)
        self._note(loaded)
        self.is_vlm = self.kit.takes_images
        banned: tuple[int, ...] = ()
        if ban_media_tokens:
            processor = self.kit.load_processor(path, trust_remote_code=settings.trust_remote_code)
            banned = self.kit.banned_token_ids(self.model_config, self.kit.tokenizer_of(processor))
        self.banned_token_ids = torch.tensor(banned, dtype=torch.long)
        self.routers: Routers | None = None
        # Whether the model scales or caps the output layer's logits; known after the first pass.
        self.changes_logits = False

    @property
    def saves_itself(self) -> bool:  # type: ignore[override]
        """Whether it has adapters, which are merged when it is saved."""
        return bool(adapted_layers(bare(self.model)))

    def save(self, folder: str | Path, *, processor: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Write a checkpoint with the adapters merged in, and the adapters in a subfolder."""
        module = bare(self.model)
        module.save_pretrained(folder, state_dict=merged_state_dict(module, weights))
        save_adapter(module, Path(folder) / ADAPTER_FOLDER, weights)
        processor.save_pretrained(folder)

    def balance_experts(self) -> None:
        """Add the load-balancing loss of a mixture of experts to every returned output, as `aux_loss`."""
        self.routers = routers_of(self.model_config, kit=self.kit)
        assert self.routers is not None, "refused by check_balanced"

    def forward(  # type: ignore[override]
        self,
        samples: Sequence[ModelSample],
        *,
        return_output: bool = False,
        return_entropy: bool = False,
        ring_attn_group: dist.ProcessGroup | None = None,
        distillation: Distillation | None = None,
    ) -> Any:
        """Return the log-probs of the samples' loss tokens, (B, A), 0 elsewhere, and the model's output if asked for.

        The output's `entropy` (B, A) is that of the same tokens. With a distillation, its `divergence` (B, A) is that of
        their distributions from the teacher's.

        Args:
            ring_attn_group: the ranks that get the same samples and share their tokens; every rank returns all log-probs.
        """

        def make(target_ids: torch.Tensor, wanted: WantedTokens) -> LayerOutcomes:
            if distillation is not None:
                return DistilledOutcomes(targets=target_ids, wanted=wanted, distillation=distillation)
            sampler = TokenDistribution(
                temperature=self.temperature,
                banned_token_ids=self.banned_token_ids.to(target_ids.device),
                cap=self._logit_cap,
            )
            return TokenOutcomes(targets=target_ids, sampler=sampler, entropy=return_entropy)

        routers = self.routers if return_output else None
        log_probs, second, output = self._run(samples, make=make, group=ring_attn_group, routers=routers)
        if return_entropy:
            output.entropy = second
        if distillation is not None:
            output.divergence = second
        return (log_probs, output) if return_output else log_probs

    @torch.no_grad()
    def teacher_tokens(
        self, samples: Sequence[ModelSample], *, ring_attn_group: dist.ProcessGroup | None
    ) -> TeacherTokens:
        """Return its logits at the samples' loss tokens; the arguments are those of `forward`."""
        kept: list[KeptInputs] = []

        def make(target_ids: torch.Tensor, wanted: WantedTokens) -> LayerOutcomes:
            kept.append(KeptInputs(targets=target_ids, wanted=wanted, group=ring_attn_group))
            return kept[0]

        self._run(samples, make=make, group=ring_attn_group, routers=None)
        tokens = kept[0].tokens
        assert tokens is not None, "kept by the pass"
        return tokens

    def _run(
        self,
        samples: Sequence[ModelSample],
        *,
        make: MakeOutcomes,
        group: dist.ProcessGroup | None,
        routers: Routers | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return both numbers of the loss tokens, (B, A), the second only if it is requested, and the output."""
        wanted = stacked(samples, lambda sample: sample.loss_mask)
        run = self._run_packed if self.packing_samples else self._run_padded
        return run(samples, wanted, make=make, group=group, routers=routers)

    def _run_padded(
        self,
        samples: Sequence[ModelSample],
        wanted: torch.Tensor,
        *,
        make: MakeOutcomes,
        group: dist.ProcessGroup | None,
        routers: Routers | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """As `_run`, on samples padded on the right."""
        rows, width = wanted.shape
        inputs = self._padded_inputs(samples, group=group)
        counted = inputs["attention_mask"].clone()
        counted[rows:] = 0
        # The model's ids may have other placeholders.
        target_ids = torch.zeros_like(inputs["input_ids"])
        target_ids[:rows, :width] = stacked(samples, lambda sample: sample.token_ids)[:, 1:].to(target_ids)
        targeted = WantedTokens.in_batch(wanted, width=target_ids.shape[1], device=target_ids.device)
        outcomes = make(target_ids, targeted)
        first, second, output = self._predictions(inputs, outcomes, balanced=partial(self._balanced, routers, counted))

        def kept(values: torch.Tensor) -> torch.Tensor:
            return values[:rows, :width] * wanted.to(values)

        return kept(first), kept(second) if outcomes.has_second else None, output

    def _run_packed(
        self,
        samples: Sequence[ModelSample],
        wanted: torch.Tensor,
        *,
        make: MakeOutcomes,
        group: dist.ProcessGroup | None,
        routers: Routers | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """As `_run`, on a packed sequence."""
        share, inputs = self._packed_inputs(samples, wanted=wanted, group=group)
        counted = torch.ones_like(share.sequence.token_ids[0])
        counted[len(counted) - share.sequence.filler :] = 0
        arguments = {**inputs, "logits_to_keep": share.sources}
        outcomes = make(share.target_ids[None], WantedTokens.in_share(share))
        balanced = partial(self._balanced, routers, counted[share.tokens])
        with running(share, model=self.model, kit=self.kit):
            first, second, output = self._predictions(arguments, outcomes, balanced=balanced)

        def scattered(values: torch.Tensor) -> torch.Tensor:
            return share.sequence.scatter(share.gather(values[0]))

        return scattered(first), scattered(second) if outcomes.has_second else None, output

    def _predictions(
        self, arguments: Mapping[str, Any], outcomes: LayerOutcomes, *, balanced: Callable[[], Any]
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Run the model; return both numbers of the tokens for which it computes logits, (B, K) each, and the output.

        Args:
            balanced: returns the context of `_balanced`.
        """
        layer = bare(self.model).get_output_embeddings()
        takes_cap = outcomes.takes_cap or self._logit_cap is None
        if type(layer) is torch.nn.Linear and takes_cap and not self.changes_logits:
            with token_outcomes(layer, outcomes), self._uncapped(), balanced() as add_loss:
                output = add_loss(self.model(**arguments, use_cache=False))
            found = outcomes.of(output["logits"])
            if found is not None:
                return *found, output
            self.changes_logits = True
        with balanced() as add_loss:
            output = add_loss(self.model(**arguments, use_cache=False))
        return *outcomes.of_logits(output["logits"]), output

    @property
    def _logit_cap(self) -> float | None:
        name = self.kit.logit_cap
        return None if name is None else getattr(self.model_config.get_text_config(), name)

    @contextmanager
    def _uncapped(self) -> Iterator[None]:
        """Keep the model from capping its logits, which the sampler does within `token_outcomes`."""
        name, text = self.kit.logit_cap, bare(self.model).config.get_text_config()
        if name is None:
            yield
            return
        cap = getattr(text, name)
        setattr(text, name, None)
        try:
            yield
        finally:
            setattr(text, name, cap)

    @contextmanager
    def _balanced(self, routers: Routers | None, counted: torch.Tensor) -> Iterator[Callable[[Any], Any]]:
        """Yield a function that adds the load-balancing loss of the counted tokens to a forward pass's output."""
        if routers is None:
            yield lambda output: output
            return
        with routers.recorded(self.model) as layers:

            def add_loss(output: Any) -> Any:
                output.aux_loss = routers.loss(layers, counted)
                return output

            yield add_loss


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
