"""Trees of what samples begin with, worked out by hand; and the definition of one, on random samples."""

import random

import numpy as np
import pytest

from lmm_r1.data import sample as module
from lmm_r1.data.sample import PlacedMedia, PrefixNode, TreeSample, prefix_tree


@pytest.fixture(autouse=True)
def nodes_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SHARED", 1)


def sample(text: str, *media: PlacedMedia) -> TreeSample:
    return TreeSample(token_ids=np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64), media=media)


def tree(*texts: str, known: int = 1) -> list[tuple[str, int | None, tuple[int, ...]]]:
    """The tokens of each node, its parent and its samples."""
    samples = [sample(text) for text in texts]
    return described(samples, known=known)


def described(samples: list[TreeSample], *, known: int = 1) -> list[tuple[str, int | None, tuple[int, ...]]]:
    nodes = prefix_tree(samples, known=known)
    return [
        (bytes(samples[node.samples[0]].token_ids[node.start : node.end].tolist()).decode(), node.parent, node.samples)
        for node in nodes
    ]


def image(key: str, start: int, end: int | None) -> PlacedMedia:
    return PlacedMedia(start, {}, ref_key=key, end=end)


def test_a_sample_by_itself_is_one_node():
    assert prefix_tree([sample("pabc")], known=1) == (PrefixNode(start=0, end=4, parent=None, samples=(0,)),)


def test_the_first_node_holds_what_all_have_in_common_and_others_what_some_have():
    assert tree("pxab1", "pxcd", "pxab2", "pxae") == [
        ("px", None, (0, 1, 2, 3)),
        ("a", 0, (0, 2, 3)),
        ("b", 1, (0, 2)),
        ("1", 2, (0,)),
        ("2", 2, (2,)),
        ("e", 1, (3,)),
        ("cd", 0, (1,)),
    ]


def test_branches_that_differ_from_the_first_token_on_have_the_prompt_in_common():
    assert tree("pp1", "pp2", "pp3", known=2) == [
        ("pp", None, (0, 1, 2)),
        ("1", 0, (0,)),
        ("2", 0, (1,)),
        ("3", 0, (2,)),
    ]


def test_a_sample_that_another_goes_on_from_ends_with_a_node():
    assert tree("pab", "pabc", "p") == [("p", None, (0, 1, 2)), ("ab", 0, (0, 1)), ("c", 1, (1,))]
    assert tree("pab", "pab") == [("pab", None, (0, 1))]


def test_runs_that_are_too_short_stay_with_each_sample_but_where_they_cost_nothing(monkeypatch):
    monkeypatch.setattr(module, "LEAST_SHARED", 3)
    # Two tokens are too few, with a third one further down there are enough.
    assert tree("p1", "pab2", "pab3") == [("p", None, (0, 1, 2)), ("1", 0, (0,)), ("ab2", 0, (1,)), ("ab3", 0, (2,))]
    assert tree("p1", "pab2", "pabc3", "pabc4") == [
        ("p", None, (0, 1, 2, 3)),
        ("1", 0, (0,)),
        ("ab2", 0, (1,)),
        ("abc", 0, (2, 3)),
        ("3", 3, (2,)),
        ("4", 3, (3,)),
    ]
    # What all have in common stands with the prompt, and samples that are the same all through are one node.
    assert tree("pa1", "pa2") == [("pa", None, (0, 1)), ("1", 0, (0,)), ("2", 0, (1,))]
    assert tree("p1", "pa", "pa") == [("p", None, (0, 1, 2)), ("1", 0, (0,)), ("a", 0, (1, 2))]
    # One that ends within a short run has it to itself.
    assert tree("p1", "pa", "pab") == [("p", None, (0, 1, 2)), ("1", 0, (0,)), ("a", 0, (1,)), ("ab", 0, (2,))]


def test_a_segment_with_media_is_shared_whole_or_not_at_all():
    # The same picture, and other words behind it.
    shown = image("a", 2, 6)
    assert described([sample("pxIIoo1", shown), sample("pxIIok2", shown)]) == [
        ("px", None, (0, 1)),
        ("IIoo1", 0, (0,)),
        ("IIok2", 0, (1,)),
    ]
    # Whole, with what is generated behind it.
    assert described([sample("pxIIoo1", shown), sample("pxIIoo2", shown)])[0] == ("pxIIoo", None, (0, 1))
    # Of a segment that does not say where it ends, not even that.
    shown = image("a", 2, None)
    assert described([sample("pxIIoo1", shown), sample("pxIIoo2", shown)])[0] == ("px", None, (0, 1))
    assert described([sample("pxIIoo", shown), sample("pxIIoo", shown)]) == [("pxIIoo", None, (0, 1))]


def test_media_are_told_apart_by_their_keys_and_by_where_they_stand():
    one, other = image("a", 2, 4), image("b", 2, 4)
    assert described([sample("pxII1", one), sample("pxII1", other), sample("pxII2", one)]) == [
        ("px", None, (0, 1, 2)),
        ("II", 0, (0, 2)),
        ("1", 1, (0,)),
        ("2", 1, (2,)),
        ("II1", 0, (1,)),
    ]
    assert described([sample("pxIII", one), sample("pxIII", image("a", 3, 5))])[0] == ("px", None, (0, 1))
    assert described([sample("pxII", one), sample("pxII")])[0] == ("px", None, (0, 1))
    # Those of the prompt are known to be the same.
    assert described([sample("II1", image("a", 0, None)), sample("II2", image("a", 0, None))], known=2)[0][0] == "II"


def random_samples(draw: random.Random) -> list[TreeSample]:
    """Samples of one prompt over a small alphabet, in which capital letters stand for a segment with media."""
    samples = []
    for _ in range(draw.randint(1, 9)):
        tokens, media = [7, 7], []
        for _ in range(draw.randint(0, 6)):
            if draw.random() < 0.3:
                width = draw.randint(1, 3)
                media.append(image(draw.choice("ab"), len(tokens), len(tokens) + width))
                tokens += [draw.choice((1, 2)) for _ in range(width)]
            else:
                tokens.append(draw.choice((3, 4)))
        samples.append(TreeSample(token_ids=np.array(tokens), media=media))
    return samples


@pytest.mark.parametrize("least", [1, 2, 4])
@pytest.mark.parametrize("seed", range(60))
def test_a_tree_holds_each_sample_and_nothing_that_its_samples_do_not_have(seed, least, monkeypatch):
    monkeypatch.setattr(module, "LEAST_SHARED", least)
    samples = random_samples(random.Random(seed))
    nodes = prefix_tree(samples, known=2)
    for index, own in enumerate(samples):
        path = [node for node in nodes if index in node.samples]
        # One behind the other, from the first token to the last.
        assert [node.start for node in path] == [0, *(node.end for node in path[:-1])]
        assert path[-1].end == len(own.token_ids)
        assert [node.parent for node in path] == [None, *(nodes.index(node) for node in path[:-1])]
        for item in own.media:
            assert any(node.start <= item.start and item.end <= node.end for node in path), "no node ends within one"
    for node in nodes:
        assert node.length > 0
        first, *others = [samples[member] for member in node.samples]
        for other in others:
            assert first.token_ids[: node.end].tolist() == other.token_ids[: node.end].tolist()
            placed = [
                [(item.start, item.key) for item in one.media if item.start < node.end] for one in (first, other)
            ]
            assert placed[0] == placed[1]
    # In pre-order: whatever is behind a node's parent and before it goes on from that parent, too.
    for number, node in enumerate(nodes):
        if node.parent is not None:
            assert all(
                set(nodes[between].samples) <= set(nodes[node.parent].samples)
                for between in range(node.parent, number)
            )


@pytest.mark.parametrize("seed", range(30))
def test_with_nodes_of_single_tokens_no_two_samples_part_before_they_must(seed):
    samples = random_samples(random.Random(seed))
    nodes = prefix_tree(samples, known=2)
    for one in range(len(samples)):
        for other in range(one):
            shared = max(node.end for node in nodes if {one, other} <= set(node.samples))
            assert shared == in_common(samples[one], samples[other])


def in_common(one: TreeSample, other: TreeSample) -> int:
    """How much two samples have in common, segments with media whole or not at all, token by token."""

    def units(sample: TreeSample) -> list[tuple]:
        found, place = [], 0
        while place < len(sample.token_ids):
            item = next((item for item in sample.media if item.start == place), None)
            end = place + 1 if item is None else item.end
            found.append((item and item.key, tuple(sample.token_ids[place:end].tolist())))
            place = end
        return found

    length = 0
    for mine, theirs in zip(units(one), units(other), strict=False):
        if mine != theirs:
            break
        length += len(mine[1])
    return length
