"""Samples of a real engine beside the trainer's log-probs, as the experiences of a first step."""

from collections.abc import Sequence

import torch
from helpers.samples import generated_sample, unrewarded
from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1.data.messages import Row
from lmm_r1.lmm_kits import EncodedPrompt, Media
from lmm_r1.models.actor import KitActor
from lmm_r1.rl.experiences import experience_of

# One list per prompt of its samples: token ids, and the log-probs that the engine reports for them.
Samples = Sequence[Sequence[tuple[list[int], list[float]]]]


def experiences(
    actor: KitActor,
    rows: Sequence[Row],
    prompts: Sequence[EncodedPrompt],
    samples: Samples,
    *,
    media: Sequence[Media | None] | None = None,
) -> list[Experience]:
    """Return an experience of each group, with the actor's log-probs beside the engine's.

    Args:
        media: what the actor gets in the place of the prompts' own.
    """
    groups = []
    for row, prompt, group, given in zip(rows, prompts, samples, media or [p.media for p in prompts], strict=True):
        made = [
            unrewarded(generated_sample(prompt.token_ids, token_ids, of=row, log_probs=log_probs))
            for token_ids, log_probs in group
        ]
        experience = Experience.concat_experiences([experience_of(one, max_len=10**6) for one in made], 0)
        with torch.no_grad():
            experience.action_log_probs = actor(
                experience.sequences,
                experience.action_mask,
                attention_mask=experience.attention_mask,
                media=[given] * len(group),
            )
        groups.append(experience)
    return groups
