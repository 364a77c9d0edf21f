"""The worker pool with real processes: limits of time and memory, and workers that are killed."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from helpers.http_servers import in_a_loop
from helpers.reward_servers import ROOT, import_unruly

from remote_rm.math_verifier import MathVerifier
from remote_rm.reward_function import reward_func_of
from remote_rm.service import pool as pool_module
from remote_rm.service.pool import QUICK_CHARS, VerifierPool
from remote_rm.verifier import Item, PoolUnavailable, Verifier


@pytest.fixture
def unruly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    return import_unruly(tmp_path, monkeypatch)


def items(*responses: str, label: str = "1") -> list[Item]:
    return [Item(prompt="p", response=response, label=label) for response in responses]


async def rewards(pool: VerifierPool, *responses: str) -> list[float]:
    return [score.reward for score in await pool.judge(items(*responses))]


@contextlib.asynccontextmanager
async def started(verifier: Verifier, **settings: float) -> AsyncIterator[VerifierPool]:
    pool = VerifierPool(verifier, **({"workers": 1, "item_timeout_seconds": 10.0} | settings))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def workers() -> list[psutil.Process]:
    """Those of this process: the children of its fork server."""
    return [child for parent in psutil.Process().children() for child in parent.children()]


@in_a_loop
async def test_one_bad_item_never_fails_its_batch_and_the_order_is_kept(unruly, monkeypatch):
    monkeypatch.setattr(pool_module, "WALL_FACTOR", 2)
    monkeypatch.setattr(pool_module, "ATTEMPTS", 2)
    responses = ("1", "sleep 60", "2", "raise", "3", "die", "4", "allocate 65536", "not a number", "burn", "nonsense")
    async with started(unruly, workers=2, item_timeout_seconds=1.0) as pool:
        scores = await pool.judge(items(*responses, "killed", "quick", "5"))
        assert [score.reward for score in scores] == [1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, *[0.0] * 5, 7.0, 5.0]
        assert [place for place, score in enumerate(scores) if score.timed_out] == [1, 9]
        assert await rewards(pool, "6", "7") == [6.0, 7.0]
    counts = pool.counts
    assert (counts.items, counts.quick, counts.worker, counts.timed_out, counts.failed) == (16, 1, 7, 2, 6)
    assert counts.lost_workers == 2


@in_a_loop
async def test_an_endless_expression_is_cut_off_though_it_never_lets_go_of_the_interpreter():
    async with started(MathVerifier(), item_timeout_seconds=1.0) as pool:
        endless = r"<think>t</think><answer>99999999!</answer>"
        scores = await pool.judge(items(endless, r"<answer>|-5|</answer>", label="5"))
    assert [(score.reward, score.timed_out) for score in scores] == [(0.5, True), (1.0, False)]


@in_a_loop
async def test_all_right_answers_are_paid_while_the_machine_is_busy():
    items = [
        Item(prompt="p", response=rf"<answer>|-{number}\sqrt{{2}}|</answer>", label=rf"{number}\sqrt{{2}}")
        for number in range(2, 34)
    ]
    # A worker's first judgement takes up to 0.7 s of processor time, and a worker gets an eighth of a core.
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(12)]
    try:
        async with started(MathVerifier(), workers=4, item_timeout_seconds=1.5) as pool:
            paid = [score.score for score in await pool.judge(items)]
    finally:
        for process in busy:
            process.kill()
    assert (paid, pool.counts.timed_out) == ([1.0] * 32, 0)


@in_a_loop
async def test_a_request_that_is_given_up_frees_its_places_and_its_worker(unruly):
    async with started(unruly, item_timeout_seconds=30.0) as pool:
        judging = asyncio.create_task(rewards(pool, "sleep 20", "sleep 20", "1"))
        await asyncio.sleep(0.3)
        assert pool.waiting == 3
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        assert pool.waiting == 0
        assert await asyncio.wait_for(rewards(pool, "2"), timeout=10) == [2.0]
    assert (pool.counts.worker, pool.counts.timed_out, pool.counts.lost_workers) == (1, 0, 0)


@in_a_loop
async def test_a_large_request_does_not_hold_up_a_small_one(unruly):
    async with started(unruly) as pool:
        large = asyncio.create_task(rewards(pool, *["sleep 0.1"] * 50))
        await asyncio.sleep(0.15)
        assert await rewards(pool, "1") == [1.0]
        assert pool.waiting == 50
        large.cancel()


@in_a_loop
async def test_a_worker_has_only_the_memory_it_is_given(unruly):
    async with started(unruly, worker_memory_bytes=400 * 2**20) as pool:
        assert await rewards(pool, "allocate 50", "allocate 500", "5") == [50.0, 0.0, 5.0]
    assert pool.counts.failed == 1


@in_a_loop
async def test_items_are_judged_again_when_their_workers_or_idle_ones_are_killed(unruly):
    async with started(unruly, workers=2) as pool:
        judging = asyncio.create_task(rewards(pool, "sleep 0.6", "sleep 0.7"))
        await asyncio.sleep(0.3)
        for worker in workers():
            worker.kill()
        assert await judging == [0.6, 0.7]
        # Now they are idle, and the process that they are forked from goes, too.
        left = workers()
        for process in (left[0].parent(), *left):
            process.kill()
        await asyncio.sleep(0.3)
        assert await rewards(pool, "1", "2") == [1.0, 2.0]
    assert (pool.counts.lost_workers >= 2, pool.counts.failed) == (True, 0)


@in_a_loop
async def test_a_faulty_verifier_is_told_instead_of_waited_for(unruly):
    async with started(unruly) as pool:
        with pytest.raises(ZeroDivisionError, match="a fault of the verifier"):
            await pool.judge(items("raise", label="cannot fail"))
        assert pool.waiting == 0


@in_a_loop
async def test_a_long_response_is_judged_where_the_limit_holds(unruly):
    async with started(unruly) as pool:
        assert await rewards(pool, "1." + "0" * QUICK_CHARS, "quick") == [1.0, 7.0]
    assert (pool.counts.quick, pool.counts.worker) == (1, 1)


@in_a_loop
async def test_stopping_ends_items_under_way_and_workers(unruly):
    async with started(unruly, item_timeout_seconds=30.0) as pool:
        judging = asyncio.create_task(rewards(pool, "sleep 20", "1"))
        await asyncio.sleep(0.3)
        ended = workers()
    with pytest.raises(PoolUnavailable, match="the pool is not running"):
        await judging
    assert ended
    assert not any(worker.is_running() for worker in ended)


class Unknown(MathVerifier):
    """A verifier whose module no worker can import."""


@in_a_loop
async def test_workers_that_do_not_come_up_are_told():
    with pytest.raises(RuntimeError, match="the worker processes did not come up"):
        async with started(Unknown()):
            pass


def judge_in_a_child() -> None:
    """What a user's reward function may do in a process of its own."""
    reply = reward_func_of("math")(["q"], ["p"], ["5"], responses=["<answer>|-5|</answer>"])
    assert reply["rewards"] == [1.0]


def test_a_child_of_multiprocessing_that_has_judged_ends():
    script = (
        "import multiprocessing, sys\n"
        "from test_reward_pool import judge_in_a_child\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=judge_in_a_child)\n"
        "    child.start()\n"
        "    child.join(60)\n"
        "    sys.exit(child.exitcode)\n"
    )
    folders = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)])
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": folders}, timeout=120)
    assert ended.returncode == 0
