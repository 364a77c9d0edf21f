"""However a user's reward function fails, the run ends with the row's place, the file's line and what was wrong."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.character_kit import CharacterKit
from helpers.conversations import message, row
from helpers.tables import table

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupRollout, GroupSettings
from lmm_r1.generation.request import PromptCodec
from lmm_r1.scoring import Moment, ScoredResponse, Scorer
from lmm_r1.scoring.sources import make_scorer

ROW = row(message("user", "1+1?"), answer="2")
BATCH = [ScoredResponse(row=ROW, prompt="p", query=f"q{text}", response=text, num_tokens=2) for text in ("2", "3")]
OPENRLHF = "def reward_func(queries, prompts, labels, responses):\n    "
EASYR1 = "def compute_score(reward_inputs):\n    "


class EndedEngine:
    """Gives both responses of a group at once."""

    async def generate(self, request, parameters, request_id):
        for index, text in enumerate(b"23"):
            piece = SimpleNamespace(
                index=index, token_ids=[text], logprobs=None, finish_reason="length", stop_reason=None
            )
            yield SimpleNamespace(outputs=[piece], prompt_token_ids=None)


def source(folder: Path, code: str, *, deadline_s: float = 60.0) -> Scorer:
    path = folder / "rewards.py"
    path.write_text(code)
    return make_scorer(RewardConfig(remote_url=str(path), deadline_s=deadline_s))


def group(scorer: Scorer) -> list[Sample]:
    """The group of `ROW`, generated and scored as in an engine."""
    rollout = GroupRollout(
        codec=PromptCodec(kit=CharacterKit(), processor=None, banned_token_ids=()),
        scorer=scorer,
        in_thread=asyncio.to_thread,
        store=lambda media: None,
    )
    settings = GroupSettings(
        sampling=SamplingSettings(n_samples=2, temperature=1.0, top_p=1.0, max_new_tokens=4),
        max_len=32,
        logprobs=False,
        ignore_eos=False,
        overlong_prompts="error",
        media=False,
        moment=Moment(step=7, held_out=False),
    )
    made = rollout.run(EndedEngine(), ROW, settings, weight_version=0)
    return asyncio.run(asyncio.wait_for(made, timeout=30))


def rewards(samples: list[Sample]) -> list[float]:
    return [sample.scored.reward for sample in samples]


@pytest.mark.parametrize(
    ("code", "said"), table("scoring/function_failures", "whatever_goes_wrong_is_told_with_the_row")
)
def test_whatever_goes_wrong_is_told_with_the_row(tmp_path, code, said):
    with pytest.raises(UserError, match=f"^rows.jsonl, line 1: --reward.remote_url .*{said}"):
        group(source(tmp_path, code))


@pytest.mark.parametrize(
    "code", table("scoring/function_failures", "numbers_of_any_library_and_async_functions_are_taken")
)
def test_numbers_of_any_library_and_async_functions_are_taken(tmp_path, code):
    assert set(rewards(group(source(tmp_path, code)))) <= {0.5, 1.0}


@pytest.mark.parametrize("code", [OPENRLHF, EASYR1])
def test_a_function_that_hangs_ends_the_run_with_its_row_after_the_deadline(tmp_path, code):
    hanging = source(tmp_path, f"import threading\n\n{code}threading.Event().wait()\n", deadline_s=0.3)
    began = time.monotonic()
    with pytest.raises(
        UserError,
        match=r"^rows.jsonl, line 1: .*rewards.py: the function has not returned the rewards of 2 responses within 0.3 s"
        ".*raise --reward.deadline_s",
    ):
        group(hanging)
    assert time.monotonic() - began < 5


def test_the_deadline_of_a_call_that_waits_for_its_turn_begins_with_the_turn(tmp_path):
    code = f"""
import time

RUNNING = []

{EASYR1}RUNNING.append(1)
    assert len(RUNNING) == 1, "called twice at once"
    time.sleep(0.3)
    RUNNING.clear()
    return [{{"overall": 1.0}} for one in reward_inputs]
"""
    scorer = source(tmp_path, code, deadline_s=0.8)

    async def four() -> None:
        await asyncio.gather(*(scorer.rewards(BATCH) for _ in range(4)))

    began = time.monotonic()
    asyncio.run(four())
    assert time.monotonic() - began >= 1.2
