"""Labels of every kind, with spellings that are right for each and, for any two, whether one answers the other.

All of it was written by hand, as a fair teacher would mark, and none of it by what the verifiers say.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True, repr=False)
class Label:
    """One gold answer and what is right for it."""

    text: str
    kind: str
    value: str
    """What it means: two labels of one value are right for each other."""
    same: tuple[str, ...] = ()
    """Other spellings of the whole value, each right for this label."""
    shorter: frozenset[str] = frozenset()
    """Values that say less and are right for it, as it is right for them: `12` for `12 cm`, and `12 cm` for `12`."""
    accepts: frozenset[str] = frozenset()
    """Values that are right for it, as it is not for them: `101` for `101_2`, whose question names the base."""
    open: frozenset[str] = frozenset()
    """Values that a fair teacher may mark either way beside it: nothing is asked of such a pair."""

    def __repr__(self) -> str:
        return f"<{self.kind} {self.text}>"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling of the whole value, the label itself first."""
        return (self.text, *self.same)

    @property
    def bare(self) -> tuple[str, ...]:
        """The spellings that are no sentence of their own, so that a sentence may be written around them."""
        return (self.text, *(text for text in self.same if not _SENTENCE.search(text)))


_SENTENCE = re.compile(r"^in |\b(?:is|be|choose)\b|[选是].|[.。]$")
DIMENSIONS = frozenset({"money", "quantity", "percentage"})
COLLECTIONS_IN_BRACKETS = frozenset({"interval", "set", "tuple"})


def expected(answer: Label, label: Label) -> bool | None:
    """Return whether one label's text is right for the other label; None where that is left open.

    Two that say more than a third do not answer one another where they are of one kind, or say what it is: `12 cm`
    and `12 kg`, `(B) 12` and `B. 13`. It is left open where they say more in different ways: `12 cm` and `(B) 12`.
    """
    if answer.value == label.value:
        return True
    if answer.value in label.shorter | label.accepts or label.value in answer.shorter:
        return True
    if answer.value in label.open or label.value in answer.open:
        return None
    kinds = {answer.kind, label.kind}
    clash = len(kinds) == 1 or kinds <= DIMENSIONS or kinds <= COLLECTIONS_IN_BRACKETS or label.value in answer.accepts
    return False if clash or are_apart(answer, label) else None


def share_an_answer(one: Label, other: Label) -> bool:
    """Return whether some answer that says less may be right for both: `12` for `12 cm` and `12 kg`."""
    return bool(_all_values(one) & _all_values(other))


def are_apart(one: Label, other: Label) -> bool:
    """Return whether no answer at all may be right for both."""
    return not share_an_answer(one, other)


def _all_values(label: Label) -> frozenset[str]:
    return label.shorter | label.accepts | label.open | {label.value}


def _label(
    kind: str, text: str, value: str, same: str = "", *, shorter: str = "", accepts: str = "", open: str = ""
) -> Label:
    """A label from columns that are separated by " | "."""
    values = [frozenset(map(_value, _split(column))) for column in (shorter, accepts, open)]
    return Label(
        text=text,
        kind=kind,
        value=_value(value),
        same=tuple(_split(same)),
        shorter=values[0],
        accepts=values[1],
        open=values[2],
    )


def _value(written: str) -> str:
    """The value in one spelling: `5e8` → `500000000`, and what is no number as it is."""
    try:
        return str(Fraction(written))
    except ValueError:
        return written


def _split(column: str) -> list[str]:
    return column.split(" | ") if column else []


def _rows(kind: str, rows: Iterable[tuple[str, ...]]) -> list[Label]:
    """Labels of one kind from (text, value, spellings, values that say less)."""
    return [
        _label(kind, text, value, *same[:1], shorter=same[1] if len(same) > 1 else "") for text, value, *same in rows
    ]


NUMBERS = [
    # A gold with two or more places is rounded: what rounds to it is right, and not the other way round.
    _label("number", "3.14", "3.14", "3.140", accepts="pi | 3.1416"),
    _label("number", "3.1416", "3.1416", accepts="pi"),
    _label("number", "4.67", "4.67", accepts="14/3"),
    _label("number", r"\frac{14}{3}", "14/3", r"14/3 | 4\frac{2}{3}"),
] + _rows(
    "number",
    [
        ("0", "0", "zero | 0.0"),
        ("1", "1", "one | 1.0 | +1"),
        ("2", "2", "two | 2.0 | 两"),
        ("3", "3", "three | 3.0 | x = 3"),
        ("5", "5", "five | 5.0 | +5 | x = 5 | x is 5 | 五 | ５"),
        ("6", "6", "six | 6.0 | 六"),
        ("7", "7", "seven | 7.0 | n = 7"),
        ("10", "10", "ten | 10.0 | 十"),
        ("12", "12", "twelve | 12.0 | 24/2 | 十二"),
        ("13", "13", "thirteen"),
        ("15", "15", "fifteen"),
        ("16", "16", "sixteen | 16.0 | 32/2"),
        ("20", "20", "twenty"),
        ("30", "30", "thirty"),
        ("42", "42", "forty-two | 42.0 | forty two"),
        ("-5", "-5", "-5.0 | negative five | minus five"),
        ("-10", "-10", "-10.0"),
        ("-679", "-679", ""),
        ("101", "101", "101.0"),
        ("100", "100", "one hundred | 10^2"),
        ("1234", "1234", r"1,234 | 1{,}234 | 1\,234 | 1 234"),
        ("1990", "1990", ""),
        ("2018", "2018", "in 2018"),
        ("32348", "32348", "32,348"),
        ("5000", "5000", "5,000 | 5 thousand | five thousand | 5千"),
        ("50000", "50000", "50,000 | 5万"),
        ("500000000", "5e8", r"500,000,000 | 5\times10^8 | 5亿 | 500 million"),
        ("1.5 \\times 10^8", "1.5e8", "1.5e8 | 150000000 | 1.5 x 10^8"),
        ("4/3", "4/3", r"\frac{4}{3} | 1\frac{1}{3} | \frac43"),
        ("5/2", "5/2", r"2.5 | \frac{5}{2} | 2\frac{1}{2} | \frac52"),
        ("1/2", "1/2", r"0.5 | \frac{1}{2} | \frac12 | one half | 二分之一 | ½"),
        ("3/4", "3/4", r"0.75 | \frac{3}{4} | \frac34 | three quarters | 四分之三"),
        (r"\frac{2}{3}", "2/3", r"2/3 | two thirds | \frac23 | 三分之二"),
        ("1/15", "1/15", r"\frac{1}{15}"),
        ("16.2", "16.2", "16.20"),
        ("0.01", "0.01", "0.010 | 1/100"),
        ("0.005", "0.005", "0.0050 | 1/200"),
        ("0.0149", "0.0149", ""),
        ("3.15", "3.15", ""),
        ("18", "18", "eighteen"),
    ],
)

PERCENTAGES = _rows(
    "percentage",
    [
        ("50%", "50%", r"50\% | 50 percent | 50 %", "50 | 1/2"),
        (r"25\%", "25%", "25% | 25 percent", "25 | 1/4"),
        ("75%", "75%", r"75\% | 75 percent", "75 | 3/4"),
        ("12.5%", "12.5%", r"12.5\%", "12.5 | 1/8"),
    ],
)

MONEY = _rows(
    "money",
    [
        (r"\$32,348", "USD 32348", r"$32,348.00 | 32348 dollars | \$32348", "32348"),
        ("32,348€", "EUR 32348", "€32,348 | 32348 euros", "32348"),
        (r"\$5", "USD 5", "$5 | 5 dollars | 5 USD | $5.00", "5"),
        ("€5", "EUR 5", "5€ | 5 euros", "5"),
        ("£5", "GBP 5", "£5.00 | 5 GBP", "5"),
        ("5元", "CNY 5", "5 yuan | 5 元", "5"),
        (r"\$12", "USD 12", "12 dollars | $12", "12"),
        (r"\$6", "USD 6", "$6 | 6 dollars", "6"),
    ],
)

QUANTITIES = _rows(
    "quantity",
    [
        ("12 cm", "length 0.12", r"12cm | 12 centimeters | 0.12 m | 120 mm | 12厘米 | 12\text{ cm}", "12"),
        ("12 m", "length 12", r"12 meters | 1200 cm | 0.012 km | 12米 | 12\,\mathrm{m}", "12"),
        ("12 km", "length 12000", "12 kilometers | 12000 m | 12千米", "12"),
        ("12 cm^2", "area 0.0012", r"12 square centimeters | 12\text{ cm}^2 | 12 cm²", "12"),
        ("12 kg", "mass 12", "12 kilograms | 12000 g | 12千克", "12"),
        ("12 s", "time 12", "12 seconds | 12秒", "12"),
        ("90 minutes", "time 5400", "90 min | 1 hour 30 minutes | 1.5 hours | 90分钟", "90"),
        ("2 hours", "time 7200", "120 minutes | 2 h | 2小时", "2"),
        ("5 years", "5 years", "5 yr | five years | 5年", "5"),
        ("5 m/s", "speed 5", r"5 meters per second | 5 \mathrm{m/s} | 18 km/h", "5"),
        ("60 km/h", "speed 60", r"60 kilometers per hour | 60 \mathrm{~km} / \mathrm{h}", "60"),
        ("1500 J", "energy 1500", "1.5 kJ | 1500 joules", "1500"),
        ("0.5 A", "current 0.5", "500 mA | 0.5 amperes", "1/2"),
        ("25 °C", "25 Celsius", r"25 degrees Celsius | 25^\circ\text{C} | 25℃", "25"),
        ("90°", "angle 90", r"90^\circ | 90 degrees | 90度", "90"),
        ("30°", "angle 30", r"30^\circ | 30 degrees", "30"),
        ("5 cm", "length 0.05", "5cm | 50 mm | 5厘米", "5"),
        ("5 kg", "mass 5", "5kg | 5000 g | 5 kilograms", "5"),
        ("8 V", "voltage 8", "8 volts", "8"),
    ],
)

RANGES = _rows(
    "range",
    [
        (f"{low}-{low + width}", f"range {low} {low + width}", f"{low}–{low + width} | {low} - {low + width}")
        for low, width in ((0, 10), (5, 10), (10, 10), (20, 10), (60, 10), (1990, 10), (2000, 10), (18, 6), (25, 9))
    ],
)

CLOCKS = [
    *(
        _label(
            "clock",
            f"{hour}:00",
            f"clock {hour}:00",
            f"0{hour}:00 | {hour} o'clock" if hour < 10 else f"{hour} o'clock",
            open=f"{hour} | ratio {hour}",
        )
        for hour in range(1, 13)
    ),
    _label("clock", "2:30", "clock 2:30"),
    _label("clock", "1:15", "clock 1:15", open="1/15 | ratio 1/15"),
    _label("clock", "3:45", "clock 3:45"),
    _label("clock", "2:30 PM", "clock 14:30", "2:30 p.m. | 2:30pm | 14:30", shorter="clock 2:30"),
    _label("clock", "2:30 AM", "clock 2:30 AM", "2:30 a.m. | 02:30 AM", shorter="clock 2:30"),
    _label("clock", "14:30", "clock 14:30", "2:30 PM | 14:30:00", open="clock 2:30"),
    _label("clock", "7:05 PM", "clock 19:05", "7:05 p.m. | 19:05"),
]

DATES = [
    _label("date", "June 20", "date 06-20", "20 June | June 20th", open="20"),
    _label("date", "June 21", "date 06-21", "21 June | June 21st"),
] + _rows(
    "date",
    [
        ("2024-01-05", "date 2024-01-05", "January 5, 2024 | 2024年1月5日 | 5 January 2024"),
        ("2024-05-01", "date 2024-05-01", "May 1, 2024"),
        ("1949-10-01", "date 1949-10-01", "October 1, 1949 | 1949年10月1日"),
        ("20 May 2015", "date 2015-05-20", "May 20, 2015"),
    ],
)

TELEPHONES = _rows(
    "telephone",
    [("555-1234", "tel 5551234"), ("555-1235", "tel 5551235"), ("800-555-0199", "tel 8005550199")],
)

SCORES = _rows(
    "score",
    [
        ("3-2", "score 3 2", "3–2 | 3 - 2"),
        ("2-3", "score 2 3", "2–3"),
        ("2-1", "score 2 1", "2–1"),
        ("21-15", "score 21 15", "21–15"),
    ],
)

RATIOS = [
    _label("ratio", "3:4", "ratio 3/4", "3 : 4 | 3 to 4 | 6:8", accepts="3/4", open="3/4 | 75%"),
    _label("ratio", "4:3", "ratio 4/3", "4 : 3 | 8:6 | 4 to 3", accepts="4/3", open="4/3"),
    _label("ratio", "2:1", "ratio 2", "2 : 1 | 4:2 | 2 to 1", accepts="2", open="2"),
    _label("ratio", "1:2:3", "ratio 1:2:3", "2:4:6"),
]

CHOICES = [
    *(
        _label(
            "choice",
            letter,
            f"choice {letter}",
            f"({letter}) | {letter}. | [{letter}] | Option {letter} | option ({letter}) | {letter} is correct. | "
            f"I choose {letter}. | 选{letter} | 答案是{letter} | {letter}) | \\textbf{{({letter})}} | "
            f"It should be {letter}.",
        )
        for letter in "ABCDE"
    ),
    _label("lettered", "(B) 12", "choice B 12", "B. 12 | B) 12", shorter="choice B", accepts="12", open="12"),
    _label("lettered", "B. 13", "choice B 13", "(B) 13", shorter="choice B", accepts="13", open="13"),
    _label("lettered", "(A) 3", "choice A 3", "A. 3", shorter="choice A", accepts="3", open="3"),
    _label("lettered", "A. red", "choice A red", "(A) red", shorter="choice A", accepts="red", open="red"),
    _label("lettered", "C. blue", "choice C blue", "(C) blue", shorter="choice C", accepts="blue", open="blue"),
    _label(
        "lettered",
        "(C) 30°",
        "choice C 30",
        "C (30°)",
        shorter="choice C",
        accepts="angle 30 | 30",
        open="angle 30 | 30",
    ),
]

WORDS = [
    # "Yes" and "True" say the same of a statement, and a teacher may take one for the other.
    _label("yes or no", "Yes", "yes", "yes | Yes. | Yes, it is.", open="true | 是"),
    _label("yes or no", "No", "no", "no | No. | No, it is not.", open="false | 否"),
    _label("yes or no", "是", "是", "是的 | 是。", open="yes | true"),
    _label("yes or no", "否", "否", "否。", open="no | false"),
    _label("true or false", "True", "true", "true | True. | It is true.", open="yes | 是"),
    _label("true or false", "False", "false", "false | False. | It is false.", open="no | 否"),
    _label("side", "left", "left", "Left | Left. | the left | It is left.", open="左"),
    _label("side", "right", "right", "Right | the right | It is right.", open="右"),
    _label("side", "above", "above", "Above"),
    _label("side", "below", "below", "Below"),
    _label("side", "north", "north", "North | It is north."),
    _label("side", "左", "左", open="left"),
    _label("side", "右", "右", open="right"),
    _label("colour", "red", "red", "Red | red. | It's red. | The car is red."),
    _label("colour", "blue", "blue", r"Blue | \text{blue} | It is blue."),
    _label("colour", "green", "green", "Green | green."),
    _label("colour", "红色", "红色", "红色。"),
    _label("colour", "蓝色", "蓝色"),
    _label("name", "Evelyn", "Evelyn", r"\text{Evelyn} | Evelyn."),
    _label("name", "Paul", "Paul", "Paul."),
    _label("name", "New York", "New York", "New York."),
    _label("name", "Beijing", "Beijing"),
    _label(
        "word", r"\text{ellipse}", "ellipse", "ellipse | an ellipse | The curve is an ellipse. | It is an ellipse."
    ),
    _label("word", "parabola", "parabola", "Parabola | a parabola"),
    _label("word", "even", "even", r"Even | \text{even} | The function is even."),
    _label("word", "odd", "odd", "Odd"),
    _label("word", "Friday", "Friday", "friday | It is Friday."),
    _label("word", "Saturday", "Saturday"),
    _label("word", "undefined", "undefined", "Undefined | It is undefined."),
]

CODES = _rows(
    "code",
    [
        ("A4", "code A4"),
        ("4A", "code 4A"),
        ("CO2", "code CO2", "CO_2 | CO₂"),
        ("OC2", "code OC2"),
        ("V8", "code V8"),
        ("8V", "code 8V"),
        ("H2O", "code H2O", r"H_2O | H₂O | \mathrm{H_2O}"),
        ("B12", "code B12"),
        ("12B", "code 12B"),
        ("3D", "code 3D"),
        ("X7", "code X7"),
        ("7X", "code 7X"),
        ("AB3", "code AB3"),
        ("BA3", "code BA3"),
        ("XIV", "code XIV"),
        ("XVI", "code XVI"),
        ("G42", "code G42"),
        ("NaCl", "code NaCl"),
        ("192.168.1.1", "code ip"),
    ],
)
# "8V" may be eight volts.
CODES = [code if code.text != "8V" else _label("code", "8V", "code 8V", open="voltage 8 | 8") for code in CODES]

COLLECTIONS = [
    _label("interval", "[1, 2]", "[1,2]", r"1 \le x \le 2 | x \in [1, 2] | [1,2]", shorter="1,2"),
    _label("interval", "[1, 2)", "[1,2)", r"1 \le x < 2"),
    _label("interval", r"(3, \infty)", "(3,oo)", "x > 3 | 3 < x | (3, ∞)"),
    _label("interval", r"[3, \infty)", "[3,oo)", r"x \ge 3 | x≥3"),
    _label("interval", r"(-\infty, 1) \cup (2, \infty)", "union", "(2,∞)∪(-∞,1) | x<1 or x>2"),
    _label("set", r"\{1, 3\}", "{1,3}", r"\{3, 1\} | \left\{1, 3\right\}", shorter="1,3"),
    _label("set", r"\{1, 4\}", "{1,4}", r"\{4,1\}", shorter="1,4"),
    _label("set", r"\emptyset", "{}", r"\varnothing | ∅ | the empty set"),
    _label("tuple", "(3, 4)", "(3,4)", "(3,4) | (x,y)=(3,4) | y=4, x=3 | x=3, y=4", shorter="3,4"),
    _label("tuple", "(4, 3)", "(4,3)", "(4,3) | x=4, y=3", shorter="4,3"),
    _label("tuple", "(1, 2)", "(1,2)", "(1,2) | x=1, y=2", shorter="1,2"),
    _label("list", "2, 3", "2,3", "2 and 3 | $2$ and $3$ | 2,3", open="score 2 3 | range 2 3"),
    _label("list", "1, 3, 5", "1,3,5", "1,3,5 | 1, 3 and 5 | 1 3 5"),
    _label("list", "1, 3, 6", "1,3,6", "1,3,6"),
    _label("list", "14 or 15", "14 or 15", "15, 14 | x=14 or x=15"),
    _label("list", r"\pm 3", "±3", r"3, -3 | -3 or 3 | \pm3"),
    _label("list", "red, blue", "red,blue", "red and blue"),
    _label("list", "AC", "choices A C", "A, C | A and C"),
    _label(
        "matrix",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        "M1234",
        r"[[1,2],[3,4]] | \begin{bmatrix}1&2\\3&4\end{bmatrix}",
    ),
    _label("matrix", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", "M1324", r"\begin{bmatrix}1&3\\2&4\end{bmatrix}"),
]

FORMULAS = _rows(
    "expression",
    [
        ("2x", "2x", r"2\cdot x | 2 x | 2*x"),
        ("3x", "3x", r"3\cdot x"),
        ("x^2+2x+1", "(x+1)^2", "(x+1)^2 | 1 + 2x + x^2"),
        ("x^2+2x", "x^2+2x", "x(x+2)"),
        (r"10\sqrt{2}", "10r2", r"\sqrt{200} | \frac{20}{\sqrt{2}}"),
        (r"2\sqrt{13}", "2r13", r"\sqrt{52}"),
        (r"\pi", "pi", "π"),
        (r"2\pi", "2pi", r"2π | 2 \pi"),
        (r"6\pi", "6pi", r"6π | \pi \cdot 6"),
        ("3+4i", "3+4i", "4i+3"),
        ("3-4i", "3-4i", "-4i+3"),
        (r"\ln 2", "ln2", r"\ln(2)"),
        ("2^{100}", "2^100", r"2 \cdot 2^{99}"),
    ],
) + [
    _label("equation", "y = 2x + 3", "y=2x+3", "y = 3 + 2x | y - 2x = 3"),
    _label("equation", "y = 2x + 4", "y=2x+4", "y=4+2x"),
    _label("equation", "3x + 4y = 12", "3x+4y=12", "6x + 8y = 24 | 4y = 12 - 3x"),
    _label("equation", "y = 5", "y=5", "y=5 | y = 5.0", shorter="5", open="x=5"),
    _label("equation", "y = 6", "y=6", "y=6", shorter="6"),
]

BASED = [
    _label("based", "101_2", "based 101 2", r"101_{2} | 101_{\text{two}}", accepts="101"),
    _label("based", "101_3", "based 101 3", r"101_{3}", accepts="101"),
    _label("based", "2516_8", "based 2516 8", r"2516_{8} | 2516_{\text{eight}}", accepts="2516"),
    _label("residue", r"3 \pmod{7}", "3 mod 7", r"10 \pmod 7", shorter="3"),
    _label("residue", r"4 \pmod{7}", "4 mod 7", r"11 \pmod 7", shorter="4"),
]

CATALOGUE: tuple[Label, ...] = tuple(
    NUMBERS + PERCENTAGES + MONEY + QUANTITIES + RANGES + CLOCKS + DATES + TELEPHONES + SCORES + RATIOS
    + CHOICES + WORDS + CODES + COLLECTIONS + FORMULAS + BASED
)  # fmt: skip
KINDS: tuple[str, ...] = tuple(dict.fromkeys(label.kind for label in CATALOGUE))
