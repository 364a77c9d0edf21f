"""Waiting for coroutines, with and without an event loop that runs already."""

import asyncio
import threading

import pytest

from lmm_r1.event_loop import run_async

pytestmark = pytest.mark.unit


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def failing() -> None:
    raise ValueError("told")


def test_without_a_loop_a_coroutine_runs_in_the_callers_thread():
    assert run_async(thread_name()) == threading.current_thread().name


def test_inside_of_a_loop_as_in_a_notebook_it_runs_in_another_thread_and_its_errors_are_raised():
    async def cell() -> tuple[str, str]:
        with pytest.raises(ValueError, match="told"):
            run_async(failing())
        return run_async(thread_name()), threading.current_thread().name

    there, here = asyncio.run(cell())
    assert there != here
