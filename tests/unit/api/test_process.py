"""What a call changes in its process, and how its errors are told."""

import asyncio
import gc
import multiprocessing
import os

import pytest

from lmm_r1.api.settings import in_arguments, own_process
from lmm_r1.errors import RunStopped, UserError


def test_environment_and_garbage_collector_are_put_back_where_a_call_fails_too():
    before, thresholds = dict(os.environ), gc.get_threshold()

    def failing() -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("PATH")
        gc.set_threshold(50_000, 20, 100)
        raise UserError("no")

    with pytest.raises(UserError), own_process({}):
        failing()
    assert (dict(os.environ), gc.get_threshold()) == (before, thresholds)


def test_where_an_event_loop_runs_as_in_a_notebook_a_call_may_run_its_own_and_that_one_goes_on():
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    async def cell() -> list[object]:
        here = asyncio.get_running_loop(), asyncio.current_task()
        with own_process({}):
            done = asyncio.run(work())
        await asyncio.sleep(0)
        return [done, here == (asyncio.get_running_loop(), asyncio.current_task())]

    assert asyncio.run(cell()) == ["done", True]


def test_a_script_that_a_helping_process_imports_again_is_told_of_its_guard(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UserError, match='put the calls of lmm_r1 under `if __name__ == "__main__":`'), own_process({}):
        pass


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("--train.batch_size 3 must be a multiple of --n", "train.batch_size 3 must be a multiple of n"),
        ("--data.prompt_dataset a.jsonl gives 2 prompts", "rows a.jsonl gives 2 prompts"),
        ("--data.prompt_dataset_split x", "data.prompt_dataset_split x"),
        ("--reward.remote_url python:right: it\nhangs", "reward right: it hangs"),
        ("saved in -- x; the same command goes on", "saved in -- x; the same call goes on"),
    ],
)
def test_a_sentence_about_flags_becomes_one_about_settings_and_arguments(sentence, told):
    assert in_arguments(sentence, {"data.prompt_dataset": "rows", "reward.remote_url": "reward"}) == told


def test_a_stop_keeps_its_code():
    with pytest.raises(RunStopped, match="the same call goes on from there") as stopped, own_process({}):
        raise RunStopped("Ctrl-C: the same command goes on from there", exit_code=130)
    assert stopped.value.exit_code == 130
