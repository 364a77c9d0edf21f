"""Sentences around answers: those that say the answer, and those that take it back, leave it open or change it."""

import random
import re
from collections.abc import Iterable

from helpers.answer_catalogue import CATALOGUE, Label, are_apart

NUMERIC_KINDS = frozenset({"number", "percentage", "money", "quantity"})
FORMULA_KINDS = NUMERIC_KINDS | {
    "interval",
    "set",
    "tuple",
    "list",
    "matrix",
    "expression",
    "equation",
    "based",
    "residue",
}
CHOICE_KINDS = frozenset({"choice", "lettered"})

SAID = (
    "{}",
    "{}.",
    " {} ",
    "**{}**",
    "**{}**.",
    "`{}`",
    "The answer is {}.",
    "The answer is {}",
    "The answer is: {}",
    "The answer is **{}**.",
    "The final answer is {}.",
    "The correct answer is {}.",
    "So the answer is {}.",
    "Therefore, the answer is {}.",
    "Answer: {}",
    "**Answer:** {}",
    "Final answer: {}",
    "It is {}.",
    "It's {}.",
    "It should be {}.",
    "It must be {}.",
    "答案是{}",
    "答案是{}。",
    "答案：{}",
    "答案为 {}。",
    "所以答案是{}。",
)
"""Ways to give an answer, right for whatever it is right for; each is also tried within the blocks of `BLOCKS`."""
FORMULA_SAID = (
    "${}$",
    "$${}$$",
    r"\({}\)",
    r"\[{}\]",
    "The answer is ${}$.",
    "The answer is\n\n${}$",
    "Thus, ${}$.",
)
WORD_SAID = (r"\text{{{}}}", '"{}"')
BLOCKS = (
    "<answer>{}</answer>",
    "<think>Let me see: 4 or 9?</think><answer>{}</answer>",
    "<think>Not 4.</think>\n<answer>\n{}\n</answer>",
    "<answer>{}",
    r"<answer>\boxed{{{}}}</answer>",
    r"\boxed{{{}}}",
    "Let us compute.\n\n\\boxed{{{}}}",
    "**Final Answer**\n\\[ \\boxed{{{}}} \\]",
    "#### {}",
    "Some reasoning with 4 and 9.\n\nThe answer is {}.",
    "Some reasoning with 4 and 9.\n\n**Answer:** {}",
)
"""Whole responses around a bare answer."""

DENIED = (
    "not {}", "It is not {}.", "It isn't {}.", "It is certainly not {}.", "The answer is not {}.",
    "The answer isn't {}.", "It can't be {}.", "It cannot be {}.", "It can not be {}.", "It couldn't be {}.",
    "It could not be {}.", "It won't be {}.", "It should not be {}.", "It shouldn't be {}.", "It must not be {}.",
    "It would not be {}.", "It is never {}.", "never {}", "anything but {}", "It is anything but {}.",
    "The answer is anything but {}.", "everything except {}", "anything except {}.", "anything other than {}",
    "It is other than {}.", "It is something other than {}.", "It differs from {}.", "It is different from {}.",
    "It is far from {}.", "It is nowhere near {}.", "It is hardly {}.", "It is no longer {}.", "I doubt it is {}.",
    "I doubt that it is {}.", "I doubt it's {}.", "I doubt the answer is {}.", "I don't think it is {}.",
    "I do not think that the answer is {}.", "I don't believe it is {}.", "I am not sure it is {}.",
    "I'm unsure whether it is {}.", "I wonder whether it is {}.", "It is unlikely that it is {}.",
    "It is unlikely to be {}.", "It is impossible that it is {}.", "It is impossible for it to be {}.",
    "It is wrong to say {}.", "It would be a mistake to say that it is {}.", "It is false that the answer is {}.",
    "It is not true that it is {}.", "There is no way it is {}.", "No way it is {}.", "Nobody would say {}.",
    "None of them is {}.", "{} is wrong.", "{} is not right.", "{} is incorrect.", "{} is not correct.",
    "{} is not the answer.", "{} is the wrong answer.", "{} isn't the answer.", "{} is a wrong answer.",
    "{} is out of the question.", "{} is ruled out.", "{} can be ruled out.", "We can rule out {}.",
    "We can exclude {}.", "The answer excludes {}.", "{}? No.", "{}, no.", "{} - wrong", "{} (wrong)",
    "{} is impossible.", "{} cannot be right.", "{} can't be the answer.", "The wrong answer is {}.",
    "The incorrect answer is {}.", "A wrong answer is {}.", "Unlike {}.", "neither {} nor anything else",
    "It is not equal to {}.", "It does not equal {}.", "It is unequal to {}.", "It is opposite to {}.",
    "the opposite of {}", "If it were {}, it would be wrong.", "Is it {}?", "Could it be {}?", "Who says it is {}?",
    "You might think it is {}, but it is not.", "You might think the answer is {}. It is not.", "不是{}", "不是{}。",
    "答案不是{}", "答案不是{}。", "答案并非{}", "并非{}", "绝不是{}", "答案绝不是{}。", "不可能是{}", "答案不可能是{}。", "不应该是{}", "不会是{}", "不能是{}",
    "除了{}", "除了{}都可以", "除{}以外", "{}是错的", "{}是错误的。", "{}不对", "{}不正确。", "{}错误", "不等于{}", "我不认为是{}", "我不认为答案是{}。",
    "我怀疑答案不是{}。", "未必是{}", "不一定是{}", "答案不一定是{}。", "排除{}", "可以排除{}。", "别选{}", "不选{}", "不要选{}", "没有{}", "难道是{}吗？",
    "答案是{}吗？", "错误答案是{}",
)  # fmt: skip
"""What denies an answer, doubts it or asks for it: never right for it."""
FORMULA_DENIED = (
    r"\ne {}", r"x \neq {}", r"x \ne {}", "x != {}", "≠ {}", r"$x \neq {}$", r"\neg {}", r"\text{{not }} {}",
)  # fmt: skip
_NO_FORMULA = re.compile(r"\$|(?<![\\A-Za-z{])[A-Za-z]{3,}|[^\x00-\x7f]")
BOUNDED = (
    "more than {}", "It is more than {}.", "less than {}", "fewer than {}", "greater than {}", "larger than {}",
    "smaller than {}", "at least {}", "at most {}", "over {}", "under {}", "above {}", "below {}", "up to {}",
    "no more than {}", "not more than {}", "> {}", "< {}", "x > {}", r"x \ge {}", r"\ge {}", r"\leq {}", "{}+",
    "{} or more", "{} or less", "{} or fewer", "{} and above", "The answer is more than {}.",
    "The answer is at least {}.", "It exceeds {}.", "It is bounded by {}.", "It is a multiple of {}.",
    "It is divisible by {}.", "大于{}", "小于{}", "超过{}", "至少{}", "至多{}", "不到{}", "不超过{}", "{}以上", "{}以下", "答案大于{}。",
)  # fmt: skip
"""What only bounds a number."""

HEDGED = (
    "{} or {}", "{}, or {}", "{} or maybe {}", "{}, or maybe {}", "{} or possibly {}", "{} or perhaps {}",
    "{} or else {}", "either {} or {}", "It is either {} or {}.", "It is {} or {}.", "The answer is {} or {}.",
    "The answer is either {} or {}.", "{}. Or maybe {}.", "The answer is {}. Or maybe {}.", "The answer is {}. Or {}.",
    "The answer is {}. It could also be {}.", "It might be {}, it might be {}.", "It could be {} or {}.",
    "Maybe {}, maybe {}.", "Perhaps {}, perhaps {}.", "{}, {}", "{}; {}", "{} / {}", "{}/{}", "{} | {}", "{} and {}",
    "{} & {}", "{}, and {}", "both {} and {}", "{} and/or {}", "{}\n{}", "- {}\n- {}", "1. {}\n2. {}", "(1) {} (2) {}",
    "{} ({})", "{} (or {})", "{} [or {}]", "{} vs {}", "{} vs. {}", "{} versus {}", "{}~{}", r"{} \text{{ or }} {}",
    r"{}\text{{ or }}{}", r"{} \lor {}", r"{} \text{{ and }} {}", r"${}$ or ${}$", r"${}$, ${}$", r"\({}\) or \({}\)",
    "**{}** or **{}**", "**{}**, **{}**", r"\text{{{}}} or \text{{{}}}", r"{}, \quad {}", r"{} \quad {}", r"{} \\ {}",
    "{} {}", "{}，{}", "{}、{}", "{}；{}", "{}或{}", "{}或者{}", "{} 或 {}", "{}还是{}", "要么{}要么{}", "不是{}就是{}", "可能是{}，也可能是{}",
    "可能是{}或{}。", "答案是{}或{}", "答案是{}或者{}。", "答案是{}，或者{}。", "答案是{}和{}", "{}和{}", "{}与{}", "{}以及{}", "between {} and {}",
    "It is between {} and {}.", "介于{}和{}之间", "If n is even {}, else {}.", "{} if so, otherwise {}.", "{} unless {}",
    "{} but {}", "It depends: {} here, {} there.", "{} for this, {} for that.", "{} in one case and {} in the other.",
    "Both {} and {} are right.", "The answer is {} and the answer is {}.", "The answers are {} and {}.",
    "Candidates: {}, {}", "One of {} and {}.", "One of {}, {}", "It is one of {} and {}.", "{} (alternatively {})",
    "{}, alternatively {}", "Answer: {} or {}", "Answers: {}, {}", "Answer 1: {}; answer 2: {}",
)  # fmt: skip
"""What gives two different answers and settles on none: right for neither."""
SECOND = (
    "{}. Actually {}", "{}. Actually, it is {}.", "{}. No, {}.", "{}. Wait, {}", "{}... no, {}",
    "The answer is {}. The answer is {}.", "{} is {}", "{} is {}.", "{} equals {}", "{}: {}", "{} = {}",
    "{} is the answer, and so is {}.", "{}, i.e. {}", "{} (that is {})", r"\boxed{{{}}} \boxed{{{}}}",
    "First {}, then {}.", "{} -> {}", "{}, not {}", "It is {}, not {}.", "not {} but {}", "It is not {} but {}.",
    "It is not {}. It is {}.", "{} instead of {}", "{} rather than {}", "{}, or equivalently {}", r"{} \approx {}",
    "不是{}，是{}", "不是{}，而是{}。", "是{}，不是{}", "{}是{}", "答案是{}。答案是{}。", "{}，不，{}", "x = {}, x = {}",
    "I said {}, I mean {}.", "{} is wrong, {} is right.", "{} is right, {} is wrong.", "{}\n\nThe answer is {}.",
    "The answer is {}.\n\n{}", "{} such that {} is right", "Yes, {}. No, {}.", "{} was {}", "**{}** is {}",
    "{} is **{}**", "${}$ is {}",
)  # fmt: skip
"""What gives a second, different answer: right for at most one of the two."""
LEFT_OPEN = (
    "{} or something else", "{} or another value", "{} or not", "It is {} or not.", "{} or anything else",
    "{} or whatever", "{}, or not.", "Possibly {}, possibly not.", "It may or may not be {}.", "{} unless it is not",
    "I cannot tell whether it is {}.", "{} or none of these", "{}或其他", "{}或别的", "也许是{}，也许不是", "可能是{}，也可能不是。",
)  # fmt: skip
"""What gives one answer and keeps the rest open: not right for it."""

CHANGED = (
    "{} halves", "{} thirds", "{} quarters", "{} fourths", "{} fifths", "{} tenths", "{} hundredths", "{} thousandths",
    "{} millionths", "{} squared", "{} cubed", "{} factorial", "{}!", "{} hundred", "{} thousand", "{} million",
    "{} billion", "{} trillion", "{} dozen", "{} below zero", "{} under zero", "minus {}", "negative {}", "-{}", "−{}",
    "- {}", "{} divided by two", "{} divided by 4", "{} over two", "{} times two", "{} multiplied by 3", "{} plus one",
    "{} minus one", "{} to the power of two", "{} to the third power", "{} modulo 3", "{} mod 3", "{} in base 3",
    "{} base 4", "half of {}", "a third of {}", "twice {}", "double {}", "triple {}", "three times {}",
    "the square of {}", "the square root of {}", "the cube root of {}", "the reciprocal of {}", "the inverse of {}",
    "one {}th", "1/{}", "{}/2", r"\frac{{{}}}{{2}}", r"\frac{{1}}{{{}}}", r"\sqrt{{{}}}", "√{}", "{}^2", "{}^{{2}}",
    "{}²", "{}³", "2^{{{}}}", "{}e3", "{}E2", "{}k", "{}.5", "{}.01", "{}5", "5{}", "{}0", "0.{}", ".{}",
    "{} and a half", "{} 1/2", "{} point five", r"{}\frac{{1}}{{2}}", "{}i", r"{}\pi", "{}π", "{}x", r"{}\sqrt{{2}}",
    r"\log {}", r"\ln {}", r"\sin {}", r"|{}-1|", "{} + 1", "{} - 1", "{} * 2", r"{} \times 2", r"{}\cdot 10^2",
    r"{} \times 10^{{3}}", "{} wrong", "{}_2", "{}万", "{}亿", "{}千", "{}百", "{}百万", "{}千万", "{}十", "{}分之一", "{}成",
    "{}折", "{}的平方", "{}的一半", "{}的两倍", "负{}", "零下{}", "{}个半", "{}点五", "{}又二分之一", "{}的倒数", "{}的阶乘", "根号{}", "{}除以二",
    "{}乘二", "{}加一", "{}减一",
)  # fmt: skip
"""What makes another number of a natural number above one."""
CHANGED_NUMBERS = ("5", "6", "7", "12", "3", "16")


def said(label: Label) -> list[str]:
    """Return the sentences that give the label's answer, in each of its spellings."""
    sentences = [frame.format(text) for text in label.bare for frame in SAID]
    if label.kind in FORMULA_KINDS:
        formulas = [text for text in label.bare if not _NO_FORMULA.search(text)]
        return sentences + [frame.format(text) for text in formulas for frame in FORMULA_SAID]
    return sentences + [frame.format(text) for text in label.bare if text.isalpha() for frame in WORD_SAID]


def denials(label: Label) -> tuple[str, ...]:
    """Return the sentences that deny or bound an answer of this label's kind."""
    more = BOUNDED + FORMULA_DENIED if label.kind in NUMERIC_KINDS else ()
    # "No, no." and "No? No." say no.
    frames = [
        frame for frame in DENIED if label.text not in ("No", "False", "否") or not frame.lower().endswith(" no.")
    ]
    return (*frames, *more)


def rivals(label: Label, *, of: Iterable[Label] = CATALOGUE) -> list[Label]:
    """Return the labels of the same kind that no answer may share with this one, in an order of this label's own.

    Zero and one have none: `5/1` is 5, and `0/5` is 0.
    """
    kinds = CHOICE_KINDS if label.kind in CHOICE_KINDS else {label.kind}
    found = [other for other in of if other.kind in kinds and are_apart(label, other) and other.value not in "01"]
    random.Random(label.text).shuffle(found)
    return found if label.value not in "01" else []
