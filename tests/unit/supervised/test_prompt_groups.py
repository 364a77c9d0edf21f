"""Solutions of one prompt: the order that keeps them together, and passes that compute the prompt and its images once."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.sessions import session_of
from helpers.tiny_models import make_actor

from lmm_r1 import dotted
from lmm_r1.config import PRMConfig
from lmm_r1.data.messages import ImagePart
from lmm_r1.data.preferences import StepRow
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.supervised import batch_indices
from lmm_r1.supervised.prm import PRMRun, StepEncoder, grouped_indices, in_turns, prompt_numbers

GROUPS = [[0, 3], [1], [2, 4, 5]]
PROMPTS = torch.tensor([0, 1, 2, 0, 2, 2])


def config(**flags: object) -> PRMConfig:
    given = {"model.model_name_or_path": "m", "data.dataset": "rows.jsonl", "ds.param_dtype": "fp32"}
    given |= {"model.placeholder_token": "*", "ds.packing_samples": True, "train.micro_batch_size": 4}
    return dotted.replace(PRMConfig(), given | {name.replace("__", "."): value for name, value in flags.items()})


def solution(*steps: str, parts: tuple[Any, ...] = ("What is x?",)) -> StepRow:
    labels = tuple(float(place % 2 == 0) for place, _ in enumerate(steps))
    return StepRow(messages=(message("user", *parts),), steps=steps, labels=labels, location="rows.jsonl line 1")


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    picture(width, height).save(stream, "PNG")
    return stream.getvalue()


def numbers(*rows: StepRow) -> list[int]:
    return prompt_numbers(rows).tolist()


def test_rows_are_of_one_prompt_where_its_text_is_the_same_and_so_is_what_is_in_its_images():
    sources = ["/a.png", png(8, 8), "/b.png", png(8, 8), "/a.png", png(8, 16)]
    rows = [solution("s", parts=(ImagePart(source), "q")) for source in sources]
    assert numbers(*rows, solution("t"), solution("s", "t")) == [0, 1, 2, 1, 0, 3, 4, 4]
    held = [solution("s", parts=(image, "q")) for image in (picture(8, 8), picture(8, 16), picture(8, 8))]
    assert numbers(*held) == [0, 1, 0]
    clips = [solution("s", parts=(clip(frames, 28, 28), "q")) for frames in (2, 3, 2)]
    assert numbers(*clips) == [0, 1, 0]


def test_the_order_shuffles_prompts_and_keeps_their_rows_together():
    orders = [
        grouped_indices(PROMPTS, batch_size=3, seed=7, step=2 * epoch)
        + grouped_indices(PROMPTS, batch_size=3, seed=7, step=2 * epoch + 1)
        for epoch in range(20)
    ]
    for order in orders:
        assert sorted(order) == [0, 1, 2, 3, 4, 5]
        for group in GROUPS:
            places = [order.index(member) for member in group]
            assert max(places) - min(places) == len(group) - 1
    # Of the 3! orders of the prompts times 2! and 3! within them.
    assert len(set(map(tuple, orders))) > 10
    # The last batch may be smaller, as without groups.
    assert [len(grouped_indices(PROMPTS, batch_size=4, seed=7, step=step)) for step in range(3)] == [4, 2, 4]
    assert in_turns([0, 3, 2, 5], ranks=2) == [0, 2, 3, 5]
    assert in_turns([0, 3, 2], ranks=2) == [0, 2, 3]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_taken_as_in_every_other_trainer_unless_the_flag_says_otherwise(ranks):
    rows = [solution("s", parts=(name,)) for name in "abcabc"]
    mesh = SimpleNamespace(size=lambda: ranks)
    for grouped in (False, True):
        settings = config(train__batch_size=6, train__seed=3, train__group_prompts_enable=grouped)
        strategy = SimpleNamespace(ds_device_mesh={"dp": mesh}, is_rank_0=lambda: True)
        run = PRMRun(session_of(settings, strategy), None, rows=rows, encode=None, filler=None)
        taken = run.indices(1)
        shares = [taken[rank::ranks] for rank in range(ranks)]
        if not grouped:
            assert taken == batch_indices(num_rows=6, batch_size=6, seed=3, step=1, keep_order=False)
            continue
        assert sorted(taken) == [0, 1, 2, 3, 4, 5]
        if ranks == 3:
            assert all(len({place % 3 for place in share}) == 1 for share in shares)


def updates_of(folder: Path, rows: list[StepRow], **flags: Any) -> tuple[dict[str, torch.Tensor], float, int]:
    """Return gradients and loss of one pass over rows, and how many tokens were computed."""
    settings = config(**flags)
    checkpoint = Checkpoint(str(folder))
    encode = StepEncoder.of(settings, kit=checkpoint.kit, processor=checkpoint.processor)
    packs = settings.ds.packing_samples
    actor = make_actor(folder, packing_samples=packs, share_prefix=packs and settings.train.shared_prefix_enable)
    run = PRMRun(
        session_of(settings, SimpleNamespace(ring_attn_group=None, is_rank_0=lambda: True), checkpoint=checkpoint),
        actor,
        rows=rows,
        encode=encode,
        filler=None,
    )
    terms = run.terms(run.collate([encode(row) for row in rows]))
    actor.computed_tokens, computed = 0, actor.computed_tokens
    terms.loss.backward()
    gradients = {name: weight.grad for name, weight in actor.model.named_parameters() if weight.grad is not None}
    return gradients, terms.loss.item(), computed


@pytest.mark.usefixtures("one_process")
def test_solutions_of_one_prompt_compute_it_with_its_image_once_and_learn_as_padded_ones(
    tiny_checkpoint: Callable[[str], Path],
):
    folder = tiny_checkpoint("qwen2_5_vl")
    # Equal pictures that are read by themselves, as workers read them, and another one behind the same text.
    one, other = (picture(112, 84), "What is x?"), (picture(84, 112), "What is x?")
    rows = [
        solution("3 x = 12", "So x = 4", parts=one),
        solution("Let x = 1", parts=other),
        solution("Add 1", "Add 2", "Stop", parts=(picture(112, 84), "What is x?")),
        solution("x is 4", parts=(picture(112, 84), "What is x?")),
    ]
    checkpoint = Checkpoint(str(folder))
    encode = StepEncoder.of(config(), kit=checkpoint.kit, processor=checkpoint.processor)
    samples = [encode(row) for row in rows]
    whole = sum(len(sample.tokens.token_ids) for sample in samples)
    prompt = samples[0].prompt_length
    assert prompt > 10

    gradients, loss, computed = updates_of(folder, rows)
    padded, wanted, _ = updates_of(folder, rows, ds__packing_samples=False)
    apart, loss_apart, computed_apart = updates_of(folder, rows, train__shared_prefix_enable=False)
    assert (computed_apart, computed) == (whole, whole - 2 * prompt)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert loss_apart == pytest.approx(wanted, rel=1e-5)
    assert gradients.keys() == padded.keys() == apart.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, padded[name], rtol=1e-5, atol=1e-5 * padded[name].abs().max().item())
    assert any(name.startswith("model.visual") for name in gradients)
