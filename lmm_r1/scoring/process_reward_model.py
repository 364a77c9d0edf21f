"""A trained process reward model: the probability that each step of a response is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt
from lmm_r1.lmm_kits.step_tokens import StepTokens, stored_tokens
from lmm_r1.models.actor import KitActor
from lmm_r1.scoring.reward_model import EncodedSample, ScoringModel
from lmm_r1.scoring.step_scores import StepJudging

TOKEN_FLAGS = ("--placeholder_token", "--reward_tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSteps(EncodedSample):
    places: list[int]
    """Of the placeholder behind each step; a response without steps has none, and no tokens."""


NO_STEPS = EncodedSteps(token_ids=[], media=None, places=[])


class ProcessRewardModel(ScoringModel[EncodedSteps, list[float]]):
    """A checkpoint of `train_prm`, or another that predicts one of two tokens at a placeholder behind each step."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        max_len: int,
        max_batch_tokens: int | None,
        judging: StepJudging,
        trust_remote_code: bool,
    ) -> None:
        """Load the checkpoint; raises UserError where it cannot be loaded or nothing says by which tokens it judges.

        Args:
            path: a folder or a hub name.
            dtype: bf16, fp16 or fp32.
            max_len: longest sample, in tokens; a longer one is refused.
            max_batch_tokens: see `ScoringModel`.
            judging: of it the tokens.
        """
        checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
        super().__init__(checkpoint, max_len=max_len, max_batch_tokens=max_batch_tokens)
        stored = stored_tokens(checkpoint.config) or {}
        placeholder = judging.placeholder_token or stored.get("placeholder_token")
        reward_tokens = judging.reward_tokens or tuple(stored.get("reward_tokens", ()))
        if placeholder is None or len(reward_tokens) != 2:
            raise UserError(
                f"{path}: its config does not say by which tokens it judges steps; give {TOKEN_FLAGS[0]} and the two "
                f"{TOKEN_FLAGS[1]}, that of a right step first"
            )
        self.tokens = StepTokens.of(
            self.kit, self.processor, placeholder=placeholder, judging=reward_tokens, flags=TOKEN_FLAGS
        )
        self._take(
            KitActor(
                path,
                attn_implementation="auto",
                param_dtype=dtype,
                trust_remote_code=trust_remote_code,
                max_len=max_len,
            )
        )

    def score(self, samples: Sequence[EncodedSteps]) -> list[list[float]]:
        """Return the scores of each sample's steps; of a response without steps there is nothing to compute."""
        judged = iter(super().score([sample for sample in samples if sample.places]))
        return [next(judged) if sample.places else [] for sample in samples]

    def encode_steps(self, row: Row, response: str, *, prompt: EncodedPrompt | None = None) -> EncodedSteps:
        """Return the row's prompt with its images and the response's steps.

        Args:
            prompt: what `encode_prompt` gave for the row, which is then not encoded again.

        Raises:
            UserError: the kit cannot take the prompt, or the sample is longer than `max_len`; names the row's location.
        """
        steps = self.tokens.split(response)
        return self._behind(prompt or self.encode_prompt(row), steps, where=f"{row.location}: ") if steps else NO_STEPS

    def encode_steps_of_text(self, prompt: str, response: str) -> EncodedSteps:
        """Return a prompt that was rendered already, special tokens included, and the response's steps.

        Raises UserError where they are too long, or the prompt holds a media token: there is no image that it stands for.
        """
        ids = self._ids_of_text(prompt)
        steps = self.tokens.split(response)
        return self._behind(EncodedPrompt.of_text(ids), steps, where="") if steps else NO_STEPS

    def _behind(self, prompt: EncodedPrompt, steps: Sequence[str], *, where: str) -> EncodedSteps:
        ids, places = self.tokens.behind(
            prompt.token_ids, steps, tokenize=self._response_ids, end=self._tokenizer.eos_token_id
        )
        self._check_length(len(ids), where=where)
        return EncodedSteps(token_ids=ids, media=prompt.media, places=places)

    def _forward(self, samples: Sequence[EncodedSteps]) -> list[list[float]]:
        sequences, mask = self._padded(samples)
        wanted = torch.zeros(sequences[:, 1:].shape, dtype=torch.bool)
        for number, sample in enumerate(samples):
            wanted[number, sample.places] = True
        with torch.no_grad():
            logits, _ = self._model.token_logits(
                sequences,
                wanted.to(self.device),
                torch.tensor(self.tokens.judging_ids, device=self.device),
                attention_mask=mask,
                media=[sample.media for sample in samples],
            )
        scores = (logits[..., 0] - logits[..., 1]).sigmoid().cpu()
        return [scores[number, sample.places].tolist() for number, sample in enumerate(samples)]
