r"""The types of spans of formulas: what a canonical form replaces, and the parts of lists, intervals, matrices and sums."""

from __future__ import annotations

import re

from remote_rm.answers.lexer import sections

_AMOUNT = r"(?:-?\d[\d,]*(?:\.\d+)?|\.\d+)(?:[ ](?:thousand|million|billion|trillion)\b|[万亿])?"
_SIGN_OF_OPERATION = r"(?:[-+*/]|\\times|\\cdot|\\div)"
_ARGUMENT = r"[^\s{}&\x02]"
_INDEX = r"\[[^\[\]]*\]"


_SPELLINGS = {
    name: [(re.compile(pattern), spelling.replace("␣", " ")) for pattern, spelling in rows.items()]
    for name, rows in sections("spellings.ini", delimiter="→").items()
}


def respelled(text: str, section: str) -> str:
    """Return the text with the spellings of a section of spellings.ini replaced, one after the other."""
    for pattern, spelling in _SPELLINGS[section]:
        text = pattern.sub(spelling, text)
    return text


class Latex:
    """Parts of formulas."""

    LEFT = re.compile(r"\\left(?![A-Za-z])")
    RIGHT = re.compile(r"\\right(?![A-Za-z])")
    BEGIN = re.compile(r"\\begin\s*\{([^{}]*)\}")
    END = re.compile(r"\\end\s*\{([^{}]*)\}")
    OVER = re.compile(r"/(?=\d)")
    NAMED = re.compile("[a-z]=")
    CAPITAL = re.compile(r"(?<!\\)[A-Z]")
    CHARGE = re.compile(r"(?:\^\{?(\d*[+-])\}?|(?<=[A-Za-z\d)])([+-]))$")
    ATOM_COUNT = re.compile(r"(?<=[A-Za-z)])(\d+)")
    PLUS_MINUS = re.compile(r"\\pm ?")

    RAISED = re.compile("[⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹]+")
    LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
    ESCAPED_DOLLARS = re.compile(rf"(?:(?<![\w.])US ?)?\\\$\s*({_AMOUNT})(?![\w^/]|\\(?![)\]])|\*(?!\*))")
    # A dollar sign alone opens no formula.
    DOLLARS = re.compile(rf"^[\s*]*(?:US ?)?\$\s?({_AMOUNT})[\s*.]*$|(?<=\d)\s?\\\$(?!\d)|(?<=^)(-?[\d.,]+)\s?\$$")
    CURRENCY_BEFORE = re.compile(rf"(-?)([€£¥￥₹])\s?({_AMOUNT})(?![\w^/]|\\(?![)\]])|\*(?!\*))")
    CURRENCY_BEHIND = re.compile(r"(?<=\d)\s?([€£¥￥₹])")
    CURRENCY_SIGN = re.compile("[€£¥￥₹]")
    NUMBER_TO_NUMBER = re.compile(r"(?<=\d)\s?[~～∼—]\s?(?=\d)")
    TEXT_COMMANDS = re.compile(
        r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|bold|emph|mbox|hbox|boxed|fbox)"
        r"\s*\{([^{}]*)\}"
    )
    CHEMISTRY = re.compile(r"\\(?:ce|mathrm)\s*\{(?=[A-Z])([A-Za-z\d()^+-]+(?:\^?\{[\d+-]+\})?)\}")
    CASES = re.compile(
        r"\\begin\{(?:cases|aligned)\}((?:[^&\\=]|\\(?![\\a-z]*(?:text|if)))*?=(?:(?!\\end|\btext|\bif\b)[^&])*)\\end\{(?:cases|aligned)\}"
    )
    INVERSE_UNIT = re.compile(r"(?<=[A-Za-z}])\s*(?:\\cdot\s?|\s)(?:\\mathrm\{)?([A-Za-z]{1,3})\}?\^\{-(\d)\}")
    AROUND_VALUE = re.compile(
        r"^(?:\\approx|\\sim|approximately|about|roughly|USD|US)(?![A-Za-z])\s*(?=[-.\d\\])|^-\s+(?=[\d.\\])",
        re.IGNORECASE,
    )
    ENVIRONMENT = re.compile(r"\\(?:begin|end|operatorname)\{[^{}]*\}")
    RELATION_SIGN = re.compile(r"\s*(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>)\s*")
    VARIABLE = re.compile(r"[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|omega|phi)")
    MEMBERSHIP = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])\s*(?=[(\[\\])")
    SET_BUILDER = re.compile(
        r"\\\{(?P<name>[A-Za-z])(?:\\in ?\\mathbb\{R\})?\s*(?:\\mid(?![A-Za-z])|\||:)"
        r"(?P<condition>[^{}]*(?P=name)[^{}]*)\\\}"
    )
    UNION = re.compile(r"\\cup(?![A-Za-z])|\s+or\s+")
    WORDS = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|exp|sqrt)(?![A-Za-z]))[A-Za-z]{3,}")
    HOLE = re.compile(r"([A-Za-z])\s*\\ne(?![A-Za-z])\s*([^,;=<>]+)")
    MATRIX = re.compile(
        r"(?:[A-Za-z]=)?(?:[(\[]\s*)?\\begin\{(?:[pb]?matrix|smallmatrix|array)\}(?P<columns>\{[lcr|@\s]*\})?"
        r"(?P<body>.*)\\end\{(?:[pb]?matrix|smallmatrix|array)\}(?:\s*[)\]])?",
        re.DOTALL,
    )
    UNIT_VECTOR = re.compile(
        r"\\(?:hat|vec|mathbf|boldsymbol|overrightarrow|bm)\s*\{?\s*(?:\\[ij]math|([ijk]))\s*\}?|\\hat\s?([ijk])"
    )
    COMPONENTS = re.compile(
        r"(?P<i>[-+]?[^-+ijk=,]*?)i(?P<j>[-+][^-+ijk=,]*?)j(?:(?P<k>[-+][^-+ijk=,]*?)k)?|(?P<i_only>[-+]?[^-+ijk=,]*?)i(?P<k_only>[-+][^-+ijk=,]*?)k"
    )
    LONG_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sinh|cosh|tanh|arcsin|arccos|arctan)(?![A-Za-z]))[A-Za-z]{4,}")
    WORDS_ONLY = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_](?:[^\W\d_]|[\s'’-])*[^\W\d_]")
    GEOMETRIC_NAME = re.compile(
        r"\\(?:angle|triangle|parallel|perp|cong|overrightarrow|widehat|odot)(?![A-Za-z])|\\(?:overline|vec)\{[A-Z]{2}\}"
    )
    FUNCTION_NAME = re.compile(r"(?:pi|ln|log|exp|sin|cos|tan)")
    PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)")
    TUPLE_ASSIGNMENT = re.compile(r"\((?:[A-Za-z]|\\[a-z]+)(?:,\s?(?:[A-Za-z]|\\[a-z]+))+\)=(?=[(\\])")
    LIST_WORDS = re.compile(r"(?:[,;]\s*|\s+|(?<=[)\]}]))(?:and|or)(?:\s+|(?=[(\[{\\]))")
    COMPUTATION = re.compile(
        r"(?:\d|[-+*/.()\s]|\\times|\\cdot|\\div)+"
        rf"|(?=.*(?:[\d)}}]\s*{_SIGN_OF_OPERATION}|[-\d)}}]\s*\(|\)\s*\d))(?:\d|[-+*/.(){{}}\s]|\\times|\\cdot|\\div|\\frac)+"
    )
    # A mixed number written out, 1-\frac{1}{2020}, is worked out as far as it goes.
    MIXED_NUMBER = re.compile(r"-?\d+[-+](?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))", re.ASCII)
    RELATION = re.compile(r"[=<>]|\\(?:le|ge|leq|geq|ne|neq|in)(?![A-Za-z])")
    ALGEBRA = re.compile(
        r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\[A-Za-z]+)|([A-Za-z](?:_(?:\w|\{\w+\}))?)|(\^|[-+/(){}\[\]]))"
    )
    NAME_OF_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4}|(?<![\\A-Za-z])[fgh]\(")
    TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
    DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^(?:\\circ|\{\\circ\})")
    CIS = re.compile(
        r"(?:\\operatorname\{cis\}|cis)\s*\(?\s*(\d+(?:\.\d+)?\^\\circ|-?\\frac\{[^{}]*\}\{[^{}]*\}|[\d\\pi/]+)\s*\)?"
    )
    INDEX_I = re.compile(r"\\(?:sum|prod)(?![A-Za-z])|_\{?i|i\s?=")
    ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?|[A-Za-z]\([A-Za-z]\)|\\[a-z]+)=([^=<>]+)")
    LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
    TERM_WITH_FACTOR = re.compile(
        r"(?<![\d.^_{(])\d+(?:\.\d+)?[A-Za-z](?![A-Za-z(]).*[-+]|[-+]\d+(?:\.\d+)?[A-Za-z](?![A-Za-z(])"
    )
    OR = re.compile(r"\sor\s")
    OF_X = re.compile(r"[fgh]\(x\)")
    ESCAPED = re.compile(r"\\[{}\\$%#&_]")
    GROUP = re.compile(r"\{([^{}]*)\}")
    # Placeholder of a group that was already read.
    FULL_GROUP, EMPTY_GROUP = "\1", "\2"
    # A command without its arguments; only a text may be empty.
    INCOMPLETE = re.compile(
        rf"\\(?:(?:[dtc]?frac|[dt]?binom)(?![A-Za-z])(?!\s*{_ARGUMENT}\s*{_ARGUMENT})|boxed(?![A-Za-z])(?!\s*{_ARGUMENT})"
        rf"|sqrt(?![A-Za-z])(?!\s*(?:{_INDEX}\s*|(?!{_INDEX})){_ARGUMENT})|(?:text|mathrm)(?![A-Za-z])(?!\s*[^\s{{}}&]))"
    )
    MEANING = re.compile(r"[^\W_]|[<>=+∞∅√°%⊂⊃∈≤≥≠-]|\\[{|]")
    # An age group or a score.
    AND_MORE = re.compile(r"\d+\+")
    DANGLING = re.compile(
        r"(?:[\^_/]|[\w})\]]\s*=|\d\s*[-+*]|[\w})\]]\s*\\(?:times|cdot|div|le|ge|leq|geq|cup|cap|pm))$"
    )
