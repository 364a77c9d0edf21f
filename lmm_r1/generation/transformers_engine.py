"""A checkpoint in plain transformers, for architectures without vLLM support and for comparisons."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from lmm_r1 import cpu
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion, FinishReason
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import EngineSettings, Outcome, SamplingSettings
from lmm_r1.generation.request import LimitedCodec, TextStream
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.lmm_kits.checkpoint import check_unquantized, torch_dtype
from lmm_r1.models.rope_scaling import keep_cache, settle_rope


class TransformersEngine:
    """Generates batch by batch with the kit's model and its key-value cache."""

    def __init__(self, path: str, settings: EngineSettings) -> None:
        self.codec = LimitedCodec(path, settings)
        self.batch_rows = settings.batch_rows
        self.device = "cuda" if cpu.has_cuda() else "cpu"
        self.model = _load(path, settings, codec=self.codec).to(self.device).eval()
        self.stop_token_ids = self.codec.stop_token_ids(self.model.generation_config)
        # Ignore the checkpoint's own settings, such as a repetition penalty.
        self.model.generation_config = GenerationConfig()
        torch.manual_seed(settings.seed)

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield the outcome of each (index, row), batch by batch."""
        source = iter(rows)
        while batch := list(itertools.islice(source, self.batch_rows)):
            began = time.perf_counter()
            prompts: list[EncodedPrompt] = []
            taken: list[tuple[int, Row]] = []
            for index, row in batch:
                try:
                    prompts.append(self.codec.encode(row))
                    taken.append((index, row))
                except UserError as error:
                    yield Outcome(index=index, row=row, reason=str(error))
            if not taken:
                continue
            samples = self._generate(prompts, sampling)
            seconds = time.perf_counter() - began
            for (index, row), prompt, completions in zip(taken, prompts, samples, strict=True):
                begun = self.codec.begun_with(row, prompt.engine_token_ids)
                whole = tuple(
                    replace(one, text=begun + one.text, image_scales=prompt.image_scales) for one in completions
                )
                yield Outcome(index=index, row=row, completions=whole, seconds=seconds)

    def stream(
        self, row: Row, sampling: SamplingSettings, *, on_text: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Completion:
        """Return one response, reporting its text as it grows; raises UserError for a row that the engine refuses."""
        prompt = self.codec.encode(row)
        text = TextStream(self.codec.tokenizer)

        def grown(token: int) -> None:
            if token not in self.stop_token_ids and (piece := text.add([token])):
                on_text(piece)

        [[completion]] = self._generate([prompt], sampling, on_token=grown, should_stop=should_stop)
        if piece := text.rest():
            on_text(piece)
        return completion

    def close(self) -> None:
        """Free the model's memory."""
        del self.model
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _generate(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingSettings,
        *,
        on_token: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[list[Completion]]:
        """Return `n_samples` completions for each prompt."""
        rows = [prompt for prompt in prompts for _ in range(sampling.n_samples)]
        rooms = [self.codec.room(prompt, max_new_tokens=sampling.max_new_tokens) for prompt in rows]
        sequences, mask = left_padded([prompt.token_ids for prompt in rows])
        media = [prompt.media for prompt in rows if prompt.media is not None]
        inputs = self.codec.kit.forward_inputs(
            self.model.config, sequences, mask, self.codec.kit.merge_media(media) if media else None
        )
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        output = self.model.generate(
            input_ids=sequences.to(self.device),
            attention_mask=mask.to(self.device),
            **{name: value.to(self.device) for name, value in inputs.items()},
            generation_config=self._generation_config(sampling, max_new_tokens=max(rooms)),
            stopping_criteria=StoppingCriteriaList([_Watch(should_stop, on_token)]),
        )
        new_tokens = output[:, sequences.shape[1] :].tolist()
        completions = [self._completion(ids, room=room) for ids, room in zip(new_tokens, rooms, strict=True)]
        size = sampling.n_samples
        return [completions[start : start + size] for start in range(0, len(completions), size)]

    def _generation_config(self, sampling: SamplingSettings, *, max_new_tokens: int) -> GenerationConfig:
        # In transformers, 0 means all.
        kept = {"top_p": sampling.top_p, "top_k": max(sampling.top_k, 0)}
        chance = {"do_sample": True, "temperature": sampling.temperature, **kept}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            use_cache=True,
            eos_token_id=self.stop_token_ids,
            pad_token_id=self.codec.tokenizer.pad_token_id,
            suppress_tokens=list(self.codec.banned_token_ids) or None,
            **(chance if sampling.temperature > 0 else {"do_sample": False}),
        )

    def _completion(self, token_ids: Sequence[int], *, room: int) -> Completion:
        """Return the response in a row of the output, which is padded at the end."""
        ids = list(token_ids[:room])
        for place, token in enumerate(ids):
            if token in self.stop_token_ids:
                return self.codec.completion(ids[: place + 1], "stop")
        reason: FinishReason = "length" if len(ids) == room else "aborted"
        return self.codec.completion(ids, reason)


class _Watch(StoppingCriteria):
    """Called after each token: passes on that of a single response, and says whether to stop."""

    def __init__(self, should_stop: Callable[[], bool], on_token: Callable[[int], None] | None) -> None:
        self._should_stop = should_stop
        self._on_token = on_token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self._on_token is not None:
            self._on_token(int(input_ids[0, -1]))
        return torch.full((len(input_ids),), self._should_stop(), device=input_ids.device)


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences and attention mask, (B, T) each, of prompts that end in the last column."""
    width = max(map(len, rows))
    sequences, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for place, ids in enumerate(rows):
        sequences[place, width - len(ids) :] = torch.tensor(ids)
        mask[place, width - len(ids) :] = 1
    return sequences, mask


def _load(path: str, settings: EngineSettings, *, codec: LimitedCodec) -> Any:
    dtype = torch_dtype(settings.dtype, config=codec.config)
    if settings.adapter is not None:
        from lmm_r1.checkpoints.merging import load_with_adapter, merge_adapter

        model = load_with_adapter(path, settings.adapter, dtype=dtype, trust_remote_code=settings.trust_remote_code)
        merge_adapter(model)
    else:
        check_unquantized(codec.config, path=path)
        model = codec.kit.load_model(
            path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=settings.trust_remote_code
        )
    settle_rope(model, max_len=codec.max_len)
    keep_cache(model)
    return model
