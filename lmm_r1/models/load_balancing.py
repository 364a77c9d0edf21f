"""The load-balancing loss of a mixture of experts, over the tokens of samples, and no filler.

Transformers' own holds the choices of all layers as one-hot vectors of experts at once, which is gigabytes where sequences
are long, and knows no filler in packed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils.output_capturing import OutputRecorder

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """What a layer's router made of its tokens."""

    logits: torch.Tensor
    """(tokens, E) or (B, T, E)."""
    choices: torch.Tensor | None
    """The experts that it sent each token to, (tokens, k); None where the logits tell."""


@dataclass(frozen=True, kw_only=True)
class Routers:
    """The modules of an architecture that send tokens to experts, as transformers describes them."""

    recorders: tuple[OutputRecorder, ...]
    top_k: int
    """Experts per token."""
    sigmoid: bool
    """Whether they score experts one by one; what they choose is then not told by the scores alone."""

    @contextmanager
    def recorded(self, model: torch.nn.Module) -> Iterator[list[Routed]]:
        """Collect what every layer's router gives while the model runs forward."""
        found: list[Routed] = []
        with ExitStack() as stack:
            for name, module in model.named_modules():
                for recorder in self.recorders:
                    if _matches(recorder, module, name):
                        stack.callback(
                            module.register_forward_hook(
                                _keep(found, recorder.index, with_choices=self.sigmoid)
                            ).remove
                        )
            yield found

    def loss(self, layers: Sequence[Routed], mask: torch.Tensor) -> torch.Tensor:
        """Return the loss of the tokens that `mask`, (tokens,) or (B, T), counts."""
        return load_balancing_loss(map(self._scored, layers), mask=mask.to(layers[0].logits.device))

    def _scored(self, layer: Routed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities (tokens, E) and choices (tokens, k).

        Sigmoid scores are divided by their sum, as in equations 19 and 20 of DeepSeek-V3, arXiv:2412.19437. Their choices
        are the router's own, in which a bias and groups of experts have a say.
        """
        logits = layer.logits.reshape(-1, layer.logits.shape[-1]).float()
        if self.sigmoid:
            assert layer.choices is not None, "recorded beside the logits"
            scores = logits.sigmoid()
            return scores / scores.sum(-1, keepdim=True), layer.choices
        probabilities = logits.softmax(-1)
        return probabilities, probabilities.topk(self.top_k, dim=-1).indices


def load_balancing_loss(layers: Iterable[tuple[torch.Tensor, torch.Tensor]], *, mask: torch.Tensor) -> torch.Tensor:
    """Return E times the sum over experts of the share of choices times the mean probability, over tokens and layers.

    Equations 4 to 6 of Switch Transformers, arXiv:2101.03961; as in transformers each of a token's k choices counts, so
    that balanced experts give k. 0 where no token counts.

    Args:
        layers: of each layer's router, probabilities (tokens, E) and choices (tokens, k).
        mask: which tokens count, (tokens,) or (B, T).
    """
    counts = mask.flatten().float()  # (tokens,)
    chosen = mean = counts.new_zeros(1)
    number = experts = 0
    for probabilities, choices in layers:
        number, experts = number + 1, probabilities.shape[-1]
        weights = counts[:, None].expand_as(choices)
        chosen = chosen + counts.new_zeros(experts).index_add(0, choices.flatten(), weights.flatten())
        mean = mean + counts @ probabilities
    total = (counts.sum() * number).clamp(min=1)
    return experts * (chosen / total * (mean / total)).sum()


def routers_of(config: PretrainedConfig, *, kit: LmmKit) -> Routers | None:
    """Return the routers of a checkpoint's architecture, None where there are none whose load this loss can balance.

    Transformers says where they are; its own loss takes a softmax of their logits whatever they make of them.
    """
    text, scores = config.get_text_config(), kit.router_scores(config)
    if scores is None:
        return None
    # Some configs name the loss's weight alone.
    with_loss = hasattr(text, "output_router_logits") or hasattr(text, "router_aux_loss_coef")
    if not (with_loss and hasattr(text, "num_experts_per_tok")):
        return None
    # Of some the language model alone is described.
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING)
    classes: list[type[PreTrainedModel]] = [
        mapping[type(part)] for part in (text, config) for mapping in mappings if type(part) in mapping
    ]
    for model_class in classes:
        recorders = (model_class._can_record_outputs or {}).get("router_logits")
        recorders = tuple(recorders) if isinstance(recorders, list) else (recorders,)
        if all(isinstance(recorder, OutputRecorder) and recorder.target_class for recorder in recorders):
            return Routers(recorders=recorders, top_k=text.num_experts_per_tok, sigmoid=scores == "sigmoid")
    return None


def check_balanced(config: PretrainedConfig, *, kit: LmmKit, coef: float, flag: str, model: str) -> None:
    """Raise UserError where a model has no mixture of experts whose load is to be balanced.

    Args:
        coef: the weight of the loss, 0 for none.
        flag: of the weight, and `model` flag and path of the model, for the message.
    """
    if coef and routers_of(config, kit=kit) is None:
        raise UserError(
            f"--{flag} {coef:g}: {model} has the architecture {config.model_type}, for which there is no load-balancing "
            "loss of a mixture of experts; leave the flag out"
        )


def _matches(recorder: OutputRecorder, module: torch.nn.Module, name: str) -> bool:
    if not isinstance(module, recorder.target_class):
        return False
    return recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."


def _keep(found: list[Routed], index: int, *, with_choices: bool) -> Any:
    def keep(module: torch.nn.Module, args: tuple, output: Any) -> None:
        # Logits, weights and choices, in this order, where a router gives several.
        choices = output[-1] if with_choices else None
        found.append(Routed(logits=output[index] if isinstance(output, tuple) else output, choices=choices))

    return keep
