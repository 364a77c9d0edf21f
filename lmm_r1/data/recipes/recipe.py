"""A recipe: a published dataset, how its columns become rows, and how its answers are judged.

A recipe with `sampling`, which says how responses are drawn, is an evaluation suite as well."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import random
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from lmm_r1.errors import UserError
from remote_rm.answers.extraction import last_boxed

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
PreferenceFormat = Literal["preference", "rlhf_v", "vlfeedback"]
_OF_PREFERENCES = set("name description source licence rows unchecked where images image_prefix format".split())


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

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.matches is None) == (self.filled is None):
            raise ValueError("give either matches or filled")
        return self


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
    format: PreferenceFormat | None = None
    """For preferences: their row format. Such a recipe has no prompt, answer or verifiers, and `images` lists the columns
    with image paths."""
    answer: Names = ()
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
    verifiers: Names = ()
    """As in `--reward`; the suite's accuracy is that of the first one."""
    sampling: SuiteSampling | None = None
    """How responses are drawn for evaluation; None for training data."""

    @model_validator(mode="after")
    def _has_what_its_rows_need(self) -> Self:
        if self.format is not None:
            if odd := sorted(self.model_fields_set - _OF_PREFERENCES):
                raise ValueError(
                    f"{odd[0]} has no use in a recipe of preferences with the format {self.format}; drop it"
                )
            return self
        for name in ("answer", "verifiers"):
            if not getattr(self, name):
                raise ValueError(f"{name}: at least one is needed, except for preferences, which have a format")
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
        # Leave out a field that few recipes have, so that folders made before it existed stay valid.
        fields = self.model_dump(mode="json", exclude={"format"} if self.format is None else None)
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


LETTERS = "ABCDEFGHIJ"
"""As many as the choice verifier accepts."""
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class RecordView:
    """One record as a recipe reads it; every error begins with the record's location."""

    def __init__(self, columns: Mapping[str, Any], *, recipe: Recipe, location: str) -> None:
        self.columns = columns
        self.recipe = recipe
        self.location = location

    def fail(self, sentence: str) -> UserError:
        """Return the error, for the caller to raise."""
        return UserError(f"{self.location}: {sentence}")

    def value(self, name: str) -> Any:
        """Return the value of a column, None if it is empty."""
        # A column's own name may contain dots; it is a path only if the recipe gives one.
        path = self.recipe.columns.get(name)
        if path is None or path in self.columns:
            value = self.columns.get(path or name)
        else:
            value = self.columns
            for step in path.split("."):
                if isinstance(value, Mapping):
                    value = value.get(step)
                elif step.isdigit() and not isinstance(value, str | bytes) and isinstance(value, Sequence):
                    value = dict(enumerate(value)).get(int(step))
                else:
                    value = None
        return None if _is_empty(value) else value

    def first(self, names: Sequence[str]) -> Any:
        """Return the value of the first of these columns that is filled; raises UserError if none is."""
        for name in names:
            value = self.value(name)
            if value is not None:
                return value
        wanted = " or ".join(f'"{self.recipe.columns.get(name, name)}"' for name in names)
        raise self.fail(f"no column {wanted}, or it is empty (found: {', '.join(self.columns) or 'nothing'})")

    def failed_filter(self) -> str | None:
        """Return the column of the first condition that the record does not meet; None if it meets all."""
        return next((name for name, wanted in self.recipe.where.items() if not self._meets(name, wanted)), None)

    def _meets(self, name: str, wanted: Any) -> bool:
        value = self.value(name)
        if isinstance(wanted, Condition) and wanted.filled is not None:
            return (value is not None) == wanted.filled
        if value is None:
            raise self.fail(
                f'no column "{name}", or it is empty (found: {", ".join(self.columns) or "nothing"}), and the recipe '
                "chooses rows by it"
            )
        if isinstance(wanted, Condition):
            return re.search(wanted.matches or "", str(value)) is not None
        known = wanted if isinstance(wanted, tuple) else (wanted,)
        # CSV files hold only text.
        return value in (map(str, known) if isinstance(value, str) else known)

    def choices(self) -> list[str]:
        """Return the choices in the order of their letters; none for an open question."""
        published = self._published_choices()
        if not self.recipe.choices_shuffled:
            return published
        # The order depends only on the choices.
        order = sorted(published)
        random.Random(hashlib.sha256("\0".join(published).encode()).hexdigest()).shuffle(order)
        return order

    def _published_choices(self) -> list[str]:
        asked, optional = self.recipe.choices, self.recipe.choices_optional
        if asked is None:
            return []
        if isinstance(asked, tuple):
            value: Any = [self.value(name) for name in asked]
        else:
            value = _listed((self.value(asked) or []) if optional else self.first((asked,)))
        if isinstance(value, list):
            held = [choice for choice in value if not _is_empty(choice)]
            if held != value[: len(held)]:
                # A gap would shift the letters.
                raise self.fail(f"an empty choice is followed by others: {value!r}")
            value = held
        if not value and optional:
            return []
        if not isinstance(value, list) or not 2 <= len(value) <= len(LETTERS):
            shown = asked if isinstance(asked, str) else " ".join(asked)
            raise self.fail(f"{shown} must be a list of 2 to {len(LETTERS)} choices, found {value!r}")
        prefix = re.compile(f"^(?:{self.recipe.choice_prefix or ''})")
        return [prefix.sub("", str(choice).strip()).strip() for choice in value]

    def label(self, choices: Sequence[str]) -> str:
        """Return the answer, or its choice's letter."""
        answer = self._answer_text()
        if not choices:
            return answer
        # Letters and indices refer to the published order.
        published = self._published_choices()
        letters = [
            LETTERS[choices.index(choice) if self.recipe.choices_shuffled else place]
            for place, choice in enumerate(published)
        ]
        named = {
            "text": {choice: letter for letter, choice in reversed(list(zip(letters, published, strict=True)))},
            "letter": dict(zip(LETTERS, letters, strict=False)),
            "index": {str(place): letter for place, letter in enumerate(letters)},
        }[self.recipe.answer_names]
        if answer not in named:
            raise self.fail(
                f"the answer {answer[:80]!r} is not the {self.recipe.answer_names} of any of the {len(choices)} choices"
            )
        return named[answer]

    def _answer_text(self) -> str:
        recipe = self.recipe
        value = self.first(recipe.answer)
        if recipe.answer_list is not None and isinstance(value := _listed(value), list):
            entries = [str(entry).strip() for entry in value if not _is_empty(entry)]
            if not entries:
                raise self.fail("the list of answers is empty")
            if recipe.answer_list == "sorted":
                entries.sort(key=lambda entry: (len(entry), entry))
            frequent = Counter(entries).most_common(1)[0][0]
            value = {"first": entries[0], "most_common": frequent}.get(recipe.answer_list, ", ".join(entries))
        text = str(value).strip()
        if recipe.answer_pattern is not None:
            found = re.findall(recipe.answer_pattern, text, flags=re.DOTALL)
            answer = found[-1] if found else None
        elif recipe.answer_in == "answer_tag":
            blocks = _ANSWER_TAG.findall(text)
            answer = blocks[-1] if blocks else None
        else:
            boxed = None if recipe.answer_in == "text" else last_boxed(text)
            answer = text if boxed is None and recipe.answer_in != "boxed" else boxed
        if answer is None or not answer.strip():
            named = {"answer_tag": "<answer> block", "boxed": r"\boxed{}"}
            wanted = recipe.answer_pattern or named.get(recipe.answer_in, "text")
            raise self.fail(f"no {wanted} in the answer {text[:80]!r}")
        return answer.strip()


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value) or (isinstance(value, float) and math.isnan(value))


def _listed(value: Any) -> Any:
    """Return a list, given as such or as the text that Parquet files may hold: `"['a', 'b']"` → `["a", "b"]`."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
        return parsed if isinstance(parsed, list) else value
    return value
