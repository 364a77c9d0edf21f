"""How every kit cuts a packed sequence: the shares' inputs are those of the language model's layers, and nothing of the rest is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.tables import kits_with
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import KITS, get_kit

IMAGES = [message("user", "Which digit ", picture(84, 56), " is this, and this?", picture(56, 56))]
TEXT = [message("user", "What is 12 + 34?")]
CASES = [(name, "text") for name in KITS] + [(name, "images") for name in kits_with("images")]


def tensors_of(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_shares_hold_the_embeddings_and_positions_of_the_whole_sequence(
    name: str, case: str, tiny_checkpoint: Callable[[str], Path]
):
    kit, folder = get_kit(name), tiny_checkpoint(name)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    encoded = encode(kit, processor, IMAGES if case == "images" else TEXT)
    model = make_actor(folder).model
    language_model = kit.language_model_of(model)
    seen: dict[str, Any] = {}

    def keep_inputs(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        assert not args
        seen["inputs"] = dict(kwargs)

    def keep_hidden(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen["hidden"] = args[0] if args else kwargs["hidden_states"]

    language_model.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    first = language_model.layers[0].register_forward_pre_hook(keep_hidden, with_kwargs=True)
    ids = torch.tensor([encoded.token_ids])
    length = ids.shape[1]
    inputs = kit.forward_inputs(model.config, ids, torch.ones_like(ids), encoded.media)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=None, use_cache=False, **inputs)
        first.remove()
        # The first border lies inside of an image.
        borders = [0, length // 2, length // 2 + 1, length]
        shares = [
            kit.cut_inputs(language_model, seen["inputs"], slice(start, end))
            for start, end in zip(borders, borders[1:], strict=False)
        ]
        embeds = [
            (
                share["inputs_embeds"]
                if share.get("inputs_embeds") is not None
                else language_model.embed_tokens(share["input_ids"])
            )
            for share in shares
        ]
    assert torch.equal(torch.cat(embeds, dim=1), seen["hidden"])
    positions = seen["inputs"]["position_ids"]
    assert torch.equal(torch.cat([share["position_ids"] for share in shares], dim=-1), positions)
    whole = [tensor for value in shares[0].values() for tensor in tensors_of(value) if length in tensor.shape]
    assert not whole, "a share's inputs hold something of all tokens of the sequence"
    for key, value in seen["inputs"].items():
        if key not in ("input_ids", "inputs_embeds", "position_ids") and key not in (encoded.media or {}):
            # What goes with some of the tokens (of images) only.
            for index, tensor in enumerate(tensors_of(value)):
                parts = [tensors_of(share[key])[index] for share in shares]
                dim = 1 if length in tensor.shape else 0
                assert torch.equal(torch.cat(parts, dim=dim), tensor), key
