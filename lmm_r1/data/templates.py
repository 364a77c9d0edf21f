"""Jinja templates of strangers, rendered within bounds of time and memory."""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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
        self._spent, self._file = _Spent(), "the template"
        self.filters = _BoundedFilters(self)
        self.concat = self.joined  # type: ignore[method-assign, assignment]
        self.template_class = _BoundedTemplate

    def begin(self) -> None:
        self._spent.until, self._spent.size = time.thread_time() + SECONDS, 0

    def spend(self, size: float) -> None:
        self._spent.size += size
        if self._spent.size > MOST or time.thread_time() > self._spent.until:
            raise jinja2.TemplateRuntimeError(
                f"{self._file} takes more than {SECONDS:g} s, or makes more than {MOST:,} characters, for one text"
            )

    def bounded(self, name: str, values: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what an operation makes of values, if that is within the bounds."""
        sizes = sorted((size for value in values for size in _sizes(value)), reverse=True)
        expected = math.prod(sizes[:2]) if name in _MULTIPLY else max(sizes, default=0)
        wide = name in ("%", "format", "format_map") and any(
            _WIDTH.search(x) for x in values[:1] if isinstance(x, str)
        )
        self.spend(math.inf if wide or expected > MOST else 0)
        made = make()
        self.spend(_length(made))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            self.spend(bits)
            return super().call_binop(context, operator, left, right)
        make = functools.partial(super().call_binop, context, operator, left, right)
        return self.bounded(operator, (left, right), make)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        own, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        make = functools.partial(super().call, __context, __obj, *args, **kwargs)
        return __self.bounded(name, (own, *args, *kwargs.values()), make)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            wrapper.__self__ = value.__self__  # type: ignore[attr-defined]
        return wrapper

    def joined(self, pieces: Iterable[Any]) -> str:
        """Return texts as one."""
        texts = []
        for piece in pieces:
            texts.append(str(piece))
            self.spend(len(texts[-1]))
        return "".join(texts)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop."""
        for item in items:
            self.spend(1)
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        self.begin()
        self._file = FILES.get(source, self._file)
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "each", [], [], None, None, lineno=loop.lineno)
        return tree.set_environment(self)  # type: ignore[return-value]

    def _generate(self, *args: Any, **settings: Any) -> str:
        # The code joins texts by a function that it imports.
        code = super()._generate(*args, **settings)
        return code.replace("\nname = ", "\nstr_join = markup_join = environment.concat\nname = ", 1)


class _BoundedTemplate(jinja2.Template):
    environment: BoundedEnvironment

    def render(self, *args: Any, **values: Any) -> str:
        self.environment.begin()
        try:
            return super().render(*args, **values)
        except _ERRORS as error:
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


class _BoundedFilters(dict[str, Any]):
    """The filters of an environment, each bounded."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment
        super().__init__(each=environment.each)
        for name, make in environment.filters.items():
            self[name] = make

    def __setitem__(self, name: str, make: Callable[..., Any]) -> None:
        @functools.wraps(make)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            return self._environment.bounded(name, values, functools.partial(make, *args, **kwargs))

        super().__setitem__(name, bounded)


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
