"""Text and images together: where `<|image_1|>` stands, the ids get a placeholder per token of that image."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image
from transformers import BatchFeature, ProcessorMixin

from lmm_r1.lmm_kits.phi3_v.image_processing import CROP, tokens_of_grid

IMAGE_TAG = re.compile(r"<\|image_(\d+)\|>")
IMAGE_TOKEN = "<|image|>"


class Phi3VProcessor(ProcessorMixin):
    """Microsoft's image processor and tokenizer as one, with its chat template.

    `img_tokens` and `calc_num_image_tokens_from_image_size` are what vLLM asks of it.
    """

    image_token = IMAGE_TOKEN
    img_tokens = tuple(f"<|image_{number}|>" for number in range(1, 1001))

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        # Released checkpoints hold the template in the tokenizer's config.
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template)

    @property
    def image_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def __call__(
        self,
        images: Image.Image | Sequence[Image.Image] | None = None,
        text: str | Sequence[str] | None = None,
        return_tensors: str | None = None,
        padding: bool = False,
        add_special_tokens: bool = True,
        **kwargs: Any,
    ) -> BatchFeature:
        """Return ids, mask and image tensors; the images stand in the order of the texts.

        Raises ValueError where the tags of a text are not `<|image_1|>`, `<|image_2|>` and so on in this order.
        """
        media: Mapping[str, Any] = {}
        counts: list[int] = []
        if images is not None:
            media = self.image_processor(images, return_tensors="pt", **kwargs)
            crop_tokens = self.image_processor.num_img_tokens
            counts = [
                tokens_of_grid(height // CROP, width // CROP, crop_tokens=crop_tokens)
                for height, width in media["image_sizes"].tolist()
            ]
        if text is None:
            return BatchFeature(dict(media), tensor_type=return_tensors)
        texts = [text] if isinstance(text, str) else list(text)
        rows = []
        for one in texts:
            tags = len(IMAGE_TAG.findall(one))
            rows.append(self.token_ids(one, counts=counts[:tags], add_special_tokens=add_special_tokens))
            counts = counts[tags:]
        if counts:
            raise ValueError(f"{len(counts)} images more than there are image tags in the text")
        padded = self.tokenizer.pad({"input_ids": rows}, padding=padding, return_tensors=return_tensors)
        return BatchFeature({**padded, **media}, tensor_type=return_tensors)

    def token_ids(self, text: str, *, counts: Sequence[int], add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text whose i-th image tag is replaced by `counts[i]` placeholders.

        The pieces between the tags are tokenized one by one, so a tokenizer that begins texts with a token (`<s>` in the
        release) begins every piece with it.
        """
        pieces = IMAGE_TAG.split(text)  # text, number, text, number, ..., text
        numbers = [int(number) for number in pieces[1::2]]
        if numbers != list(range(1, len(counts) + 1)):
            raise ValueError(f"the image tags of a text must count from 1 to its {len(counts)} images, not {numbers}")
        first, *others = self.tokenizer(pieces[::2], add_special_tokens=add_special_tokens)["input_ids"]
        for count, ids in zip(counts, others, strict=True):
            first += [self.image_token_id] * count + ids
        return first

    def apply_chat_template(
        self, conversation: Sequence[Any], *args: Any, tokenize: bool = False, **kwargs: Any
    ) -> Any:
        """Return the conversation as text; the template takes text alone, so images are written as numbered tags.

        Raises ValueError for a conversation with images that is to be tokenized: call the processor on text and images.
        """
        if conversation and not isinstance(conversation[0], Mapping):
            return [self.apply_chat_template(one, *args, tokenize=tokenize, **kwargs) for one in conversation]
        chat, images = with_image_tags(conversation)
        if images and tokenize:
            raise ValueError("a conversation with images is rendered with tokenize=False, then given to the processor")
        return super().apply_chat_template(chat, *args, tokenize=tokenize, **kwargs)

    def calc_num_image_tokens_from_image_size(self, *, width: int, height: int) -> int:
        """Return how many tokens stand for an image of this size in pixels."""
        return self.image_processor.num_image_tokens(width=width, height=height)


def with_image_tags(conversation: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the conversation with text alone, and the number of its images.

    [image, "Which?"] -> "<|image_1|>\\nWhich?": numbered through the conversation, each tag on a line of its own.
    """
    images = 0
    chat = []
    for turn in conversation:
        content = turn["content"]
        if not isinstance(content, str):
            pieces = []
            for part in content:
                if part["type"] == "text":
                    pieces.append(part["text"])
                else:
                    images += 1
                    pieces.append(f"<|image_{images}|>\n")
            content = "".join(pieces)
        chat.append({**turn, "content": content})
    return chat, images
