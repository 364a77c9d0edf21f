"""The policy (and reference) model: OpenRLHF's `Actor` with everything architectural asked of the kit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.models import Actor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits, set_z3_leaf_modules
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit, Media, kit_of
from lmm_r1.models.adapters import EVERY_LAYER, LoraSettings, add_adapters
from lmm_r1.models.banned_tokens import ban

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
        experts_implementation: str | None = None,
        trust_remote_code: bool = False,
        ban_media_tokens: bool = False,
        **unused: Any,
    ) -> None:
        assert not any((load_in_4bit, use_liger_kernel, packing_samples)), "refused by config.resolve"
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
        self.packing_samples = False
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

        `media` holds one entry per row of `sequences` (B, T), None for rows without images.
        """
        output = self._run(sequences, attention_mask, [item for item in media if item is not None])
        logits = output["logits"].to(torch.float32)
        if len(self.banned_token_ids):
            logits = ban(logits, self.banned_token_ids)
        if self.temperature != 1.0:
            # Once, here, so that entropy and log-probs describe the policy that the rollout sampled from.
            logits = logits / self.temperature
        output["logits"] = logits
        if return_entropy:
            output.entropy = compute_entropy(logits)[:, :-1]
        if action_mask is None and not return_logprobs:
            return output
        log_probs = log_probs_from_logits(logits, torch.roll(sequences, shifts=-1, dims=1))[:, :-1]
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    def _run(self, sequences: torch.Tensor, attention_mask: torch.Tensor, media: list[Media]) -> Any:
        rows, width = sequences.shape
        if not media and self.kit.filler_media is not None and dist.is_initialized() and dist.get_world_size() > 1:
            sequences, attention_mask, media = self._with_filler_row(sequences, attention_mask)
        merged = None
        if media:
            # Pixel values follow the model's dtype; grids and sizes stay integers.
            dtype = next(self.model.parameters()).dtype
            merged = {
                key: value.to(sequences.device, dtype=dtype if value.is_floating_point() else None)
                for key, value in self.kit.merge_media(media).items()
            }
        inputs = self.kit.forward_inputs(self.model_config, sequences, attention_mask, merged)
        output = self.model(sequences, attention_mask=attention_mask, use_cache=False, **inputs)
        output["logits"] = output["logits"][:rows, :width]
        return output

    def _with_filler_row(
        self, sequences: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[Media]]:
        """Add a row that holds the smallest legal image, whose output is dropped.

        All ranks must run the vision tower in a step, or ZeRO's collectives wait for one another forever. The row
        takes no part in the loss, so its gradients are exactly zero.
        """
        ids, media = self.kit.filler_media(self.model_config)
        width = max(sequences.shape[1], len(ids))
        padded = sequences.new_zeros(len(sequences) + 1, width)
        mask = attention_mask.new_zeros(len(sequences) + 1, width)
        padded[:-1, : sequences.shape[1]] = sequences
        mask[:-1, : sequences.shape[1]] = attention_mask
        padded[-1, : len(ids)] = sequences.new_tensor(ids)
        mask[-1, : len(ids)] = 1
        return padded, mask, [media]


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
