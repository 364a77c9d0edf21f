"""The load-balancing loss of a mixture of experts, over the tokens of samples, and no filler.

Transformers' own holds the choices of all layers as one-hot vectors of experts at once, which is gigabytes where sequences
are long, and knows no filler in packed ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils.output_capturing import OutputRecorder

from lmm_r1.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Routers:
    """The modules of an architecture that send tokens to experts, as transformers describes them."""

    recorders: tuple[OutputRecorder, ...]
    top_k: int
    """Experts per token."""

    @contextmanager
    def recorded(self, model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
        """Collect the logits of every layer's router, (tokens, E) each, while the model runs forward."""
        found: list[torch.Tensor] = []
        with ExitStack() as stack:
            for name, module in model.named_modules():
                for recorder in self.recorders:
                    if _matches(recorder, module, name):
                        stack.callback(module.register_forward_hook(_keep(found, recorder.index)).remove)
            yield found

    def loss(self, logits: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        """Return the loss of the tokens that `mask`, (tokens,) or (B, T), counts."""
        return load_balancing_loss(logits, top_k=self.top_k, mask=mask)


def load_balancing_loss(logits: Sequence[torch.Tensor], *, top_k: int, mask: torch.Tensor) -> torch.Tensor:
    """Return E times the sum over experts of the share of choices times the mean probability, over tokens and layers.

    Equations 4 to 6 of Switch Transformers, arXiv:2101.03961; as in transformers each of a token's k choices counts, so
    that balanced experts give k. 0 where no token counts.

    Args:
        logits: of each layer's router, (tokens, E) or (B, T, E).
        mask: which tokens count, (tokens,) or (B, T).
    """
    counts = mask.flatten().to(logits[0].device, torch.float)  # (tokens,)
    experts = logits[0].shape[-1]
    chosen = probabilities = torch.zeros(experts, device=counts.device)
    for layer in logits:
        layer_probabilities = layer.reshape(-1, experts).float().softmax(-1)
        choices = layer_probabilities.topk(top_k, dim=-1).indices  # (tokens, k)
        weights = counts[:, None].expand_as(choices)
        chosen = chosen.index_add(0, choices.flatten(), weights.flatten())
        probabilities = probabilities + counts @ layer_probabilities
    total = (counts.sum() * len(logits)).clamp(min=1)
    return experts * (chosen / total * (probabilities / total)).sum()


def routers_of(config: PretrainedConfig) -> Routers | None:
    """Return the routers of a checkpoint's architecture, None where transformers knows of none with this loss."""
    text = config.get_text_config()
    # Some configs name the loss's weight alone.
    with_loss = hasattr(text, "output_router_logits") or hasattr(text, "router_aux_loss_coef")
    if not (with_loss and hasattr(text, "num_experts_per_tok")):
        return None
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    classes: list[type[PreTrainedModel]] = [
        mapping[type(part)] for part in (text, config) for mapping in mappings if type(part) in mapping
    ]
    for model_class in classes:
        recorders = (model_class._can_record_outputs or {}).get("router_logits")
        recorders = tuple(recorders) if isinstance(recorders, list) else (recorders,)
        if all(isinstance(recorder, OutputRecorder) and recorder.target_class for recorder in recorders):
            return Routers(recorders=recorders, top_k=text.num_experts_per_tok)
    return None


def check_balanced(config: PretrainedConfig, *, coef: float, flag: str, model: str) -> None:
    """Raise UserError where a model has no mixture of experts whose load is to be balanced.

    Args:
        coef: the weight of the loss, 0 for none.
        flag: of the weight, and `model` flag and path of the model, for the message.
    """
    if coef and routers_of(config) is None:
        raise UserError(
            f"--{flag} {coef:g}: {model} has the architecture {config.model_type}, for which there is no load-balancing "
            "loss of a mixture of experts; leave the flag out"
        )


def _matches(recorder: OutputRecorder, module: torch.nn.Module, name: str) -> bool:
    if not isinstance(module, recorder.target_class):
        return False
    return recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."


def _keep(found: list[torch.Tensor], index: int) -> Any:
    def keep(module: torch.nn.Module, args: tuple, output: Any) -> None:
        found.append(output[index] if isinstance(output, tuple) else output)

    return keep
