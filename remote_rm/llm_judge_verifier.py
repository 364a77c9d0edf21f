"""Judges answers by a language model behind an OpenAI-compatible chat endpoint, and by a rule if it is not asked.

python -m remote_rm llm_judge --judge-url http://127.0.0.1:8000/v1 --judge-model Qwen/Qwen3-8B --port 5000
"""

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from remote_rm.answer_verifier import AnswerVerifier, setting
from remote_rm.registry import get_verifier, positive
from remote_rm.verifier import Item, Score

if TYPE_CHECKING:
    from remote_rm.llm_judge import AskingJudge

PARTS = ("judge_asked", "judge_disagrees", "judged_by_rule")
"""Of its scores, each 0.0 or 1.0: the judge's verdict counts; it is right where the rule's is wrong; the judge was to be
asked, but gave no verdict, so that the rule judged."""


@dataclass(frozen=True, kw_only=True)
class LlmJudge(AnswerVerifier):
    """The rule's verdict, and a language model's on what the rule does not take for right.

    `quick_score`, `score` and `failed_score` are only the rule's, as workers need them; `judge_type` asks the judge.
    """

    name: ClassVar[str] = "llm_judge"

    judge_url: str = setting(
        "", required=True, help="base of an OpenAI-compatible API: vLLM's http://127.0.0.1:8000/v1, a hosted one"
    )
    judge_model: str = setting("", required=True, help="name of the model there")
    judge_rule: str = setting(
        "math", metavar="VERIFIER", help="the verifier that judges first, and alone where the judge fails"
    )
    judge_folder: str = setting(
        "llm_judge",
        metavar="FOLDER",
        help="verdicts, so that no question is asked twice; on a disk of this machine, where processes may share it",
    )
    judge_body: str = setting(
        "{}", metavar="JSON", help='fields put into every request, such as {"max_tokens": 64}; null takes one out'
    )
    judge_concurrency: int = setting(16, type=positive(int), help="requests under way at a time")
    judge_deadline_seconds: float = setting(
        45.0,
        type=positive(float),
        help="time of one item in up to 3 requests, after which the rule judges it; keep it below the time that clients "
        "allow a reward (--reward.timeout_s)",
    )
    rule: AnswerVerifier = field(init=False, repr=False, compare=False)
    """The verifier for items that the judge does not decide; made from `judge_rule`."""

    def __post_init__(self) -> None:
        """Raise ValueError for a rule that compares no answers, or a body that is not an object."""
        rule = get_verifier(self.judge_rule)
        if not isinstance(rule, AnswerVerifier) or isinstance(rule, LlmJudge):
            raise ValueError(
                f"--judge-rule {self.judge_rule} compares no answer with the label; take math, choice, number, exact or list"
            )
        object.__setattr__(self, "rule", rule)
        try:
            is_object = isinstance(json.loads(self.judge_body), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ValueError(
                f"--judge-body {self.judge_body} is no JSON object: give one such as '{{\"max_tokens\": 64}}'"
            )

    def matches(self, answer: str, label: str) -> bool:
        return self.rule.matches(answer, label)

    def quick_match(self, answer: str, label: str) -> bool | None:
        return self.rule.quick_match(answer, label)

    def states(self, answer: str, label: str) -> bool:
        return self.rule.states(answer, label)

    def check_label(self, label: str) -> None:
        self.rule.check_label(label)

    def weighted(self, item: Item, *, is_right: bool) -> Score:
        return self.decided(super().weighted(item, is_right=is_right), None, is_asked=True)

    def decided(self, by_rule: Score, is_right: bool | None, *, is_asked: bool) -> Score:
        """Return the rule's score with the judge's verdict in its place; the rule's if there is none."""
        was_wrong = by_rule.score == 0.0 and not by_rule.timed_out
        marks = (is_right is not None, bool(is_right) and was_wrong, is_asked and is_right is None)
        parts = {**by_rule.parts, **dict(zip(PARTS, map(float, marks), strict=True))}
        if is_right is None:
            return replace(by_rule, parts=parts)
        parts["accuracy"] = float(is_right)
        reward = self.weights.accuracy * parts["accuracy"] + self.weights.format * parts["format"]
        return Score(reward=reward, score=parts["accuracy"], parts=parts)

    def judge_type(self) -> "type[AskingJudge]":
        """Return the pool of the rule's workers that also asks the language model."""
        from remote_rm.llm_judge import AskingJudge

        return AskingJudge

    async def check_ready(self) -> None:
        """Raise NotReady if the judge cannot be asked, or its records cannot be kept."""
        from remote_rm.llm_judge import Asker

        asker = Asker(self)
        try:
            await asker.check()
        finally:
            await asker.close()
