"""Recipes of public datasets: how the columns of one become rows, and how its answers are judged.

To add one, add a YAML file to datasets/recipes/.
A recipe with `sampling`, which says how responses are drawn, is an evaluation suite as well."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self


CHOICES_FIELD = "choices"
"""In a prompt, `{choices}` is replaced by the lettered choices."""


def _regular(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error
    return pattern


Names = Annotated[tuple[str, ...], Field(min_length=1)]
Pattern = Annotated[str, AfterValidator(_regular)]
"""A regular expression."""
Scalar = str | int | bool
Aspect = Literal["files", "columns", "answer", "split", "rows", "licence"]
"""The aspects of a recipe that can be checked against the published dataset."""


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeSource(_Checked):
    """Where the rows are."""

    dataset: str | None = None
    """Its name on the Hugging Face hub; None if users must assemble it themselves."""
    revision: str | None = None
    """A branch, tag or commit of the dataset; None takes its main branch."""
    split: str
    files: tuple[str, ...] = ()
    """Patterns of the row files (`*` also crosses folders); empty takes the Parquet files named after the split."""
    media: tuple[str, ...] = ()
    """Patterns of the images that rows name by path: archives (zip, tar, tar.gz) or image files."""
    obtain: str | None = None
    """How to get a local copy, if there is no dataset on the hub."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.dataset is None) == (self.obtain is None):
            raise ValueError("give either dataset, a name on the hub, or obtain, how to get a copy")
        return self

    @property
    def row_patterns(self) -> tuple[str, ...]:
        return self.files or (f"{self.split}-*.parquet", f"*/{self.split}-*.parquet")


class SuiteSampling(_Checked):
    """How responses are sampled unless a flag says otherwise; the defaults also apply to row files without a recipe."""

    temperature: float = Field(default=0.0, ge=0)
    n_samples: int = Field(default=1, ge=1)
    max_new_tokens: int = Field(default=1024, ge=1)


class Condition(_Checked):
    """A test of a column other than equality."""

    matches: Pattern | None = None
    """It must be found in the value."""
    filled: bool | None = None
    """Whether there must be a value."""


class Recipe(_Checked):
    """One dataset."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    description: str
    source: RecipeSource
    licence: str
    """An SPDX name, or `unknown`."""
    rows: int | None = Field(default=None, ge=1)
    """How many rows it makes, if known."""
    unchecked: Mapping[Aspect, str] = Field(default_factory=dict)
    """What could not be compared with the published files, and what is assumed instead."""
    columns: Mapping[str, str] = Field(default_factory=dict)
    """The recipe's names for columns, or for values inside them: `conversations.0.value`."""
    where: Mapping[str, Scalar | tuple[Scalar, ...] | Condition] = Field(default_factory=dict)
    """A row matches only if these columns have this value, have one of these values, or meet the condition."""
    images: tuple[str, ...] = ()
    """The column with the image or images: the first of these that a row has; empty for text."""
    images_from: Literal["first", "all"] = "first"
    """`all` takes the images of all columns in `images` that a row has, possibly none."""
    image_prefix: str = ""
    """Removed from the start of image paths."""
    image_tag: str | None = None
    """Marks the place of the next image in the prompt; None puts all images before the text."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Larger images are scaled down to this many pixels."""
    messages: str | None = None
    """The column with ready-made messages, a list or its JSON text, instead of `prompt` and `images`."""
    answer: Names
    """The column with the answer: the first of these that a row has."""
    answer_list: Literal["first", "most_common", "joined", "sorted"] | None = None
    """For an answer that is a list: take its first entry, its most common one, or all joined by commas, also in the order
    of whole numbers."""
    answer_in: Literal["text", "answer_tag", "boxed", "boxed_or_text"] = "text"
    r"""Where the answer is in the text: all of it, in <answer> tags, or in the last \boxed{} (with or without fallback)."""
    answer_pattern: Pattern | None = None
    """Its one group is the answer, instead of `answer_in`; its last match counts."""
    choices: str | Names | None = None
    """The column with the list of choices, or one column per choice; they get letters from A, the letter is the label."""
    choices_optional: bool = False
    """Whether rows without choices are open questions instead of errors."""
    choices_shuffled: bool = False
    """Whether choices are shuffled, with a fixed order per row: for datasets that list the right choice first."""
    choice_prefix: Pattern | None = None
    """What precedes a choice's text, such as its own letter, and is removed."""
    answer_names: Literal["text", "letter", "index"] = "text"
    """How the answer names its choice: by text, letter, or index from 0."""
    remove: tuple[str, ...] = ()
    """Pieces of text that are removed from columns before they are used in the prompt."""
    system: str | None = None
    """The system turn before the user's."""
    prompt: str | None = None
    """The user's turn after the images: `{column}` is replaced by a column, `{choices}` by the lettered choices."""
    response: str | None = None
    """The assistant's turn for supervised training, with columns in braces as in the prompt."""
    group: str | None = None
    """A column by whose values metrics are split: the datasource becomes NAME/VALUE."""
    verifiers: Names
    """As in `--reward`; the suite's accuracy is that of the first one."""
    sampling: SuiteSampling | None = None
    """How responses are drawn for evaluation; None for training data."""

    @model_validator(mode="after")
    def _has_what_its_rows_need(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages, the column with ready-made ones")
        fields = [field for text in (self.prompt, self.response) for field in template_fields(text or "")]
        if odd := [field for field in fields if not field.isidentifier()]:
            raise ValueError(
                f"the prompt has the field {{{odd[0]}}}; a field must be the plain name of a column (`columns` can set one)"
            )
        if (CHOICES_FIELD in template_fields(self.prompt or "")) != (self.choices is not None):
            raise ValueError("a prompt with {choices} needs the column of the choices, and vice versa")
        if self.messages is not None and (self.images or self.system or self.image_tag):
            raise ValueError("messages hold images and system turns themselves: drop images, image_tag and system")
        if self.answer_pattern is not None and re.compile(self.answer_pattern).groups != 1:
            raise ValueError("answer_pattern needs exactly one group, the answer")
        return self

    @property
    def is_suite(self) -> bool:
        """Whether `lmm-r1 evaluate` accepts it."""
        return self.sampling is not None

    @property
    def digest(self) -> str:
        """SHA-256 of all that the rows depend on, independent of comments and the order of fields."""
        fields = self.model_dump(mode="json")
        canonical = json.dumps(fields, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def template_fields(template: str) -> list[str]:
    """Return the names in braces, in order."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in a YAML file; raises UserError with the file and the problem."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not a YAML file ({error})") from error
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            place, said = ".".join(map(str, fault["loc"])) or "the recipe", fault["msg"].removeprefix("Value error, ")
            odd = fault["type"] == "extra_forbidden"
            faults.append(f"{place} is not a field of a recipe" if odd else f"{place}: {said}")
        raise UserError(f"{path}: {'; '.join(faults)}") from error


# An installed wheel has the YAML files next to this module; the repository has them in a folder of its own.
_INSTALLED = Path(__file__).parent / "published"
_IN_REPOSITORY = Path(__file__).parents[3] / "datasets" / "recipes"


@cache
def _folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _IN_REPOSITORY


@cache
def recipe_names() -> tuple[str, ...]:
    """Return the names of the built-in recipes."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def get_recipe(name: str, *, what: str = "recipe", names: tuple[str, ...] | None = None) -> Recipe:
    """Return a built-in recipe by its name, or the one in a YAML file; raises UserError for an unknown name.

    Args:
        what: what a message calls it, including its flag if there is one.
        names: the names to choose from; None allows all.
    """
    if name.endswith((".yaml", ".yml")):
        return read_recipe(Path(name))
    known = recipe_names() if names is None else names
    if name not in known:
        match = nearest(name, known=known)
        hint = f"did you mean {match}?" if match else f"known are {', '.join(known)}, or the path of a YAML file"
        raise UserError(f"{what} {name}: no such {what.rpartition('--')[2]}; {hint}")
    return read_recipe(_folder() / f"{name}.yaml")
