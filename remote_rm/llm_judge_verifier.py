"""Judges answers by a language model behind an OpenAI-compatible chat endpoint, and by a rule if it is not asked.

python -m remote_rm.llm_judge_verifier --judge-url http://127.0.0.1:8000/v1 --judge-model Qwen/Qwen3-8B --port 5000
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from remote_rm import registry
from remote_rm.answer_verifier import AnswerVerifier, setting
from remote_rm.registry import get_verifier, positive, verifier_with
from remote_rm.reward_function import FunctionReply, RewardFunction, reward_func_of
from remote_rm.verifier import Item, Score

if TYPE_CHECKING:
    from remote_rm.llm_judge.asker import AskingJudge

PARTS = ("judge_asked", "judge_disagrees", "judge_failed", "judged_by_rule")
PREFIX, WEIGHTS = "judge_", ("accuracy_weight", "format_weight")
"""Of the settings among the arguments of `reward_func`, which holds whatever a row has, too."""
CALLS_AT_ONCE = 256
"""How many groups `reward_func` may get at a time: its calls mostly wait."""


@dataclass(frozen=True, kw_only=True)
class LlmJudge(AnswerVerifier):
    """The rule's verdict, and a language model's on what the rule does not take for right.

    Its settings are those of its flags.

    `quick_score`, `score` and `failed_score` are only the rule's, as workers need them; `judge_type` asks the judge.
    In addition to `accuracy` and `format` the parts of its scores are, each 0.0 or 1.0:

    - judge_asked: the judge's verdict counts, asked for now or earlier;
    - judge_disagrees: it is not the rule's;
    - judge_failed: it was to be asked, and gave no verdict;
    - judged_by_rule: there was no judge to ask, for it failed or its budget is used up; the rule judged.
    """

    name: ClassVar[str] = "llm_judge"

    judge_url: str = setting(
        "", required=True, help="base of an OpenAI-compatible API: vLLM's http://127.0.0.1:8000/v1, a hosted one"
    )
    judge_model: str = setting("", required=True, help="name of the model there")
    judge_key_env: str | None = setting(
        None,
        metavar="NAME",
        help="environment variable with the API key; without the flag LLM_JUDGE_API_KEY is sent where it is set",
    )
    judge_rule: str = setting(
        "math",
        metavar="VERIFIER",
        help="the verifier that judges first, and alone where the judge fails or its budget is used up",
    )
    judge_always: bool = setting(
        False,
        help="ask also where the rule says right; by default it is not asked then, since the rules are strict: what they "
        "take for right is right but for rare cases, and most of a trained policy's answers would be paid for in vain",
    )
    judge_folder: str | None = setting(
        "llm_judge",
        metavar="FOLDER",
        help="verdicts, what was spent, and disagreements with the rule; with the same folder nothing is paid for twice and "
        "the budget goes on; on a disk of this machine, where several processes may share it",
    )
    judge_body: str = setting(
        "{}", metavar="JSON", help='fields put into every request, such as {"max_tokens": 64}; null takes one out'
    )
    judge_max_requests: int | None = setting(
        None, type=positive(int), help="requests that the folder may hold in all, after which the rule judges"
    )
    judge_max_tokens: int | None = setting(
        None, type=positive(int), help="tokens likewise, by the replies' usage; requests under way may exceed it"
    )
    judge_concurrency: int = setting(16, type=positive(int), help="requests under way at a time")
    judge_timeout_seconds: float = setting(20.0, type=positive(float), help="time of one request")
    judge_deadline_seconds: float = setting(
        45.0,
        type=positive(float),
        help="time of one item for its turn, all requests and pauses, after which the rule judges it; keep it below the "
        "time that clients allow a reward (--reward.timeout_s)",
    )
    judge_attempts: int = setting(
        3,
        type=positive(int),
        help="requests for one item: another follows a time-out, a connection error, 408, 429, 5xx or a reply that is no "
        "verdict",
    )
    judge_max_answer_chars: int = setting(
        500,
        type=positive(int),
        help="characters of the final answer that the judge is shown; of a longer one both ends",
    )
    judge_max_question_chars: int = setting(
        4000, type=positive(int), help="characters of the question, and of the label, likewise"
    )
    rule: AnswerVerifier = field(init=False, repr=False, compare=False)
    """The verifier for items that the judge does not decide; made from `judge_rule`."""

    def __post_init__(self) -> None:
        """Raise ValueError for a rule that compares no answers, an invalid address, or a body that is not an object."""
        rule = get_verifier(self.judge_rule)
        if not isinstance(rule, AnswerVerifier) or isinstance(rule, LlmJudge):
            raise ValueError(
                f"--judge-rule {self.judge_rule} compares no answer with the label; take math, choice, number, exact or list"
            )
        object.__setattr__(self, "rule", rule)
        address = urlsplit(self.judge_url)
        if self.judge_url and (address.scheme not in ("http", "https") or not address.netloc):
            raise ValueError(
                f"--judge-url {self.judge_url} is no address of an API: give its base, such as http://127.0.0.1:8000/v1"
            )
        try:
            body = json.loads(self.judge_body)
        except ValueError as error:
            raise ValueError(f"--judge-body {self.judge_body} is no JSON: {error}") from error
        if not isinstance(body, dict):
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
        return self.marked(super().weighted(item, is_right=is_right), judged_by_rule=1.0)

    def marked(self, score: Score, **parts: float) -> Score:
        """Return a score with the given of PARTS, the others 0.0."""
        assert parts.keys() <= set(PARTS), parts
        return replace(score, parts={**score.parts, **dict.fromkeys(PARTS, 0.0), **parts})

    def decided(self, by_rule: Score, *, is_right: bool, disagrees: bool) -> Score:
        """Return the rule's score with the judge's verdict in its place."""
        told = self.marked(by_rule, judge_asked=1.0, judge_disagrees=float(disagrees))
        parts = {**told.parts, "accuracy": float(is_right)}
        reward = self.weights.accuracy * parts["accuracy"] + self.weights.format * parts["format"]
        return replace(told, reward=reward, score=parts["accuracy"], parts=parts, timed_out=False)

    def judge_type(self) -> "type[AskingJudge]":
        """Return the pool of the rule's workers that also asks the language model."""
        from remote_rm.llm_judge.asker import AskingJudge

        return AskingJudge

    async def check_ready(self) -> None:
        """Raise NotReady if the judge cannot be asked, or its records cannot be kept."""
        from remote_rm.llm_judge.asker import Asker

        await Asker(self).check()


VERIFIER = LlmJudge

_made: dict[str, RewardFunction] = {}
_making = threading.Lock()


def reward_func(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[str],
    *,
    responses: Sequence[str] | None = None,
    **given: Any,
) -> FunctionReply:
    """Return the reply for parallel lists; the flags are given by name: judge_url, judge_model and so on.

    Raises ValueError for unequal lengths, a label without answer and a wrong setting, and RuntimeError if the judge
    cannot be asked from the start.
    """
    settings = {
        name: json.dumps(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if name.startswith(PREFIX) or name in WEIGHTS
    }
    key = json.dumps(settings, sort_keys=True, default=str)
    with _making:
        if key not in _made:
            _made[key] = reward_func_of(verifier_with(LlmJudge.name, settings))
    return _made[key](queries, prompts, labels, responses=responses)


if __name__ == "__main__":
    registry.run("llm_judge", None, prog="python -m remote_rm.llm_judge_verifier")
