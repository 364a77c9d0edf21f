"""Chain-of-thought responses with known verdicts, and some that keep sympy busy without end, for the reward server's benchmark."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SAMPLES_PER_PROMPT = 8
RIGHT_SHARE = 0.6
REFORMULATED_SHARE = 1 / 3
"""How many of the right answers are written in another form than the gold."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response to judge, and how it was made."""

    prompt: str
    response: str
    label: str
    answer: str
    is_right: bool
    is_pathological: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question with its gold answer, spellings of it, and wrong answers."""

    gold: str
    same: Sequence[str]
    """Other forms of the gold answer."""
    wrong: Sequence[str]


def _integer(rng: random.Random) -> Problem:
    n = rng.choice((rng.randint(-50, 200), rng.randint(200, 99_999)))
    return Problem(
        gold=str(n), same=(f"{n}.0", f"{n:,}", f"x = {n}"), wrong=(str(n + rng.randint(1, 9)), str(-n - 1), f"{n}.5")
    )


def _fraction(rng: random.Random) -> Problem:
    q = rng.choice((3, 7, 9, 11, 13))
    p, k = rng.randint(1, 5) * q + rng.randint(1, 2), rng.randint(2, 6)
    same = (f"{p}/{q}", rf"\dfrac{{{p}}}{{{q}}}", rf"\frac{{{k * p}}}{{{k * q}}}")
    return Problem(
        gold=rf"\frac{{{p}}}{{{q}}}", same=same, wrong=(rf"\frac{{{q}}}{{{p}}}", rf"\frac{{{p + 1}}}{{{q}}}")
    )


def _decimal(rng: random.Random) -> Problem:
    n = 4 * rng.randint(2, 400) + rng.choice((1, 3))
    return Problem(gold=str(n / 4), same=(rf"\frac{{{n}}}{{4}}", f"{n}/4"), wrong=(str((n + 1) / 4), str(n)))


def _radical(rng: random.Random) -> Problem:
    a, b = rng.randint(2, 90), rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23))
    same = (rf"\sqrt{{{a * a * b}}}", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}")
    wrong = (*(rf"{a + k}\sqrt{{{b}}}" for k in range(1, 5)), rf"{a}\sqrt{{{4 * b + 1}}}", str(a * b))
    return Problem(gold=rf"{a}\sqrt{{{b}}}", same=same, wrong=wrong)


def _circle(rng: random.Random) -> Problem:
    a, k = rng.randint(2, 2000), rng.randint(2, 5)
    same = (rf"\frac{{{k * a}\pi}}{{{k}}}", rf"{a} \cdot \pi")
    wrong = (*(rf"{a + k}\pi" for k in range(1, 5)), rf"\frac{{{a}\pi}}{{{k}}}", rf"{a}\pi^2")
    return Problem(gold=rf"{a}\pi", same=same, wrong=wrong)


def _polynomial(rng: random.Random) -> Problem:
    a, b = rng.sample(range(1, 80), 2)
    same = (f"(x+{a})(x+{b})", f"x(x+{a + b})+{a * b}")
    wrong = (f"(x+{a})(x-{b})", f"(x-{a})(x-{b})", *(f"x^2+{a + b + k}x+{a * b}" for k in range(1, 5)))
    return Problem(gold=f"x^2+{a + b}x+{a * b}", same=same, wrong=wrong)


def _rational(rng: random.Random) -> Problem:
    b = rng.randint(1, 40)
    a = b + rng.randint(2, 40)
    return Problem(
        gold=rf"\frac{{x+{a}}}{{x+{b}}}",
        same=(rf"1+\frac{{{a - b}}}{{x+{b}}}",),
        wrong=(rf"\frac{{x+{b}}}{{x+{a}}}", *(rf"1+\frac{{{a + k}}}{{x+{b}}}" for k in range(4))),
    )


def _interval(rng: random.Random) -> Problem:
    a = rng.randint(-20, 5)
    b = a + rng.randint(1, 30)
    same = (rf"\left[{a},{b}\right)", rf"[{a}, \frac{{{2 * b}}}{{2}})")
    return Problem(gold=f"[{a}, {b})", same=same, wrong=(f"[{a}, {b}]", f"({a}, {b})", f"[{a}, {b + 1})"))


def _line(rng: random.Random) -> Problem:
    a, b, c = rng.sample(range(2, 40), 3)
    same = (f"{2 * a}x + {2 * b}y = {2 * c}", f"{a}x + {b}y - {c} = 0")
    wrong = (f"{a}x - {b}y = {c}", *(f"{a}x + {b}y = {c + k}" for k in range(1, 5)))
    return Problem(gold=f"{a}x + {b}y = {c}", same=same, wrong=wrong)


def _logarithm(rng: random.Random) -> Problem:
    a, b = rng.sample(range(2, 60), 2)
    wrong = (*(rf"\ln {a * b + k}" for k in range(1, 5)), rf"\ln {a + b}")
    return Problem(gold=rf"\ln {a * b}", same=(rf"\ln {a} + \ln {b}", rf"\ln({a * b})"), wrong=wrong)


def _power(rng: random.Random) -> Problem:
    a, n = rng.choice((2, 3, 5)), rng.randint(50, 2000)
    same = (rf"{a} \cdot {a}^{{{n - 1}}}", rf"{a}^{{{n - 3}}} \cdot {a**3}")
    return Problem(gold=rf"{a}^{{{n}}}", same=same, wrong=(*(rf"{a}^{{{n + k}}}" for k in range(1, 5)), str(a * n)))


KINDS: dict[Callable[[random.Random], Problem], int] = {
    _integer: 46,
    _fraction: 14,
    _decimal: 5,
    _radical: 8,
    _circle: 5,
    _polynomial: 7,
    _rational: 3,
    _interval: 5,
    _line: 3,
    _logarithm: 2,
    _power: 2,
}
"""The kinds of problem, with how many in a hundred."""
SYMPY_KINDS: dict[Callable[[random.Random], Problem], int] = {_logarithm: 1, _power: 1}
"""What the reward server cannot decide without sympy."""

STEPS = (
    "Let me read the problem again: we are given {a} and {b}, and we want the value they lead to.",
    "First, I compute $ {a} \\times {b} = {product} $, which I will need in a moment.",
    "Subtracting gives $ {a} - {b} = {difference} $, so the two quantities differ by that much.",
    "Now set up the equation $ {a}x + {b} = {total} $ and isolate $x$.",
    "Dividing both sides, \\[ \\frac{{{product}}}{{{a}}} = {b}. \\]",
    "Wait, I should double-check this step: ${a} + {b} = {sum}$, and that matches what I had before.",
    "By the Pythagorean theorem, $\\sqrt{{{a}^2 + {b}^2}}$ is the length of the diagonal.",
    "Substituting back into the original expression we get $f({a}) = {a}^2 - {b} = {value}$.",
    "Hmm, that would mean the discriminant is $\\Delta = {b}^2 - 4 \\cdot {a}$, which is not what we want here.",
    "Alternatively, factor the left-hand side as $(x - {a})(x + {b})$ and look at the signs of both factors.",
    "So far this is consistent: the sum of the first {b} terms is $\\frac{{{b}({b}+1)}}{{2}}$.",
    "In the figure, the angle at the base is ${a}^\\circ$, so the other one must be $180^\\circ - {a}^\\circ$.",
    "Since the total is {total}, roughly {percent}\\% of it belongs to the first group.",
    "Let me verify with a small case, $n = {small}$: the formula gives ${small} \\cdot {a} = {multiple}$, as expected.",
)
ENDINGS = (
    (45, "<think>{work}</think>\n<answer>${answer}$</answer>"),
    (20, "<think>\n{work}\n</think>\n\n<answer>\nThe result is $\\boxed{{{answer}}}$.\n</answer>"),
    (25, "{work}\n\nTherefore, the final answer is $\\boxed{{{answer}}}$."),
    (10, "{work}\n\nThe answer is ${answer}$."),
)


def make_samples(
    count: int, *, seed: int, kinds: dict[Callable[[random.Random], Problem], int] = KINDS
) -> list[Sample]:
    """Return chain-of-thought responses, eight per prompt, in a shuffled order."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    while len(samples) < count:
        problem = rng.choices(list(kinds), weights=list(kinds.values()))[0](rng)
        prompt = prompt_of(rng)
        for _ in range(SAMPLES_PER_PROMPT):
            is_right = rng.random() < RIGHT_SHARE
            right = rng.choice(problem.same) if rng.random() < REFORMULATED_SHARE else problem.gold
            answer = right if is_right else rng.choice(problem.wrong)
            samples.append(make_sample(prompt, answer=answer, label=problem.gold, is_right=is_right, rng=rng))
    rng.shuffle(samples)
    return samples[:count]


def prompt_of(rng: random.Random) -> str:
    """Return a prompt as a chat template renders it."""
    question = " ".join(step_of(rng) for _ in range(3))
    return f"<|im_start|>user\n{question} What is the result?<|im_end|>\n<|im_start|>assistant\n"


def make_sample(prompt: str, *, answer: str, label: str, is_right: bool, rng: random.Random) -> Sample:
    """Return a sample whose response, of 300 to 900 tokens, ends in the answer."""
    work = "\n".join(step_of(rng) for _ in range(rng.randint(10, 26)))
    ending = rng.choices([text for _, text in ENDINGS], weights=[weight for weight, _ in ENDINGS])[0]
    response = ending.format(work=work, answer=answer)
    return Sample(prompt=prompt, response=response, label=label, answer=answer, is_right=is_right)


def step_of(rng: random.Random) -> str:
    """Return one sentence of reasoning with numbers of its own."""
    a, b, small = rng.randint(12, 98), rng.randint(3, 60), rng.randint(2, 9)
    return rng.choice(STEPS).format(
        a=a,
        b=b,
        small=small,
        product=a * b,
        difference=a - b,
        sum=a + b,
        value=a * a - b,
        total=a * 7 + b,
        percent=small * 10,
        multiple=small * a,
    )


def pathological(rng: random.Random) -> Sample:
    """Return a wrong response whose answer keeps sympy busy for longer than any limit."""
    k = rng.randint(2, 400)
    depth = rng.randint(28, 40)
    gold, answer = rng.choice(
        (
            ("7", rf"9^{{9^{{9^{{{k}}}}}}}"),
            ("7", rf"(10^8+{k})!"),
            ("7", rf"2^{{3^{{4^{{5+{k}}}}}}}-1"),
            (rf"\frac{{1}}{{x+{k}}}", r"\frac{1}{x+" * depth + f"y+{k}" + "}" * depth),
            (f"x^2-{k}", rf"(x+1)^{{{800 + k}}}(x-1)^{{{900 + k}}}+{k}"),
            (f"x^2-{k}", rf"(x+y+z+{k})^{{{70 + k % 20}}}"),
        )
    )
    sample = make_sample(prompt_of(rng), answer=answer, label=gold, is_right=False, rng=rng)
    return replace(sample, is_pathological=True)


def spoiled_batches(batch: int, count: int, *, share: float, seed: int) -> list[Sample]:
    """Return `count` batches; of each, the share (rounded, but at least one item where a batch has several) is pathological."""
    rng = random.Random(seed + batch)
    samples = make_samples(batch * count, seed=seed + 100 + batch)
    group = batch if batch > 1 else len(samples)
    for start in range(0, len(samples), group):
        for place in rng.sample(range(start, start + group), max(1, round(share * group))):
            samples[place] = pathological(rng)
    return samples


def description_of(samples: Sequence[Sample]) -> dict:
    """Return what the responses are like."""
    return {
        "median_characters": int(statistics.median(len(sample.response) for sample in samples)),
        "responses": len(samples),
        "right": round(statistics.mean(sample.is_right for sample in samples), 3),
        "prompts": len({sample.prompt for sample in samples}),
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "distinct_answers": len({(sample.answer, sample.label) for sample in samples}),
        "spelled_as_the_gold": round(statistics.mean(sample.answer == sample.label for sample in samples), 3),
        "kinds_percent": {kind.__name__.strip("_"): share for kind, share in KINDS.items()},
    }
