"""The worker pool with real processes: limits of time, memory and queue, and workers that are killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from helpers.http_servers import in_a_loop
from helpers.reward_servers import import_unruly, running, unruly_command

from remote_rm.math_verifier import MathVerifier
from remote_rm.service.pool import QUICK_CHARS, PoolUnavailable, VerifierPool
from remote_rm.verifier import Item, ServiceLimits, Verifier


@pytest.fixture
def unruly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    return import_unruly(tmp_path, monkeypatch)


def items(*responses: str) -> list[Item]:
    return [Item(prompt="p", response=response, label="1") for response in responses]


async def rewards(pool: VerifierPool, *responses: str) -> list[float]:
    return [score.reward for score in await pool.judge(items(*responses))]


@contextlib.asynccontextmanager
async def started(pool: VerifierPool) -> AsyncIterator[VerifierPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@in_a_loop
async def test_stalled_items_do_not_hold_up_those_behind_them(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=2.0)) as pool:
        stalled = asyncio.create_task(rewards(pool, "burn", "burn", "burn"))
        await asyncio.sleep(0.1)
        assert await rewards(pool, "1", "2") == [1.0, 2.0]
        assert not stalled.done()
        assert await stalled == [0.0, 0.0, 0.0]
    assert (pool.counts.timed_out, pool.counts.failed) == (3, 0)


@in_a_loop
async def test_all_right_answers_are_paid_while_the_machine_is_busy():
    items = [
        Item(prompt="p", response=rf"<answer>|-{number}\sqrt{{2}}|</answer>", label=rf"{number}\sqrt{{2}}")
        for number in range(2, 34)
    ]
    # A worker's first judgement takes up to 0.7 s of processor time, and a worker gets an eighth of a core.
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(12)]
    try:
        async with started(VerifierPool(MathVerifier(), workers=4, item_timeout_seconds=1.5)) as pool:
            paid = [score.score for score in await pool.judge(items)]
    finally:
        for process in busy:
            process.kill()
    assert (paid, pool.counts.timed_out) == ([1.0] * 32, 0)


@in_a_loop
async def test_an_item_whose_worker_gets_no_processor_time_is_judged_again(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=1.0)) as pool:
        (worker,) = pool.worker_pids
        os.kill(worker, signal.SIGSTOP)
        assert await rewards(pool, "3") == [3.0]
        assert pool.counts.timed_out == 0
        # What waits by itself is late in the end.
        (late,) = await pool.judge(items("sleep 60"))
    assert (late.reward, late.timed_out, pool.counts.timed_out) == (0.0, True, 1)


@in_a_loop
async def test_a_full_queue_refuses_what_needs_a_worker_and_nothing_else(unruly):
    async with started(
        VerifierPool(unruly, workers=1, item_timeout_seconds=10.0, limits=ServiceLimits(max_queued_items=2))
    ) as pool:
        # One is with the worker, and two wait: the queue is as long as it may be.
        accepted = asyncio.create_task(rewards(pool, "sleep 0.4", "1", "2"))
        await asyncio.sleep(0.1)
        assert (pool.busy, pool.waiting) == (1, 2)
        with pytest.raises(PoolUnavailable, match="2 items wait to be judged, and the limit is 2") as refused:
            await rewards(pool, "3")
        assert refused.value.retry_after_seconds >= 1
        assert await rewards(pool, "quick") == [7.0]
        assert await accepted == [0.4, 1.0, 2.0]
        assert await rewards(pool, "3") == [3.0]
    assert (pool.counts.items, pool.counts.worker, pool.counts.quick) == (5, 4, 1)


@in_a_loop
async def test_a_request_that_is_given_up_frees_its_places_and_its_worker(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=30.0)) as pool:
        judging = asyncio.create_task(rewards(pool, "sleep 20", "sleep 20", "1"))
        await asyncio.sleep(0.1)
        assert (pool.busy, pool.waiting) == (1, 2)
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging
        await asyncio.sleep(0.05)
        assert (pool.busy, pool.waiting) == (0, 0)
        assert await asyncio.wait_for(rewards(pool, "2"), timeout=10) == [2.0]
    assert (pool.counts.worker, pool.counts.timed_out, pool.counts.lost_workers) == (1, 0, 0)


@in_a_loop
async def test_requests_given_up_while_their_workers_start_leave_no_process_behind(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=30.0)) as pool:
        # Each kills the worker of the one before it, so that the next finds none and starts one.
        for _ in range(6):
            judging = asyncio.create_task(rewards(pool, "sleep 20"))
            await asyncio.sleep(0.02)
            judging.cancel()
        assert (await asyncio.wait_for(rewards(pool, "2"), timeout=20), pool.workers) == ([2.0], 1)


@in_a_loop
async def test_a_large_request_does_not_hold_up_a_small_one(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=30.0)) as pool:
        large = asyncio.create_task(rewards(pool, *["sleep 0.1"] * 50))
        await asyncio.sleep(0.15)
        assert await rewards(pool, "1") == [1.0]
        assert pool.waiting > 40
        large.cancel()


@in_a_loop
async def test_a_request_larger_than_the_queue_waits_for_an_empty_one(unruly):
    async with started(
        VerifierPool(unruly, workers=1, item_timeout_seconds=10.0, limits=ServiceLimits(max_queued_items=4))
    ) as pool:
        accepted = asyncio.create_task(rewards(pool, "sleep 0.3", "1", "2"))
        await asyncio.sleep(0.1)
        with pytest.raises(PoolUnavailable, match="2 items wait to be judged, and the limit is 4"):
            await rewards(pool, "3", "4", "5")
        assert await rewards(pool, "3") == [3.0]
        assert await accepted == [0.3, 1.0, 2.0]
        assert await rewards(pool, *["1"] * 9) == [1.0] * 9


@in_a_loop
async def test_a_pool_that_refuses_drops_what_it_has_and_keeps_its_workers(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=30.0)) as pool:
        judging = asyncio.create_task(rewards(pool, "sleep 20", "1"))
        await asyncio.sleep(0.1)
        pool.refuse()
        for refused in (judging, rewards(pool, "1"), rewards(pool, "quick")):
            with pytest.raises(PoolUnavailable, match="the server is stopping"):
                await refused


@in_a_loop
async def test_a_worker_has_only_the_memory_it_is_given(unruly):
    async with started(
        VerifierPool(
            unruly, workers=1, item_timeout_seconds=5.0, limits=ServiceLimits(worker_memory_bytes=400 * 2**20)
        )
    ) as pool:
        assert await rewards(pool, "allocate 50", "allocate 500", "5") == [50.0, 0.0, 5.0]
    assert pool.counts.failed == 1


@in_a_loop
async def test_a_worker_that_held_much_memory_is_replaced(unruly):
    async with started(
        VerifierPool(
            unruly, workers=1, item_timeout_seconds=5.0, limits=ServiceLimits(worker_memory_bytes=600 * 2**20)
        )
    ) as pool:
        before = pool.worker_pids
        await rewards(pool, "1", "2")
        kept = pool.worker_pids == before
        # bytearray zeroes what it allocates, so that all of it is resident.
        await rewards(pool, "allocate 350", "1")
        assert (kept, pool.worker_pids != before) == (True, True)


@in_a_loop
async def test_an_item_is_judged_again_when_its_worker_is_killed(unruly):
    async with started(VerifierPool(unruly, workers=2, item_timeout_seconds=10.0)) as pool:
        judging = asyncio.create_task(rewards(pool, "sleep 0.5", "sleep 0.6"))
        await asyncio.sleep(0.2)
        for pid in pool.worker_pids:
            os.kill(pid, signal.SIGKILL)
        assert await judging == [0.5, 0.6]
    assert (pool.counts.lost_workers, pool.counts.failed) == (2, 0)


@in_a_loop
async def test_an_item_that_always_costs_its_worker_fails_in_the_end(unruly):
    async with started(VerifierPool(unruly, workers=2, item_timeout_seconds=10.0)) as pool:
        assert await rewards(pool, "killed", "1") == [0.0, 1.0]
    assert (pool.counts.lost_workers, pool.counts.failed) == (10, 1)


@in_a_loop
async def test_a_faulty_verifier_is_told_instead_of_waited_for(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=0.5)) as pool:
        for response in ("raise", "sleep 60"):
            with pytest.raises(ZeroDivisionError, match="a fault of the verifier"):
                await pool.judge([Item(prompt="p", response=response, label="cannot fail")])
        assert (pool.busy, pool.waiting) == (0, 0)
        assert await rewards(pool, "nonsense", "1") == [0.0, 1.0]


@in_a_loop
async def test_the_process_that_workers_are_forked_from_may_be_killed_too(unruly):
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=10.0)) as pool:
        (worker,) = pool.worker_pids
        parent = psutil.Process(worker).parent()
        assert parent.pid != os.getpid()
        parent.kill()
        os.kill(worker, signal.SIGKILL)
        assert await rewards(pool, "1", "2") == [1.0, 2.0]


@in_a_loop
async def test_a_long_response_is_judged_where_the_limit_holds(unruly):
    long = "1." + "0" * QUICK_CHARS
    async with started(VerifierPool(unruly, workers=1, item_timeout_seconds=5.0)) as pool:
        assert await rewards(pool, long, "quick") == [1.0, 7.0]
    assert (pool.counts.quick, pool.counts.worker) == (1, 1)


def test_stopping_ends_items_under_way_and_workers(unruly):
    pool = VerifierPool(unruly, workers=1, item_timeout_seconds=30.0)

    async def scenario() -> list[int]:
        await pool.start()
        pids = pool.worker_pids
        judging = asyncio.create_task(rewards(pool, "sleep 20", "1"))
        await asyncio.sleep(0.1)
        await pool.stop()
        with pytest.raises(PoolUnavailable, match="the pool was stopped"):
            await judging
        return pids

    assert not any(psutil.pid_exists(pid) for pid in asyncio.run(scenario()))


def test_a_worker_that_computes_on_ends_soon_after_its_server_was_killed(tmp_path):
    with running(unruly_command(tmp_path, "--workers", "1", "--item-timeout-seconds", "1")) as server:
        (worker,) = server.workers()
        body = b'{"query": ["q"], "prompts": ["p"], "labels": ["1"], "responses": ["burn"]}'
        request = urllib.request.Request(server.endpoint, data=body, headers={"Content-Type": "application/json"})

        def ask() -> None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)
        server.kill()
        asking.join()
        # Its limit is 1 s of computing, and 1 s more, with the share of a core that is left to one that takes long.
        assert worker.is_running()
        worker.wait(timeout=120)
