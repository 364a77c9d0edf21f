"""The row formats by name, and detection of a file's format.

A new format is a `RowFormat` in the registry, its name in `config.shared.FormatName`, and a sample in `datasets/samples/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic

from lmm_r1.data.formats.chats import CHATS
from lmm_r1.data.formats.problems import PROBLEMS
from lmm_r1.data.formats.row_format import ColumnNames, Fields, Record, RowFields, RowFormat, Unreadable
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file, load_user_function


@dataclass(frozen=True, kw_only=True)
class FormatSet(Generic[Fields]):
    """The formats of one kind of rows."""

    formats: tuple[RowFormat[Fields], ...]
    own: RowFormat[Fields]
    """The format of files that fit none, and of files whose columns the user named."""
    refused: tuple[frozenset[str], ...] = ()
    """Sets of columns by which a file also holds undesirable responses."""
    keys: tuple[str, ...] = ()
    """The flags that name columns, for the error about a file that fits no format; without them it is read as `own`."""

    def find(self, columns: Iterable[str], *, file: str, named: ColumnNames | None = None) -> RowFormat[Fields]:
        """Return the format of a file with these columns.

        Args:
            named: the columns that the user named; that of the answer indicates no format.

        Raises:
            UserError: several formats fit, one of another kind, or none.
        """
        names, named = set(columns), named or ColumnNames()
        choose = named.flag("format")
        for columns in self.refused:
            if columns <= names - {named.answer}:
                raise UserError(
                    f"{file}: by its columns {', '.join(sorted(columns))} it also holds undesirable responses; train on pairs "
                    f"with train_dpo, or leave these rows out and choose how to read the others with {choose}"
                )
        fitting = [one for one in self.formats if one.fits(names)]
        if not fitting and named.answer is not None and names & {named.answer, named.answer.partition(".")[0]}:
            fitting = [one for one in self.formats if one.fits(names | {"answer"})]
        if len(fitting) > 1:
            choices = " and ".join(f"{row_format.name} ({row_format.wants})" for row_format in fitting)
            raise UserError(f"{file}: its columns fit the row formats {choices}; choose one with {choose}")
        if not fitting and self.keys and names.isdisjoint(self.own.needs[0]):
            shapes = "; ".join(f"{row_format.name} ({row_format.wants})" for row_format in self.formats)
            raise UserError(
                f"{file}: its columns ({', '.join(sorted(names)) or 'none'}) are those of no known row format. Name the "
                f"columns with {', '.join(map(named.flag, self.keys))}, or rename them. The formats and their columns: {shapes}"
            )
        return fitting[0] if fitting else self.own

    def named(self, name: str, *, file: str, names: ColumnNames | None = None) -> RowFormat[Fields]:
        """Return the format of this name, or of `FILE.py:NAME`; raises UserError if this kind of rows does not come in it."""
        flag = (names or ColumnNames()).flag("format")
        if function_file(name):
            function = load_user_function(name, default="read_row", flag=flag)

            def each(record: Record) -> Record:
                columns, location, folder = record
                if isinstance(columns, Unreadable):
                    return record
                try:
                    made = function(columns)
                    if not isinstance(made, dict):
                        raise UserError(f"{flag} {name}: return a dict of columns, not {type(made).__name__}")
                except UserError as error:
                    made = Unreadable(UserError(f"{location}: {error}"))
                return made, location, folder

            return replace(self.own, name=name, each=each)
        for row_format in self.formats:
            if row_format.name == name:
                return row_format
        known = ", ".join(row_format.name for row_format in self.formats)
        raise UserError(f"{file}: {flag} {name} is for another kind of rows; the formats for this one are {known}")


FORMATS: dict[str, RowFormat[RowFields]] = {one.name: one for one in (*CHATS, *PROBLEMS)}
OWN = FORMATS["lmm_r1"]
"""The format of this project's own rows, and of files whose prompt column the user named."""
_KEYS = ("input_key", "label_key", "image_key")
_VERDICTS = tuple(map(frozenset, (("chosen", "rejected"), ("prompt", "completion", "label"), ("kto_tag",))))
PROMPT_ROWS = FormatSet(formats=tuple(FORMATS.values()), own=OWN, refused=_VERDICTS, keys=_KEYS)
"""Rows that RL samples from and SFT trains on."""
