"""Samples as packed sequences, worked out by hand with a kit of one rule: a token's position is where it stands."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.packed_batches import segments_of

from lmm_r1.data.sample import PlacedMedia, SampleMedia
from lmm_r1.lmm_kits import Media
from lmm_r1.models.packed.layout import PackedSegment
from lmm_r1.models.packed.packing import ModelSample, PackedSequence, pack_batch, stacked

IMAGE = 9  # its placeholder; those of one image see each other in both directions
FILLER = [8, IMAGE, IMAGE]


class PlainKit:
    """What packing asks of a kit: positions in two rows, the second tenfold; types of tokens where there are media."""

    bidirectional_within_window = False

    def __init__(self, *, bidirectional: bool = False) -> None:
        self.bidirectional = bidirectional

    def forward_inputs(
        self, config: Any, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        assert attention_mask.all(), "samples come without padding"
        positions = torch.arange(sequences.shape[1]).expand(1, -1)
        inputs = {"position_ids": torch.stack([positions, 10 * positions])}
        if media is None:
            return inputs
        return {**inputs, "token_types": (sequences == IMAGE).long(), "pixels": media["pixels"]}

    def merge_media(self, media: Sequence[Media]) -> Media:
        return {"pixels": torch.cat([item["pixels"] for item in media])}

    def bidirectional_token_ids(self, config: Any) -> frozenset[int]:
        return frozenset({IMAGE} if self.bidirectional else ())

    def filler_media(self, config: Any) -> tuple[list[int], Media]:
        return FILLER, {"pixels": torch.zeros(1, 2)}


def image(value: float) -> Media:
    return {"pixels": torch.full((1, 2), value)}


def pack(
    samples: Sequence[tuple[list[int], list[int]]],
    *,
    media: Sequence[SampleMedia] = (),
    share: bool = True,
    groups: Sequence[int] | None = None,
    kit: PlainKit | None = None,
    **settings: Any,
) -> PackedSequence:
    """Pack samples, each a prompt and a response of which every token is wanted; equal prompts are a group unless told."""
    prompts = [prompt for prompt, _ in samples]
    given = [
        ModelSample(
            token_ids=torch.tensor(prompt + response),
            loss_mask=torch.tensor([False] * (len(prompt) - 1) + [True] * len(response)),
            media=media[row] if media else None,
            group=groups[row] if groups else prompts.index(prompt),
            prompt_tokens=len(prompt),
        )
        for row, (prompt, response) in enumerate(samples)
    ]
    return packed_samples(given, share_prefix=share, kit=kit, **settings)


def packed_samples(samples: list[ModelSample], *, kit: PlainKit | None = None, **settings: Any) -> PackedSequence:
    settings = {"wanted": stacked(samples, lambda one: one.loss_mask), "share_prefix": True, "fill": False, **settings}
    return pack_batch(kit or PlainKit(), SimpleNamespace(), samples, **settings)


def learnt(token_ids: list[int], loss_mask: list[int], *, prompt: int) -> ModelSample:
    """A sample of the one group."""
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    return ModelSample(token_ids=torch.tensor(token_ids), loss_mask=mask, group=0, prompt_tokens=prompt)


GROUP = [([11, 12], [21, 22, 23]), ([13], [31, 32]), ([11, 12], [24])]


def test_samples_stand_one_behind_the_other_without_padding():
    packed = pack(GROUP, share=False)
    assert packed.token_ids.tolist() == [[11, 12, 21, 22, 23, 13, 31, 32, 11, 12, 24]]
    assert packed.layout.segments == segments_of((5, None), (3, None), (3, None))
    assert packed.layout.block_ids is None
    assert packed.inputs["position_ids"].tolist() == [
        [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]],
        [[0, 10, 20, 30, 40, 0, 10, 20, 0, 10, 20]],
    ]
    assert packed.inputs.keys() == {"position_ids"}
    assert packed.sources.tolist() == [1, 2, 3, 5, 6, 9]
    assert packed.target_ids.tolist() == [21, 22, 23, 31, 32, 24]
    assert [place.tolist() for place in packed.places] == [[0, 0, 0, 1, 1, 2], [1, 2, 3, 0, 1, 1]]


def test_a_groups_prompt_stands_once_and_its_responses_go_on_from_it():
    packed = pack(GROUP)
    assert packed.token_ids.tolist() == [[11, 12, 21, 22, 23, 24, 13, 31, 32]]
    assert packed.layout.segments == segments_of((2, None), (3, 0), (1, 0), (3, None))
    assert packed.inputs["position_ids"][0].tolist() == [[0, 1, 2, 3, 4, 2, 0, 1, 2]]
    # The first token of each response is predicted from the prompt's last one.
    assert packed.sources.tolist() == [1, 2, 3, 1, 6, 7]
    assert packed.target_ids.tolist() == [21, 22, 23, 24, 31, 32]
    assert [place.tolist() for place in packed.places] == [[0, 0, 0, 2, 1, 1], [1, 2, 3, 1, 0, 1]]


def test_results_go_back_to_the_places_of_their_tokens_and_everything_else_is_zero():
    packed = pack(GROUP)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    scattered = packed.scatter(values)
    assert scattered.tolist() == [[0.0, 1.0, 2.0, 3.0], [5.0, 6.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0]]
    scattered.sum().backward()
    assert values.grad.tolist() == [1.0] * 6


def test_a_token_that_is_not_wanted_within_a_response_has_no_target():
    packed = packed_samples(
        [learnt([11, 12, 21, 22, 23, 24], [0, 1, 0, 0, 1], prompt=2), learnt([11, 12, 25], [0, 1], prompt=2)]
    )
    assert packed.token_ids.tolist() == [[11, 12, 21, 22, 23, 24, 25]]
    assert (packed.sources.tolist(), packed.target_ids.tolist()) == ([1, 4, 1], [21, 24, 25])


def test_a_value_of_the_last_token_is_wanted_from_it():
    samples = [ModelSample.whole([11, 12, 21]), ModelSample.whole([13])]
    packed = packed_samples(samples, wanted=stacked(samples, lambda one: one.last))
    assert packed.sources.tolist() == [2, 3]
    assert packed.scatter(torch.tensor([1.0, 2.0])).tolist() == [[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]]


def test_media_of_a_group_come_once_and_in_the_order_of_their_groups():
    prompt, one, other = [8, IMAGE, IMAGE, 11], image(1.0), image(2.0)
    samples = [([11], [20]), (prompt, [21]), (prompt, [22]), (prompt, [23]), (prompt, [24])]
    packed = pack(samples, media=[None, other, one, other, one], groups=[0, 1, 2, 1, 2])
    assert packed.inputs["pixels"].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert packed.token_ids.tolist() == [[11, 20, *prompt, 21, 23, *prompt, 22, 24]]
    # Without media there are no types of tokens: all is text.
    assert packed.inputs["token_types"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]]


def test_media_behind_the_prompt_are_a_samples_own():
    prompt, shown = [8, IMAGE, IMAGE, 11], image(1.0)
    given = PlacedMedia(0, shown)
    # The second sample is shown another image after its first token, the fourth two of them; the third is another prompt's.
    samples = [
        (prompt, [21]),
        (prompt, [22, IMAGE, IMAGE, 23]),
        ([11], [24, IMAGE]),
        (prompt, [IMAGE, 25, IMAGE]),
        (prompt, []),
    ]
    media = [
        shown,
        (given, PlacedMedia(5, image(2.0))),
        (PlacedMedia(2, image(3.0)),),
        (given, PlacedMedia(4, image(4.0)), PlacedMedia(6, image(5.0))),
        (given,),
    ]
    packed = pack(samples, media=media)
    assert packed.token_ids.tolist() == [[*prompt, 21, 22, IMAGE, IMAGE, 23, IMAGE, 25, IMAGE, 11, 24, IMAGE]]
    assert packed.layout.lengths == (4, 1, 4, 3, 3)
    assert packed.inputs["position_ids"][0].tolist() == [[0, 1, 2, 3, 4, 4, 5, 6, 7, 4, 5, 6, 0, 1, 2]]
    assert packed.inputs["token_types"].tolist() == [[0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1]]
    assert packed.inputs["pixels"][:, 0].tolist() == [1, 2, 4, 5, 3]


@pytest.fixture
def nodes_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmm_r1.data.sample.LEAST_SHARED", 1)


def test_samples_that_go_on_alike_are_a_tree(nodes_of_single_tokens):
    samples = [
        ([11, 12], [21, 22, 31, 32]),
        ([11, 12], [21, 22, 33]),
        ([11, 12], [24]),
        # It ends where others go on, and one is there twice.
        ([11, 12], [21, 22]),
        ([11, 12], [21, 22, 31, 34, 35]),
        ([11, 12], [24]),
    ]
    packed = pack(samples)
    assert packed.token_ids.tolist() == [[11, 12, 21, 22, 31, 32, 34, 35, 33, 24]]
    assert packed.layout.segments == segments_of((2, None), (2, 0), (1, 1), (1, 2), (2, 2), (1, 1), (1, 0))
    assert packed.inputs["position_ids"].tolist() == [
        [[0, 1, 2, 3, 4, 5, 5, 6, 4, 2]],
        [[0, 10, 20, 30, 40, 50, 50, 60, 40, 20]],
    ]
    # Of each token and what it predicts there is one result, whoever wants it.
    assert packed.sources.tolist() == [1, 2, 3, 4, 3, 1, 4, 6]
    assert packed.target_ids.tolist() == [21, 22, 31, 32, 33, 24, 34, 35]
    assert packed.copies.tolist() == [*[0, 1, 2, 3], *[0, 1, 4], 5, *[0, 1], *[0, 1, 2, 6, 7], 5]
    assert packed.places[0].tolist() == [*[0] * 4, *[1] * 3, 2, *[3] * 2, *[4] * 5, 5]
    assert packed.places[1].tolist() == [1, 2, 3, 4, 1, 2, 3, 1, 1, 2, 1, 2, 3, 4, 5, 1]


def test_results_of_shared_tokens_go_to_all_samples_and_gradients_come_back_as_sums(nodes_of_single_tokens):
    packed = pack([([11], [21, 22]), ([11], [21, 23]), ([11], [24])])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    assert packed.target_ids.tolist() == [21, 22, 23, 24]
    scattered = packed.scatter(values)
    assert scattered.tolist() == [[1.0, 2.0], [1.0, 3.0], [4.0, 0.0]]
    (scattered * torch.tensor([[1.0, 10.0], [100.0, 1000.0], [5.0, 7.0]])).sum().backward()
    assert values.grad.tolist() == [101.0, 10.0, 1000.0, 5.0]


def test_runs_are_numbered_and_end_with_their_segment():
    prompt = [8, IMAGE, IMAGE]
    packed = pack(
        [(prompt, [21]), ([IMAGE, 11], [22]), (prompt, [23])],
        media=[image(1.0), image(2.0), image(3.0)],
        kit=PlainKit(bidirectional=True),
        share=False,
    )
    assert packed.layout.block_ids.tolist() == [-1, 0, 0, -1, 1, -1, -1, -1, 2, 2, -1]
    # The second sample begins with an image where the first one ends with one.
    packed = pack(
        [([11, IMAGE], []), ([IMAGE, 11], [])], media=[image(1.0), image(2.0)], kit=PlainKit(bidirectional=True)
    )
    assert packed.layout.block_ids.tolist() == [-1, 0, 1, -1]


def test_a_sequence_of_texts_gets_a_filler_where_all_ranks_must_run_the_vision_tower():
    packed = pack([([11], [21]), ([11], [22])], fill=True)
    assert packed.filled
    assert packed.token_ids.tolist() == [[11, 21, 22, *FILLER]]
    assert packed.layout.segments[-1] == PackedSegment(start=3, end=6)
    assert packed.inputs["position_ids"][0].tolist() == [[0, 1, 1, 0, 1, 2]]
    assert packed.inputs["pixels"].tolist() == [[0.0, 0.0]]
    assert packed.target_ids.tolist() == [21, 22]


def test_a_sequence_is_filled_up_to_a_multiple_of_the_ranks_that_share_it():
    packed = pack([([11, 12], [21]), ([13], [22])], multiple_of=4)
    assert packed.token_ids.tolist() == [[11, 12, 21, 13, 22, 11, 11, 11]]
    assert packed.layout.segments[-1] == PackedSegment(start=5, end=8)
    assert packed.inputs["position_ids"][0].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.target_ids.tolist() == [21, 22]
    packed = pack([([11, 12], [21]), ([13], [])], multiple_of=4)
    assert packed.layout.length == 4
