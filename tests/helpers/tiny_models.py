"""Small random checkpoints of every kit, and their actors."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from helpers.flat_models import flat_actor

from lmm_r1.data.images import load_video
from lmm_r1.data.messages import Message, images_of, videos_of
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor

CORPUS = (
    "system\nYou are a helpful assistant.",
    "user\nWhat is 12 + 34? Which digit does the picture show?",
    "assistant\n<think>12 + 34 = 46</think><answer>46</answer>",
)
# Of a run's samples; what the smallest models with longrope take with its short factors.
MAX_LEN = 4096

# Mixtures of experts, with what their configs call the number of experts.
MIXTURES: dict[str, dict[str, object]] = {"Mixtral": {"num_local_experts": 4, "intermediate_size": 32}, "Qwen3Moe": {}}


def altered(kit: LmmKit, **members: object) -> LmmKit:
    """Return a kit that differs from the given one in some attributes or methods; it does not pickle."""
    return type(f"Altered{type(kit).__name__}", (type(kit),), members)()


def build_checkpoint(kit: LmmKit, folder: Path) -> None:
    """Write the smallest checkpoint that the kit can build."""
    folder.mkdir(exist_ok=True)
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=0, tie_embeddings=False)
    kit.build_tiny(spec, CORPUS, folder)


def build_experts(language_model: Path, folder: Path, *, architecture: str = "Qwen3Moe", **sizes: object) -> None:
    """Write a tiny mixture of experts with the tokenizer of the language model kit's tiny checkpoint."""
    kit = get_kit("llm")
    processor = kit.load_processor(str(language_model), trust_remote_code=False)
    settings = {
        "vocab_size": len(processor),
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**settings | sizes)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(folder)
    kit.save_processor(processor, folder)


def encode(kit: LmmKit, processor: object, messages: Sequence[Message]) -> EncodedPrompt:
    """Encode with the generation prompt; the images and the videos' frames are those in the messages."""
    images = [part.source for part in images_of(messages)]
    videos = [load_video(part, location="test") for part in videos_of(messages)]
    return kit.encode(processor, messages, images=images, videos=videos, add_generation_prompt=True)


def make_actor(folder: Path, *, attention: str = "sdpa", param_dtype: str = "fp32", **settings: object) -> KitActor:
    """Return the checkpoint's actor, in evaluation mode."""
    settings = {"max_len": MAX_LEN, **settings}
    return flat_actor(str(folder), attn_implementation=attention, param_dtype=param_dtype, **settings).eval()


def run_kit(kit: LmmKit, folder: Path, messages: Sequence[Message]) -> tuple[list[int], torch.Tensor]:
    """Return a conversation's ids and the logits (T, V) of the checkpoint in fp32, through the given kit alone."""
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    model = kit.load_model(
        str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    ).eval()
    encoded = encode(kit, processor, messages)
    sequences, mask = pad([encoded.token_ids], side="right")
    media = None if encoded.media is None else kit.merge_media([encoded.media])
    with torch.no_grad():
        inputs = kit.forward_inputs(model.config, sequences, mask, media)
        return encoded.token_ids, model(sequences, attention_mask=mask, use_cache=False, **inputs).logits[0]


def pad(rows: Sequence[Sequence[int]], *, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences and attention mask, (B, T) each, with zeros on the given side."""
    width = max(map(len, rows))
    sequences, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for index, ids in enumerate(rows):
        place = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        sequences[index, place] = torch.tensor(ids)
        mask[index, place] = 1
    return sequences, mask
