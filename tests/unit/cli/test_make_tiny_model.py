import json

import pytest

from lmm_r1.cli.make_tiny_model import main
from lmm_r1.lmm_kits import KITS
from lmm_r1.tools.tasks import TASKS


def make(output, *flags, arch="llm"):
    main(["--arch", arch, "--output", str(output), "--hidden-size", "64", *flags])
    return output


def test_the_checkpoint_is_complete_and_nothing_else_is_left(tmp_path, capsys):
    folder = make(tmp_path / "models" / "tiny", "--layers", "3", "--tie-embeddings")
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["tie_word_embeddings"]) == (64, 3, True)
    files = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{folder}: llm, ")


def test_weights_depend_on_the_seed_alone(tmp_path):
    first, again, other = (
        (make(tmp_path / name, "--seed", seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert first == again != other


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"digits"}))
def test_a_tokenizer_learns_the_words_of_the_tasks_that_are_named(task, tmp_path):
    folders = [make(tmp_path / name, *flags) for name, flags in (("a", []), ("b", ["--tasks", task]))]
    words = [set(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) for folder in folders]
    assert words[0] != words[1]


def test_an_empty_folder_may_be_given(tmp_path):
    (tmp_path / "out").mkdir()
    assert (make(tmp_path / "out") / "config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--arch", "nonsense"], "no kit for model_type 'nonsense'; known: " + ", ".join(sorted(KITS))),
        (["--arch", "llm", "--hidden-size", "100"], "100 must be a positive multiple of 64"),
        (["--arch", "llm", "--layers", "0"], "--layers 0 positive"),
        (["--arch", "llm", "--tokens", "255"], "--tokens 255: a tokenizer has at least 256"),
        (
            ["--arch", "llm", "--tasks", "sokoban", "--rows", "r.jsonl"],
            "--tasks sokoban with --rows r.jsonl: leave one out",
        ),
        (["--arch", "llm", "--rows", "none.jsonl"], "no row file none.jsonl; check the path"),
        (["--arch", "llm", "--tasks", "digit"], "unknown task 'digit'; did you mean digits?"),
    ],
)
def test_a_mistake_ends_with_a_sentence_and_leaves_nothing(flags, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*flags, "--output", str(tmp_path / "out")])
    assert stopped.value.code == 1
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_not_written_to(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        make(tmp_path)
    assert stopped.value.code == 1
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_tokenizer_learns_the_words_of_row_files_and_as_many_as_it_is_asked_for(tmp_path):
    turns = [{"from": "human", "value": "zebra zebra quartz"}, {"from": "gpt", "value": "wyvern wyvern"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"conversations": turns}) + "\n", encoding="utf-8")
    large, small = (
        json.loads((make(tmp_path / tokens, "--rows", str(file), "--tokens", tokens) / "tokenizer.json").read_text())
        for tokens in ("500", "260")
    )
    assert {"zebra", "Ġzebra", "wyvern", "Ġwyvern"} <= set(large["model"]["vocab"])
    assert len(small["model"]["vocab"]) == 260
    assert "zebra" not in small["model"]["vocab"]
