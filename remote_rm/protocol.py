"""The wire format, OpenRLHF's own: what a trainer posts to /get_reward and what it reads from the reply."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from remote_rm.verifier import as_text, check_parallel

if TYPE_CHECKING:
    from typing_extensions import Self


_SURROGATE = re.compile("[\ud800-\udfff]")


def without_lone_surrogates(text: Any) -> Any:
    r"""Return a string with U+FFFD for each half of a surrogate pair, which no encoding can carry (JSON's `\ud800` can)."""
    if not isinstance(text, str) or text.isascii():
        return text
    return _SURROGATE.sub("\ufffd", text)


Text = Annotated[str, BeforeValidator(lambda value: without_lone_surrogates(as_text(value)))]
TextOrNull = Annotated[Text, BeforeValidator(lambda value: "" if value is None else value)]
Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RewardRequest(BaseModel):
    """Parallel lists, one entry per sample."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "query": ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<answer>4</answer><|im_end|>"],
                    "prompts": ["<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"],
                    "labels": ["4"],
                    "responses": ["<answer>4</answer>"],
                }
            ]
        },
    )

    query: list[Text]
    """Prompt and response as decoded by the trainer, special tokens included."""
    prompts: list[TextOrNull]
    """The prompt as rendered by the chat template."""
    labels: list[Text]
    """The gold answer of each sample, text or a number; an empty one is refused."""
    responses: list[Text] | None = None
    """The response. OpenRLHF does not send it; without it the response is extracted from `query`."""

    image_scales: list[list[tuple[Scale, Scale]]] | None = None
    """Of each sample's images, (x, y): what coordinates that the model writes are multiplied by to be pixels of the image as
    it is stored. OpenRLHF does not send it; without it coordinates are compared as they are written."""

    @model_validator(mode="after")
    def _lists_are_parallel(self) -> Self:
        check_parallel("the lists of one request", {name: getattr(self, name) for name in type(self).model_fields})
        return self


class RewardReply(BaseModel):
    """One entry per sample, in the order of the request."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [{"rewards": [1.0], "scores": [1.0], "extra_logs": {"accuracy": [1.0], "format": [0.0]}}]
        },
    )

    rewards: list[float]
    """What the policy is trained on: the weighted sum of the parts."""
    scores: list[float]
    """Right (1.0) or wrong (0.0), or between the two by a verifier that measures: what OpenRLHF's dynamic sampling
    filters by."""
    extra_logs: dict[str, list[float]]
    """The named parts of the rewards, for the trainer's log."""
