"""The record of a check: whole after each result, with its failures, gone on from by the next command."""

import json
import time

import pytest
import torch
from gpu_stages.record import Clock, Record, Task

from lmm_r1.errors import UserError

HEADER = {"device": "cpu", "scale": 1.0}


def record(path, **settings):
    return Record(path, header=HEADER, **{"again": False, **settings})


def clock(budget=60.0):
    return Clock(began=time.perf_counter(), budget=budget)


def task(name, *, calls, error=None, partial=None):
    def measure(save):
        calls.append(name)
        if partial is not None:
            save(partial)
        if error is not None:
            raise error
        return {"value": len(calls)}

    return Task(name=name, measure=measure)


def read(path):
    return json.loads(path.read_text())["stages"]["c"]


def test_the_file_is_whole_before_and_after_every_result(tmp_path):
    file, seen = tmp_path / "result.json", []

    def measure(save):
        seen.append(read(file))
        save({"peak": 3})
        seen.append(read(file))
        return {"value": 1}

    record(file).run("c", [Task(name="one", measure=measure), Task(name="two", measure=measure)], clock=clock())
    first, during, second, _ = seen
    assert first == {"results": {"one": {"unfinished": True}}, "left_out": ["one", "two"]}
    assert during["results"] == {"one": {"unfinished": True, "peak": 3}}
    assert second["left_out"] == ["two"]
    assert second["results"]["one"]["value"] == 1
    end = read(file)
    assert end["left_out"] == []
    assert [result["value"] for result in end["results"].values()] == [1, 1]


def test_a_failure_is_a_result_and_the_next_goes_on(tmp_path):
    file, calls = tmp_path / "result.json", []
    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    missing = ImportError("No module named 'deepspeed'")
    tasks = [
        task("one", calls=calls, error=out_of_memory, partial={"peak": 3}),
        task("two", calls=calls, error=missing),
        task("three", calls=calls),
    ]
    ended = record(file)
    ended.run("c", tasks, clock=clock())
    results = read(file)["results"]
    assert results["one"]["error"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB (")
    assert "test_record.py" in results["one"]["error"]
    assert results["one"]["peak"] == 3
    assert "unfinished" not in results["one"]
    assert results["two"]["error"].startswith("ImportError: No module named 'deepspeed'")
    assert results["three"]["value"] == 3
    assert read(file)["left_out"] == []


def test_what_is_no_number_is_a_word_of_json(tmp_path):
    values = {"log_probs": float("nan"), "tried": [float("-inf"), 1.5]}
    record(tmp_path / "result.json").run("c", [Task(name="one", measure=lambda save: values)], clock=clock())

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    content = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    result = content["stages"]["c"]["results"]["one"]
    assert (result["log_probs"], result["tried"]) == ("nan", ["-inf", 1.5])


def test_what_failed_holds_no_tensor_afterwards(tmp_path):
    held = []

    def measure(save):
        large = torch.zeros(4)
        held.append(torch.multiprocessing.reductions.StorageWeakRef(large.untyped_storage()))
        raise torch.OutOfMemoryError("out of memory")

    def look(save):
        return {"expired": held[0].expired()}

    record(tmp_path / "result.json").run(
        "c", [Task(name="one", measure=measure), Task(name="two", measure=look)], clock=clock()
    )
    assert read(tmp_path / "result.json")["results"]["two"]["expired"] is True


def test_the_next_command_measures_what_is_left_and_last_what_was_not_finished(tmp_path):
    file, calls = tmp_path / "result.json", []
    tasks = [task(name, calls=calls) for name in ("one", "two", "three")]
    before = record(file)
    before.run("c", tasks[:1], clock=clock())
    before.content["stages"]["c"]["results"]["two"] = {"unfinished": True}
    before.write()
    record(file).run("c", tasks, clock=clock())
    assert calls == ["one", "three", "two"]
    record(file).run("c", tasks, clock=clock())
    assert len(calls) == 3
    record(file, again=True).run("c", tasks, clock=clock())
    assert calls[3:] == ["one", "two", "three"]


def test_other_stages_of_the_file_stay(tmp_path):
    file, calls = tmp_path / "result.json", []
    record(file).run("a", [task("one", calls=calls)], clock=clock())
    record(file).run("c", [task("one", calls=calls)], clock=clock())
    stages = json.loads(file.read_text())["stages"]
    assert [stages[stage]["results"]["one"]["value"] for stage in ("a", "c")] == [1, 2]


def test_a_stage_whose_time_is_up_says_what_it_left_out(tmp_path):
    file, calls = tmp_path / "result.json", []
    tasks = [task(name, calls=calls) for name in ("one", "two")]
    ended = record(file)
    ended.run("c", tasks, clock=clock(budget=0.0))
    assert read(file) == {"results": {}, "left_out": ["one", "two"]}
    # Another as long as the longest so far would not end in time.
    short = clock(budget=60.0)
    short.note(61.0)
    record(file).run("c", tasks, clock=short)
    assert calls == []


@pytest.mark.parametrize(("name", "value"), [("device", "NVIDIA H200"), ("scale", 0.5)])
def test_results_of_another_device_or_scale_are_not_mixed_in(tmp_path, name, value):
    file = tmp_path / "result.json"
    record(file).write()
    with pytest.raises(UserError, match=f"holds results of {name} {HEADER[name]}, and this is {value}"):
        Record(file, header={**HEADER, name: value}, again=False)
