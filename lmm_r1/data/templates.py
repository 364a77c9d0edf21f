"""Jinja templates of strangers, rendered within bounds of time and memory."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0
"""Of the thread's processor time, for one text."""
MOST = 2**25
"""The most characters and items that all operations for one text may make together."""
FILES: dict[str, str] = {}
"""Where templates come from, for messages."""
# What may make the product of its two largest values, instead of about the largest.
_MULTIPLY = ("*", "%", "replace", "join", "format", "format_map", "indent", "expandtabs")
_WIDTH = re.compile(r"\d{7,}")
_SHORT = 64
_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, MemoryError, RecursionError)


class _Spent(threading.local):
    until = math.inf
    size = 0.0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Raises TemplateRuntimeError for a template that takes more than `SECONDS` or makes more than `MOST`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.spent, self._file = _Spent(), "the template"
        self.filters = _BoundedFilters(self.bounded)
        for name, make in {**jinja2.filters.FILTERS, "each": self.each}.items():
            self.filters[name] = make
        self.concat = self.joined  # type: ignore[method-assign, assignment]
        self.template_class = _BoundedTemplate

    def spend(self, size: float) -> None:
        self.spent.size += size
        if self.spent.size > MOST or time.thread_time() > self.spent.until:
            raise jinja2.TemplateRuntimeError(
                f"{self._file} takes more than {SECONDS:g} s, or makes more than {MOST:,} characters, for one text"
            )

    def bounded(self, name: str, values: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what an operation makes of values, if that is within the bounds."""
        sizes = sorted((size for value in values for size in _sizes(value)), reverse=True)
        expected = math.prod(sizes[:2]) if name in _MULTIPLY else max(sizes, default=0)
        wide = name in ("%", "format", "format_map") and _WIDTH.search(str(values[0]))
        self.spend(math.inf if wide or expected > MOST else 0)
        made = make()
        self.spend(_length(made))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        make = partial(super().call_binop, context, operator, left, right)
        if not (isinstance(left, int) and isinstance(right, int)):
            return self.bounded(operator, (left, right), make)
        self.spend(left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length())
        return make()

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        values = (getattr(__obj, "__self__", None), *args, *kwargs.values())
        make = partial(super().call, __context, __obj, *args, **kwargs)
        return __self.bounded(getattr(__obj, "__name__", ""), values, make)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (wrapper := super().wrap_str_format(value)) is not None:
            wrapper.__self__ = value.__self__  # type: ignore[attr-defined]
        return wrapper

    def joined(self, pieces: Iterable[Any]) -> str:
        """Return texts as one."""
        texts = []
        for text in map(str, pieces):
            self.spend(len(text))
            texts.append(text)
        return "".join(texts)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop."""
        for item in items:
            self.spend(1)
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        self._file = FILES.get(source, self._file)
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "each", [], [], None, None, lineno=loop.lineno)
        return tree.set_environment(self)  # type: ignore[return-value]

    def _generate(self, *args: Any, **settings: Any) -> str:
        # The code joins texts by functions that it imports.
        own = "\nstr_join = markup_join = environment.concat\nname = "
        return super()._generate(*args, **settings).replace("\nname = ", own, 1)


class _BoundedTemplate(jinja2.Template):
    environment: BoundedEnvironment

    def render(self, *args: Any, **values: Any) -> str:
        self.environment.spent.until, self.environment.spent.size = time.thread_time() + SECONDS, 0
        try:
            return super().render(*args, **values)
        except _ERRORS as error:
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


class _BoundedFilters(dict[str, Callable[..., Any]]):
    """The filters of an environment, each bounded."""

    def __init__(self, bounded: Callable[..., Any]) -> None:
        self._bounded = bounded

    def __setitem__(self, name: str, make: Callable[..., Any]) -> None:
        def filtered(*args: Any, **kwargs: Any) -> Any:
            return self._bounded(name, (*args, *kwargs.values()), partial(make, *args, **kwargs))

        super().__setitem__(name, wraps(make)(filtered))


def _sizes(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield abs(value)
    elif isinstance(value, str):
        yield len(value) if len(value) > _SHORT else 1
    elif isinstance(value, list | tuple):
        yield sum(map(_length, value)) + len(value)
        yield from (abs(item) for item in value if isinstance(item, int))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | set) else 0
