"""Which updates an engine's weights have had, and which of them the tokens of its requests came of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmm_r1.generation.request import Request


@dataclass(kw_only=True)
class EngineWeights:
    """The weights of one engine: their version, and the requests that they generate for."""

    version: int = 0
    """How many updates of the run they have had."""
    _under_way: dict[str, Request] = field(default_factory=dict)

    @contextmanager
    def generating(self, request_id: str, request: Request) -> Iterator[None]:
        """Tell a request, while the block runs, of each update that comes in the middle of its responses."""
        self._under_way[request_id] = request
        try:
            yield
        finally:
            del self._under_way[request_id]

    def replaced(self, counts: Mapping[str, Mapping[int, int]]) -> None:
        """Count an update.

        Args:
            counts: how many tokens the unfinished responses had before it, by request and place; a request that the engine
                has not begun is not among them.
        """
        self.version += 1
        for request_id, request in self._under_way.items():
            request.note_update(counts.get(request_id, {}), version=self.version)


def tokens_under_way(engine: Any) -> dict[str, dict[int, int]]:
    """Return how many tokens each unfinished response has that a vLLM engine generates, by request and place.

    Of an engine that is paused: of one with a process of its own, what has come from there by then.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        counts.setdefault(state.external_req_id, {})[state.request_index] = state.detokenizer.num_output_tokens()
    return counts
