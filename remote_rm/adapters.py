"""Verifiers as the reward functions of other trainers: verl's, EasyR1's and TRL's.

The last part is what EasyR1's reward files import from `mathruler.grader`, where that package is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TypedDict

from remote_rm.answers.extraction import last_boxed
from remote_rm.registry import verifier_with
from remote_rm.responses import strip_end_tokens
from remote_rm.reward_function import FunctionReply, RewardFunction, reward_func_of


class RewardInput(TypedDict):
    """What EasyR1 gives for each response."""

    response: str
    response_length: int
    ground_truth: str


Completion = str | Sequence[Mapping[str, object]]
"""TRL's: a text, or the messages of a conversation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Adapter:
    """A verifier by name and settings; it can be pickled, so other trainers may send it to their workers."""

    verifier: str = "math"
    settings: Mapping[str, object] = field(default_factory=dict)
    """By the names of its flags: {"format_weight": 0.0}."""

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown verifier, setting or value."""
        verifier_with(self.verifier, self.settings)

    def __getstate__(self) -> dict[str, object]:
        return {"verifier": self.verifier, "settings": self.settings}

    @cached_property
    def _reward_func(self) -> RewardFunction:
        return reward_func_of(verifier_with(self.verifier, self.settings))

    def _reply(self, responses: Sequence[str], labels: Sequence[str], prompts: Sequence[str]) -> FunctionReply:
        texts = [strip_end_tokens(response) for response in responses]
        return self._reward_func(texts, prompts, list(map(str, labels)), responses=texts)

    def _parts(self, responses: Sequence[str], labels: Sequence[str], *, reward: str) -> list[dict[str, float]]:
        """The reward of each response under this name, with its named parts."""
        reply = self._reply(responses, labels, [""] * len(responses))
        logs = reply["extra_logs"]
        return [
            {reward: value, **{name: values[place] for name, values in logs.items()}}
            for place, value in enumerate(reply["rewards"])
        ]


class VerlScore(_Adapter):
    """A `compute_score` for verl's `custom_reward_function`."""

    def __call__(self, data_source: str, solution_str: str, ground_truth: str, **_more: object) -> dict[str, float]:
        """Return the reward as `score`, the accuracy as `acc` for validation, and the parts."""
        (parts,) = self._parts([solution_str], [ground_truth], reward="score")
        return {**parts, "acc": parts["accuracy"]} if "accuracy" in parts else parts


class EasyR1Scores(_Adapter):
    """A `compute_score` for EasyR1's `worker.reward.reward_function`, with `REWARD_TYPE = "batch"`."""

    def __call__(self, reward_inputs: Sequence[RewardInput]) -> list[dict[str, float]]:
        """Return the reward of each response as `overall`, and its parts."""
        responses = [given["response"] for given in reward_inputs]
        return self._parts(responses, [given["ground_truth"] for given in reward_inputs], reward="overall")


@dataclass(frozen=True, kw_only=True, eq=False)
class TRLReward(_Adapter):
    """An entry of `reward_funcs` of TRL's trainers."""

    label: str = "answer"
    """The column with the gold answers."""

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "label": self.label}

    @property
    def __name__(self) -> str:
        """What TRL calls it in its metrics."""
        return self.verifier

    def __call__(
        self, *, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: object
    ) -> list[float]:
        """Return one reward for each completion; raises ValueError if the rows have no column `label`."""
        labels = columns.get(self.label)
        if not isinstance(labels, Sequence):
            raise ValueError(
                f"the rows have no column {self.label!r} with gold answers; name it, as in "
                f'TRLReward(verifier={self.verifier!r}, label="solution")'
            )
        texts = list(map(_text_of, prompts))
        return self._reply(list(map(_text_of, completions)), labels, texts)["rewards"]


def _text_of(completion: Completion) -> str:
    """The text of a completion, or of the last message of a conversation, whose content may be a list of parts."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(str(part["text"]) for part in content if part.get("type") == "text")
    return str(content or "")


grader = sys.modules[__name__]


def extract_boxed_content(text: str) -> str:
    r"""Return the content of the last `\boxed{}`, and the text `None` without one, as mathruler does."""
    return last_boxed(text) or "None"


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    """Return whether an answer is right, as the verifier `math` says; its worker has a limit of processor time."""
    given, truth = str(given_answer).strip(), str(ground_truth).strip()
    if given_answer is None or not truth or given == truth:
        return given_answer is not None and given == truth
    reply = _judge()([given], [""], [truth], responses=[f"<answer>{given}</answer>"])
    return reply["scores"] == [1.0]


@cache
def _judge() -> RewardFunction:
    return reward_func_of("math")
