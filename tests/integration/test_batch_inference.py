"""`lmm-r1 batch_inference` as a process: backends agree, kills lose nothing, scores, selections, and bad input."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import error_of, flags, tree, write_rows
from helpers.commands_here import Ended, run_here
from helpers.conversations import load_rows
from helpers.processes import kill, warm_python
from helpers.tables import table
from helpers.value_models import save_reward_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BROKEN, MISSING = 3, 20
KILLS = 3


def row(folder: Path, record: dict) -> dict:
    """A record with its images by their absolute path."""
    for message in record["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if "image" in part:
                part["image"] = str(folder / part["image"])
    return record


@pytest.fixture(scope="module")
def rows(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with text and image rows in turn, one broken image and one that is missing."""
    folder = tmp_path_factory.mktemp("rows")
    sources = {name: (demo / name / "rows.jsonl").read_text().splitlines() for name in ("text", "image")}
    pairs = zip(sources["text"], sources["image"], strict=True)
    records = [row(demo / name, json.loads(line)) for pair in pairs for name, line in zip(sources, pair, strict=True)]
    (folder / "broken.png").write_bytes(b"no image")
    for place, image in ((BROKEN, "broken.png"), (MISSING, "missing.png")):
        content = [{"type": "image", "image": image}, {"type": "text", "text": "Sort the digits."}]
        records.insert(place, {"messages": [{"role": "user", "content": content}], "answer": "1"})
    return write_rows(folder, *records)


def command(demo: Path, rows: Path, output: Path, **changes: object) -> list[str]:
    values = {"model": demo / "model", "data": rows, "output": output, "dtype": "float32", "max_new_tokens": 40}
    # As the tiny model was trained.
    return [warm_python(), "-m", "lmm_r1.cli.batch_inference", *flags(values | {"system_prompt": "none"} | changes)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}


def run(argv: list[str], *, cwd: Path, code: int = 3) -> Ended:
    """Run a command in this process, but with vLLM's engine, whose memory ends with its process, in one of its own."""
    _, _, module, *arguments = argv
    if module.endswith("batch_inference") and "--eval_task" not in arguments:
        done = subprocess.run(argv, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600)
        ended = Ended(code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    else:
        ended = run_here(module.rpartition(".")[2], arguments, folder=cwd)
    assert ended.code == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def records(output: Path) -> list[dict]:
    """The rows of an output without the time that each took."""
    return [
        {name: value for name, value in json.loads(line).items() if name != "seconds"}
        for line in output.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def greedy(demo: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an uninterrupted greedy run with plain transformers, and what it said beside it."""
    folder = tmp_path_factory.mktemp("greedy")
    argv = command(demo, rows, folder / "out.jsonl", eval_task="generate", reward="math")
    ended = run(argv, cwd=folder)
    (folder / "stdout").write_text(ended.stdout)
    (folder / "stderr").write_text(ended.stderr)
    return folder


def test_rows_come_out_in_order_with_all_that_is_known_of_them(greedy, rows, demo):
    done = records(greedy / "out.jsonl")
    assert [record["index"] for record in done] == [n for n in range(34) if n not in (BROKEN, MISSING)]
    text, image = done[0], done[1]
    assert text["location"] == f"{rows} line 1"
    assert text["prompt"][0]["role"] == "user"
    assert image["prompt"][0]["content"][0]["image"].startswith(str(demo / "image" / "images"))
    for record in done:
        [response] = record["responses"]
        assert response["text"].startswith("<think>")
        assert response["finish_reason"] == "stop"
        assert 5 <= response["tokens"] <= 40
        assert response["reward"] == response["scores"]["accuracy"] + 0.5 * response["scores"]["format"]
    accuracy = [record["responses"][0]["scores"]["accuracy"] for record in done if "text" in record["datasource"]]
    assert 0.2 < sum(accuracy) / len(accuracy)
    assert all(json.loads(line)["seconds"] > 0 for line in (greedy / "out.jsonl").read_text().splitlines())


def test_rows_that_cannot_be_used_are_counted_and_listed_at_the_end(greedy, rows):
    assert "32 rows, 2 left out; 32 responses of" in (greedy / "stdout").read_text()
    listed = (greedy / "stderr").read_text().splitlines()[-3:]
    assert listed[0] == "lmm-r1 batch_inference: 2 rows were left out, and everything else was done:"
    assert listed[1].startswith(f"  {rows} line {BROKEN + 1}: cannot read the image")
    assert listed[2].startswith(f"  {rows} line {MISSING + 1}: no image file")


def test_killed_three_times_at_random_it_ends_with_the_rows_of_an_uninterrupted_run(demo, rows, greedy, tmp_path):
    output = tmp_path / "out.jsonl"
    # Two rows at a time, so that there is something to interrupt.
    argv = command(demo, rows, output, eval_task="generate", reward="math", batch_rows=2)
    chance = random.Random(7)
    for attempt in range(KILLS):
        size = output.stat().st_size if output.exists() else 0
        process = subprocess.Popen(
            argv, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        if attempt == KILLS - 1:  # while the model is loaded, perhaps
            time.sleep(chance.uniform(0, 5))
        else:  # soon after a row was written
            while process.poll() is None and (not output.exists() or output.stat().st_size == size):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.2))
        kill(process)
    before = len(output.read_bytes().splitlines())
    assert 0 < before, "nothing was written before the kills"
    ended = run(argv, cwd=tmp_path)
    assert records(output) == records(greedy / "out.jsonl")
    assert "2 rows were left out" in ended.stderr
    assert "all 34 rows were done before" in run(argv, cwd=tmp_path).stdout


@pytest.fixture(scope="module")
def sampled(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of four samples a row, judged by the verifier."""
    folder = tmp_path_factory.mktemp("sampled")
    changes = {"eval_task": "generate", "reward": "math", "n_samples": 4, "temperature": 1.0}
    changes |= {"select": "rejection_sampling", "selected": folder / "sft.jsonl", "min_reward": 1.5}
    run(command(demo, demo / "text", folder / "out.jsonl", **changes), cwd=folder, code=0)
    return folder


def test_rejection_sampling_writes_rows_that_train_sft_takes(sampled, demo, tmp_path):
    done = records(sampled / "out.jsonl")
    good = [record for record in done if any(response["reward"] == 1.5 for response in record["responses"])]
    assert 0 < len(good) < len(done)
    chosen = load_rows(str(sampled / "sft.jsonl"))
    assert [item.answer for item in chosen] == [record["answer"] for record in good]
    assert all(item.response is not None and item.messages[-1].role == "user" for item in chosen)
    values = {"model.model_name_or_path": demo / "model", "data.dataset": sampled / "sft.jsonl"}
    values |= {
        "ckpt.output_dir": tmp_path / "sft",
        "train.max_steps": 1,
        "train.batch_size": 2,
        "train.micro_batch_size": 2,
    }
    training = [sys.executable, "-m", "lmm_r1.cli.train_sft", *flags(values), "--ckpt.disable_ds"]
    run(training, cwd=tmp_path, code=0)


def test_a_reward_model_scores_an_earlier_output_and_gives_the_best_of_n(sampled, demo, tmp_path):
    save_reward_model(demo / "model", tmp_path / "reward_model")
    changes = {"eval_task": "rm", "model": tmp_path / "reward_model", "select": "best_of_n"}
    changes |= {"selected": tmp_path / "best.jsonl"}
    output = tmp_path / "scored.jsonl"
    run(command(demo, sampled / "out.jsonl", output, **changes), cwd=tmp_path, code=0)
    before, after = records(sampled / "out.jsonl"), records(output)
    best = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    assert len(after) == len(before) == len(best)
    for old, new, row in zip(before, after, best, strict=True):
        assert [item["text"] for item in new["responses"]] == [item["text"] for item in old["responses"]]
        rewards = [item["reward"] for item in new["responses"]]
        assert row["reward"] == max(rewards)
        assert row["messages"][-1]["content"] == new["responses"][rewards.index(max(rewards))]["text"]
    assert len({item["reward"] for record in after for item in record["responses"]}) > 4


def test_an_adapter_is_merged_in_by_both_backends(demo, rows, greedy, tmp_path):
    values = {"model.model_name_or_path": demo / "model", "data.dataset": demo / "solutions", "ds.lora.rank": 4}
    values |= {"ckpt.output_dir": tmp_path / "sft", "train.max_steps": 2, "train.batch_size": 4, "adam.lr": 1e-2}
    values |= {"train.micro_batch_size": 4, "ds.param_dtype": "fp32", "lr_warmup_ratio": 0}
    run([sys.executable, "-m", "lmm_r1.cli.train_sft", *flags(values), "--ckpt.disable_ds"], cwd=tmp_path, code=0)
    adapter = tmp_path / "sft" / "adapter"
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    run(command(demo, rows, one, eval_task="generate", adapter=adapter, reward="math"), cwd=tmp_path)
    # Its folder alone: the adapter names its base itself.
    run(command(demo, rows, two, model=adapter, reward="math"), cwd=tmp_path)
    assert records(one) == records(two)
    assert records(one) != records(greedy / "out.jsonl"), "the adapter changes nothing, so nothing is compared"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: Path) -> Path:
    """The current folder of a command that runs in this process, with a checkpoint and rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(demo / "model")
    write_rows(tmp_path, {"messages": [{"role": "user", "content": "What is 1+1?"}], "answer": "2"})
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty.jsonl").write_text("\n")
    return tmp_path


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("changes", "sentence"), table("integration/batch_inference", "bad_input_ends_with_one_sentence")
)
def test_bad_input_ends_with_one_sentence(changes, sentence, work, capfd):
    before = tree(work)
    values = {"eval_task": "generate", "model": "model", "data": "rows.jsonl", "output": "out/out.jsonl"}
    assert error_of("batch_inference", flags(values | changes), capfd=capfd).startswith(sentence)
    assert tree(work) == before
