"""Plain text, pre-training, columns and reading ahead in supervised runs."""

from dataclasses import replace
from functools import partial

import pytest
from helpers.character_kit import END, IMAGE, NEWLINE, CharacterKit
from helpers.conversations import message, row, write_rows
from helpers.sessions import configured
from PIL import Image

from lmm_r1.config import SFTConfig
from lmm_r1.config.run_rows import plain_template
from lmm_r1.data.messages import Row, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.checkpoint import encode_row
from lmm_r1.supervised import chat_template, first_fitting, read_ahead
from lmm_r1.supervised.sft import RowEncoder, SFTRun

config = partial(configured, SFTConfig)


def encoder(**flags: object) -> RowEncoder:
    return RowEncoder.of(config(**flags), kit=CharacterKit(), processor=None)


def plain(*texts: tuple[str, str]) -> Row:
    return replace(row(*(message(role, text) for role, text in texts)), plain=True)


def test_of_plain_text_the_loss_takes_the_response_and_its_end():
    sample = encoder()(plain(("user", "ab"), ("assistant", "c")))
    assert sample.token_ids == [*b"abc", END]
    assert sample.loss_mask == [False, False, True, True]


def test_in_pre_training_every_token_of_a_text_counts_and_an_end_follows():
    sample = encoder(model__pretrain_mode_enable=True)(plain(("user", "ab")))
    assert sample.token_ids == [*b"ab", END]
    assert sample.loss_mask == [True, True, True]


def test_in_pre_training_every_token_of_a_conversation_counts_but_those_of_images():
    sample = encoder(model__pretrain_mode_enable=True)(row(message("user", IMAGE, "x"), message("assistant", "y")))
    # u <image x 3> </image> x END \n a y END \n
    assert sample.loss_mask == [True, False, False, False, *[True] * 8]


def test_a_text_longer_than_the_longest_sequence_is_left_out():
    assert encoder(model__pretrain_mode_enable=True, data__max_len=3)(plain(("user", "abc"))) is None


def test_a_plain_prompt_is_encoded_as_it_stands():
    encoded = encode_row(plain(("user", "ab")), kit=CharacterKit(), processor=None, add_generation_prompt=True)
    assert encoded.token_ids == encoded.engine_token_ids == [*b"ab"]
    with pytest.raises(UserError, match="^rows.jsonl, line 1: the text holds a media token"):
        encode_row(plain(("user", "a\x02")), kit=CharacterKit(), processor=None, add_generation_prompt=True)


def test_which_prompts_are_plain():
    default = "User: {}\nAssistant: "
    assert plain_template(config()) is None
    assert plain_template(config(data__output_key="a")) == default
    assert plain_template(config(data__output_key="a", data__input_template=None)) == "{}"
    assert plain_template(config(data__output_key="a", data__apply_chat_template=True)) is None
    assert plain_template(config(model__pretrain_mode_enable=True)) == "{}"


def test_the_columns_of_the_rows_are_those_of_the_flags(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"q": "1?", "a": "2"})
    flags = {"data__dataset": path, "data__input_key": "q", "data__output_key": "a", "train__batch_size": 1}
    (found,) = SFTRun.training_rows(config(**flags))
    sample = encoder()(found)
    assert sample.token_ids == [*b"User: 1?\nAssistant: 2", END]
    (turns,) = SFTRun.training_rows(config(**flags, data__apply_chat_template=True))
    assert encoder()(turns).token_ids == [*b"u1?", END, NEWLINE, *b"a2", END, NEWLINE]


def test_a_column_of_text_is_for_pre_training(tmp_path):
    path = write_rows(tmp_path / "texts.jsonl", {"text": "a <image> b"})
    flags = {"data__dataset": path, "data__input_key": "text", "train__batch_size": 1}
    with pytest.raises(UserError, match="--data.output_key, or learn plain text with --model.pretrain_mode_enable"):
        SFTRun.training_rows(config(**flags | {"data__dataset": write_rows(tmp_path / "one.jsonl", {"text": "a"})}))
    with pytest.raises(UserError, match="texts.jsonl line 1: a plain-text prompt with images"):
        SFTRun.training_rows(config(**flags, model__pretrain_mode_enable=True))
    path = write_rows(tmp_path / "texts.jsonl", {"text": "ab"})
    (found,) = SFTRun.training_rows(config(**flags, model__pretrain_mode_enable=True))
    assert encoder(model__pretrain_mode_enable=True)(found).token_ids == [*b"ab", END]


def test_evaluation_rows_have_answers_where_a_verifier_judges(tmp_path):
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    path = write_rows(tmp_path / "rows.jsonl", {"messages": turns, "gold": "2"})
    assert SFTRun.evaluation_rows(config()) == []
    (found,) = SFTRun.evaluation_rows(config(eval__dataset=path))
    assert found.answer == ""
    (found,) = SFTRun.evaluation_rows(config(eval__dataset=path, eval__reward="math", data__label_key="gold"))
    assert found.answer == "2"
    with pytest.raises(UserError, match='rows.jsonl line 1: the answer "answer" is missing'):
        SFTRun.evaluation_rows(config(eval__dataset=path, eval__reward="math"))


def test_images_come_from_the_column_that_the_flag_names(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "2"}]
    path = write_rows(tmp_path / "rows.jsonl", {"messages": turns, "pictures": ["a.png"]})
    flags = {"data__dataset": path, "train__batch_size": 1}
    (found,) = SFTRun.training_rows(config(**flags, data__image_key="pictures"))
    assert [part.source for part in images_of(found.messages)] == [str(tmp_path / "a.png")]
    with pytest.raises(UserError, match="--data.image_key"):
        SFTRun.training_rows(config(**flags))


def test_a_chat_template_is_text_or_a_file(tmp_path):
    assert chat_template(config()) is None
    assert chat_template(config(data__tokenizer_chat_template="{{ messages }}")) == "{{ messages }}"
    file = tmp_path / "chat.jinja"
    file.write_text("{% if a %}", encoding="utf-8")
    assert chat_template(config(data__tokenizer_chat_template=str(file))) == "{% if a %}"
    with pytest.raises(UserError, match="^--data.tokenizer_chat_template chatml is no template"):
        chat_template(config(data__tokenizer_chat_template="chatml"))


def test_workers_give_the_same_samples_in_the_same_order():
    rows = [row(message("user", text), message("assistant", "b")) for text in ("a", "a" * 50, "cd")]
    encode = encoder(data__max_len=20)
    ahead = list(read_ahead(rows, encode, indices=[2, 1, 0, 2], workers=2))
    assert ahead == [encode(rows[2]), None, encode(rows[0]), encode(rows[2])]


def test_a_row_that_cannot_be_taken_is_told_when_its_turn_comes():
    rows = [row(message("user", "a"), message("assistant", "b")), row(message("user", "a"))]
    ahead = read_ahead(rows, encoder(), indices=[0, 1], workers=1)
    assert next(ahead) is not None
    refused = next(ahead)
    assert isinstance(refused, UserError)
    assert str(refused).startswith("rows.jsonl, line 1: an assistant turn must follow a prompt")


def test_the_first_row_that_fits_is_found_behind_those_that_cannot_be_encoded():
    rows = [
        row(message("user", "a")),
        row(message("user", "b"), message("assistant", "b" * 99)),
        row(message("user", "a"), message("assistant", "b")),
    ]
    skips = config(data__bad_rows="skip", data__max_len=20)
    encode = RowEncoder.of(skips, kit=CharacterKit(), processor=None)
    assert first_fitting(skips, rows, encode) == encode(rows[2])
    with pytest.raises(UserError, match=r"must follow a prompt.* repeat the command with --data.bad_rows skip, which"):
        first_fitting(config(data__max_len=20), rows, encode)
    with pytest.raises(UserError, match="every row of --data.dataset None is longer than --data.max_len 20"):
        first_fitting(skips, rows[:2], encode)


def texts(rows: list[Row]) -> set[str]:
    return {row.messages[0].parts[0].text for row in rows}


def test_datasets_are_mixed_by_their_shares_and_cut_to_so_many_rows(tmp_path):
    turns = {name: [{"role": "user", "content": name}, {"role": "assistant", "content": "x"}] for name in "ab"}
    one, other = (write_rows(tmp_path / f"{name}.jsonl", *([{"messages": turns[name]}] * 20)) for name in "ab")
    flags = {"data__dataset": f"{one},{other}", "train__batch_size": 1}
    assert len(SFTRun.training_rows(config(**flags))) == 40
    assert len(SFTRun.training_rows(config(**flags, data__max_samples=7))) == 7
    assert texts(SFTRun.training_rows(config(**flags, data__dataset_probs="0.0,1.0"))) == {"b"}
    with pytest.raises(UserError, match="gives 7 rows, fewer than --train.batch_size 8"):
        SFTRun.training_rows(config(**flags | {"train__batch_size": 8}, data__max_samples=7))


def test_the_split_is_the_one_that_is_named(tmp_path):
    import datasets

    splits = {
        name: datasets.Dataset.from_list(
            [{"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "x"}]}]
        )
        for name in ("train", "test", "held_out")
    }
    folder = str(tmp_path / "saved")
    datasets.DatasetDict(splits).save_to_disk(folder)
    flags = {"data__dataset": folder, "data__dataset_split": "test", "train__batch_size": 1}
    assert texts(SFTRun.training_rows(config(**flags))) == {"test"}
    assert texts(SFTRun.evaluation_rows(config(eval__dataset=folder, eval__split="held_out"))) == {"held_out"}


def test_held_out_rows_are_those_of_all_files_that_are_named(tmp_path):
    turns = [[{"role": "user", "content": name}, {"role": "assistant", "content": "x"}] for name in "ab"]
    first, second = (write_rows(tmp_path / f"{number}.jsonl", {"messages": one}) for number, one in enumerate(turns))
    rows = SFTRun.evaluation_rows(config(eval__dataset=f"{first}, {second}"))
    assert texts(rows) == {"a", "b"}
    assert sorted(path for path, _ in rows.origins.values()) == sorted(map(str, (first, second)))
    with pytest.raises(UserError, match="--eval.dataset .* has an empty entry"):
        SFTRun.evaluation_rows(config(eval__dataset=f"{first},"))


def test_the_last_turn_alone_is_learnt_where_asked_for():
    turns = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    assert sum(encoder()(row(*turns)).loss_mask) == 4
    assert sum(encoder(data__multiturn=False)(row(*turns)).loss_mask) == 2
