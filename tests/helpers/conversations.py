"""Conversations for tests: images that differ everywhere, messages and rows."""

from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart


def picture(width: int, height: int) -> Image.Image:
    """Return an image whose pixels all differ a little, so that no two patches look the same."""
    pixels = bytes(value % 256 for y in range(height) for x in range(width) for value in (7 * x, 11 * y, 5 * (x + y)))
    return Image.frombytes("RGB", (width, height), pixels)


def message(role: str, *parts: str | Image.Image | ImagePart) -> Message:
    """Return a message of texts and images in the order given."""
    wrapped = {str: TextPart, Image.Image: ImagePart, ImagePart: lambda part: part}
    return Message(role=role, parts=tuple(wrapped[type(part)](part) for part in parts))


def row(*messages: Message, answer: str = "46") -> Row:
    return Row(messages=messages, answer=answer, datasource="test", location="rows.jsonl, line 1")
