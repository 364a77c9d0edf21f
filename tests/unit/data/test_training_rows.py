"""Rows that a training takes, and the files that hold what they show."""

import os

import datasets
import pytest
from helpers.conversations import message, row

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.data.training_rows import PromptStream, blend, check_prompt, files_of_rows, parse_dataset_spec
from lmm_r1.errors import UserError


def rows(letter, count):
    messages = (Message(role="user", parts=(TextPart("Hi"),)),)
    return [Row(messages=messages, answer=f"{letter}{n}", datasource=letter, location="") for n in range(count)]


def answers(blended):
    return [row.answer for row in blended]


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_the_order_is_that_of_hugging_face_interleaving(seed):
    lists = [rows("a", 20), rows("b", 60), rows("c", 40)]
    theirs = datasets.interleave_datasets(
        [datasets.Dataset.from_dict({"answer": answers(part)}) for part in lists],
        probabilities=[0.2, 0.5, 0.3],
        seed=seed,
        stopping_strategy="first_exhausted",
    )
    assert answers(blend(lists, [0.2, 0.5, 0.3], seed=seed)) == theirs["answer"][:]


def test_a_spec_is_split_at_commas():
    assert parse_dataset_spec("a.jsonl, b.jsonl", "0.7, 0.3") == (["a.jsonl", "b.jsonl"], [0.7, 0.3])
    assert parse_dataset_spec("a.jsonl") == (["a.jsonl"], None)
    assert parse_dataset_spec("a.jsonl,b.jsonl", "") == (["a.jsonl", "b.jsonl"], None)


@pytest.mark.parametrize(
    ("paths", "probabilities", "sentence"),
    [
        *(("a,b", given, f"--data.prompt_probs {given}: give one number") for given in ("1.0", "1.5,-0.5", "0.5,nan")),
        *(("a,b", given, f"--data.prompt_probs {given}: give one number") for given in ("0.5,0.4", "half,half")),
        ("a,,b", None, "--data.prompt_dataset 'a,,b' has an empty entry"),
    ],
)
def test_a_spec_that_does_not_fit_names_the_flags(paths, probabilities, sentence):
    with pytest.raises(UserError) as raised:
        parse_dataset_spec(paths, probabilities)
    assert sentence in str(raised.value)


def test_a_dataset_without_rows_cannot_be_drawn_from():
    with pytest.raises(UserError, match="dataset 2 of --data.prompt_dataset holds no rows"):
        blend([rows("a", 1), []], [0.5, 0.5], seed=0)


def stream(*, rows=10, episodes=2, seed=3):
    return PromptStream(list(range(rows)), seed=seed, episodes=episodes)


def test_an_episode_gives_every_row_once_and_the_next_one_another_order():
    prompts = stream()
    assert prompts.has(10)
    first = prompts.take(10)
    assert prompts.has(10)
    second = prompts.take(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert not prompts.has(1)


def test_the_next_episode_begins_whatever_is_left_and_behind_the_last_there_is_nothing():
    prompts, whole = stream(), stream()
    whole.take(10)
    whole.has(10)
    prompts.take(3)
    assert prompts.next_episode()
    assert prompts.take(20) == whole.take(10)
    assert prompts.take(1) == []
    assert not prompts.next_episode()
    assert prompts.take(1) == []
    assert not prompts.has(1)


def test_a_stream_taken_up_again_goes_on_with_the_same_rows():
    uninterrupted, stopped = stream(), stream()
    for prompts in (uninterrupted, stopped):
        assert prompts.has(7)
        prompts.take(7)
        assert prompts.has(4)  # moves on: three rows are left of the first episode
        prompts.take(4)
    state = stopped.state_dict()
    assert state == {"episode": 1, "position": 4}

    resumed = stream()
    resumed.load_state_dict(state)
    assert resumed.take(6) == uninterrupted.take(6)
    assert not resumed.has(1)


def test_the_last_rows_of_an_episode_can_be_taken_but_are_no_full_batch():
    prompts = stream(episodes=1)
    assert prompts.has(10)
    assert len(prompts.take(8)) == 8
    assert prompts.has(2)
    assert len(prompts.take(5)) == 2
    assert prompts.take(5) == []
    assert not prompts.has(1)


def test_a_prompt_that_ends_with_the_answer_is_refused_with_its_place():
    prompt = row(message("user", "What is 1 + 1?"))
    check_prompt(prompt)
    asked = [message("user", "Hello."), message("assistant", "Hello."), message("user", "What is 1 + 1?")]
    with pytest.raises(UserError, match="rows.jsonl, line 1: a prompt for RL must not end with one of several"):
        check_prompt(row(*asked, message("assistant", "2")))


def test_the_files_of_rows_are_named_once_with_size_and_time_and_without_their_folder(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(b"12345")
        os.utime(tmp_path / folder / "x.png", ns=(7, 7))
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"1")
    os.utime(clip, ns=(9, 9))

    def rows(folder):
        path = str(tmp_path / folder / "x.png")
        shown = message("user", ImagePart(path), "?", ImagePart("https://example.org/y.png"), ImagePart(b"bytes"))
        films = message("user", VideoPart(str(clip)), VideoPart((path, str(tmp_path / "gone.png"))))
        return [row(shown), row(films)]

    found = files_of_rows(rows("a"))

    assert found == [("clip.mp4", 1, 9), ("gone.png", 0, 0), ("x.png", 5, 7)]
    assert files_of_rows(rows("b")) == found
    os.utime(tmp_path / "b" / "x.png", ns=(8, 8))
    assert files_of_rows(rows("b")) != found
