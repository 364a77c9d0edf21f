"""The flags of every command that reads rows, and how the rows are read by them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from lmm_r1.data.formats import FormatName
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.reading import PromptTemplate, RowReading
from lmm_r1.errors import UserError

# A value that ends like this and holds no blank is the name of a file, not a text.
_TEXT_FILES = (".txt", ".md", ".jinja", ".jinja2", ".j2")
IMAGES = "images"


@dataclass(frozen=True, kw_only=True)
class RowReadingConfig:
    """How rows of any kind are read; which columns hold their prompts and answers is the command's."""

    format: FormatName | None = None
    """Format of the rows; None finds it by the columns of each file."""
    image_key: str = IMAGES
    """Column with the images of `<image>` tags, and of image parts without a source; left at `images`, a format that
    calls it otherwise takes its own."""
    datasource_key: str | None = None
    """Column by whose values metrics are told apart; None takes the format's: `datasource`, `data_source` or `category`."""
    image_dir: str | None = None
    """Folder that relative paths of images and videos start from; None is the row file's own."""
    min_pixels: int | None = None
    """Images, and frames of videos, with fewer pixels are scaled up to them; one that a row gives an image goes first."""
    max_pixels: int | None = None
    """Images, and frames of videos, with more pixels are scaled down to them; one that a row gives an image goes first."""
    system_prompt: str | None = None
    """System turn of every row, as text or as the name of a text file; it replaces the one that a row has."""
    prompt_template: str | None = None
    """Jinja template of the last turn of the user, as text or as the name of a text file; gets its text as `content`,
    with `<image>` where an image stands, and the row's columns by their names."""


@dataclass(frozen=True, kw_only=True)
class RowsConfig(RowReadingConfig):
    input_key: str | None = None
    """Column with the prompt: messages, or text. Without a format it is read as one of this project's own rows; None
    takes the column of the format, which is `message` or `messages` in this project's own."""
    label_key: str | None = None
    """Column with the right answer; None takes the format's: `answer`, or `solution` where a format calls it so."""


def row_reading(config: RowsConfig, *, prefix: str = "--") -> RowReading:
    """Return how the flags say that rows of prompts are read; takes and raises what `named_reading` does."""
    return named_reading(config, prompt=config.input_key, answer=config.label_key, prefix=prefix)


def named_reading(
    config: RowReadingConfig, *, prompt: str | None, answer: str | None = None, prefix: str = "--"
) -> RowReading:
    """Return how the flags say that rows are read.

    Args:
        prompt: the column with the prompt, and `answer` that with the right answer; None takes the format's.
        prefix: what stands in front of the flags' names on this command's line.

    Raises:
        UserError: a folder or file is missing, a bound makes no sense, or the template is broken.
    """
    _check_bounds(config, prefix=prefix)
    if config.image_dir is not None and not Path(config.image_dir).is_dir():
        raise UserError(f"{prefix}image_dir {config.image_dir}: no such folder; check the path")
    template = config.prompt_template
    return RowReading(
        format=config.format,
        names=ColumnNames(
            prompt=prompt,
            answer=answer,
            images=None if config.image_key == IMAGES else config.image_key,
            datasource=config.datasource_key,
        ),
        image_dir=None if config.image_dir is None else Path(os.path.abspath(config.image_dir)),
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        system_prompt=_text(config.system_prompt, flag=f"{prefix}system_prompt"),
        prompt_template=(
            None
            if template is None
            else PromptTemplate(
                _text(template, flag=f"{prefix}prompt_template") or "", flag=f"{prefix}prompt_template"
            )
        ),
    )


def refuse_row_flags(config: RowsConfig, *, because: str, prefix: str = "--") -> None:
    """Raise UserError for the first of these flags that is given, where nothing reads rows by them."""
    given = [own.name for own in fields(RowsConfig) if getattr(config, own.name) != own.default]
    if given:
        raise UserError(f"{prefix}{given[0]} {getattr(config, given[0])}: {because}; leave it out")


def _check_bounds(config: RowReadingConfig, *, prefix: str) -> None:
    lowest, highest = config.min_pixels, config.max_pixels
    for name, bound in (("min_pixels", lowest), ("max_pixels", highest)):
        if bound is not None and bound < 1:
            raise UserError(f"{prefix}{name} {bound} must be at least 1")
    if lowest is not None and highest is not None and lowest > highest:
        raise UserError(f"{prefix}min_pixels {lowest} must not be above {prefix}max_pixels {highest}")


def _text(value: str | None, *, flag: str) -> str | None:
    """Return a flag's text, or that of the file it names."""
    if value is None:
        return None
    looks_like_file = value.endswith(_TEXT_FILES) and not any(character.isspace() for character in value)
    if looks_like_file:
        try:
            value = Path(value).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{flag} {value}: cannot be read ({error.strerror}); check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{flag} {value}: not UTF-8 text ({error})") from error
    if not value.strip():
        raise UserError(f"{flag} is empty; write a text, or leave it out")
    return value.strip()
