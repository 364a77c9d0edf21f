"""Items that wait, in one line per request: requests take turns, so that a large one does not hold up the others."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

FIRST_SERVED = 3
"""So many items in a row may be the first of their requests; then one of a request that has begun has its turn."""


class Line(Generic[T]):
    """What waits of one request."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = deque(items)


class FairQueue(Generic[T]):
    """Gives out items of requests by turns, and the first one of a new request soonest.

    So a request of one item waits for one item, and not for the large ones that came before it.
    """

    def __init__(self) -> None:
        self._again: deque[T] = deque()
        self._new: deque[Line[T]] = deque()
        self._begun: deque[Line[T]] = deque()
        self._length = 0
        self._firsts = 0

    def __len__(self) -> int:
        """How many items wait."""
        return self._length

    def add(self, items: Iterable[T]) -> Line[T]:
        """Queue the items of one request, at least one."""
        line = Line(items)
        assert line.items, "a line without items would never be taken up"
        self._new.append(line)
        self._length += len(line.items)
        return line

    def put_back(self, item: T) -> None:
        """Queue an item that was given out: it is the next."""
        self._again.append(item)
        self._length += 1

    def pop(self) -> T:
        """Return the next item; raises IndexError where none waits."""
        self._length -= bool(self._length)
        if self._again:
            return self._again.popleft()
        is_first = bool(self._new) and (not self._begun or self._firsts < FIRST_SERVED)
        self._firsts = self._firsts + 1 if is_first else 0
        line = (self._new if is_first else self._begun).popleft()
        item = line.items.popleft()
        if line.items:
            self._begun.append(line)
        return item

    def drop(self, line: Line[T]) -> None:
        """Take the rest of a request out."""
        if not line.items:
            return
        (self._new if line in self._new else self._begun).remove(line)
        self._length -= len(line.items)
        line.items.clear()

    def clear(self) -> Iterator[T]:
        """Take everything out, and yield it."""
        while self:
            yield self.pop()
