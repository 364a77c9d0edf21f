"""A policy without a model: random turns on a tiny checkpoint's own tokens, ended in every way in which vLLM ends one."""

from __future__ import annotations

import bisect
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from helpers.conversations import message
from helpers.tiny_models import encode
from PIL import Image

from lmm_r1.lmm_kits import LmmKit


@dataclass(frozen=True)
class Spoken:
    """One turn as the engine has made it."""

    read: tuple[int, ...]
    """What it was shown, placeholders expanded."""
    images: tuple[Image.Image, ...]
    generated: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended_by: str
    """`token`, `text` or `length`."""


class RandomPolicy:
    """A `TokenEngine` whose turns are random tokens, or what `turn` says, and which notes all that it is shown.

    Samples that have been shown the same now and then say the same, as branches of one episode do. What comes of a
    conversation follows from the seed and from what was shown, whatever the order of requests.
    """

    def __init__(self, kit: LmmKit, processor: Any, config: Any, *, turn: Callable[[Random], str], seed: int) -> None:
        self.kit, self.processor, self.turn, self.seed = kit, processor, turn, seed
        self.tokenizer = kit.tokenizer_of(processor)
        self.placeholders = kit.placeholder_ids(processor)
        self.banned = frozenset(kit.banned_token_ids(config, self.tokenizer))
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        self.ordinary = [token for token in range(len(self.tokenizer)) if token not in self.banned | ends]
        # As text they are no special tokens: nothing keeps a policy from spelling them.
        banned = sorted(self.banned & set(range(len(self.tokenizer))))
        self.spelt = [*self.tokenizer.convert_ids_to_tokens(banned), "<|image_1|>"]
        self.spoken: list[Spoken] = []
        self._asked: Counter[int] = Counter()
        self._expansions: dict[tuple[int, int], list[int]] = {}

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        assert parameters.logit_bias is None, "the workers ban tokens"
        ids = prompt["prompt_token_ids"]
        images = tuple(prompt.get("multi_modal_data", {}).get("image", ()))
        asked = zlib.crc32(repr((self.seed, ids, [zlib.crc32(image.tobytes()) for image in images])).encode())
        self._asked[asked] += 1
        alike = Random(asked).random() < 0.3
        draw = Random(repr((asked, 0 if alike else self._asked[asked])))
        generated, ended_by = self._ended(self._tokens(draw), parameters, draw)
        read = self._expanded(ids, images)
        given = Random(repr((read, generated)))
        log_probs = [-given.expovariate(1.0) for _ in generated]
        self.spoken.append(Spoken(tuple(read), images, tuple(generated), tuple(log_probs), ended_by))
        part = SimpleNamespace(
            index=0,
            token_ids=generated,
            logprobs=[
                {token: SimpleNamespace(logprob=value)} for token, value in zip(generated, log_probs, strict=True)
            ],
            finish_reason="length" if ended_by == "length" else "stop",
            stop_reason=self._stop_in(generated, parameters.stop) if ended_by == "text" else None,
        )
        yield SimpleNamespace(outputs=[part], prompt_token_ids=read)

    def _tokens(self, draw: Random) -> list[int]:
        noise = draw.choices(self.ordinary, k=draw.choice((0, 0, 1, 3, 12)))
        if draw.random() < 0.25:
            return noise + draw.choices(self.ordinary, k=draw.randint(0, 8))
        text = self.turn(draw)
        if draw.random() < 0.1:
            text = text.replace(">", f">{draw.choice(self.spelt)}", 1)
        ids = [token for piece in _broken(text, self.spelt) for token in self._plain(piece)]
        return noise + [token for token in ids if token not in self.banned]

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _ended(self, ids: list[int], parameters: Any, draw: Random) -> tuple[list[int], str]:
        """Return a turn as vLLM ends it: behind the first text that ends turns, at the limit, or by the end token."""
        end = self.tokenizer.eos_token_id
        ids = [token for token in ids if token != end]
        if self._stop_in(ids, parameters.stop):
            # Whether one stands in so many tokens: no, no, ..., yes, yes.
            holds = [*range(1, len(ids) + 1)]
            first = bisect.bisect_left(
                holds, True, key=lambda count: bool(self._stop_in(ids[:count], parameters.stop))
            )
            ids = ids[: holds[first]]
            if len(ids) <= parameters.max_tokens:
                return ids, "text"
        if len(ids) >= parameters.max_tokens:
            return ids[: parameters.max_tokens], "length"
        return [*ids, end], "token"

    def _stop_in(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return next((stop for stop in stops if stop in text), None)

    def _expanded(self, ids: Sequence[int], images: Sequence[Image.Image]) -> list[int]:
        """Return a prompt with what the kit writes for each image by itself in the place of its placeholder."""
        expansions = iter([self._expansion_of(image) for image in images])
        read = [token for one in ids for token in (next(expansions) if one in self.placeholders else [one])]
        assert next(expansions, None) is None, "more images than placeholders"
        return read

    def _expansion_of(self, image: Image.Image) -> list[int]:
        if image.size not in self._expansions:
            alone = encode(self.kit, self.processor, [message("user", image)])
            (start,) = (place for place, token in enumerate(alone.engine_token_ids) if token in self.placeholders)
            behind = len(alone.engine_token_ids) - start - 1
            self._expansions[image.size] = alone.token_ids[start : len(alone.token_ids) - behind]
        return self._expansions[image.size]


def _broken(text: str, words: Sequence[str]) -> list[str]:
    """Return a text in pieces, none of which holds one of the words whole."""
    for word in words:
        text = text.replace(word, f"{word[0]}\0{word[1:]}")
    return text.split("\0")
