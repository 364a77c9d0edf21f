"""A kit whose tokens are characters, so that ids can be worked out by hand; it loads no model."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, TextPart, VideoPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.lmm_kits.encoding import any_of, collapse_runs

END, PLACEHOLDER, AFTER_IMAGE, BORDER = 1, 2, 3, 4
PATCHES = 3
NEWLINE = 10
IMAGE = Image.new("RGB", (4, 4))


class CharacterTokenizer:
    """Characters are ids; the rest are three special tokens."""

    eos_token_id = END
    pad_token_id = 0
    bos_token = None
    chat_template = ""
    added_tokens_decoder: ClassVar[dict[int, object]] = {}
    all_special_tokens: ClassVar[tuple[str, ...]] = ()

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return list(map(chr, token_ids))

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [PLACEHOLDER if character == "#" else ord(character) for character in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        special = {END: "<end>", PLACEHOLDER: "<image>", AFTER_IMAGE: "</image>"}
        return "".join(special.get(token, chr(token)) for token in token_ids)


class CharacterKit:
    """A turn is the first letter of its role, its characters, END and a newline; an image is three placeholders, a video one.

    What `GroupRollout` and `encode_sample` ask of an LmmKit, and how often they ask for the encoding.
    """

    def __init__(self) -> None:
        self.encoded = 0

    def tokenizer_of(self, processor: object) -> CharacterTokenizer:
        return CharacterTokenizer()

    takes_images = takes_videos = True
    spoken_tokens: ClassVar[tuple[str, ...]] = ()

    def check_size(self, processor: object, part: object, *, width: int, height: int) -> None:
        if width < 2:
            raise UserError("an image is too small")

    def placeholder_ids(self, processor: object) -> frozenset[int]:
        return frozenset({PLACEHOLDER})

    def collapsed(self, processor: object, token_ids: Sequence[int]) -> list[int]:
        return collapse_runs(token_ids, placeholders=frozenset({PLACEHOLDER}))

    def media_ids(self, processor: object) -> frozenset[int]:
        return frozenset({PLACEHOLDER})

    def media_texts(self, processor: object) -> re.Pattern[str]:
        return any_of(())

    def spoken_end_ids(self, tokenizer: object) -> frozenset[int]:
        return frozenset()

    def engine_media(self, encoded: EncodedPrompt) -> dict[str, list[Image.Image]]:
        return {"image": encoded.images} if encoded.images else {}

    def image_scales(
        self, processor: object, encoded: EncodedPrompt, *, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[float, float], ...]:
        """As if every image were shown with half its width and a quarter of its height."""
        return ((2.0, 4.0),) * len(sizes)

    def encode(
        self,
        processor: object,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[object] = (),
    ) -> EncodedPrompt:
        self.encoded += 1
        if any(image.width < 2 for image in images):
            raise UserError("an image is too small")
        ids = self._ids(messages, patches=PATCHES, add_generation_prompt=add_generation_prompt)
        return EncodedPrompt(
            token_ids=ids,
            engine_token_ids=collapse_runs(ids, placeholders=frozenset({PLACEHOLDER})),
            images=list(images),
            media={"pixels": len(images)} if images else None,
            videos=list(videos),
        )

    def encode_bordered(
        self,
        processor: object,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        videos: Sequence[object],
    ) -> tuple[list[int], int]:
        bordered = [
            replace(
                one,
                parts=tuple(
                    TextPart(f"{chr(BORDER)}{part.text}{chr(BORDER)}") if isinstance(part, TextPart) else part
                    for part in one.parts
                ),
            )
            for one in messages
        ]
        return self.encode(processor, bordered, images=images, add_generation_prompt=False).token_ids, BORDER

    def render(
        self,
        processor: object,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
    ) -> list[int]:
        return self._ids(messages, patches=1, add_generation_prompt=add_generation_prompt)

    def chat_text(self, processor: object, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return "".join(map(chr, self._ids(messages, patches=1, add_generation_prompt=add_generation_prompt)))

    def encode_text(
        self, processor: object, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        written = [ord(character) for character in text]
        if written.count(PLACEHOLDER) != len(images):
            raise UserError(f"{written.count(PLACEHOLDER)} marks for {len(images)} images")
        ids = [token for token in written for _ in range(PATCHES if token == PLACEHOLDER else 1)]
        return EncodedPrompt(
            token_ids=ids,
            engine_token_ids=written,
            images=list(images),
            media={"pixels": len(images)} if images else None,
        )

    def _ids(self, messages: Sequence[Message], *, patches: int, add_generation_prompt: bool) -> list[int]:
        ids = []
        for message in messages:
            ids.append(ord(message.role[0]))
            for part in message.parts:
                if isinstance(part, ImagePart):
                    ids += [PLACEHOLDER] * patches + [AFTER_IMAGE]
                elif isinstance(part, VideoPart):
                    ids.append(PLACEHOLDER)
                else:
                    ids += map(ord, part.text)
            ids += [END, NEWLINE]
        return [*ids, ord("a")] if add_generation_prompt else ids
