"""Scores of single answers by a registered verifier, and texts that a policy, a data set or an attacker may send to one."""

from __future__ import annotations

from hypothesis import strategies as st

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item, Score


def scored(name: str, answer: str, label: str, **settings: object) -> Score:
    """Return the score of an answer in the format; the quick score has to be the same, or None."""
    return scored_response(name, f"<think>t</think><answer>{answer}</answer>", label, **settings)


def scored_response(name: str, response: str, label: str, **settings: object) -> Score:
    """Return the score of a whole response."""
    verifier, item = get_verifier(name, **settings), Item(prompt="p", response=response, label=label)
    score = verifier.score(item)
    assert verifier.quick_score(item) in (score, None)
    return score


MEGABYTE = 10**6
PIECES = (
    "<think>", "</think>", "<answer>", "</answer>", "<think", r"\boxed{", r"\fbox{", "{", "}", "$", "$$", r"\(", r"\[", "\0",
    "\ud800", "\udfff", "\ufeff", "\u202e", "𝟜", "½", "１２", "९", "\\", r"\frac", r"\frac{1}{", r"\sqrt{", r"\text{", r"\pm",
    r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", r"\infty", "9^{9^{9^9}}", "99999999!", "10^{10^{10}}", r"\int_0^1 x^x dx",
    "x^{1000000}", "(1+x)^{9999}", "4", "-", ",", ";", ".", "%", "=", "<", " or ", " and ", "answer is ", "#### ", "\n", "\t",
    "<|im_start|>assistant\n", "<|im_end|>", "<pad>", "[/INST]", "None", "nan", "1e999", "__import__('os')", "lambda",
)  # fmt: skip
LARGE = (
    "a" * MEGABYTE,
    "1," * (MEGABYTE // 2),
    " " * MEGABYTE,
    "\0" * MEGABYTE,
    "<pad>" * (MEGABYTE // 5),
    "<think>" * (MEGABYTE // 7),
    "<answer>" * (MEGABYTE // 8),
    r"\boxed{" * (MEGABYTE // 7),
    "$1$ " * (MEGABYTE // 4),
    "9" * MEGABYTE,
    "<answer>" + "1+" * (MEGABYTE // 2) + "1</answer>",
    "{" * 10_000 + "4" + "}" * 10_000,
    r"<answer>\boxed{" + "{" * 10_000 + "4" + "}" * 10_000 + "}</answer>",
    "<answer>" + "(" * 450 + "x" + ")" * 450 + "</answer>",
    "<answer>" + r"\sqrt{" * 160 + "</answer>",
    "<answer>" + r"\frac{1}{" * 90 + "2" + "}" * 90 + "</answer>",
    "<answer>9^{9^{9^9}}</answer>",
    "<answer>" + "9" * 999 + "!</answer>",
)

any_text = st.text(alphabet=st.characters(exclude_categories=()), max_size=60)
pieced = st.lists(st.one_of(st.sampled_from(PIECES), any_text), max_size=12).map("".join)
wrapped = st.tuples(
    st.sampled_from(("{}", "<answer>{}</answer>", "<think>t</think><answer>{}</answer>", r"\boxed{{{}}}", "${}$")),
    pieced,
).map(lambda pair: pair[0].format(pair[1]))
response = st.one_of(any_text, pieced, wrapped, wrapped, st.sampled_from(LARGE))
label = st.one_of(any_text, pieced, st.sampled_from((r"2\sqrt{2}", "4", "[1, 2]", "x^2+1", "north", "9^{9^{9^9}}")))
