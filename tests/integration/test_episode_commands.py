"""`evaluate`, `batch_inference` and `interactive_chat` on episodes, on one real vLLM engine, with a user's environment."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands import flags
from helpers.conversations import load_rows, picture
from helpers.scripted_engines import ENGINE

from lmm_r1.cli import batch_inference, evaluate, interactive_chat
from lmm_r1.data.messages import images_of
from lmm_r1.generation import engine as backends
from lmm_r1.records.responses import read_responses
from lmm_r1.tools.batch import run as batch_run
from lmm_r1.tools.evaluation import measurement

pytestmark = pytest.mark.slow

ROWS = 4
# Shows a part of the image after each turn but the third, and pays for the length of that one; row 2 has no luck.
ENVIRONMENT = """
from lmm_r1.agents.environment import Answered, Environment, Episode
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, TextPart, images_of


class Looks(Environment):
    name = "looks"
    rewards = ("odd",)
    counts = ("looks",)
    # An untrained model does not end a turn by itself.
    stops = tuple("aeiou")

    def begin(self, row, *, seed):
        return Look(row, seed)


class Look(Episode):
    def __init__(self, row, seed):
        self.row, self.seed = row, seed

    async def answer(self, turn):
        if self.row.location.endswith("line 2"):
            raise LookupError("bad luck")
        if turn.number == 2:
            return Answered(rewards={"odd": float(len(turn.text) % 2)})
        image = load_image(images_of(self.row.messages)[0], location=self.row.location)
        left = (self.seed + turn.number) % 28
        return Answered(
            shown=(TextPart(f"Look {turn.number}: "), ImagePart(image.crop((left, 0, left + 56, 28)))), counts={"looks": 1}
        )
"""


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen2_5_vl")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[backends.Engine]:
    backends.prepare_process()
    settings = replace(ENGINE, max_model_len=512, max_images=8, enforce_eager=True, seed=0)
    made = backends.make_engine("vllm", str(model), settings)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, engine: backends.Engine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of commands that all take the one engine, with rows and the environment's file."""
    with monkeypatch.context() as patch:
        for module in (batch_run, measurement, backends):
            patch.setattr(module, "make_engine", lambda *arguments: engine)
            patch.setattr(module, "prepare_process", lambda: None)
        patch.setattr(type(engine), "close", lambda self: None)
        patch.chdir(tmp_path)
        (tmp_path / "looks.py").write_text(ENVIRONMENT)
        rows = []
        for number in range(ROWS):
            picture(112 + 28 * number, 84).save(tmp_path / f"{number}.png")
            content = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Which?"}]
            rows.append({"messages": [{"role": "user", "content": content}]})
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield tmp_path


def values(model: Path, /, **changes: object) -> dict[str, object]:
    given = {"agent": "looks.py", "dtype": "float32", "max_model_len": 512, "max_new_tokens": 8, "temperature": 1}
    return {**given, **changes}


def ended(main: Callable[[list[str]], None], argv: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return stopped.value.code


def test_an_evaluation_plays_episodes_and_repeated_it_is_the_same(folder, model, capsys):
    def scores(name: str) -> list:
        argv = ["--checkpoints", f"tiny={model}", "--files", "rows=rows.jsonl", "--reward", "agent:odd"]
        code = ended(evaluate.main, [*argv, *flags(values(model, n_samples=2, output=f"{name}.json"))])
        assert code == 3, "row 2 is left out"
        return read_responses(folder / f"{name}.responses.jsonl")

    responses = scores("out")
    printed = capsys.readouterr()
    assert "rows.jsonl line 2: the environment looks failed in 2 of 2 episodes: it raised LookupError: bad luck" in (
        printed.err
    )
    assert [(one.index, one.sample) for one in responses] == [(row, sample) for row in (0, 2, 3) for sample in (0, 1)]
    for one in responses:
        assert (one.episode.end, one.episode.turns, one.episode.counts) == ("over", 3, {"looks": 2})
        assert one.verdicts["agent:odd"].score == one.episode.rewards["odd"] == len(one.response) % 2
        assert [Path(image).is_file() for turn in one.episode.said for image in turn.images] == [True, True]
    found = json.loads((folder / "out.json").read_text())["checkpoints"][0]["files"]["rows"]
    within = [found["verifiers"]["agent:odd"]["within_turns"][turns]["mean"] for turns in "123"]
    assert within == [0.0, 0.0, found["accuracy"]]
    # Two pictures of each of six episodes, and those of the three rows.
    assert (folder / "out.html").read_text().count("<img src=") == 12 + 3
    again = [(one.response, [turn.text for turn in one.episode.said]) for one in scores("again")]
    assert again == [(one.response, [turn.text for turn in one.episode.said]) for one in responses]
    evaluate.main(["--compare", "out.json", "again.json"])


def test_batch_inference_writes_trajectories_that_a_stop_changes_nothing_of(folder, model, monkeypatch):
    def job(output: str, **changes: object) -> list[dict]:
        given = values(model, model=model, data="rows.jsonl", output=output, n_samples=3, **changes)
        assert ended(batch_inference.main, flags(given)) == 3
        lines = (folder / output).read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]

    selection = {"select": "rejection_sampling", "selected": "sft/rows.jsonl", "min_reward": 0, "max_per_prompt": 3}
    whole = job("whole/out.jsonl", **selection)
    assert [line["index"] for line in whole] == [0, 2, 3]
    for line in whole:
        for response in line["responses"]:
            assert (response["end"], response["turns"], response["counts"]) == ("over", 3, {"looks": 2})
            assert response["reward"] == response["scores"]["odd"]
            roles = [message["role"] for message in response["messages"]]
            assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]
    chosen = load_rows(str(folder / "sft" / "rows.jsonl"), answer_required=False)
    assert len(chosen) > 1
    assert all(len(images_of(row.messages)) == 3 for row in chosen)

    append, lines = batch_run.RowLog.append, []

    def stopped(log, records) -> None:
        append(log, records)
        lines.append(records)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch_run.RowLog, "append", stopped)
        given = values(model, model=model, data="rows.jsonl", output="cut/out.jsonl", n_samples=3)
        assert ended(batch_inference.main, flags(given)) == 130
    assert len(lines) == 1
    again = job("cut/out.jsonl")
    assert [line["responses"] for line in again] == [line["responses"] for line in whole]


def test_a_chat_plays_an_episode_for_each_message(folder, model, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/image 0.png\nWhich?\nAnd?\n")))
    given = values(model, model=model)
    interactive_chat.main(flags(given))
    answers, said = capfd.readouterr()
    assert "each message begins an episode with the environment looks" in said
    assert said.count("the environment: Look 0: [picture]") == 2
    assert said.count("3 turns, looks 2, odd ") == 2
    assert len(answers.split("\n\n")) >= 6
