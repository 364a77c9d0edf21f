"""Supervised fine-tuning: its rows, its evaluation with generated answers, and the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import GenerationConfig
from typing_extensions import Self

from lmm_r1 import cpu
from lmm_r1.config import SFTConfig
from lmm_r1.config.run_rows import read_conversations
from lmm_r1.data.messages import Row, demonstration, images_of, videos_of
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.generation.codec import LimitedCodec
from lmm_r1.generation.engine import EngineDtype, EngineSettings, SamplingSettings
from lmm_r1.generation.transformers_engine import TransformersEngine
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.lmm_kits.checkpoint import ImageFitting
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.scoring.sources import make_judge
from lmm_r1.supervised import RowCheck, SampleEncoder, kept
from lmm_r1.supervised.held_out import LOSS, HeldOut
from lmm_r1.supervised.loop import SupervisedRun, TokenTerms
from lmm_r1.supervised.models import SupervisedSession, prepare_policy
from lmm_r1.supervised.samples import SFTSample, check_sample, encode_sample, loss_turns
from lmm_r1.train.update import Counts, Terms


@dataclass(frozen=True, kw_only=True)
class RowEncoder(SampleEncoder):
    """Encodes conversations and plain texts."""

    every_turn: bool
    every_token: bool

    @classmethod
    def of(cls, config: SFTConfig, *, kit: LmmKit, processor: Any) -> RowEncoder:
        return cls(
            kit=kit,
            processor=processor,
            max_len=config.data.max_len,
            every_turn=config.data.multiturn,
            every_token=config.model.pretrain_mode_enable,
        )

    def check(self, row: Row, fitting: ImageFitting | None) -> Row:
        outline = check_sample(
            row, kit=self.kit, processor=self.processor, every_turn=self.every_turn, every_token=self.every_token
        )
        return row if fitting is None else fitting.fitted(row, outline)

    def __call__(self, row: Row) -> SFTSample | None:
        return encode_sample(
            row,
            kit=self.kit,
            processor=self.processor,
            max_len=self.max_len,
            every_turn=self.every_turn,
            every_token=self.every_token,
        )


class SFTEvaluation(HeldOut["SFTRun[Any]", SFTSample]):
    """The mean loss per loss token of all ranks' rows, and the accuracies that a verifier finds."""

    def __init__(self, run: SFTRun[Any], rows: Sequence[Row]) -> None:
        super().__init__(run, rows)
        # The names of other measured values; known after the first pass.
        self.parts: tuple[str, ...] = ()
        asked = self.config.eval.reward is not None
        self.answers = Answers(self.config, run.engine, checkpoint=run.checkpoint, rows=rows) if asked else None

    def _all_metrics(self) -> dict[str, float]:
        metrics = super()._all_metrics()
        if self.answers is not None:
            metrics |= self.answers.accuracies(self._own_rows(), self.sources, group=self._group)
        return metrics

    def _measured(self, samples: Sequence[SFTSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        tokens = torch.stack([sample.loss_mask.sum() for sample in batch])
        found = self.run.token_losses(batch)
        self.parts = tuple(found.parts)
        sums = [values.double().sum(-1) for values in (found.loss, *found.parts.values())]
        return torch.stack([*sums, tokens.to(sums[0])], dim=-1)

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        *totals, tokens = sums.tolist()
        names = (LOSS, *self.parts)
        return {name: total / tokens for name, total in zip(names, totals, strict=True)} if tokens else {}


class Answers:
    """Greedy answers of the trained model, judged by a verifier; each rank generates and judges its own."""

    def __init__(self, config: SFTConfig, model: Any, *, checkpoint: Checkpoint, rows: Sequence[Row]) -> None:
        """Args: model: the module that DeepSpeed wraps."""
        assert config.eval.reward is not None, "the caller checks it"
        self.verifier = config.eval.reward
        self.sampling = SamplingSettings(
            n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=config.eval.max_new_tokens
        )
        settings = engine_settings(config, rows, dtype="auto", gpu_memory_utilization=1.0, enforce_eager=True)
        codec = LimitedCodec(checkpoint.path, settings, checkpoint=checkpoint)
        self.engine = TransformersEngine.around(bare(model), codec=codec, batch_rows=settings.batch_rows)

    def accuracies(self, rows: Sequence[Row], sources: Sequence[str], *, group: dist.ProcessGroup) -> dict[str, float]:
        """Return pass@1 by data source over the rows of all ranks; rows too long for an answer are left out."""
        # Right answers and all answers by data source.
        sums = torch.zeros(len(sources), 2, dtype=torch.double, device=cpu.device())
        prompts = {index: prompt_of(row) for index, row in enumerate(rows)}
        with _own_settings(self.engine.model):
            outcomes = list(self.engine.respond(prompts.items(), self.sampling)) if prompts else []
        with make_judge(self.verifier, flag="--eval.reward", workers=1) as judge:
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


def engine_settings(
    config: SFTConfig,
    rows: Sequence[Row],
    *,
    dtype: EngineDtype,
    gpu_memory_utilization: float | None,
    enforce_eager: bool | None,
) -> EngineSettings:
    """Return the settings of an engine that answers these rows."""
    return EngineSettings(
        adapter=None,
        dtype=dtype,
        max_model_len=config.data.max_len,
        max_images=max(len(images_of(row.messages)) for row in rows),
        max_videos=max(len(videos_of(row.messages)) for row in rows),
        batch_rows=config.train.micro_batch_size,
        tensor_parallel_size=1,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        seed=config.train.seed,
        trust_remote_code=config.train.trust_remote_code,
    )


def prompt_of(row: Row) -> Row:
    """Return a row without the assistant turn at its end."""
    ends_answered = row.messages[-1].role == "assistant"
    return replace(row, messages=row.messages[:-1]) if ends_answered else row


@contextmanager
def _own_settings(model: Any) -> Iterator[None]:
    """Generate without the checkpoint's generation config (such as a repetition penalty), which is saved with it."""
    of_checkpoint, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = of_checkpoint


SFTConfigT = TypeVar("SFTConfigT", bound=SFTConfig)


class SFTRun(SupervisedRun[SFTConfigT, Row, SFTSample, list[ModelSample]]):
    """The loss is the mean over all loss tokens."""

    kind = "sft"
    encoder = RowEncoder
    evaluator = SFTEvaluation

    @classmethod
    def load(cls, config: SFTConfigT, path: str, *, split: str, check: RowCheck[Row], held_out: bool) -> KeptRows[Row]:
        def check_row(row: Row) -> Row:
            learned = demonstration(row)
            if not config.model.pretrain_mode_enable:
                loss_turns(learned, every_turn=config.data.multiturn)
            return check(learned)

        file = read_conversations(config, path, split=split, held_out=held_out, check=check_row)
        return kept(file)

    @classmethod
    def of(cls, session: SupervisedSession[SFTConfigT], **learned: Any) -> Self:
        return cls(session, prepare_policy(session), **learned)

    def collate(self, samples: Sequence[SFTSample]) -> list[ModelSample]:
        return [sample.for_model() for sample in samples]

    def counts(self, batch: list[ModelSample]) -> Counts:
        tokens = sum(int(sample.loss_mask.sum()) for sample in batch)
        return Counts(units=tokens, tokens=tokens, samples=len(batch))

    def terms(self, batch: list[ModelSample]) -> Terms:
        found = self.token_losses(batch)
        sums = {name: values.detach().sum() for name, values in found.parts.items()}
        return Terms(loss=found.loss.sum(), aux_loss=found.aux_loss, sums=sums)

    def token_losses(self, batch: list[ModelSample]) -> TokenTerms:
        """Return the negative log-likelihood of each loss token."""
        log_probs, aux_loss = self.policy_log_probs(batch)
        return TokenTerms(loss=-log_probs, aux_loss=aux_loss)
