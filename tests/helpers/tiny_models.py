"""Small random checkpoints of every kit, and their actors."""

from collections.abc import Sequence
from pathlib import Path

import torch

from lmm_r1.data.messages import ImagePart, Message
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, TinyModelSpec
from lmm_r1.models.actor import KitActor

CORPUS = (
    "system\nYou are a helpful assistant.",
    "user\nWhat is 12 + 34? Which digit does the picture show?",
    "assistant\n<think>12 + 34 = 46</think><answer>46</answer>",
)


def build_checkpoint(kit: LmmKit, folder: Path) -> None:
    """Write the smallest checkpoint that the kit can build."""
    folder.mkdir()
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=0, tie_embeddings=False)
    kit.build_tiny(spec, CORPUS, folder)


def encode(kit: LmmKit, processor: object, messages: Sequence[Message]) -> EncodedPrompt:
    """Encode with the generation prompt; the images are those in the messages."""
    images = [part.source for turn in messages for part in turn.parts if isinstance(part, ImagePart)]
    return kit.encode(processor, messages, images=images, add_generation_prompt=True)


def make_actor(folder: Path, *, attention: str = "sdpa", **settings: object) -> KitActor:
    """Return the checkpoint's actor in fp32, in evaluation mode."""
    return KitActor(str(folder), attn_implementation=attention, param_dtype="fp32", **settings).eval()


def pad(rows: Sequence[Sequence[int]], *, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences and attention mask, (B, T) each, with zeros on the given side."""
    width = max(map(len, rows))
    sequences, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for index, ids in enumerate(rows):
        place = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        sequences[index, place] = torch.tensor(ids)
        mask[index, place] = 1
    return sequences, mask
