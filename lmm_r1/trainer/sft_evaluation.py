"""Evaluation during a supervised run: the loss on held-out rows, and how many of them are answered rightly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from lmm_r1.config import SFTConfig
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.generation.codec import LimitedCodec
from lmm_r1.generation.engine import EngineSettings, SamplingSettings
from lmm_r1.generation.transformers_engine import TransformersEngine
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.scoring.response_scores import JUDGE_SECONDS, Judge
from lmm_r1.trainer.held_out import BestMetric as BestMetric
from lmm_r1.trainer.held_out import HeldOut
from lmm_r1.trainer.sft_rows import RowEncoder
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, collate
from lmm_r1.trainer.strategy import KitStrategy
from lmm_r1.trainer.supervised import TokenLosses


class Evaluation(HeldOut[Row, SFTSample]):
    """The mean loss per loss token of all ranks' rows, and of each data source where there are several."""

    def __init__(
        self,
        config: SFTConfig,
        strategy: KitStrategy,
        *,
        rows: Sequence[Row],
        encode: RowEncoder,
        filler: SFTSample,
        losses: Callable[[SFTBatch], TokenLosses],
        answers: Answers | None = None,
    ) -> None:
        """Args:
        filler: a sample without loss tokens.
        losses: gives those of a batch's tokens.
        """
        super().__init__(
            config, strategy, rows=rows, source_of=lambda row: row.datasource, encode=encode, filler=filler
        )
        self.pad_token_id = encode.kit.tokenizer_of(encode.processor).pad_token_id
        self.losses = losses
        # Of what is measured beside the loss; known after the first pass.
        self.parts: tuple[str, ...] = ()
        self.answers = answers

    def _all_metrics(self) -> dict[str, float]:
        metrics = super()._all_metrics()
        if self.answers is not None:
            metrics |= self.answers.accuracies(self._own_rows(), self.sources, group=self._group)
        return metrics

    def _measured(self, samples: Sequence[SFTSample]) -> torch.Tensor:
        batch = collate(samples, pad_token_id=self.pad_token_id)
        found = self.losses(batch)
        self.parts = tuple(found.parts)
        sums = [values.double().sum(-1) for values in (found.loss, *found.parts.values())]
        return torch.stack([*sums, batch.loss_mask.sum(-1).to(sums[0])], dim=-1)

    def _metrics(self, sums: torch.Tensor, *, source: str | None) -> dict[str, float]:
        *totals, tokens = sums.tolist()
        of_source = "eval_" if source is None else f"eval_{source}_"
        names = (f"{of_source}{name}" for name in ("loss", *self.parts))
        return {name: total / tokens for name, total in zip(names, totals, strict=True)} if tokens else {}


class Answers:
    """Greedy answers of the model that is trained, judged by a verifier; each rank generates and judges its own."""

    def __init__(self, config: SFTConfig, model: Any, *, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
        """Args: model: as DeepSpeed has it."""
        assert config.eval.verifier is not None, "made where one is asked for"
        self.verifier = config.eval.verifier
        self.sampling = SamplingSettings(
            n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=config.eval.max_new_tokens
        )
        settings = EngineSettings(
            adapter=None,
            dtype="auto",
            max_model_len=config.data.max_len,
            max_images=max(len(images_of(row.messages)) for row in rows),
            max_videos=max(len(videos_of(row.messages)) for row in rows),
            batch_rows=config.train.micro_batch_size,
            tensor_parallel_size=1,
            gpu_memory_utilization=1.0,
            enforce_eager=True,
            seed=config.train.seed,
            trust_remote_code=config.train.trust_remote_code,
        )
        codec = LimitedCodec(checkpoint.path, settings, checkpoint=checkpoint)
        self.engine = TransformersEngine.around(bare(model), codec=codec, batch_rows=settings.batch_rows)

    def accuracies(self, rows: Sequence[Row], sources: Sequence[str], *, group: dist.ProcessGroup) -> dict[str, float]:
        """Return pass@1 by data source over the rows of all ranks; rows too long for an answer are left out."""
        # By data source: right answers, and all of them.
        sums = torch.zeros(len(sources), 2, dtype=torch.double, device=torch.cuda.current_device())
        prompts = {index: prompt_of(row) for index, row in enumerate(rows)}
        with _own_settings(self.engine.model):
            outcomes = list(self.engine.respond(prompts.items(), self.sampling)) if prompts else []
        with Judge(self.verifier, workers=1, item_timeout_seconds=JUDGE_SECONDS) as judge:
            for outcome in outcomes:
                if outcome.reason is None:
                    row = rows[outcome.index]
                    [score] = judge.score(row, outcome.completions)
                    sums[sources.index(row.datasource)] += torch.tensor([score.score, 1.0]).to(sums)
        dist.all_reduce(sums, group=group)
        return {
            f"eval_{source}_pass1": right / count
            for source, (right, count) in zip(sources, sums.tolist(), strict=True)
            if count
        }


def prompt_of(row: Row) -> Row:
    """Return a row without the assistant turn at its end."""
    ends_answered = row.messages[-1].role == "assistant"
    return replace(row, messages=row.messages[:-1]) if ends_answered else row


@contextmanager
def _own_settings(model: Any) -> Iterator[None]:
    """Generate without what the checkpoint asks for (a repetition penalty, say), which is saved with the model."""
    of_checkpoint, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = of_checkpoint
