"""The gated delta rule over trees of segments against the rule token by token, and its convolution."""

import pytest
import torch
from torch.nn.functional import conv1d, pad

from lmm_r1.lmm_kits.delta_rule import (
    CHUNK,
    Borders,
    SegmentTree,
    convolved_at_borders,
    gated_delta_rule,
    one_token_each,
)
from lmm_r1.models.packed.attention import by_depth

EXACT = {"atol": 1e-12, "rtol": 0}
CPU = torch.device("cpu")
# A prompt with two levels of branches, another prompt, and one by itself; one segment has no tokens.
PREFIXES = (None, 0, 0, 2, 2, None, 5, None)
# The first prompt ends before, at and after the border of a chunk, of ours and of transformers' (64).
FIRST = [size + more for size in (CHUNK, 64) for more in (-1, 0, 1)]
CASES = [(first, 1, 3, 70, 0, 5, 2, 129) for first in FIRST]


def tree_of(lengths: tuple[int, ...], prefixes: tuple[int | None, ...] = PREFIXES) -> SegmentTree:
    return SegmentTree(lengths=lengths, prefixes=prefixes, device=CPU)


def inputs_of(length: int, *, heads: int = 2, keys: int = 4, values: int = 6) -> list[torch.Tensor]:
    """Return queries, keys, values, decays and betas that remember for some dozens of tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    wide = [draw(length, heads, width) for width in (keys, keys, values)]
    scalars = [-0.1 * draw(length, heads).exp(), draw(length, heads).sigmoid()]
    return [tensor.requires_grad_() for tensor in (*wide, *scalars)]


def token_by_token(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the last state, as the paper defines them."""
    outputs = []
    for query, key, value, decay, beta in zip(*inputs, strict=True):
        query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
        state = state * decay.exp()[:, None, None]
        old = torch.einsum("hkv,hk->hv", state, key)
        state = state + torch.einsum("hk,hv->hkv", key, beta[:, None] * (value - old))
        outputs.append(torch.einsum("hkv,hk->hv", state, query) / query.shape[-1] ** 0.5)
    return (torch.stack(outputs) if outputs else inputs[2][:0]), state


def path(tree: SegmentTree, segment: int) -> torch.Tensor:
    """Return the tokens of a segment and of its prefix, in order."""
    return torch.tensor(tree.last_tokens(segment, tree.length), dtype=torch.long)


@pytest.mark.parametrize("lengths", CASES)
def test_each_segment_and_its_gradients_are_those_of_the_sequence_by_itself(lengths):
    tree = tree_of(lengths)
    inputs = inputs_of(tree.length)
    outputs, states = gated_delta_rule(*inputs, tree)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((outputs * weights).sum() + states.sum(), inputs)
    expected = torch.zeros(())
    for segment, own in enumerate(outputs.split(tree.lengths)):
        alone, state = token_by_token([part[path(tree, segment)] for part in inputs], torch.zeros_like(states[0]))
        alone = alone[len(alone) - len(own) :]
        torch.testing.assert_close(own, alone, **EXACT)
        torch.testing.assert_close(states[segment], state, **EXACT)
        expected = expected + (alone * weights.split(tree.lengths)[segment]).sum() + state.sum()
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


def test_sequences_go_on_from_given_states_in_chunks_and_token_by_token():
    inputs = inputs_of(40)
    _, before = gated_delta_rule(*(part[:38] for part in inputs), tree_of((20, 18), (None, None)))
    last = [part[38:] for part in inputs]
    outputs, states = gated_delta_rule(*last, tree_of((1, 1), (None, None)), initial=before)
    each, after = one_token_each(*last, before)
    for place in range(2):
        expected, state = token_by_token([part[place : place + 1] for part in last], before[place])
        for mine, kept in ((outputs, states), (each, after)):
            torch.testing.assert_close(mine[place], expected[0], **EXACT)
            torch.testing.assert_close(kept[place], state, **EXACT)


@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_a_convolution_takes_the_last_inputs_of_the_prefix(width):
    # Prefixes and branches are shorter than the kernel, too.
    tree = tree_of((2, 1, 9, 0, 3, 1, 2, 8))
    borders = Borders.of(tree, width=width)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tree.length, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(3, generator=generator, dtype=torch.float64)

    def convolved(part: torch.Tensor) -> torch.Tensor:
        return conv1d(pad(part.t(), (width - 1, 0)), weight[:, None], bias, groups=3).t()

    whole = convolved(inputs)
    whole[borders.tokens] = convolved_at_borders(inputs, weight, bias, borders)
    for segment, own in enumerate(whole.split(tree.lengths)):
        if len(own):
            torch.testing.assert_close(own, convolved(inputs[path(tree, segment)])[-len(own) :], **EXACT)


def test_flash_linear_attentions_function_is_called_once_per_depth_with_the_states_of_the_prefixes():
    """With a stand-in of the function that takes several sequences; the package itself needs a GPU."""
    tree = tree_of(CASES[0])
    inputs = inputs_of(tree.length)
    calls = []

    def rule(query, key, value, *, g, beta, initial_state, cu_seqlens, **settings):
        calls.append(settings)
        lengths = tuple(cu_seqlens.diff().tolist())
        several = tree_of(lengths, (None,) * len(lengths))
        outputs, states = gated_delta_rule(query[0], key[0], value[0], g[0], beta[0], several, initial=initial_state)
        return outputs[None], states

    outputs = by_depth(rule, *(part[None] for part in inputs), tree)[0]
    theirs, _ = gated_delta_rule(*inputs, tree)
    torch.testing.assert_close(outputs, theirs, **EXACT)
    for mine, exact in zip(
        torch.autograd.grad(outputs.square().sum(), inputs),
        torch.autograd.grad(theirs.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, exact, **EXACT)
    assert calls == [{"output_final_state": True, "use_qk_l2norm_in_kernel": True}] * 3
