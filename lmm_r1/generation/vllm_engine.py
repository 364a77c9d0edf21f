"""A checkpoint in vLLM, in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams

from lmm_r1.data.completion import Completion, FinishReason
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.generation.adapter_merge import merged_checkpoint
from lmm_r1.generation.codec import LimitedCodec, TextStream
from lmm_r1.generation.engine import EngineSettings, Outcome, SamplingSettings
from lmm_r1.generation.engine_arguments import engine_arguments
from lmm_r1.generation.sampling import sampling_params

# Responses that are under way together: enough to keep the engine busy, few enough that rows end nearly in order.
RESPONSES_AT_ONCE = 256


@dataclass(kw_only=True)
class _Request:
    index: int
    row: Row
    began: float = field(default_factory=time.perf_counter)


class VllmEngine:
    """Feeds rows to vLLM as earlier ones end, so that it is never idle between batches."""

    def __init__(self, path: str, settings: EngineSettings) -> None:
        self.codec = LimitedCodec(path, settings)
        with merged_checkpoint(path, settings) as folder:
            arguments = engine_arguments(
                folder,
                kit=self.codec.kit,
                config=self.codec.config,
                trust_remote_code=settings.trust_remote_code,
                dtype=settings.dtype,
                max_model_len=self.codec.max_len,
                max_images=settings.max_images,
                max_videos=settings.max_videos,
                tensor_parallel_size=settings.tensor_parallel_size,
                gpu_memory_utilization=settings.gpu_memory_utilization,
            )
            # Whoever asks for responses says how far they are.
            self.llm = LLM(**arguments, seed=settings.seed, use_tqdm_on_load=False)
        self.engine = self.llm.llm_engine
        self._requests = 0

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield how each (index, row) went, in the order in which they end."""
        parameters = self._parameters(sampling, streamed=False)
        at_once = max(2, RESPONSES_AT_ONCE // sampling.n_samples)
        source = iter(rows)
        running: dict[str, _Request] = {}
        try:
            while True:
                while len(running) < at_once and (item := next(source, None)) is not None:
                    request = _Request(index=item[0], row=item[1])
                    try:
                        running[self._submit(request.row, parameters)] = request
                    except UserError as error:
                        yield Outcome(index=request.index, row=request.row, reason=str(error))
                if not running:
                    return
                for output in self.engine.step():
                    if output.finished:
                        yield self._outcome(running.pop(output.request_id), output)
        finally:
            if running:
                self.engine.abort_request(list(running))

    def stream(
        self,
        row: Row,
        sampling: SamplingSettings,
        *,
        on_text: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> Completion:
        """Return one response, handing on its text as it grows; raises UserError for a row that cannot be taken."""
        text = TextStream(self.codec.tokenizer)
        token_ids: list[int] = []
        finish_reason: FinishReason = "aborted"
        name = self._submit(row, self._parameters(sampling, streamed=True))
        while self.engine.has_unfinished_requests():
            if should_stop():
                self.engine.abort_request([name])
            for output in self.engine.step():
                part = output.outputs[0]
                token_ids.extend(part.token_ids)
                finish_reason = part.finish_reason if part.finish_reason in ("stop", "length") else finish_reason
                ended = finish_reason == "stop"
                if piece := text.add(part.token_ids[:-1] if ended else part.token_ids):
                    on_text(piece)
        if piece := text.rest():
            on_text(piece)
        return self.codec.completion(token_ids, finish_reason)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.engine.engine_core.shutdown()
        del self.engine, self.llm
        gc.collect()

    def _submit(self, row: Row, parameters: SamplingParams) -> str:
        """Return the name of the new request."""
        prompt = self.codec.request(self.codec.encode(row))
        self._requests += 1
        name = str(self._requests)
        self.engine.add_request(name, prompt, parameters)
        return name

    def _parameters(self, sampling: SamplingSettings, *, streamed: bool) -> SamplingParams:
        return sampling_params(
            n_samples=sampling.n_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            banned_token_ids=self.codec.banned_token_ids,
            end_token_id=self.codec.tokenizer.eos_token_id,
            streamed=streamed,
        )

    def _outcome(self, request: _Request, output: Any) -> Outcome:
        broken = [part.finish_reason for part in output.outputs if part.finish_reason not in ("stop", "length")]
        if broken:
            reason = f"{request.row.location}: vLLM broke a response off ({broken[0]})"
            return Outcome(index=request.index, row=request.row, reason=reason)
        return Outcome(
            index=request.index,
            row=request.row,
            completions=tuple(self.codec.completion(part.token_ids, part.finish_reason) for part in output.outputs),
            seconds=time.perf_counter() - request.began,
        )
