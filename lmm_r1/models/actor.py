"""The policy (and reference) model: OpenRLHF's `Actor` with everything architectural asked of the kit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.models import Actor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits

from lmm_r1.data.sample import SampleMedia
from lmm_r1.errors import UserError
from lmm_r1.models.kit_module import KitModule
from lmm_r1.models.load_balancing import Routers, routers_of
from lmm_r1.models.loading import LoadSettings, load_model
from lmm_r1.models.output_layer import Sampler, TokenOutcomes, only_tokens, token_outcomes
from lmm_r1.models.packed.packing import Targets
from lmm_r1.models.packed.sequence_parallel import bare, running


class KitActor(KitModule, Actor):
    """A causal model whose loading, positions and media tensors come from its kit.

    Takes the place of OpenRLHF's `Actor` wherever that is built; `forward` keeps its meaning and return values.
    With `ban_media_tokens` the log-probs are those of the distribution that the rollout samples from, in which media
    tokens and ids beyond the tokenizer are banned.
    """

    def __init__(
        self,
        pretrain_or_model: str,
        temperature: float = 1.0,
        trust_remote_code: bool = False,
        ban_media_tokens: bool = False,
        **settings: Any,
    ) -> None:
        loaded = load_model(pretrain_or_model, LoadSettings.of(trust_remote_code=trust_remote_code, **settings))
        if hasattr(loaded.model.config, "value_head_prefix"):
            raise UserError(
                f"{pretrain_or_model}: this is a critic or reward model, which has no output layer to generate with; "
                "give the checkpoint of a policy"
            )
        super().__init__(loaded.model, temperature=temperature)
        self._note(loaded)
        self.is_vlm = self.kit.takes_images
        banned: tuple[int, ...] = ()
        if ban_media_tokens:
            processor = self.kit.load_processor(pretrain_or_model, trust_remote_code=trust_remote_code)
            banned = self.kit.banned_token_ids(self.model_config, self.kit.tokenizer_of(processor))
        self.banned_token_ids = torch.tensor(banned, dtype=torch.long)
        self.routers: Routers | None = None
        # Whether it scales or caps what its output layer gives; known once it has run.
        self.changes_logits = False

    def balance_experts(self) -> None:
        """Add the load-balancing loss of its mixture of experts, as `aux_loss`, to every output that is returned."""
        self.routers = routers_of(self.model_config)
        assert self.routers is not None, "refused by check_balanced"

    def forward(
        self,
        sequences: torch.LongTensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: dist.ProcessGroup | None = None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
        media: Sequence[SampleMedia] = (),
    ) -> Any:
        """Return log-probs of the response tokens, (B, A), or of all next tokens, (B, T - 1), and/or the output.

        `media` holds one entry per row of `sequences` (B, T). Where samples are packed, the prompt's media of one group's
        rows have one key. The ranks of `ring_attn_group` get the same batch and share its tokens: the log-probs are all
        of them on every rank. The output has logits only where no log-probs are asked for.
        """
        assert attention_mask is not None, "OpenRLHF's workers and ours all give it"
        routers = self.routers if return_output else None
        if action_mask is None and not return_logprobs:
            return self._run(sequences, attention_mask, media, routers=routers)
        targets = wanted_targets(attention_mask, action_mask)
        if self.packing_samples:
            log_probs, output = self._run_packed(
                sequences,
                attention_mask,
                media,
                targets=targets,
                return_entropy=return_entropy,
                group=ring_attn_group,
                routers=routers,
            )
        else:
            self._check_padded(ring_attn_group)
            log_probs, output = self._run_padded(
                sequences, attention_mask, media, return_entropy=return_entropy, routers=routers
            )
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    def token_logits(
        self,
        sequences: torch.Tensor,
        wanted: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        ring_attn_group: dist.ProcessGroup | None = None,
        media: Sequence[SampleMedia] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the logits of a few tokens of the vocabulary, (B, T - 1, K), and the load-balancing loss of experts.

        Args:
            wanted: whether the prediction of the next token is asked for, (B, T - 1); all other logits are 0.
            token_ids: which tokens, (K,).
        """
        rows, width = sequences.shape
        if self.packing_samples:
            targets = Targets(wanted=wanted, shared=False)
            share, inputs = self._packed_inputs(
                sequences, attention_mask, media, targets=targets, group=ring_attn_group
            )
            counted = torch.ones_like(share.sequence.token_ids[0])
            counted[len(counted) - share.sequence.filler :] = 0
            arguments = {**inputs, "logits_to_keep": share.sources}
            with running(share, model=self.model, kit=self.kit):
                logits, aux_loss = self._few_logits(arguments, token_ids, counted=counted[share.tokens])
            columns = [share.sequence.scatter(share.gather(column), like=wanted) for column in logits[0].unbind(-1)]
            return torch.stack(columns, dim=-1), aux_loss
        self._check_padded(ring_attn_group)
        padded = self._padded_inputs(sequences, attention_mask, media)
        counted = padded["attention_mask"].clone()
        counted[rows:] = 0
        logits, aux_loss = self._few_logits(padded, token_ids, counted=counted)
        return torch.where(wanted[..., None], logits[:rows, : width - 1], 0.0), aux_loss

    def _few_logits(
        self, arguments: Mapping[str, Any], token_ids: torch.Tensor, *, counted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Run the model and return the logits of some tokens, (..., K) in single precision at least."""
        layer = bare(self.model).get_output_embeddings()
        plain = type(layer) is torch.nn.Linear
        with (
            self._balanced(self.routers, counted) as add_loss,
            only_tokens(layer, token_ids) if plain else nullcontext(),
        ):
            output = add_loss(self.model(**arguments, use_cache=False))
        logits = output["logits"] if plain else output["logits"][..., token_ids]
        assert logits.shape[-1] == len(token_ids), "a model hands on what its output layer gives, scaled or capped"
        aux_loss = 0.0 if self.routers is None else output.aux_loss
        return logits.to(torch.promote_types(logits.dtype, torch.float32)), aux_loss

    def _run(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[SampleMedia],
        *,
        routers: Routers | None,
    ) -> Any:
        rows, width = sequences.shape
        inputs = self._padded_inputs(sequences, attention_mask, media)
        counted = inputs["attention_mask"].clone()
        counted[rows:] = 0
        with self._balanced(routers, counted) as add_loss:
            output = add_loss(self.model(**inputs, use_cache=False))
        output["logits"] = self._sampler(sequences.device)(output["logits"][:rows, :width])
        return output

    def _run_padded(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[SampleMedia],
        *,
        return_entropy: bool,
        routers: Routers | None,
    ) -> tuple[torch.Tensor, Any]:
        """Return the log-probs of all next tokens (B, T - 1) and the output, with their entropy where asked for."""
        rows, width = sequences.shape
        inputs = self._padded_inputs(sequences, attention_mask, media)
        target_ids = torch.zeros_like(inputs["input_ids"])
        target_ids[:rows, : width - 1] = sequences[:, 1:]
        counted = inputs["attention_mask"].clone()
        counted[rows:] = 0
        log_probs, entropy, output = self._predictions(
            inputs, target_ids, entropy=return_entropy, balanced=partial(self._balanced, routers, counted)
        )
        if return_entropy:
            output.entropy = entropy[:rows, : width - 1]
        return log_probs[:rows, : width - 1], output

    def _run_packed(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[SampleMedia],
        *,
        targets: Targets,
        return_entropy: bool,
        group: dist.ProcessGroup | None,
        routers: Routers | None,
    ) -> tuple[torch.Tensor, Any]:
        """As `_run_padded`, over a packed sequence: only for the targets, all others get 0."""
        share, inputs = self._packed_inputs(sequences, attention_mask, media, targets=targets, group=group)
        counted = torch.ones_like(share.sequence.token_ids[0])
        counted[len(counted) - share.sequence.filler :] = 0
        arguments = {**inputs, "logits_to_keep": share.sources}
        balanced = partial(self._balanced, routers, counted[share.tokens])
        with running(share, model=self.model, kit=self.kit):
            log_probs, entropy, output = self._predictions(
                arguments, share.target_ids[None], entropy=return_entropy, balanced=balanced
            )
        if return_entropy:
            output.entropy = share.sequence.scatter(share.gather(entropy[0]), like=targets.wanted)
        return share.sequence.scatter(share.gather(log_probs[0]), like=targets.wanted), output

    def _predictions(
        self, arguments: Mapping[str, Any], target_ids: torch.Tensor, *, entropy: bool, balanced: Callable[[], Any]
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Run the model; return log-probs of target tokens, the distributions' entropies (0 without `entropy`), the output.

        Args:
            target_ids: (B, K), of the tokens for which the model computes logits.
            balanced: makes the context of a run, see `_balanced`.
        """
        sampler = self._sampler(target_ids.device)
        layer = bare(self.model).get_output_embeddings()
        if type(layer) is torch.nn.Linear and not self.changes_logits:
            outcomes = TokenOutcomes(targets=target_ids, sampler=sampler, entropy=entropy)
            with token_outcomes(layer, outcomes), balanced() as add_loss:
                output = add_loss(self.model(**arguments, use_cache=False))
            found = outcomes.of(output["logits"])
            if found is not None:
                return *found, output
            self.changes_logits = True
        with balanced() as add_loss:
            output = add_loss(self.model(**arguments, use_cache=False))
        logits = sampler(output["logits"])
        log_probs = log_probs_from_logits(logits, target_ids)
        return log_probs, compute_entropy(logits) if entropy else torch.zeros_like(log_probs), output

    @contextmanager
    def _balanced(self, routers: Routers | None, counted: torch.Tensor) -> Iterator[Callable[[Any], Any]]:
        """Yield what adds the load-balancing loss of the counted tokens to the output of a forward pass within."""
        if routers is None:
            yield lambda output: output
            return
        with routers.recorded(self.model) as logits:

            def add_loss(output: Any) -> Any:
                output.aux_loss = routers.loss(logits, counted)
                return output

            yield add_loss

    def _sampler(self, device: torch.device) -> Sampler:
        return Sampler(temperature=self.temperature, banned_token_ids=self.banned_token_ids.to(device))


def wanted_targets(attention_mask: torch.Tensor, action_mask: torch.Tensor | None) -> Targets:
    """Return the tokens of a batch whose predictions are used: those of the responses, or all.

    Args:
        attention_mask: (B, T).
        action_mask: (B, A), of the last A tokens; None for all.
    """
    wanted = attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()
    if action_mask is None:
        return Targets(wanted=wanted, shared=False)
    width = action_mask.shape[1]
    responses = torch.zeros_like(wanted)
    responses[:, wanted.shape[1] - width :] = action_mask.bool()
    return Targets(wanted=wanted & responses, shared=True)
