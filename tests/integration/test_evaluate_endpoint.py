"""`lmm-r1 evaluate` with a server for a model."""

import json
from pathlib import Path

import pytest
from aiohttp import web
from helpers.commands import error_of, tree, write_rows
from helpers.http_servers import chat_server, completion, failure
from helpers.tables import table
from PIL import Image

from lmm_r1.cli.evaluate import main
from lmm_r1.data.reading import shipped_prompt
from lmm_r1.records.responses import read_responses

pytestmark = pytest.mark.usefixtures("own_environment")

QUICK = ["--judge_workers", "1", "--bootstrap_resamples", "100"]


def option_row(number: int) -> dict:
    text = f"What is {number}+1?\nA. {number + 1}\nB. 0"
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "answer": "A"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the command, with six rows of options and one picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "sk-very-secret")
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows", *map(option_row, range(6)))
    Image.new("RGB", (60, 40), "blue").save(tmp_path / "rows/a.png")
    return tmp_path


def answer(body: dict, number: int) -> web.Response:
    """Right on 0, 1 and 2, wrong on 3 and 4, refused on 5 at first."""
    system, question = body["messages"]
    assert (system["role"], system["content"]) == ("system", shipped_prompt("think"))
    asked = int(question["content"][1]["text"].split()[2].partition("+")[0])
    if asked == 5 and number < 6:
        return failure(400, "no fives today")
    return completion(f"<think>so</think><answer>{'A' if asked < 3 else 'B'}</answer>")


def run(argv: list[str]) -> int:
    try:
        main([*argv, *QUICK])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_served_model_is_measured_and_taken_up_again(work, capsys):
    with chat_server(answer) as server:
        command = ["--endpoint", server.url, "--model", "org/m", "--api_key_env", "SECRET", "--files", "sums=rows"]
        command += ["--reward", "choice", "--output", "out/scores.json"]
        assert run(command) == 3
        said = capsys.readouterr()
        assert "rows/rows.jsonl line 6: the endpoint refused the row with status 400 (no fives today)" in said.err
        assert [one.index for one in read_responses(Path("out/scores.responses.jsonl"))] == [0, 1, 2, 3, 4]
        # Only the row that failed is asked again.
        assert (run(command), len(server.requests)) == (0, 7)
        assert "out/scores.answers.jsonl: holds the answers to 5 requests" in capsys.readouterr().out
    scores = json.loads(Path("out/scores.json").read_text())
    assert scores["checkpoints"][0]["files"]["sums"]["accuracy"] == 0.5
    assert (scores["settings"]["endpoint"], scores["settings"]["dtype"]) == (server.url, None)
    assert not [name for name, content in tree(work).items() if content and b"sk-very-secret" in content]


@pytest.mark.parametrize(
    ("argv", "sentence"), table("integration/evaluate_endpoint", "bad_input_ends_with_one_sentence")
)
def test_bad_input_ends_with_one_sentence(argv, sentence, work, capfd):
    rows = ["--files", "f=rows", "--output", "s.json"] if argv.startswith("--endpoint") else []
    before = tree(work)
    code = 2 if sentence.startswith("unknown flag") else 1
    assert error_of("evaluate", [*argv.split(), *rows], capfd=capfd, code=code).startswith(sentence)
    assert tree(work) == before
