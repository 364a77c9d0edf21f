"""OpenRLHF's experiences as the samples generator makes them of responses."""

from collections.abc import Sequence
from typing import Any

import torch
from helpers.samples import generated_sample
from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1.data.sample import MediaRef
from lmm_r1.rl.experiences import experience_of


def sample(
    prompt: Sequence[int], response: Sequence[int], *, media: MediaRef | None = None, reward: float = 0.0
) -> Experience:
    """One sample, of which the response is learnt."""
    return experience_of(generated_sample(prompt, response, media=media, reward=reward), max_len=10_000)


def group(prompt: Sequence[int], lengths: Sequence[int], *, media: MediaRef | None = None) -> list[Experience]:
    """Samples of one prompt with responses of these lengths, each of a token of its own."""
    return [sample(prompt, [50 + place] * length, media=media) for place, length in enumerate(lengths)]


def trained(experience: Experience) -> Experience:
    """The experience with what models and estimator add before an update."""
    shape = experience.action_mask.shape
    experience.action_log_probs = -torch.rand(shape)
    experience.returns = torch.rand(shape)
    experience.advantages = torch.rand(shape)
    return experience


def samples_of(batches: Sequence[Experience]) -> list[Experience]:
    """The samples of batches by their places, each as a batch of one without padding."""
    found = {}
    for batch in batches:
        for row, place in enumerate(batch.index):
            length = int(batch.attention_mask[row].sum())
            parts: dict[str, Any] = {"index": [place]}
            for name, value in vars(batch).items():
                if isinstance(value, torch.Tensor):
                    parts[name] = value[row : row + 1]
                    if Experience.is_step_tensor_field(name):
                        parts[name] = parts[name][:, : length - batch.sequences.shape[1] + value.shape[1]]
                elif isinstance(value, dict):
                    parts[name] = {key: values[row : row + 1] for key, values in value.items()}
                elif name == "mm_train_inputs" and value:
                    parts[name] = [value[row]]
            found[place] = Experience(**parts)
    return [found[place] for place in sorted(found)]
