"""The policy (and reference) model: OpenRLHF's `Actor` with everything architectural asked of the kit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.models import Actor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits, set_z3_leaf_modules
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit, Media, kit_of
from lmm_r1.models.adapters import EVERY_LAYER, LoraSettings, add_adapters
from lmm_r1.models.banned_tokens import ban
from lmm_r1.models.batch_inputs import BatchInputs
from lmm_r1.models.packed_attention import packed_row, packing_refusal, use_packed_attention
from lmm_r1.models.packing import Targets

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class KitActor(Actor):
    """A causal model whose loading, positions and media tensors come from its kit.

    Takes the place of OpenRLHF's `Actor` wherever that is built; `forward` keeps its meaning and return values.
    With `ban_media_tokens` the log-probs are those of the distribution that the rollout samples from, in which media
    tokens and ids beyond the tokenizer are banned.
    """

    def __init__(
        self,
        pretrain_or_model: str,
        attn_implementation: str,
        param_dtype: str = "bf16",
        temperature: float = 1.0,
        ds_config: dict | None = None,
        freeze_visual_encoder: bool = False,
        load_in_4bit: bool = False,
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        target_modules: str | Sequence[str] = EVERY_LAYER,
        use_liger_kernel: bool = False,
        packing_samples: bool = False,
        share_prefix: bool = False,
        experts_implementation: str | None = None,
        trust_remote_code: bool = False,
        ban_media_tokens: bool = False,
        **unused: Any,
    ) -> None:
        assert not any((load_in_4bit, use_liger_kernel)), "refused by config.resolve"
        kit = kit_of(pretrain_or_model, trust_remote_code=trust_remote_code)
        # While this object lives, transformers loads straight into ZeRO-3 shards.
        sharded = ds_config is not None and ds_config["zero_optimization"]["stage"] == 3
        loading = HfDeepSpeedConfig(ds_config) if sharded else None
        extra = {} if experts_implementation is None else {"experts_implementation": experts_implementation}
        model = kit.load_model(
            pretrain_or_model,
            dtype=DTYPES[param_dtype],
            attn_implementation=resolve_attention(attn_implementation, kit=kit),
            trust_remote_code=trust_remote_code,
            **extra,
        )
        del loading
        super().__init__(model, temperature=temperature)
        self.kit = kit
        self.is_vlm = kit.takes_images
        self.packing_samples = packs_samples(model, asked=packing_samples, share_prefix=share_prefix)
        self.share_prefix = share_prefix
        # DeepSpeed's engine may show its own config under `.config`.
        self.model_config = model.config
        if freeze_visual_encoder:
            freeze(model, prefixes=(*kit.vision_prefixes, *kit.projector_prefixes))
        if lora_rank:
            _refuse_split_layers(ds_config)
            names = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
            lora = LoraSettings(rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout, target_modules=names)
            add_adapters(model, kit, lora)
        self.trains_vision = not (freeze_visual_encoder or lora_rank)
        set_z3_leaf_modules(model, detect_hybrid=False)
        banned: tuple[int, ...] = ()
        if ban_media_tokens:
            processor = kit.load_processor(pretrain_or_model, trust_remote_code=trust_remote_code)
            banned = kit.banned_token_ids(model.config, kit.tokenizer_of(processor))
        self.banned_token_ids = torch.tensor(banned, dtype=torch.long)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Compute activations again in the backward pass; a frozen vision tower stays out of it."""
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs)
        if not self.trains_vision:
            # The reentrant kind needs an input that requires a gradient. Transformers hooks the inputs of all towers,
            # which would send gradients through a frozen one; the text's embeddings are enough.
            self.model.disable_input_require_grads()
            self.model.get_input_embeddings().register_forward_hook(_require_gradient)

    @property
    def _inputs(self) -> BatchInputs:
        return BatchInputs(kit=self.kit, config=self.model_config, dtype=next(self.model.parameters()).dtype)

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
        media: Sequence[Media | None] = (),
    ) -> Any:
        """Return log-probs of the response tokens, (B, A), or of all next tokens, (B, T - 1), and/or the output.

        `media` holds one entry per row of `sequences` (B, T), None for rows without images. Where samples are packed,
        rows of one group hold the same object, and the output's logits are those of the tokens asked for.
        """
        if action_mask is None and not return_logprobs:
            return self._run(sequences, attention_mask, media)
        targets = wanted_targets(attention_mask, action_mask)
        run = self._run_packed if self.packing_samples else self._run_padded
        log_probs, output = run(sequences, attention_mask, media, targets=targets, return_entropy=return_entropy)
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    def _run(self, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Sequence[Media | None]) -> Any:
        rows, width = sequences.shape
        inputs = self._inputs.padded(sequences, attention_mask, media)
        output = self.model(**inputs, use_cache=False)
        output["logits"] = self._sampled_from(output["logits"][:rows, :width])
        return output

    def _run_padded(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[Media | None],
        *,
        targets: Targets,
        return_entropy: bool,
    ) -> tuple[torch.Tensor, Any]:
        """Return the log-probs of all next tokens (B, T - 1) and the output, with their entropy where asked for."""
        output = self._run(sequences, attention_mask, media)
        if return_entropy:
            output.entropy = compute_entropy(output["logits"])[:, :-1]
        return log_probs_from_logits(output["logits"], torch.roll(sequences, shifts=-1, dims=1))[:, :-1], output

    def _run_packed(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor,
        media: Sequence[Media | None],
        *,
        targets: Targets,
        return_entropy: bool,
    ) -> tuple[torch.Tensor, Any]:
        """As `_run_padded`, over packed rows: logits are computed for the targets only, all others get 0."""
        log_probs, entropies, outputs = [], [], []
        rows = self._inputs.packed(sequences, attention_mask, media, targets=targets, share_prefix=self.share_prefix)
        for row, inputs in rows:
            with packed_row(row.layout):
                output = self.model(**inputs, use_cache=False, logits_to_keep=row.sources)
            logits = self._sampled_from(output["logits"])  # (1, K, V)
            output["logits"] = logits
            log_probs.append(row.scatter(log_probs_from_logits(logits, row.target_ids[None])[0], like=targets.wanted))
            if return_entropy:
                entropies.append(row.scatter(compute_entropy(logits)[0], like=targets.wanted))
            outputs.append(output)
        output = outputs[-1]
        if output.get("aux_loss") is not None:
            output["aux_loss"] = torch.stack([one["aux_loss"] for one in outputs]).mean()
        if return_entropy:
            output.entropy = torch.stack(entropies).sum(dim=0)
        return torch.stack(log_probs).sum(dim=0), output

    def _sampled_from(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) of the distribution that the rollout sampled from, in single precision."""
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if len(self.banned_token_ids):
            logits = ban(logits, self.banned_token_ids)
        return logits if self.temperature == 1.0 else logits / self.temperature


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


def packs_samples(model: PreTrainedModel, *, asked: bool, share_prefix: bool) -> bool:
    """Return whether a model runs on packed rows, and make its attention take them where it does.

    Raises UserError where packing was asked for and the model's attention cannot take it; where only shared prefixes
    would have needed it, the model runs padded, and the run warns.
    """
    if not (asked or share_prefix):
        return False
    refusal = packing_refusal(model)
    if refusal is None:
        use_packed_attention(model)
        return True
    if asked:
        raise UserError(f"--ds.packing_samples: {refusal}; leave the flag out")
    logger.warning("prompts are computed once per sample, not once per group: %s", refusal)
    return False


def _require_gradient(module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    output.requires_grad_(True)


def _refuse_split_layers(ds_config: dict | None) -> None:
    pieces = 1 if ds_config is None else ds_config["tensor_parallel"]["autotp_size"]
    if pieces > 1:
        raise UserError(
            f"--ds.tensor_parallel_size {pieces} splits the layers that --ds.lora.rank adapts; leave one out"
        )


def resolve_attention(name: str, *, kit: LmmKit) -> str:
    """Return the attention implementation for `auto`: flash-attn where it can run, PyTorch's SDPA elsewhere."""
    if name != "auto":
        return name
    if not kit.takes_flash_attention:
        return "sdpa"
    try:
        import flash_attn_2_cuda  # noqa: F401  # the compiled part; the stand-in in compat/ has none
    except ImportError:
        return "sdpa"
    return "flash_attention_2" if torch.cuda.is_available() else "sdpa"


def freeze(model: torch.nn.Module, *, prefixes: tuple[str, ...]) -> None:
    """Stop gradients of all parameters whose name begins with one of `prefixes`; raises UserError if none does."""
    names = [name for name, _ in model.named_parameters() if name.startswith(prefixes)] if prefixes else []
    if not names:
        raise UserError("--actor.freeze_visual_encoder: this model has no vision tower to freeze")
    for name in names:
        model.get_parameter(name).requires_grad_(False)
