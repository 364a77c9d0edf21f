"""Responses of a checkpoint to a file of rows, through vLLM in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from lmm_r1.data.messages import Row
from lmm_r1.data.row_encoding import encode_row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import kit_of
from lmm_r1.models.banned_tokens import BAN_BIAS

# Rows that are encoded and handed to vLLM at a time: enough to keep it busy, few enough to show progress.
CHUNK_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    temperature: float
    top_p: float
    max_new_tokens: int
    n_samples: int
    seed: int
    dtype: str
    max_model_len: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class Response:
    row: Row
    text: str
    num_tokens: int
    finish_reason: str
    """`stop`, `length` (cut off at the longest response) or another of vLLM's."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class CheckpointEngine:
    """A vLLM engine on one checkpoint; `close` frees its memory for the next."""

    def __init__(self, path: str, *, settings: GenerationSettings, max_images: int, max_videos: int) -> None:
        self.settings = settings
        self.kit = kit_of(path, trust_remote_code=settings.trust_remote_code)
        self.processor = self.kit.load_processor(path, trust_remote_code=settings.trust_remote_code)
        self.tokenizer = self.kit.tokenizer_of(self.processor)
        config = self.kit.load_config(path, trust_remote_code=settings.trust_remote_code)
        self.banned = self.kit.banned_token_ids(config, self.tokenizer)
        self.llm = LLM(
            path,
            dtype=settings.dtype,
            seed=settings.seed,
            max_model_len=settings.max_model_len,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            trust_remote_code=settings.trust_remote_code,
            enforce_eager=True,
            # A line per checkpoint is printed by whoever asks for responses.
            use_tqdm_on_load=False,
            **self.kit.engine_arguments(config, max_images=max_images, max_videos=max_videos),
        )

    def respond(self, rows: Sequence[Row], *, on_progress: Callable[[int], None]) -> list[Response]:
        """Return `n_samples` responses per row, in row order; `on_progress` is told how many rows are done."""
        settings = self.settings
        sampling = SamplingParams(
            n=settings.n_samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_new_tokens,
            # No seed per request: vLLM's CPU backend fails on it. The engine's own seed makes runs repeatable.
            stop_token_ids=[self.tokenizer.eos_token_id],
            skip_special_tokens=False,
            logit_bias=dict.fromkeys(self.banned, BAN_BIAS),
        )
        responses: list[Response] = []
        for start in range(0, len(rows), CHUNK_ROWS):
            chunk = rows[start : start + CHUNK_ROWS]
            outputs = self.llm.generate([self._prompt(row) for row in chunk], sampling, use_tqdm=False)
            for row, output in zip(chunk, outputs, strict=True):
                responses.extend(self._response(row, sample) for sample in output.outputs)
            on_progress(start + len(chunk))
        return responses

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def _prompt(self, row: Row) -> TokensPrompt:
        encoded = encode_row(row, kit=self.kit, processor=self.processor, add_generation_prompt=True)
        if len(encoded.token_ids) >= self.settings.max_model_len:
            raise UserError(
                f"{row.location}: the prompt takes {len(encoded.token_ids)} tokens, which leaves no room for a response "
                f"in --max_model_len {self.settings.max_model_len}; raise it"
            )
        prompt = TokensPrompt(prompt_token_ids=encoded.engine_token_ids)
        media = self.kit.engine_media(encoded)
        if media:
            prompt["multi_modal_data"] = media
        return prompt

    def _response(self, row: Row, sample: Any) -> Response:
        ids = list(sample.token_ids)
        if sample.finish_reason == "stop":
            ids = ids[:-1]
        return Response(
            row=row,
            text=self.tokenizer.decode(ids, skip_special_tokens=False),
            num_tokens=len(sample.token_ids),
            finish_reason=str(sample.finish_reason),
        )
