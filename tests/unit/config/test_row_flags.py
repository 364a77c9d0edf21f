"""The flags that say how rows are read."""

from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.cli.arguments import parse
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.config.evaluate import EvaluateConfig, check
from lmm_r1.config.generation import BatchConfig
from lmm_r1.config.run_rows import row_reading
from lmm_r1.config.shared import RowsConfig, refuse_row_flags
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.media_access import VARIABLES, MediaLimits, limits_environment, media_limits
from lmm_r1.data.reading import AS_THEY_ARE, shipped_prompt
from lmm_r1.errors import UserError

FLAGS = table("config/row_flags", "flags")


@pytest.mark.parametrize("command", [PPOConfig, SFTConfig, EvaluateConfig, BatchConfig])
def test_every_command_that_reads_rows_takes_the_same_flags(command):
    grouped = command in (PPOConfig, SFTConfig)
    prefix = "--data." if grouped else "--"
    argv = [text for name, value in FLAGS.items() for text in (prefix + name, value)]
    if command is BatchConfig:
        argv += ["--model", "m", "--data", "d", "--output", "o"]
    config = parse(command, argv, prog="", description="")
    reading = row_reading(config.data if grouped else config, prefix=prefix)
    assert reading.names == ColumnNames(prompt="q", answer="gold", images="pics", datasource="set")
    assert (reading.format, reading.min_pixels, reading.max_pixels) == ("flat", 100, 200)
    assert (reading.system_prompt, reading.image_dir) == ("Think.", Path.cwd())
    assert reading.prompt_template.text == "{{ content }} Go."


def test_without_flags_rows_are_read_as_they_are():
    assert row_reading(RowsConfig()) == AS_THEY_ARE


def test_shipped_prompts_are_named_and_switched_off():
    think, off = row_reading(RowsConfig(system_prompt="think")), row_reading(RowsConfig(system_prompt="none"))
    assert (think.system_prompt, think.default_prompt) == (None, shipped_prompt("think"))
    assert off == AS_THEY_ARE
    refuse_row_flags(RowsConfig(system_prompt="none"), because="no rows")


def test_prompts_may_stand_in_files(tmp_path):
    (tmp_path / "think.txt").write_text("Think first.\n")
    (tmp_path / "ask.jinja").write_text("{{ content }}\nBox it.\n")
    reading = row_reading(
        RowsConfig(system_prompt=str(tmp_path / "think.txt"), prompt_template=str(tmp_path / "ask.jinja"))
    )
    assert reading.system_prompt == "Think first."
    assert reading.prompt_template.text == "{{ content }}\nBox it."


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"image_dir": "no/such"}, "--data.image_dir no/such: no such folder"),
        ({"min_pixels": 0}, "--data.min_pixels 0 must be at least 1"),
        ({"min_pixels": 9, "max_pixels": 8}, "--data.min_pixels 9 must not be above --data.max_pixels 8"),
        ({"system_prompt": "prompts/no.txt"}, "--data.system_prompt prompts/no.txt: cannot be read"),
        ({"system_prompt": " "}, "--data.system_prompt is empty"),
        ({"prompt_template": "Solve it."}, "--data.prompt_template omits the prompt"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_by_name(flags, sentence):
    with pytest.raises(UserError) as raised:
        row_reading(RowsConfig(**flags), prefix="--data.")
    assert str(raised.value).startswith(sentence)


def test_what_images_may_cost_and_reach_holds_for_the_process(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    assert media_limits() == MediaLimits(max_megapixels=64.0, allow_private_urls=False)
    MediaLimits(max_megapixels=8.5, allow_private_urls=True).apply()
    row_reading(RowsConfig())
    assert media_limits() == MediaLimits(max_megapixels=8.5, allow_private_urls=True)
    assert limits_environment() == {VARIABLES[0]: "8.5", VARIABLES[1]: "1"}
    for wrong in ("0", "nan", "many"):
        monkeypatch.setenv(VARIABLES[0], wrong)
        with pytest.raises(UserError, match=f"^{VARIABLES[0]}={wrong} must be a number above 0"):
            row_reading(RowsConfig())


def test_flags_for_files_are_refused_where_only_suites_are_measured(tmp_path):
    config = EvaluateConfig(
        checkpoints=("a=b",), suite=("superclevr_200",), output=tmp_path / "o.json", system_prompt="Think."
    )
    with pytest.raises(UserError, match="^--system_prompt Think.: it is for --files, and there are none"):
        check(config)
