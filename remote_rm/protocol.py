"""The wire format, OpenRLHF's own: what a trainer posts to /get_reward and what it reads from the reply."""

import re
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import Self

from remote_rm.verifier import as_text, check_parallel

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
        columns = {name: getattr(self, name) for name in type(self).model_fields}
        check_parallel("the lists of one request", columns)
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


class GradedSample(BaseModel):
    """A model's output, as OpenAI's graders call it; other fields are ignored."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    output_text: Text
    """The response."""


class GradedItem(BaseModel):
    """A row of the data set; other fields are ignored."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    reference_answer: Text = Field(validation_alias=AliasChoices("reference_answer", "answer", "label"))
    """The gold answer, which may be called `answer` or `label`, too."""


class GradeRequest(BaseModel):
    """One sample, as OpenAI's fine-tuning posts it to a grader's endpoint."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [{"sample": {"output_text": "The answer is 4."}, "item": {"reference_answer": "4"}}]
        },
    )

    sample: GradedSample
    """What is graded."""
    item: GradedItem
    """What it is graded by."""

    def as_rewards(self) -> RewardRequest:
        """Return the request for its reward."""
        return RewardRequest(
            query=[self.sample.output_text],
            prompts=[""],
            labels=[self.item.reference_answer],
            responses=[self.sample.output_text],
        )


class GradeReply(BaseModel):
    """The reply to a graded sample."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    score: float
    """From 0.0 to 1.0, without the format."""
    reward: float
    """The weighted sum of the parts, which includes the format."""
    parts: dict[str, float]
    """The named parts of the reward."""


class Refusal(BaseModel):
    """Why a request got no rewards."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    detail: str | list[dict[str, Any]]
    """A sentence, or one entry per wrong field with its place `loc` and the reason `msg`."""
    max_request_items: int | None = None
    """With 413 for too many samples: how many a request may hold."""


class Health(BaseModel):
    """The state of the service and its counts since the start."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    status: str
    """Always `ok`: a service that is not does not answer."""
    service: str
    """The name of this service, by which clients recognise it."""
    verifier: str
    """The registered name of the verifier."""
    items: int
    """Items taken on."""
    quick: int
    """Items decided in the server process."""
    worker: int
    """Items decided in a worker process."""
    timed_out: int
    """Items that were cut off at the time limit."""
    failed: int
    """Items whose verifier raised, or that crashed their worker."""
    lost_workers: int
    """Workers killed from outside; their items were judged again."""
    waiting: int
    """Items that wait for a worker now."""
    busy: int
    """Items that are with a worker now."""
    workers: int
    """Worker processes alive now."""
    max_request_items: int
    """Samples that one request may hold; one with more is refused with 413."""


MAX_DEPTH = 64
"""Brackets that may be open at once; messages with images have about ten."""
MAX_DIGITS = 400
"""Digits in a row; a float has at most 309 before its point."""

_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_SIGN = re.compile(rf'"(?:[^"\\]|\\.)*"|[\[\]{{}}]|[0-9]{{{MAX_DIGITS + 1}}}', re.DOTALL)


def check_json(text: str) -> None:
    """Raise ValueError for JSON that is nested too deeply or has too long a number; strings may hold anything.

    Text that is not JSON may pass: the parser refuses it.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH and not _LONG_NUMBER.search(text):
        return
    depth = 0
    for found in _SIGN.finditer(text):
        sign = found[0]
        if sign in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep (character {found.start()})")
        elif sign in "]}":
            depth -= 1
        elif not sign.startswith('"'):
            raise ValueError(f"a number has more than {MAX_DIGITS} digits (character {found.start()})")
