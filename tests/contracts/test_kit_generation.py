"""What plain transformers generates with each kit's model: the likeliest tokens of its own forward passes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.conversations import clip
from helpers.scripted_engines import ENGINE
from helpers.tiny_models import LONGROPE, encode, with_longrope
from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.request import LimitedCodec
from lmm_r1.generation.transformers_engine import TransformersEngine, left_padded
from lmm_r1.lmm_kits.registry import KITS, get_kit

NEW_TOKENS = 8
SETTINGS = replace(ENGINE, max_model_len=4096, max_videos=2, batch_rows=3, seed=0)
GREEDY = SamplingSettings(n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=NEW_TOKENS)


def user(*parts: object) -> Message:
    return Message(role="user", parts=tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def conversations(*, images: bool, videos: bool = False) -> list[tuple[Message, ...]]:
    """Prompts of different lengths, with images between and without; behind them one of two videos, in a batch with a text."""
    texts = [
        (user("What is 12 + 34?"),),
        (user("Which digit?"), Message(role="assistant", parts=(TextPart("46"),)), user("What is 12?")),
    ]
    if not images:
        return texts
    drawn = [ImagePart(Image.effect_noise((70, side), 80).convert("RGB")) for side in (56, 90)]
    shown = [texts[0], (user(drawn[0], "What is 12?"),), (user(*drawn, "Which digit?"),), texts[1]]
    return [*shown, (user(clip(3, 84, 56), "or", clip(2, 56, 56), "?"),)] if videos else shown


def likeliest(engine: TransformersEngine, messages: tuple[Message, ...]) -> list[int]:
    """Ids from forward passes over the whole sequence, each without a cache, as training makes them."""
    codec = engine.codec
    encoded = encode(codec.kit, codec.processor, messages)
    sequence, mask = left_padded([encoded.token_ids])
    media = None if encoded.media is None else codec.kit.merge_media([encoded.media])
    for _ in range(NEW_TOKENS):
        inputs = codec.kit.forward_inputs(engine.model.config, sequence, mask, media)
        with torch.no_grad():
            logits = engine.model(sequence, attention_mask=mask, use_cache=False, **inputs).logits[:, -1]
        logits[:, list(codec.banned_token_ids)] = -torch.inf
        sequence = torch.cat([sequence, logits.argmax(-1, keepdim=True)], dim=1)
        mask = torch.ones_like(sequence)
        if sequence[0, -1] in engine.stop_token_ids:
            break
    return sequence[0, len(encoded.token_ids) :].tolist()


@pytest.mark.parametrize("name", sorted(KITS))
def test_generation_takes_the_likeliest_token_of_each_forward_pass(
    name: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    engine = TransformersEngine(str(tiny_checkpoint(name)), SETTINGS)
    kit = get_kit(name)
    rows = [
        Row(messages=messages, answer="", datasource="test", location=f"row {place}")
        for place, messages in enumerate(conversations(images=kit.takes_images, videos=kit.takes_videos))
    ]
    outcomes = list(engine.respond(enumerate(rows), GREEDY))
    assert [outcome.index for outcome in outcomes] == list(range(len(rows)))
    written = set()
    for row, outcome in zip(rows, outcomes, strict=True):
        ids = likeliest(engine, row.messages)
        ended = ids[-1] in engine.stop_token_ids
        expected = engine.codec.completion(ids, "stop" if ended else "length")
        encoded = engine.codec.encode(row)
        begun = engine.codec.begun_with(row, encoded.engine_token_ids) + expected.text
        assert outcome.completions == (replace(expected, text=begun, image_scales=encoded.image_scales),)
        written.update(ids)
        # The same, alone and handed on piece by piece.
        pieces: list[str] = []
        streamed = engine.stream(row, GREEDY, on_text=pieces.append, should_stop=lambda: False)
        assert streamed == expected
        # A tokenizer that falls back to bytes turns each byte of a broken character into a mark, once it sees all of them.
        if "\ufffd" not in expected.text:
            assert "".join(pieces) == expected.text
    assert len(written) > 1, "one token over and over would also come of an engine that reads no prompt"
    engine.close()


@pytest.mark.parametrize("name", LONGROPE)
def test_a_response_that_grows_beyond_the_limit_of_longrope_keeps_its_factors(
    name: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM never changes them, and transformers would forget its cache there and take others from then on."""
    row = Row(messages=conversations(images=False)[0], answer="", datasource="test", location="row 1")
    written = {}
    for max_len in (400, 4096):
        codec = LimitedCodec(str(tiny_checkpoint(name)), SETTINGS)
        limit = len(codec.encode(row).token_ids) + 3
        folder = with_longrope(tiny_checkpoint(name), limit if max_len == 400 else 4096, copy=tmp_path / str(max_len))
        engine = TransformersEngine(str(folder), replace(SETTINGS, max_model_len=max_len))
        [outcome] = engine.respond([(0, row)], GREEDY)
        ids = likeliest(engine, row.messages)
        assert outcome.completions == (
            engine.codec.completion(ids, "stop" if ids[-1] in engine.stop_token_ids else "length"),
        )
        written[max_len] = ids
        engine.close()
    assert len(written[400]) > 4, "it ends before the limit"
    assert written[400] != written[4096], "the factors make no difference"


def test_sampling_stops_where_asked_and_a_bad_row_stops_no_other(tiny_checkpoint: Callable[[str], Path]) -> None:
    engine = TransformersEngine(str(tiny_checkpoint("qwen2_5_vl")), SETTINGS)
    broken = Row(messages=(user(ImagePart("/nowhere.png")),), answer="", datasource="test", location="row 1")
    many = Row(
        messages=(user(*[ImagePart(Image.new("RGB", (56, 56)))] * 3),), answer="", datasource="test", location="row 2"
    )
    good = Row(messages=(user("What is 12?"),), answer="", datasource="test", location="row 3")
    sampling = SamplingSettings(n_samples=3, temperature=1.0, top_p=0.9, max_new_tokens=NEW_TOKENS)
    outcomes = {outcome.index: outcome for outcome in engine.respond(enumerate([broken, many, good]), sampling)}
    assert outcomes[0].reason is not None
    assert outcomes[0].reason.startswith("row 1: no image file /nowhere.png")
    assert outcomes[1].reason == "row 2: 3 images in one prompt, more than --max_images 2"
    assert len(outcomes[2].completions) == 3
    assert len({completion.text for completion in outcomes[2].completions}) > 1

    steps = iter(range(100))
    stopped = engine.stream(good, GREEDY, on_text=lambda text: None, should_stop=lambda: next(steps) >= 2)
    assert stopped.finish_reason in ("aborted", "stop")
    assert stopped.num_tokens <= 3
    engine.close()
