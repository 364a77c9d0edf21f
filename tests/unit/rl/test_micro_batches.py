"""How samples are cut into optimizer steps, over ranks and into passes; the numbers are worked out by hand."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from helpers.rl_steps import sample

from lmm_r1.rl.samples import Pass, PassLimits, TrainingSample, forward_passes, update_passes


def groups(*responses: Sequence[int], prompts: Sequence[int] = ()) -> list[TrainingSample]:
    """One group per list of response lengths, with prompts of 10 tokens where none are given."""
    prompts = prompts or [10] * len(responses)
    samples = []
    for number, (prompt, lengths) in enumerate(zip(prompts, responses, strict=True)):
        for place, length in enumerate(lengths):
            samples.append(sample([1] * prompt, [50 + place] * length, group=number))
    return placed(samples)


def placed(samples: list[TrainingSample]) -> list[TrainingSample]:
    for place, one in enumerate(samples):
        one.place = place
    return samples


def shared(*, samples: int | None = None, tokens: int | None = None) -> PassLimits:
    return PassLimits(samples=samples, tokens=tokens, share_prefix=True)


def apart(*, samples: int | None = None, tokens: int | None = None) -> PassLimits:
    return PassLimits(samples=samples, tokens=tokens, share_prefix=False)


def of_one_rank(samples: list[TrainingSample], limits: PassLimits) -> list[set[int]]:
    (passes,) = sets(forward_passes(samples, ranks=1, limits=limits))
    return passes


def sets(ranks: list[list[Pass]]) -> list[list[set[int]]]:
    """The places of the samples of each pass."""
    return [[{one.place for one in batch} for batch in passes] for passes in ranks]


def cost(samples: list[TrainingSample], limits: PassLimits) -> int:
    """What is computed for samples in one pass."""
    groups = {one.group: [other for other in samples if other.group == one.group] for one in samples}
    return sum(limits.part(group).tokens for group in groups.values())


def test_a_prompt_counts_once_per_group_in_a_pass():
    samples = groups([5, 7], [1, 1, 1])
    assert cost(samples, shared()) == (10 + 5 + 7) + (10 + 3)
    assert cost(samples, apart()) == 2 * 10 + 5 + 7 + 3 * 10 + 3


def test_groups_are_added_until_a_pass_has_as_many_samples_as_it_may():
    samples = groups([1] * 4, [1] * 4, [1] * 4)
    assert of_one_rank(samples, shared(samples=1)) == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}]
    assert of_one_rank(samples, shared(samples=4)) == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}]
    # 5 samples are rounded up to two whole groups.
    assert of_one_rank(samples, shared(samples=5)) == [{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11}]
    assert of_one_rank(samples, shared()) == [set(range(12))]


def test_without_shared_prefixes_a_pass_has_exactly_as_many_samples_as_asked_for():
    samples = groups([9, 1, 5, 3])
    # The longest together, so that padding is short.
    assert of_one_rank(samples, apart(samples=2)) == [{0, 2}, {1, 3}]
    assert of_one_rank(samples, apart(samples=3)) == [{0, 2, 3}, {1}]


def test_groups_share_a_pass_as_far_as_the_tokens_allow():
    # Tokens of the groups: 10 + 20 = 30, 10 + 4 = 14, 10 + 10 = 20, 10 + 2 = 12.
    samples = groups([10, 10], [2, 2], [5, 5], [1, 1])
    # 30 + 20 = 50; 14 + 12 = 26.
    assert of_one_rank(samples, shared(tokens=50)) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    # Both limits: 2 samples are one group.
    assert of_one_rank(samples, shared(samples=2, tokens=50)) == [{0, 1}, {4, 5}, {2, 3}, {6, 7}]
    # Whole samples: 20 + 20 = 40, 15 + 15 + 12 = 42, 12 + 11 + 11 = 34.
    assert of_one_rank(samples, apart(tokens=47)) == [{2, 4, 5}, {0, 1}, {3, 6, 7}]


def test_a_group_over_the_tokens_is_divided_into_few_parts_that_repeat_the_prompt():
    # 30 tokens leave 20 for responses next to the prompt of 10: 12 + 8, 11 + 9, 7 + 6 + 5.
    samples = groups([5, 11, 6, 12, 9, 8, 7])
    assert of_one_rank(samples, shared(tokens=30)) == [{3, 5}, {1, 4}, {6, 2, 0}]
    # The last part, 10 + 18 = 28 of 45 tokens, has room for another group: 10 + 7 = 17.
    samples = groups([18, 18, 17, 18], [4, 3])
    assert of_one_rank(samples, shared(tokens=46)) == [{0, 1}, {2, 3}, {4, 5}]
    samples = groups([18, 18, 18], [4, 3])
    assert of_one_rank(samples, shared(tokens=46)) == [{0, 1}, {2, 3, 4}]


def test_a_sample_over_the_tokens_goes_alone():
    samples = groups([100, 1, 1], [3])
    assert of_one_rank(samples, shared(tokens=40)) == [{0}, {1, 2, 3}]
    assert of_one_rank(samples, apart(tokens=40)) == [{0}, {3, 1, 2}]
    # A prompt that is over them alone.
    samples = groups([2, 1], [3], prompts=[50, 10])
    assert of_one_rank(samples, shared(tokens=40)) == [{0}, {1}, {2}]


def test_ranks_get_whole_groups_as_many_samples_and_about_as_many_tokens():
    # Tokens of the groups: 110, 60, 30, 20.
    samples = groups([50, 50], [25, 25], [10, 10], [5, 5])
    assert sets(forward_passes(samples, ranks=2, limits=shared(samples=4))) == [[{0, 1, 6, 7}], [{2, 3, 4, 5}]]


def test_a_group_for_which_no_rank_has_room_is_divided():
    # 3 groups of 4 for 2 ranks with room for 6 each: the last is halved.
    samples = groups([3] * 4, [2] * 4, [1] * 4)
    assert sets(forward_passes(samples, ranks=2, limits=shared())) == [[{0, 1, 2, 3, 8, 9}], [{4, 5, 6, 7, 10, 11}]]
    # Groups of 4 for 4 ranks with room for 2 each.
    samples = groups([2] * 4, [1] * 4)
    assert sets(forward_passes(samples, ranks=4, limits=shared())) == [[{0, 1}], [{2, 3}], [{4, 5}], [{6, 7}]]


def test_ranks_of_unequal_content_make_as_many_passes():
    # The first rank gets the group of 10 + 300 tokens, in 3 passes; the other one 10 + 6 tokens.
    samples = groups([100, 100, 100], [3, 2, 1])
    one, other = sets(forward_passes(samples, ranks=2, limits=shared(tokens=110)))
    assert one == [{0}, {1}, {2}]
    # {3, 4, 5} is divided into {3} and {4, 5}, and the larger of those, 10 + 2 + 1 and 10 + 3, once more.
    assert sorted(map(sorted, other)) == [[3], [4], [5]]

    # Where a pass holds several groups, it is divided between them.
    samples = groups([100, 100], [100, 100], [3, 2], [2, 1])
    one, other = sets(forward_passes(samples, ranks=2, limits=shared(tokens=220)))
    assert one == [{0, 1}, {4, 5}]
    assert other == [{2, 3}, {6, 7}]
    samples = groups([100] * 4, [3, 2], [2, 1])
    one, other = sets(forward_passes(samples, ranks=2, limits=shared(tokens=220)))
    assert one == [{0, 1}, {2, 3}]
    assert other == [{4, 5}, {6, 7}]


def group_counts(samples: list[TrainingSample], *, batch_size: int) -> list[Counter]:
    """How many samples of which group each optimizer step holds."""
    steps = update_passes(samples, batch_size=batch_size, ranks=1, limits=shared(samples=4), seed="a").steps
    return [Counter(one.group for rank in ranks for batch in rank for one in batch) for ranks in steps]


def test_an_optimizer_step_holds_whole_groups():
    samples = groups(*[[1] * 4 for _ in range(10)])
    counts = group_counts(samples, batch_size=12)
    # The last step has the one group of ten that is left.
    assert [sorted(count.values()) for count in counts] == [[4, 4, 4]] * 3 + [[4]]
    assert len(set().union(*counts)) == 10


def test_a_group_that_straddles_two_optimizer_steps_is_divided():
    samples = groups(*[[1] * 4 for _ in range(3)])
    counts = group_counts(samples, batch_size=6)
    assert [sorted(count.values()) for count in counts] == [[2, 4], [2, 4]]
    assert sum(counts, Counter()) == {0: 4, 1: 4, 2: 4}


def tree(*samples: tuple[dict[int, int], int], group: int = 0) -> list[TrainingSample]:
    """One group, of whose samples each has nodes in common with others, and tokens of its own."""
    return placed(
        [
            sample(
                [1] * 10,
                [100 + node for node, tokens in nodes.items() for _ in range(tokens)] + [1000 + place] * own,
                group=group,
            )
            for place, (nodes, own) in enumerate(samples)
        ]
    )


@pytest.fixture
def trees(monkeypatch):
    monkeypatch.setattr("lmm_r1.data.sample.LEAST_SHARED", 1)


# Two trunks of 40 and 30 tokens with branches of 5 and 6; the last two of the second go on alike for 8 tokens more.
TRUNKS = tree(
    ({1: 40}, 5), ({2: 30}, 6), ({1: 40}, 5), ({2: 30, 3: 8}, 1), ({1: 40}, 5), ({2: 30, 3: 8}, 2), ({1: 40}, 5)
)


@pytest.mark.usefixtures("trees")
def test_what_samples_have_in_common_behind_the_prompt_counts_once_too():
    assert cost(TRUNKS, shared()) == 10 + (40 + 4 * 5) + (30 + 6) + (8 + 1 + 2)
    assert cost([TRUNKS[0], TRUNKS[3]], shared()) == 10 + 45 + 39
    assert cost(TRUNKS, apart()) == 7 * 10 + 4 * 45 + 36 + 39 + 40
    # Nodes of other groups have other tokens.
    other = tree(({1: 7}, 1), group=1)
    assert cost([*TRUNKS, *other], shared()) == 117 + 18


@pytest.mark.usefixtures("trees")
def test_a_tree_over_the_tokens_is_divided_between_its_branches():
    assert of_one_rank(TRUNKS, shared(tokens=117)) == [set(range(7))]
    # 10 + 60 and 10 + 47.
    assert of_one_rank(TRUNKS, shared(tokens=70)) == [{0, 2, 4, 6}, {1, 3, 5}]
    # Three branches of the first trunk make 65 tokens, and the fourth goes alone.
    assert of_one_rank(TRUNKS, shared(tokens=65)) == [{0, 2, 4}, {1, 3, 5}, {6}]


@pytest.mark.usefixtures("trees")
@pytest.mark.parametrize("seed", range(20))
def test_random_trees_are_planned_whole_and_within_the_tokens(seed):
    draw = random.Random(seed)
    samples: list[TrainingSample] = []
    for group in range(4):
        tokens = {node: draw.randint(1, 30) for node in range(1, 6)}
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in tokens:
            paths[node] = (*paths[draw.randrange(node)], node)
        made = [
            ({node: tokens[node] for node in draw.choice(list(paths.values()))}, draw.randint(1, 20)) for _ in range(6)
        ]
        samples += tree(*made, group=group)
    placed(samples)
    limits = shared(tokens=draw.randint(60, 200))
    ranks = forward_passes(samples, ranks=2, limits=limits)
    assert sorted(one.place for passes in ranks for batch in passes for one in batch) == list(range(24))
    assert len({len(passes) for passes in ranks}) == 1
    for batch in (batch for passes in ranks for batch in passes):
        assert len(batch) == 1 or cost(batch, limits) <= limits.tokens
