"""What a suite is: a benchmark's dataset, how its columns become rows, and how its answers are sampled and judged."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import Self

from lmm_r1.errors import UserError

CHOICES_FIELD = "choices"
"""In a prompt, `{choices}` is the list of lettered choices."""

Names = Annotated[tuple[str, ...], Field(min_length=1)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Checked):
    """Where the rows are."""

    dataset: str | None = None
    """Its name on the Hugging Face hub; None where it has to be put together by hand."""
    split: str
    obtain: str | None = None
    """Where there is no dataset: how to get a local copy."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.dataset is None) == (self.obtain is None):
            raise ValueError("give either dataset, a name on the hub, or obtain, how to get a copy")
        return self


class Sampling(_Checked):
    """How responses are sampled where no flag says otherwise; row files without a recipe have these defaults."""

    temperature: float = Field(default=0.0, ge=0)
    n_samples: int = Field(default=1, ge=1)
    max_new_tokens: int = Field(default=1024, ge=1)


class Recipe(_Checked):
    """One suite."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    description: str
    source: Source
    licence: str
    """An SPDX name, or `unknown`."""
    rows: int | None = Field(default=None, ge=1)
    """How many rows the whole suite has, where that is known."""
    where: Mapping[str, str | int | bool] = Field(default_factory=dict)
    """Rows count only where these columns have these values."""
    images: tuple[str, ...] = ()
    """The column with the image or the images: the first of these that a row has; none for text."""
    image_prefix: str = ""
    """Cut off the front of image paths."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Larger images are scaled down to so many pixels."""
    answer: Names
    """The column with the answer: the first of these that a row has."""
    choices: str | None = None
    """The column with the choices, which get letters from A; the answer's letter is the label then."""
    answer_names: Literal["text", "letter", "index"] = "text"
    """What the answer names its choice by: its text, its letter, or its place from 0."""
    remove: tuple[str, ...] = ()
    """Pieces that are taken out of columns before they go into the prompt."""
    prompt: str
    """The user's turn behind the images: `{column}` stands for a column, `{choices}` for the lettered choices."""
    verifiers: Names
    """As `--verifiers` takes them; the first one's accuracy is the suite's."""
    sampling: Sampling

    @model_validator(mode="after")
    def _prompt_fits(self) -> Self:
        fields = self.prompt_fields
        odd = [field for field in fields if not field.isidentifier()]
        if odd:
            raise ValueError(f"the prompt has the field {{{odd[0]}}}; a field is the plain name of a column")
        if (CHOICES_FIELD in fields) != (self.choices is not None):
            raise ValueError("a prompt with {choices} needs the column of the choices, and the other way round")
        return self

    @property
    def prompt_fields(self) -> list[str]:
        """The names in braces, in order."""
        return [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None]


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a YAML file; raises UserError with the file and what is wrong in it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not a YAML file ({error})") from error
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {'; '.join(map(_sentence, error.errors()))}") from error


def _sentence(fault: ErrorDetails) -> str:
    place = ".".join(map(str, fault["loc"])) or "the recipe"
    if fault["type"] == "extra_forbidden":
        return f"{place} is no field of a recipe"
    return f"{place}: {fault['msg'].removeprefix('Value error, ')}"
