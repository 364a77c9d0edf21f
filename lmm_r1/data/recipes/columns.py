"""What a record says under the names of a recipe: columns, choices, the answer, and whether the row counts."""

from __future__ import annotations

import ast
import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lmm_r1.data.recipes.recipe import Condition, Recipe
from lmm_r1.errors import UserError
from remote_rm.answers.extraction import last_boxed

LETTERS = "ABCDEFGHIJ"
"""As many as the choice verifier knows."""
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class RecordView:
    """One record, read as a recipe says; every error opens with the record's place."""

    def __init__(self, columns: Mapping[str, Any], *, recipe: Recipe, location: str) -> None:
        self.columns = columns
        self.recipe = recipe
        self.location = location

    def fail(self, sentence: str) -> UserError:
        """Return the error; it is for the caller to raise."""
        return UserError(f"{self.location}: {sentence}")

    def value(self, name: str) -> Any:
        """The value of a column, None where there is none."""
        value: Any = self.columns
        # A column's own name may have dots in it; a path is looked for only where the recipe gives one.
        path = self.recipe.columns.get(name)
        if path is None or path in self.columns:
            value = self.columns.get(path or name)
        else:
            for step in path.split("."):
                value = _inside(value, step)
        return None if _is_empty(value) else value

    def first(self, names: Sequence[str]) -> Any:
        """The value of the first of these columns that the record has; raises UserError where it has none of them."""
        for name in names:
            value = self.value(name)
            if value is not None:
                return value
        wanted = " or ".join(f'"{self.recipe.columns.get(name, name)}"' for name in names)
        raise self.fail(f"no column {wanted}, or it is empty (found: {', '.join(self.columns) or 'nothing'})")

    def failed_filter(self) -> str | None:
        """The column of the first condition that the record does not meet; None where the row counts."""
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
        # CSV files hold text alone.
        return value in (map(str, known) if isinstance(value, str) else known)

    def choices(self) -> list[str]:
        """The choices in the order of their letters; empty where the question is an open one."""
        published = self._published_choices()
        return _shuffled(published) if self.recipe.choices_shuffled else published

    def _published_choices(self) -> list[str]:
        asked = self.recipe.choices
        if asked is None:
            return []
        if isinstance(asked, tuple):
            value = self._without_end([self.value(name) for name in asked])
        else:
            value = self.value(asked) if self.recipe.choices_optional else self.first((asked,))
            value = self._without_end(_listed(value)) if value is not None else []
        if not value and self.recipe.choices_optional:
            return []
        choices = [self._bare(str(choice)) for choice in value] if isinstance(value, list) else []
        if not 2 <= len(choices) <= len(LETTERS):
            shown = asked if isinstance(asked, str) else " ".join(asked)
            raise self.fail(f"{shown} must be a list of 2 to {len(LETTERS)} choices, found {value!r}")
        return choices

    def _without_end(self, choices: Any) -> Any:
        """The choices without empty ones behind the last; raises UserError for a gap: letters would stand for others."""
        if not isinstance(choices, list):
            return choices
        held = [place for place, choice in enumerate(choices) if not _is_empty(choice)]
        if held != list(range(len(held))):
            raise self.fail(f"a choice is empty, and others follow it: {choices!r}")
        return choices[: len(held)]

    def _bare(self, choice: str) -> str:
        prefix = self.recipe.choice_prefix
        return (re.sub(f"^(?:{prefix})", "", choice.strip()) if prefix else choice).strip()

    def label(self, choices: Sequence[str]) -> str:
        """The answer, or its choice's letter."""
        answer = self._answer_text()
        if not choices:
            return answer
        # Letters and indices count the choices as they were published.
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
                f"the answer {answer[:80]!r} is not the {self.recipe.answer_names} of one of the {len(choices)} choices"
            )
        return named[answer]

    def _answer_text(self) -> str:
        recipe = self.recipe
        value = self.first(recipe.answer)
        if recipe.answer_list is not None:
            value = self._of_list(_listed(value))
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

    def _of_list(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        entries = [str(entry).strip() for entry in value if not _is_empty(entry)]
        if not entries:
            raise self.fail("the list of answers is empty")
        if self.recipe.answer_list == "most_common":
            return Counter(entries).most_common(1)[0][0]
        return entries[0] if self.recipe.answer_list == "first" else ", ".join(entries)


def _inside(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(step)
    if (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and step.isdigit()
        and int(step) < len(value)
    ):
        return value[int(step)]
    return None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value) or (isinstance(value, float) and math.isnan(value))


def _listed(value: Any) -> Any:
    """A list as it is, or as the text that writers of Parquet files make of it: `"['a', 'b']"` → `["a", "b"]`."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
        return parsed if isinstance(parsed, list) else value
    return value


def _shuffled(choices: list[str]) -> list[str]:
    """The choices in an order that only they themselves decide."""
    seed = hashlib.sha256("\0".join(choices).encode()).hexdigest()
    order = sorted(choices)
    random.Random(seed).shuffle(order)
    return order
