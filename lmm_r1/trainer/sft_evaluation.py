"""Evaluation during a supervised run: the loss on held-out rows, and how many of them are answered rightly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig

from lmm_r1.checkpoints.folder import best_metric
from lmm_r1.config import SFTConfig, checkpoint_folder
from lmm_r1.data.messages import Row, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.generation.codec import LimitedCodec
from lmm_r1.generation.engine import EngineSettings, SamplingSettings
from lmm_r1.generation.transformers_engine import TransformersEngine
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.scoring.response_scores import JUDGE_SECONDS, Judge
from lmm_r1.trainer.sft_rows import RowEncoder
from lmm_r1.trainer.sft_samples import SFTBatch, SFTSample, collate
from lmm_r1.trainer.strategy import KitStrategy

LOSS = "eval_loss"


class Evaluation:
    """Evaluates the model on all rows, of which each group of ranks with the same samples takes its share."""

    def __init__(
        self,
        config: SFTConfig,
        strategy: KitStrategy,
        *,
        rows: Sequence[Row],
        encode: RowEncoder,
        filler: SFTSample,
        log_probs: Callable[[SFTBatch], torch.Tensor],
        answers: Answers | None = None,
    ) -> None:
        """Args:
        filler: a sample without loss tokens, for a rank that has run out of rows: passes are made by all ranks at once.
        log_probs: gives those of a batch's loss tokens, 0 elsewhere, (B, T - 1).
        """
        self.config = config
        self.strategy = strategy
        self.rows = rows
        self.encode = encode
        self.filler = filler
        self.log_probs = log_probs
        self.answers = answers
        self.sources = sorted({row.datasource for row in rows})

    def is_due(self, step: int, *, per_epoch: int, steps: int) -> bool:
        """Say whether the model is evaluated after a step: every `--eval.steps`, else after each epoch and the last step."""
        every = self.config.eval.steps
        return step % every == 0 if every > 0 else step % per_epoch == 0 or step == steps

    def run(self, model: Any) -> dict[str, float]:
        """Return the metrics by name, the same on every rank; the model is in training mode afterwards.

        Raises UserError where no row fits into `--data.max_len`.
        """
        model.eval()
        try:
            metrics = self._losses()
            if self.answers is not None:
                metrics |= self.answers.accuracies(self._own_rows(), self.sources, group=self._group)
        finally:
            model.train()
        return metrics

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.strategy.ds_device_mesh["dp"].get_group()

    def _own_rows(self) -> list[Row]:
        share = self.strategy.ds_device_mesh["dp"]
        return list(self.rows[share.get_local_rank() :: share.size()])

    @torch.no_grad()
    def _losses(self) -> dict[str, float]:
        """Return the mean loss per loss token of all ranks' rows, and of each data source where there are several."""
        size = self.config.train.micro_batch_size
        own = self._own_rows()
        passes = math.ceil(len(self.rows) / self.strategy.ds_device_mesh["dp"].size() / size)
        # By data source: the loss of all loss tokens, their number, and the rows that are too long.
        sums = torch.zeros(len(self.sources), 3, dtype=torch.double, device=torch.cuda.current_device())
        pad_token_id = self.encode.kit.tokenizer_of(self.encode.processor).pad_token_id
        for number in range(passes):
            part = own[number * size : (number + 1) * size]
            encoded = [(self.sources.index(row.datasource), self.encode(row)) for row in part]
            kept = [(source, sample) for source, sample in encoded if sample is not None]
            batch = collate([sample for _, sample in kept] or [self.filler], pad_token_id=pad_token_id)
            losses = -self.log_probs(batch).double().sum(-1)
            for place, (source, _) in enumerate(kept):
                sums[source, 0] += losses[place]
                sums[source, 1] += int(batch.loss_mask[place].sum())
            for source, item in encoded:
                sums[source, 2] += item is None
        dist.all_reduce(sums, group=self._group)
        total, tokens, overlong = sums.sum(0).tolist()
        if not tokens:
            raise UserError(
                f"every row of --eval.dataset {self.config.eval.dataset} is longer than --data.max_len "
                f"{self.config.data.max_len}, or has no loss token; raise it"
            )
        metrics = {LOSS: total / tokens, "eval_overlong_rows": overlong}
        if len(self.sources) > 1:
            for name, (of_source, of_tokens, _) in zip(self.sources, sums.tolist(), strict=True):
                if of_tokens:
                    metrics[f"eval_{name}_loss"] = of_source / of_tokens
        return metrics


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


class BestMetric:
    """The best value so far of what `--ckpt.best_metric_key` names, in the folder of checkpoints too."""

    def __init__(self, config: SFTConfig) -> None:
        self.key = config.ckpt.best_metric_key or LOSS
        self.folder = checkpoint_folder(config)
        self.best: float | None = None

    def resume(self) -> None:
        """Take up the value of the best checkpoint that is there; every rank must call it."""
        found: list[float | None] = [best_metric(self.folder, key=self.key) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        self.best = found[0]

    def improves(self, metrics: dict[str, float]) -> bool:
        """Note an evaluation and say whether it is the best; raises UserError where it lacks the metric.

        Of a loss the least is best, of all others the largest.
        """
        if self.key == "none":
            return False
        if self.key not in metrics:
            raise UserError(
                f"--ckpt.best_metric_key {self.key}: the evaluation has {', '.join(metrics)}; name one of them"
            )
        value = metrics[self.key]
        sign = -1 if self.key.endswith("_loss") else 1
        if not math.isfinite(value) or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        return True
