"""Chats without a checkpoint: an engine that says what it is told to."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fastapi.testclient import TestClient

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.tools.chat import Chat, ChatModel
from remote_rm.math_verifier import MathVerifier
from remote_rm.service.app import create_app

GREEDY = SamplingSettings(n_samples=1, temperature=0, top_p=1, max_new_tokens=16)


@dataclass
class ScriptedEngine:
    """Answers each prompt with the next entry: a completion, or the sentence of a UserError."""

    script: list[Completion | str]
    rows: list[Row] = field(default_factory=list)
    sampling: list[SamplingSettings] = field(default_factory=list)

    def stream(
        self, row: Row, sampling: SamplingSettings, *, on_text: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Completion:
        self.rows.append(row)
        self.sampling.append(sampling)
        answer = self.script.pop(0)
        if isinstance(answer, str):
            raise UserError(answer)
        for character in answer.text:
            on_text(character)
        return answer


def answer(text: str, *, finish_reason: str = "stop", num_tokens: int = 4) -> Completion:
    return Completion(text=text, num_tokens=num_tokens, finish_reason=finish_reason)


def chat(*script: Completion | str, system: str | None = None, **changes: object) -> Chat:
    """A chat whose engine has the script; `changes` are fields of its model."""
    model = ChatModel(
        engine=ScriptedEngine(list(script)),
        name="models/tiny",
        max_images=2,
        max_videos=0,
    )
    return Chat(model=replace(model, **changes), sampling=GREEDY, out=io.StringIO(), in_terminal=False, system=system)


@contextmanager
def reward_client(*, item_timeout_seconds: float) -> Iterator[TestClient]:
    """A client of a reward server."""
    rewards = create_app(MathVerifier(), workers=1, item_timeout_seconds=item_timeout_seconds)
    with TestClient(rewards, raise_server_exceptions=False) as client:
        yield client
