"""The conversations that rollouts answer, as a page's script gets them."""

import json
from collections.abc import Sequence

from lmm_r1.records.rollouts import Message, Part
from lmm_r1.records.run import Stage
from lmm_r1.report.inline_images import ImageError, InlineImages


class Prompts:
    """Collects conversations: the same one stands in the page once, whichever run, stage and step it was sampled in."""

    def __init__(self, images: InlineImages) -> None:
        self.records: list[list[dict[str, object]]] = []
        self._images = images
        self._places: dict[str, int] = {}

    def add(self, messages: Sequence[Message], *, stage: Stage) -> int:
        """Return the place in `records` of a conversation of this stage."""
        record = [
            {"role": message.role, "parts": [self._part(part, stage=stage) for part in message.parts]}
            for message in messages
        ]
        key = json.dumps(record)
        if key not in self._places:
            self._places[key] = len(self.records)
            self.records.append(record)
        return self._places[key]

    def _part(self, part: Part, *, stage: Stage) -> dict[str, object]:
        if part.kind == "text":
            return {"text": part.value}
        try:
            return {"image": self._images.add(part.value, folder=stage.folder)}
        except ImageError as error:
            shown = "data URI" if part.value.startswith("data:") else part.value
            return {"missing": f"{shown}: {error}"}
