"""`lmm-r1 evaluate` with a server for a model, its files for other harnesses, and theirs judged again."""

import base64
import io
import json
from pathlib import Path

import pytest
from aiohttp import web
from helpers.commands import error_of, tree, write_rows
from helpers.http_servers import chat_server, completion, failure
from helpers.tables import table
from PIL import Image

from lmm_r1.cli.evaluate import main
from lmm_r1.evaluation.predictions import write_table
from lmm_r1.records.responses import read_responses

pytestmark = pytest.mark.usefixtures("own_environment")

QUICK = ["--judge_workers", "1", "--bootstrap_resamples", "100"]


def option_row(number: int) -> dict:
    question = f"What is {number}+1?"
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": f"{question}\nA. {number + 1}\nB. 0"}]
    options = {"index": 100 + number, "question": question, "A": str(number + 1), "B": "0", "category": "sums"}
    return {"messages": [{"role": "user", "content": content}], "answer": "A", **options}


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
    asked = int(body["messages"][0]["content"][1]["text"].split()[2].partition("+")[0])
    if asked == 5 and number < 6:
        return failure(400, "no fives today")
    return completion(f"<think>so</think><answer>{'A' if asked < 3 else 'B'}</answer>")


def run(argv: list[str]) -> int:
    try:
        main([*argv, *QUICK])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_served_model_is_measured_taken_up_again_exported_and_judged_again_alike(work, capsys):
    with chat_server(answer) as server:
        command = ["--endpoint", server.url, "--model", "org/m", "--api_key_env", "SECRET", "--files", "sums=rows"]
        command += ["--reward", "choice", "--output", "out/scores.json"]
        command += ["--export", "out/{checkpoint}.xlsx", "out/a.tsv", "out/a.json", "out/a.jsonl"]
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
    first = [one.verdicts["choice"] for one in read_responses(Path("out/scores.responses.jsonl"))]
    entries = ["x=out/org_m.xlsx", "t=out/a.tsv", "j=out/a.json", "l=out/a.jsonl"]
    assert run(["--rejudge", *entries, "--output", "out/again.json"]) == 0
    found = read_responses(Path("out/again.responses.jsonl"))
    assert [[one.verdicts["choice"] for one in found if one.file == name] for name in "xtjl"] == [first] * 4
    (rejudged,) = json.loads(Path("out/again.json").read_text())["rejudged"]
    assert (rejudged["file"], rejudged["metric"], rejudged["disagreements"]) == ("l", "choice_score", 0)
    assert (rejudged["agreements"][0]["theirs"], rejudged["agreements"][0]["ours"]) == (0.5, 0.5)


def test_saved_responses_of_one_checkpoint_are_exported_without_an_engine(work):
    with chat_server(answer) as server:
        command = ["--endpoint", server.url, "--model", "m", "--files", "sums=rows", "--reward", "choice"]
        assert run([*command, "--max_rows", "2", "--output", "scores.json"]) == 0
    assert run(["--compare", "scores.json", "--export", "a.tsv"]) == 0
    lines = Path("a.tsv").read_text().splitlines()
    assert lines[0] == '"index"\t"question"\t"A"\t"B"\t"answer"\t"category"\t"prediction"'
    assert lines[2].startswith('"101"\t"What is 1+1?"\t"2"\t"0"\t"A"\t"sums"\t"<think>')


def test_disagreements_are_listed_with_their_images(work, capsys):
    said = ["A", "(B) 0", "I would say A", "B", "the first one"]
    # The harness takes the third for wrong and the last for right; of the sixth it says nothing.
    hits = [1, 0, 0, 0, 1]
    rows = [
        {"index": 100 + n, "question": f"What is {n}+1?", "A": str(n + 1), "B": "0", "answer": "A"}
        | {"prediction": text, "hit": hit}
        for n, (text, hit) in enumerate(zip([*said, "A"], [*hits, ""], strict=True))
    ]
    rows[2]["prediction"] = "The answer is (A)."
    write_table(Path("theirs.tsv"), rows)
    assert run(["--rejudge", "bench=theirs.tsv", "--rejudge_data", "bench=rows", "--output", "out/scores.json"]) == 0
    listed = [json.loads(line) for line in Path("out/scores.disagreements.jsonl").read_text().splitlines()]
    assert [(one["key"], one["theirs"], one["ours"], one["predictions"]) for one in listed] == [
        ("102", 0.0, 1.0, ["The answer is (A)."]),
        ("104", 1.0, 0.0, ["the first one"]),
    ]
    assert (listed[0]["question"], listed[0]["label"], listed[0]["options"]) == (
        "What is 2+1?",
        "A",
        {"A": "3", "B": "0"},
    )
    (image,) = listed[0]["images"]
    shown = Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2])))
    assert shown.size == (60, 40)
    page = Path("out/scores.html").read_text()
    assert page.count(f'<img src="{image}"') == 2
    assert "2 rows judged differently by hit and choice" in page
    assert "What is 2+1?\nA. 3\nB. 0</p>" in page
    (rejudged,) = json.loads(Path("out/scores.json").read_text())["rejudged"]
    agreement = rejudged["agreements"][0]
    comparison = agreement["comparison"]
    assert (agreement["theirs"], agreement["ours"], comparison["difference"]) == (0.4, 0.4, 0.0)
    assert (comparison["rows"], comparison["rows_of_one"]) == (5, 1)
    assert (comparison["better_rows"], comparison["worse_rows"], comparison["p_value"]) == (1, 1, 1.0)
    told = capsys.readouterr().out
    assert "bench: 2 rows judged differently by hit and choice" in told
    assert "  104: theirs 1, ours 0; gold 'A', predicted 'the first one'" in told


@pytest.mark.parametrize(
    ("argv", "sentence"), table("integration/evaluate_harness", "bad_input_ends_with_one_sentence")
)
def test_bad_input_ends_with_one_sentence(argv, sentence, work, capfd):
    rows = ["--files", "f=rows", "--output", "s.json"] if argv.startswith("--endpoint") else []
    before = tree(work)
    assert error_of("evaluate", [*argv.split(), *rows], capfd=capfd).startswith(sentence)
    assert tree(work) == before
