"""Recipes of public datasets: how the columns of one become rows, and how its answers are judged; and its source files.

To add one, add a YAML file to datasets/recipes/.
A recipe with `sampling`, which says how responses are drawn, is an evaluation suite as well."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import string
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmm_r1 import hub
from lmm_r1.data.fetching import MAX_BYTES
from lmm_r1.data.files import Record, read_records
from lmm_r1.data.media_access import downloaded_folder, is_below
from lmm_r1.data.messages import resolve
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
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
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


ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
Member = tuple[zipfile.ZipFile, str] | Path


def is_archive(path: Path) -> bool:
    """Return whether the file's name is that of a supported archive."""
    return path.name.lower().endswith(ARCHIVES)


class MediaFiles:
    """Finds an image by the end of its path: `train/1.png` is `images/train/1.png`, and never `test/1.png`.

    Zip archives are read in place; tar archives have no index, so they are unpacked.
    """

    def __init__(self, files: Sequence[Path], *, folder: Path, unpack_into: Path | None) -> None:
        """List files of the dataset's folder; tar archives are unpacked into `unpack_into`, None refuses them.

        Raises UserError for an archive that cannot be read.
        """
        self._by_name: dict[str, list[tuple[tuple[str, ...], Member]]] = {}
        self._open: list[zipfile.ZipFile] = []
        self.folders = (folder,) if unpack_into is None else (folder, unpack_into)
        for file in files:
            if not is_archive(file):
                self._add(file.relative_to(folder), file)
            elif file.suffix.lower() == ".zip":
                try:
                    archive = zipfile.ZipFile(file)
                except (zipfile.BadZipFile, OSError) as error:
                    raise UserError(f"{file}: not a readable zip archive ({error}); fetch it again") from error
                self._open.append(archive)
                for name in archive.namelist():
                    if not name.endswith("/"):
                        self._add(PurePosixPath(name), (archive, name))
            elif unpack_into is None:
                raise UserError(f"{file}: tar archives cannot be read in place; unpack it, and give the folder")
            else:
                content = unpack_into / file.relative_to(folder)
                try:
                    content.mkdir(parents=True)
                    with tarfile.open(file) as packed:
                        packed.extractall(content, filter="data")
                except (tarfile.TarError, EOFError, OSError) as error:
                    raise UserError(f"{file}: cannot be unpacked ({error}); fetch it again, or free space") from error
                for path in sorted(content.rglob("*")):
                    if path.is_file():
                        self._add(path.relative_to(content), path)

    def __enter__(self) -> MediaFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for archive in self._open:
            archive.close()

    def find(self, path: str, *, base_dir: Path, location: str) -> str | bytes:
        """Return the path of an existing file, or the encoded image from an archive; `path` itself if nothing fits.

        Raises UserError if several files fit equally well, or an archive is damaged.
        """
        local = str(resolve(path, base_dir=base_dir))
        is_own = downloaded_folder(base_dir) is None or is_below(local, self.folders)
        if is_own and os.path.isfile(local):
            return local
        asked = _steps(PurePosixPath(os.path.normpath(path.removeprefix("file://"))))
        fitting: dict[int, list[Member]] = {}
        for name, member in self._by_name.get(asked[-1] if asked else "", ()):
            shared = len(os.path.commonprefix([asked[::-1], name[::-1]]))
            if shared == min(len(asked), len(name)):
                fitting.setdefault(shared, []).append(member)
        if not fitting:
            return path
        best = fitting[max(fitting)]
        if len(best) > 1:
            raise UserError(
                f"{location}: the image {path} may be any of {len(best)} files, such as {_shown(best[0])} and "
                f"{_shown(best[1])}; remove those that do not belong to the dataset"
            )
        return _content(best[0], location=location)

    def _add(self, name: PurePath, member: Member) -> None:
        self._by_name.setdefault(name.name, []).append((_steps(name), member))


def _steps(path: PurePath) -> tuple[str, ...]:
    return tuple(step for step in path.parts if step not in ("/", ".", ".."))


def _content(member: Member, *, location: str) -> str | bytes:
    if isinstance(member, Path):
        return str(member)
    archive, name = member
    if archive.getinfo(name).file_size > MAX_BYTES:
        raise UserError(
            f"{location}: {_shown(member)} is larger than {MAX_BYTES // 2**20} MiB; remove it from the archive"
        )
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{location}: cannot read {_shown(member)} ({error}); fetch the archive again") from error


def _shown(member: Member) -> str:
    return str(member) if isinstance(member, Path) else f"{member[0].filename}:{member[1]}"


ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files that a recipe's rows are read from."""

    folder: Path
    """The folder that names are relative to."""
    rows: tuple[Path, ...]
    """Row files in reading order, or one folder that `read_records` reads as a whole."""
    media: tuple[Path, ...]
    """Archives and images that are not next to the row files."""
    revision: str | None
    """The commit of the dataset on the hub; None for a local copy."""

    def records(self, *, split: str) -> Iterator[Record]:
        for path in self.rows:
            yield from read_records(str(path), split=split)


def hub_files(recipe: Recipe) -> SourceFiles:
    """Fetch a recipe's files from the hub or its cache; an interrupted download resumes.

    Raises UserError if they are not available, or the dataset has no such files.
    """
    source = recipe.source
    assert source.dataset is not None, "the caller handles recipes without a dataset"
    folder = hub.dataset_folder(
        source.dataset, patterns=[*source.row_patterns, *source.media], revision=source.revision
    )
    found = _found(recipe, folder)
    if not found.rows:
        raise UserError(
            f"{source.dataset}: the dataset on the hub has no files {' or '.join(source.row_patterns)}; its layout has "
            "changed since the recipe was written"
        )
    return replace(found, revision=folder.name)


def local_files(recipe: Recipe, path: Path) -> SourceFiles:
    """Return the files of a local copy: a row file, or a folder with the published layout.

    A folder without the published files is read as by `read_records`.

    Raises:
        UserError: `path` does not exist, or is no row file.
    """
    if path.is_file():
        if is_archive(path):
            raise UserError(
                f"{path}: an archive alone has no rows; give the row file next to it, or the folder that holds both"
            )
        if path.suffix.lower() not in ROW_SUFFIXES:
            raise UserError(f"{path}: unknown kind of row file; known kinds are {', '.join(ROW_SUFFIXES)}")
        return replace(_found(recipe, path.parent), rows=(path,))
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    found = _found(recipe, path)
    if found.rows:
        return found
    alone = [name for name in _names(path) if name.lower().endswith(ROW_SUFFIXES)]
    return replace(found, rows=(path / alone[0] if len(alone) == 1 else path,))


def _found(recipe: Recipe, folder: Path) -> SourceFiles:
    """Return the files of a folder that the recipe names, and loose images if it has media."""
    names, media = _names(folder), recipe.source.media
    loose = [name for name in names if media and name.lower().endswith(_IMAGE_SUFFIXES)]
    return SourceFiles(
        folder=folder,
        rows=tuple(folder / name for name in _matching(names, recipe.source.row_patterns)),
        media=tuple(folder / name for name in dict.fromkeys([*_matching(names, media), *loose])),
        revision=None,
    )


def _names(folder: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that fit, else those of a copy in a deeper folder, or with all files in one folder."""
    anywhere = [f"*/{pattern}" for pattern in patterns]
    for known in (patterns, anywhere, [pattern.rpartition("/")[2] for pattern in patterns]):
        if fitting := [name for pattern in known for name in names if fnmatch.fnmatchcase(name, pattern)]:
            return list(dict.fromkeys(fitting))
    return []
