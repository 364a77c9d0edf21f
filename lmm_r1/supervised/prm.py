"""Training of process reward models: steps of solutions as samples, rows grouped by prompt, and the run."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from typing_extensions import Self

from lmm_r1.config import PRMConfig
from lmm_r1.data.messages import ImagePart, ImageSource, Part, Row, StoredBytes, VideoPart
from lmm_r1.data.preferences import JudgedRow, StepRow
from lmm_r1.data.training_rows import KeptRows
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit, Media
from lmm_r1.lmm_kits.checkpoint import encode_row, outlined_row
from lmm_r1.lmm_kits.plain_text import text_ids
from lmm_r1.lmm_kits.step_tokens import CONFIG_KEY, StepTokens
from lmm_r1.models.actor import KitActor
from lmm_r1.supervised import RowCheck, SampleEncoder, judged_rows, updates_per_epoch
from lmm_r1.supervised.held_out import LOSS, HeldOut
from lmm_r1.supervised.loop import Counts, SupervisedRun, Terms
from lmm_r1.supervised.models import SupervisedSession, load_policy, prepare_trained
from lmm_r1.supervised.samples import SFTBatch, SFTSample, collate

TOKEN_FLAGS = ("--model.placeholder_token", "--model.reward_tokens")


@dataclass(frozen=True, kw_only=True)
class StepSample:
    tokens: SFTSample
    """The loss tokens follow the placeholders: a placeholder's prediction of the next token is judged."""
    labels: tuple[float, ...]
    """One per step, from 0 (wrong) to 1 (right)."""
    prompt_length: int
    """The number of tokens before the first step."""

    @property
    def filler(self) -> StepSample:
        """A sample without loss tokens."""
        return replace(self, tokens=self.tokens.filler, labels=())


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    tokens: SFTBatch
    labels: torch.Tensor
    """The label of the step that is judged at each place, (B, T - 1); 0 elsewhere."""
    prompt_lengths: torch.Tensor  # (B,)


@dataclass(frozen=True, kw_only=True)
class StepEncoder(SampleEncoder):
    """Encodes prompts with their steps."""

    tokens: StepTokens

    @classmethod
    def of(cls, config: PRMConfig, *, kit: LmmKit, processor: Any) -> StepEncoder:
        """Return the encoder of a run; raises UserError if the tokenizer lacks a token of the flags."""
        placeholder = config.model.placeholder_token
        assert placeholder is not None, "required by resolve"
        tokens = StepTokens.of(
            kit, processor, placeholder=placeholder, judging=config.model.reward_tokens, flags=TOKEN_FLAGS
        )
        return cls(kit=kit, processor=processor, max_len=config.data.max_len, tokens=tokens)

    def check(self, row: StepRow) -> None:
        prompt = row.conversation(())
        outline = outlined_row(prompt, kit=self.kit, processor=self.processor, add_generation_prompt=True)
        self._behind(outline.token_ids, row)

    def __call__(self, row: StepRow) -> StepSample | None:
        """Return the row's sample, None if it is too long.

        Raises UserError, with the row's place, for media that cannot be used, and for a step with the placeholder in it.
        """
        prompt = encode_row(row.conversation(()), kit=self.kit, processor=self.processor, add_generation_prompt=True)
        ids, places = self._behind(prompt.token_ids, row)
        if len(ids) > self.max_len:
            return None
        mask = [False] * len(ids)
        for place in places:
            mask[place + 1] = True
        return StepSample(
            tokens=SFTSample(token_ids=ids, loss_mask=mask, media=prompt.media),
            labels=tuple(row.labels),
            prompt_length=len(prompt.token_ids),
        )

    def _behind(self, prompt: Sequence[int], row: StepRow) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt followed by a row's steps, and the places of the placeholders."""
        return self.tokens.behind(
            prompt,
            row.steps,
            tokenize=partial(self._ids, location=row.location),
            end=self.kit.tokenizer_of(self.processor).eos_token_id,
        )

    def _ids(self, step: str, *, location: str) -> list[int]:
        if (
            self.tokens.placeholder_id
            in self.kit.tokenizer_of(self.processor)(step, add_special_tokens=False)["input_ids"]
        ):
            raise UserError(
                f"{location}: a step holds the placeholder {self.tokens.placeholder}, which stands behind steps only; name "
                "what ends them with --data.step_tag, or take another --model.placeholder_token"
            )
        return text_ids(self.kit, self.processor, step)


def collate_steps(samples: Sequence[StepSample], *, pad_token_id: int) -> StepBatch:
    """Pad samples on the right into one batch; samples of one prompt share one object for its media."""
    tokens = collate([sample.tokens for sample in samples], pad_token_id=pad_token_id)
    tokens = replace(tokens, media=_in_common(tokens.media))
    labels = torch.zeros(tokens.loss_mask.shape)
    labels[tokens.loss_mask] = torch.tensor([label for sample in samples for label in sample.labels])
    prompt_lengths = torch.tensor([sample.prompt_length for sample in samples])
    return StepBatch(tokens=tokens, labels=labels, prompt_lengths=prompt_lengths)


def _in_common(media: Sequence[Media | None]) -> list[Media | None]:
    """Replace media that are equal to earlier ones by those objects."""
    found: list[Media] = []
    given: list[Media | None] = []
    for item in media:
        known = None if item is None else next((one for one in found if _are_equal(one, item)), item)
        if known is not None and known is item:
            found.append(known)
        given.append(known)
    return given


def _are_equal(one: Media, other: Media) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def prompt_numbers(rows: Iterable[JudgedRow]) -> torch.Tensor:
    """Return the number of each row's prompt, (N,), from 0 in the order of their first rows.

    Images and videos given by a path or an address are compared by name, others by content.
    """
    known: dict[Hashable, int] = {}
    return torch.tensor([known.setdefault(_key(row), len(known)) for row in rows])


def grouped_indices(prompts: torch.Tensor, *, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the row indices of update `step` (from 0), as `batch_indices` does, but with the rows of a prompt together.

    Each epoch is a new permutation of the prompts, and of the rows of each.

    Args:
        prompts: the number of each row's prompt, (N,).
    """
    rows = len(prompts)
    epoch, position = divmod(step, updates_per_epoch(rows, batch_size))
    generator = torch.Generator().manual_seed(seed + epoch)
    turns = torch.randperm(int(prompts.max()) + 1, generator=generator)[prompts]
    order = (turns * rows + torch.randperm(rows, generator=generator)).argsort()
    return order[position * batch_size : (position + 1) * batch_size].tolist()


def in_turns(indices: Sequence[Any], *, ranks: int) -> list[Any]:
    """Return an update's rows so that ranks, which take every so-many-th of them, each get neighbours.

    `[1, 1, 2, 2]` and 2 ranks → `[1, 2, 1, 2]`.
    """
    own, rest = divmod(len(indices), ranks)
    starts = [rank * own + min(rank, rest) for rank in range(ranks)]
    full = [indices[start + place] for place in range(own) for start in starts]
    return full + [indices[start + own] for start in starts[:rest]]


def _key(row: JudgedRow) -> Hashable:
    messages = tuple((message.role, tuple(map(_known, message.parts))) for message in row.messages)
    return row.plain, messages


def _known(part: Part) -> Hashable:
    if isinstance(part, ImagePart):
        return replace(part, source=_content(part.source))
    if isinstance(part, VideoPart) and not isinstance(part.source, str):
        return replace(part, source=tuple(map(_content, part.source)))
    return part


def _content(source: ImageSource) -> str | bytes:
    if isinstance(source, str):
        return source
    if isinstance(source, Image.Image):
        found = f"{source.mode} {source.size}".encode() + source.tobytes()
    else:
        found = source.read() if isinstance(source, StoredBytes) else source
    return hashlib.blake2b(found, digest_size=16).digest()


ACCURACY, SCORE = "step_accuracy", "step_score"


def step_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of labels p and the two judging tokens: -p log s(d) - (1 - p) log s(-d), the sigmoid s.

    Math-Shepherd, equation 5 of https://arxiv.org/abs/2312.08935, also for labels between 0 and 1.

    Args:
        logits: of the token of a right step and of that of a wrong one, (..., 2); d is the first less the second.
        labels: how right each step is, (...).
    """
    difference = logits[..., 0] - logits[..., 1]
    return -labels * F.logsigmoid(difference) - (1 - labels) * F.logsigmoid(-difference)


class StepEvaluation(HeldOut["PRMRun", StepSample]):
    """The means over the steps of all held-out rows."""

    of_sources = (LOSS, ACCURACY)

    def _measured(self, samples: Sequence[StepSample]) -> torch.Tensor:
        batch = self.run.collate(samples)
        judged, _ = self.run.judged(batch)
        counts = batch.tokens.loss_mask.sum(-1, keepdim=True).to(judged)
        return torch.cat([judged.sum(1), counts], dim=-1).double()

    def _metrics(self, sums: torch.Tensor) -> dict[str, float]:
        loss, correct, score, count = sums.tolist()
        return {LOSS: loss / count, ACCURACY: correct / count, SCORE: score / count} if count else {}


class PRMRun(SupervisedRun[PRMConfig, StepRow, StepSample, StepBatch]):
    """The loss is the mean over steps."""

    kind = "prm"
    shown = (ACCURACY,)
    encoder = StepEncoder
    evaluator = StepEvaluation
    actor: KitActor
    encode: StepEncoder

    @classmethod
    def load(
        cls, config: PRMConfig, path: str, *, split: str, check: RowCheck[StepRow], held_out: bool
    ) -> KeptRows[StepRow]:
        return judged_rows(config, path, split=split, check=check)

    @classmethod
    def conversations(cls, rows: Sequence[StepRow]) -> list[Row]:
        return [row.conversation(()) for row in rows]

    @classmethod
    def of(cls, session: SupervisedSession[PRMConfig], **learned: Any) -> Self:
        """Return the run of a session, whose model keeps the judging tokens in its config."""
        config = session.config
        actor = load_policy(session, share_prefix=config.ds.packing_samples and config.train.shared_prefix_enable)
        setattr(actor.model_config, CONFIG_KEY, learned["encode"].tokens.in_config)
        return cls(session, prepare_trained(session, actor), **learned)

    def __init__(self, *given: Any, **learned: Any) -> None:
        super().__init__(*given, **learned)
        # The prompt of each row, if the rows of a prompt stay together.
        self.prompts = prompt_numbers(self.rows) if self.config.train.group_prompts_enable else None

    def indices(self, step: int) -> list[Any]:
        """Return the rows of an update; with `--train.group_prompts_enable`, those of one prompt are on one rank."""
        if self.prompts is None:
            return super().indices(step)
        train = self.config.train
        found = grouped_indices(self.prompts, batch_size=train.batch_size, seed=train.seed, step=step)
        return in_turns(found, ranks=self.strategy.ds_device_mesh["dp"].size())

    def collate(self, samples: Sequence[StepSample]) -> StepBatch:
        return collate_steps(samples, pad_token_id=self.pad_token_id)

    def counts(self, batch: StepBatch) -> Counts:
        steps = int(batch.tokens.loss_mask.sum())
        return Counts(units=steps, tokens=steps)

    def terms(self, batch: StepBatch) -> Terms:
        judged, aux_loss = self.judged(batch)
        sums = judged.sum((0, 1))
        names = (ACCURACY, SCORE)
        logged = dict(zip(names, sums[1:].detach().unbind(), strict=True))
        return Terms(loss=sums[0], aux_loss=aux_loss, sums=logged)

    def judged(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return each step's loss, accuracy and score, (B, T - 1, 3), 0 elsewhere, and the load-balancing loss of experts.

        Every rank calls it equally often.
        """
        device = torch.cuda.current_device()
        tokens = batch.tokens
        wanted = tokens.loss_mask.to(device)
        logits, aux_loss = self.actor.token_logits(
            tokens.sequences.to(device),
            wanted,
            torch.tensor(self.encode.tokens.judging_ids, device=device),
            attention_mask=tokens.attention_mask.to(device),
            ring_attn_group=self.strategy.ring_attn_group,
            media=tokens.media,
            prompt_lengths=batch.prompt_lengths if self.config.train.shared_prefix_enable else None,
        )
        labels = batch.labels.to(logits)
        scores = (logits[..., 0] - logits[..., 1]).detach().sigmoid()
        correct = (scores >= 0.5) == (labels >= 0.5)
        values = torch.stack([step_losses(logits, labels), correct.to(logits), scores], dim=-1)
        return torch.where(wanted[..., None], values, 0.0), aux_loss
