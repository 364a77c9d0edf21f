"""How a reward server's model scores samples as they are sent: whole responses, or their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from lmm_r1.config.generation import StepScores
from lmm_r1.data.messages import Row
from lmm_r1.data.sent_prompt import ending_of
from lmm_r1.scoring.scored_response import score_of_steps
from remote_rm.answers.extraction import find_response
from remote_rm.verifier import Score

if TYPE_CHECKING:
    from lmm_r1.lmm_kits import EncodedPrompt
    from lmm_r1.scoring.reward_model import EncodedSample, EncodedSteps, ProcessRewardModel, RewardModel

SampleT = TypeVar("SampleT", bound="EncodedSample")


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One sample as it was sent."""

    query: str
    prompt: str
    response: str | None
    label: str


class ServedRewards(ABC, Generic[SampleT]):
    """A model that scores samples; one thread at a time may use it."""

    name: ClassVar[str]
    """Its name in `GET /health`."""
    max_batch_tokens: int
    """How many tokens are computed together."""

    @abstractmethod
    def encode_prompt(self, row: Row) -> EncodedPrompt:
        """Return a prompt of messages, for several samples; raises UserError for an unusable one."""

    @abstractmethod
    def encode(self, item: RewardItem, response: str, *, row: Row, prompt: EncodedPrompt) -> SampleT:
        """Return the sample of a prompt of messages and a response; raises UserError for an unusable one."""

    @abstractmethod
    def encode_text(self, item: RewardItem) -> SampleT:
        """Return the sample of rendered text; raises UserError for an unusable one."""

    @abstractmethod
    def score(self, samples: Sequence[SampleT]) -> list[Score]:
        """Return the score of each sample; its numbers are not checked, and may not be finite."""


class ResponseRewards(ServedRewards["EncodedSample"]):
    """Rewards of whole responses."""

    name = "reward_model"

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self.max_batch_tokens = model.max_batch_tokens

    def encode_prompt(self, row: Row) -> EncodedPrompt:
        return self._model.encode_prompt(row)

    def encode(self, item: RewardItem, response: str, *, row: Row, prompt: EncodedPrompt) -> EncodedSample:
        """Return the sample; the token that ended the response is read from the query."""
        ending = self._model.known_ending(ending_of(item.query, response=response))
        return self._model.encode(row, response, ending=ending, prompt=prompt)

    def encode_text(self, item: RewardItem) -> EncodedSample:
        return self._model.encode_text(item.query, prompt=item.prompt)

    def score(self, samples: Sequence[EncodedSample]) -> list[Score]:
        return [Score(reward=reward, score=reward, parts={}) for reward in self._model.score(samples)]


class StepRewards(ServedRewards["EncodedSteps"]):
    """Rewards computed from the scores of a response's steps, with all other aggregates as parts."""

    name = "process_reward_model"

    def __init__(self, model: ProcessRewardModel, *, step_scores: StepScores) -> None:
        self._model = model
        self._step_scores = step_scores
        self.max_batch_tokens = model.max_batch_tokens

    def encode_prompt(self, row: Row) -> EncodedPrompt:
        return self._model.encode_prompt(row)

    def encode(self, item: RewardItem, response: str, *, row: Row, prompt: EncodedPrompt) -> EncodedSteps:
        return self._model.encode_steps(row, response, prompt=prompt)

    def encode_text(self, item: RewardItem) -> EncodedSteps:
        """Return the sample; a response that was not sent separately is what follows the prompt in the query."""
        response = find_response(item.query, prompt=item.prompt) if item.response is None else item.response
        return self._model.encode_steps_of_text(item.prompt, response)

    def score(self, samples: Sequence[EncodedSteps]) -> list[Score]:
        return [score_of_steps(scores, kind=self._step_scores) for scores in self._model.score(samples)]
