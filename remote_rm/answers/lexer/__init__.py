r"""The lexer: all regular expressions of answers/, by the types of the spans that they find.

`Token` has the words of sentences, English and Chinese: those that state, deny, bound and leave open, and options. Values
are in `values`, formulas in `latex`, other languages in `languages`. A new wording is an addition to a row.
"""

from __future__ import annotations

import re
import string
from configparser import RawConfigParser
from fractions import Fraction
from functools import lru_cache
from pathlib import Path


def sections(file: str) -> dict[str, dict[str, str]]:
    """Return the sections of a table of this folder; its lines are `key = value`."""
    table = RawConfigParser(delimiters=("=",), comment_prefixes=("#",))
    table.optionxform = str  # type: ignore[assignment, method-assign]
    table.read_string((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {name: dict(table[name]) for name in table.sections()}


_BOUNDED = r"(?:\$|[£€¥]|\\\(|-|about |the |year )?(?:[\d\\]|(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\b)"
_AFTER_VALUE = r"(?=,? (?:when|where|at|for|if|since|because|which|with|by|as|achieved|attained|in total|in all|altogether|because of)\b)"
_NAMED = r"(?:option|choice|answer|statement|picture|figure|diagram|graph|point|tile|选项|选)\s*"
_JOINED = r"(?:\b(?:or|and|nor|versus|vs)\b|或者|or\s?者|[,;/&|+、和与或\\])"


_SMALL_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TEN_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

Match = re.Match[str]


class Token:
    """The types of spans, each with the pattern that finds it."""

    # The verb between a subject and its predicate.
    VERB = re.compile(
        r"\b(?:is|are|was|were|be|been|equals?|becomes?|such that|satisfying|namely|gives?|yields?|reads?|says?|shows?|displays?|made of"
        r"|called|named|(?:signed|written|painted|made|composed|won) by|consists? of|comes? (?:to|out to)|amounts? to|lasts?|takes?|costs?"
        r"|measures?|weighs?|contains?|has|have|had|takes? place|occurs?|happens?|located)\b"
        r"|(?:(?<=\bit)|(?<=that)|(?<=here)|(?<=what))['’]s\b(?=\s)|[是为](?!\W*$)|等于|等於|共有|一共|总共|合计|得到|得出|写着|显示",
        re.IGNORECASE,
    )
    # Introduces a final answer.
    LEAD_IN = re.compile(
        r"(?<!wrong )(?<!incorrect )(?<!not the )\b(?:answers?(?=:)|answer|option|choice)\b(?:\s?\d)?[\s*_\"')\]]{0,5}(?:(?:(?:should|must|would|will|has to|to) be\b|(?:is|are|was)\b|[:：=])[\s*_]*)+"
        r"|\bI(?:\s+would|\s+will|['’]ll|['’]d)?\s+(?:choose|chose|pick|picked|select|selected|go with)\b"
        r"|\b(?:corresponds to|matches)\s+(?=(?:option|choice)\s+\(?[A-J]\b)"
        r"|\b(?:it|this|that)(?:\s+is|['’]s)\s+(?=[\s*$]{0,4}(?:\\[a-z]+\{)?(?:option |choice )?(?-i:[(\[]?[A-J](?:[)\]]\s*[^\s(),;]{0,12}\W*|\s?\([^\s(),;]{1,12}\)\W*|\.\s\w{1,12}\W*|[\s.*$})]*)$))"
        r"|####|【答案】|\b(?:it|this) (?:should|must|has to) be\b"
        r"|(?:答案|选项(?!\s*[:：]\s*\n))[\s*]{0,4}(?:应该|应当|应|就)?(?:[是为选]\s*[:：=]?|[:：=])"
        r"|(?:故选|应选|选择|(?<![可不别要])选(?!项\s*[:：]\s*\n))(?:项|答案)?\s*[:：]?(?=[\s(（\[【$\\*{]{0,6}(?:text|mathrm|boxed)?[{(\s]{0,3}[A-JＡ-Ｊ])"
        r"|(?:^|[\n。])\s*答\s*[:：]",
        re.IGNORECASE,
    )
    # May stand between the verb and what is said.
    FILLING = re.compile(
        r"(?:(?:[\s:：=]|\*\*|__)+|(?:an?|the|exactly|simply|just|only|therefore|thus|hence|then|also|equal to|given by|either)\s+"
        r"|(?:option|choice|about|approximately|around|roughly)\s+(?=[\d$\\(A-J])|(?:大约|大概|约|选项?)\s*(?=[\d$\\(A-J]))+"
    )
    # Denies, or says that nothing is known.
    DENIED = re.compile(
        r"\b(?:not|never|cannot|neither|nor|except|unlike|wrong|incorrect|impossible|unsure|unclear|doubt\w*|unlikely|hardly|unknown"
        r"|anything but|other than|bounded by|far from|ruled? out|exclude[sd]?|opposite|no longer|mistaken?|no way|nobody|no one|none of (?:them|these)|who says|out of the question|false that|differs? from|different from|nowhere near|unequal|apart from|(?:just )?(?:kidding|joking)|was joking|lied|is a lie|(?:everything|all) but|so I thought|contrary to|nothing like|reject(?:s|ed)?|by no means|in no case|no circumstances|untrue|false to|myth|(?:careless|hasty|naive) \w+ (?:would|might|may)|no reason|tempting)\b"
        r"|^\W*(?:instead of|rather than|as opposed to|in place of)\b|n['’]t\b|,\s*no\b\W*$|\\not(?![a-z])"
        r"|不是|并非|不可能|不能|不对|不正确|错误|排除|不等于|不应|不选|无法|不确定|未必|绝非|怎么会|没有(?=\s*[\dA-Za-z$\\])|不认为|不一定|不会|不要|别选|除了|以外|吗",
        re.IGNORECASE,
    )
    # Denies something else next to a value: `5, not 6`.
    CONTRAST = re.compile(
        r"(?:,\s+(?:and\s+|but\s+)?not|[.,]?\s+(?:rather than|instead of|as opposed to))(?:\s+|(?=\())(?!only\b|sure\b|certain\b)[^,;.]{1,40}(?=[,;.]|$)"
        r"|\bnot\s+[^,;.]{1,40}?,?\s+but\s+(?:rather\s+)?"
        r"|[，,]?\s*(?:而不是|而非)[^，。,;]{1,30}(?=[，。,;]|$)|[，,]\s*不是[^，。,;]{1,30}(?=[，。,;]|$)",
        re.IGNORECASE,
    )
    # Leaves open whether that is the answer.
    LEFT_OPEN = re.compile(
        r"\b(?:maybe|perhaps|candidates?|wonder|one of|possibly|might|could|guess\w*|whether|depends|unless|likely|alternatively|otherwise|or else|if so|if\b.*\belse|for this\b.*\bfor that|such as|for example|e\.g|something like|not sure|would have said|first thought|I (?:first )?thought|possibility|options include|etc)\b|,\s*(?:\.{3}|…|\\[lc]?dots)|\.{3}\W*$|(?-i:\bmay\b)(?! \d)|可能|也许|或许|抑或|要么|还是",
        re.IGNORECASE,
    )
    # Joins alternatives.
    OR = re.compile(r"\bor\b|或者?|还是")
    # A number that bounds the answer and is not the answer.
    BOUND = re.compile(
        r"\b(?:at least|at most|up to|(?:more|less|greater|fewer|other|larger|smaller|bigger|higher|lower|later|earlier|longer|shorter|older"
        rf"|younger) than|(?<!\d )(?:over|under|above|below|after|before)|since|until|exceed\w*|nearly|almost|divisible by|multiples? of)[\s:]+{_BOUNDED}"
        r"|\band (?:above|below|over|under|more|up)\b|\bor (?:more|less|fewer|greater|later|earlier|above|below|over|under)\b"
        r"|(?:超过|至少|至多|最多|大于|小于|不到|多于|少于|不足|不超过|高于|低于)[有是为需要\s]{0,3}[-−£€¥\d一二两三四五六七八九十百$\\]|\d\s*[^\d\s，。,]{0,3}(?:以上|以下|多[个人只])",
        re.IGNORECASE,
    )
    # Begins a sentence that takes back the one before.
    CORRECTED = re.compile(
        r"(?:(?:oh|but|no|hmm),?\s+)?(?:actually|wait|no|correction|sorry|on second thoughts?|scratch that|hmm|不对|不，|等等|更正|其实)(?:[\s,:;!.，：。]+|(?<=[，]))",
        re.IGNORECASE,
    )
    # Begins a sentence that names a further answer.
    ALTERNATIVE = re.compile(
        r"(?:but\s+)?(?:or|alternatively|maybe|perhaps|possibly|otherwise|also|it (?:could|might|may)|could|might|then again)\b"
        r"|或者?|但?也?可能|或许|也许|还是|但也",
        re.IGNORECASE,
    )
    # Begins a conclusion within a sentence.
    CONSEQUENCE = re.compile(
        r"(?:^|[,;，；。]\s*|\s+(?=therefore|thus|hence))(?:(?:and\s+)?(?:so|thus|hence|therefore|consequently|meaning|which means)\b(?! that\b)|(?:for|giving|making) a total of|(?:that is|i\.e\.|in other words),|所以|因此|因而|故)[\s,，:：]*",
        re.IGNORECASE,
    )
    # Begins a comment on what was said before it.
    COMMENT = re.compile(
        r"[,;，；—–]\s*(?:(?:which|because|since|as|in|to the|on the|next to|where|when|with|whose|while|who|though|although|making|and (?:it|this|they|he|she)|at|for|by|but"
        r"|followed by|due to|according to)\b|因为|由于|其中)|(?:因为|由于)|\s+(?:because|since)\b(?! \d)",
        re.IGNORECASE,
    )
    # Is said of a subject that is itself the answer: `B is the answer`, `Evelyn is the fastest`.
    VERDICT = re.compile(
        r"(?:(?:the|our|my)\s+)?(?:only\s+|most\s+)?(?:correct|right|true|best|accurate|answer|final answer|one|solution|appropriate)"
        r"(?:\s+(?:answer|one|option|choice|statement|value|result|solution))?(?:\s+(?:here|to\b.*|for\b.*|among\b.*|of\b.*))?[.!]?$"
        r"|the\s+(?:\w+\s+){0,3}?(?:\w{2,}est|most|least|first|last|winner|only|one)\b.*$"
        r"|(?:\w{2,}er|more \w+|less \w+) than\b.*$"
        r"|正确的?(?:答案|选项)?(?:的)?[。！]?$|对的[。！]?$|最\S+[。！]?$",
        re.IGNORECASE,
    )
    # Is said of a number of things without being the answer: `48 tiles are needed`.
    USED = re.compile(
        r"(?!undefined)\w{2,}ed|left|there|visible|possible|present|available|remaining|sold|made|won|lost|seen|shown|taken|eaten|given|born|built|drawn"
        r"|written|known|found|in total|in all|altogether",
        re.IGNORECASE,
    )
    # Says that the writer has no answer.
    IGNORANCE = re.compile(
        r"\bI(?:['’]m| am)? (?:do not|don['’]t|cannot|can['’]t|could not|couldn['’]t|not|have no) (?:know|tell|say|determine|see|sure|idea|able)\b|不知道",
        re.IGNORECASE,
    )
    # Begins a sentence by saying when or where: `After 3 hours it has gone 150 km`.
    ADVERBIAL = re.compile(
        r"(?:after|before|since|in|on|at|by|from|for|with|over|under|when|if)\s[^,]*?(?:,\s*|\s(?=(?:it|he|she|they|we|there|the)\s))",
        re.IGNORECASE,
    )
    # Makes the number after it another one: `half of 5`.
    CHANGED_BEFORE = re.compile(
        r"\b(?:half|thirds?|quarters?|twice|double|triple|times|squared?|cubed?|root|reciprocal|inverse|opposite|negative|minus|factorial"
        r"|logarithm|multiples?|power)\s+(?:of\s+)?(?:the\s+)?$",
        re.IGNORECASE,
    )
    # Makes the number before it another one, in Chinese.
    CHANGED_AFTER = re.compile(
        r"\s*(?:的(?:平方|立方|一半|两倍|[一二三四五六七八九十]倍|倒数|阶乘|相反数)|分之|折|又|除以|乘以?|加上?|减去?|半)"
    )
    # Its one group that is not None is the formula without its signs.
    FORMULA = re.compile(
        r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+)\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL
    )
    # With its currency, scale, denominator and percent sign.
    NUMBER = re.compile(
        r"(?<![A-Za-z0-9_.,/£€¥])(?:(?:\\?\$|[£€¥])\s?)?-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)[百千万亿]*(?:/\d+|\s?\\?%|\s?[€£¥元](?!\d))?(?![A-Za-z0-9_/€£]|[.,]\d)"
    )
    # `3-5`.
    NUMBER_RANGE = re.compile(r"(?<![\d.,-])(\d[\d,.]*)\s?[-–~～]\s?(\d[\d,.]*\d|\d)(?![\d-])")
    # `from 3 to 5`.
    RANGE_IN_WORDS = re.compile(r"\b(?:from|between)\s+(\S*\d\S*)\s+(?:to|and|until)\s+(\S*\d[^\s.,]*)")
    # At the end: `2, 3 and 5`.
    NUMBER_LIST = re.compile(r"\d[\d,.]*(?:(?:,| and|, and) \d[\d,.]*)+$")
    # The last two numbers of a chain of equations.
    CHAIN = re.compile(
        r"(?<![\^_\w\\{.,])\d[\d,]*(?:\.\d+)?\)?(?: ?[A-Za-z]{1,4}(?:/[A-Za-z]{1,3})?)?\s*=\s*(\$?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?)(?![\w\\^*/+(€£-]|[.,]\d)"
    )
    # A number or an expression of numbers.
    PLAIN_VALUE = re.compile(
        r"[-+]?(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*\d(?:[\d.,{}/^ ]|\\d?frac|\\pi|\\sqrt|\\cdot|\\times)*"
    )
    # Only digits.
    BARE_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
    CHINESE_NUMERALS = re.compile(r"[零一二两三四五六七八九十百千万亿]{2,}(?=[^零一二两三四五六七八九十百千万亿]|$)")
    # `(1, 2)`.
    POINT = re.compile(r"\([^(),=]{1,20}(?:,[^(),=]{1,20})+\)")
    # `x = 5`.
    NAMED_VALUE = re.compile(r"\s*([a-z])\s*=\s*([^\s=]{1,20})\s*")
    # Yes or no at the start.
    POLAR = re.compile(
        r"[\s*\"$~]*(yes|no|true|false|是的?|不是|否|对的?|不对|错误?|正确)[*\"]{0,3}(?:[,.;:!，。；！、]|\s[-–—])",
        re.IGNORECASE,
    )
    NO = re.compile(r"\b(?:no|false)\b(?=\W*$|\s?[,.;!])|否|错误|不对", re.IGNORECASE)
    YES = re.compile(r"\b(?:yes|true)\b|(?<![^\W\d_])(?:是|对)(?![^\W\d_])", re.IGNORECASE)
    CHINESE_UNIT = re.compile(r"\s?([\u4e00-\u9fff]{1,4})")
    # Between a number and its unit.
    ATTACHED_UNIT = re.compile(r"(?<=\d)(?=(?:[kcdm]?m|[km]?g|m?[Ll]|km/h|m/s|s|h|min|N|J|W|V|A|Hz|Pa)(?![A-Za-z]))")
    ATTACHED_WORD = re.compile(r" ?([A-Za-zμ][a-zμ]*|[\u4e00-\u9fff]{1,3})[A-Za-zμ]*")
    # Up to three words after a number.
    WORDS_AFTER = re.compile(r"(?:[ -][A-Za-z]+){0,3}")
    # `5 (five)`.
    IN_FIGURES = re.compile(r"(\S+) \(([A-Za-z][A-Za-z -]*)\)")
    # A value at the start, before what does not change it.
    LEADING_VALUE = re.compile(r"(\$[^$]{1,200}\$|\\\([^\n]{1,200}?\\\)|-?\d[\d,]*(?:\.\d+)?)" + _AFTER_VALUE)
    QUOTED = re.compile(r"[\"“‘「]([^\"“”‘’「」\n]{1,60})[\"”’」][.!]?$")
    BOLD_AT_END = re.compile(r"\*\*([^*\n]{1,60})\*\*[.!]?$")
    # Says that what is listed is the answer.
    SOLUTIONS = re.compile(r"\b(?:solutions?|roots?|zeros?|answers?|values?|factors?|elements?|points?)\b")
    SENTENCE_END = re.compile(
        r"(?:(?<!^[A-Z])(?<![^A-Za-z][A-Z])(?<!\b[ap]\.m)(?<!\b(?:Dr|Mr|Ms|St|No|vs|Jr|Sr))(?<!\b(?:Mrs|etc|Fig|e\.g|i\.e)))(?<=[^\s.])\.{1,2}[*_]{0,2}\s+(?=[A-Z(\"'$\\*\d]|(?:or|maybe)\b)"
        r"|\.\s+(?=(?:Or|It|But|Maybe|Perhaps|Alternatively|Actually|Wait|The|This|So)\b)"
        r"|(?<=[^\s!?])[!?][*_]{0,2}\s+|[。！？]\s*|\n+",
    )
    SENTENCE_WITHIN = re.compile(r"[.。!！]\D")
    PREPOSITION = re.compile(
        r"(?:\b(?:of|by|in|on|at|from|to|with|near|behind)\b|\b(?:the|an?)\b)\s+(?:(?:the|an?)\s+)?"
    )
    PREPOSITION_OF_TIME = re.compile(r"\b(?:in|on|at|by)\s+(?=\d)")
    SUBORDINATE = re.compile(r"\b(?:when|if|where|that|which|who|whose|because|since|while|whether)\b[^,;]*$")
    JOINED_BEFORE = re.compile(r"[,，、;；/|&~\\]|和|与|以及|或者?|\b(?:or|and|vs|versus|but)\b")
    # `Evelyn wins`.
    HAS_SUBJECT = re.compile(r"\**([A-Z][a-z]+)\**\s+(?:wins?|won|ran|got|took|does|did|finishe[sd])\b")
    # How many things a Chinese list has named.
    KINDS_AFTER = re.compile(r"(?<=[\u4e00-\u9fff])[一二两三四五六七八九十\d]+[种个者]$")
    # A sentence that denies the one before.
    TAKEN_BACK = re.compile(
        r"(?:but )?(?:it|this|that)\s?(?:is|was|'s)?\s?(?:n['’]t|not)\W*$|(?:no|wrong|not)\W*$|(?:just )?(?:kidding|joking)\b"
        r"|(?:wait|no|oh),? (?:no\W*$|(?:that|this|it)(?:['’]s| is| was) (?:not|wrong|incorrect))",
        re.IGNORECASE,
    )
    # A comment that denies or doubts what it comments on: `5, but that is wrong`.
    DOUBTED = re.compile(
        r"\b(?:but|which|though|although|yet)\s+(?:(?:it|that|this|I)\b\s*)?(?:['’]m|['’]s|is|was|am|would be)?\s*(?:n['’]t|not|wrong|incorrect|false|mistaken|unsure)"
        r"(?:\s+(?:sure|certain|right|correct|true|it|so|the (?:answer|case)))*\W*$",
        re.IGNORECASE,
    )
    # `1/3, or about 0.33`.
    ROUNDED = re.compile(
        r"(?<=\S),?\s+(?:\((?:that is|i\.e\.|about|approximately|≈|=)[^()]*\)"
        r"|(?:or|which is) (?:about|approximately|roughly) \$?\\?\$?[\d.,]+\\?%?\$?)(?=[.\s*$]*$)"
    )
    # `6, 8, 10 (in increasing order)`.
    REMARK = re.compile(
        r"\s\((?!.*\b(?:or|kidding|joking|guess|sure|unsure|lie|doubt|rejected)\b|alternatively|maybe|perhaps|not\b|wrong)[a-z]{2,}(?: [a-z]+){1,8}\)(?=[.\s$*]*$)"
    )
    # Between a subject and its verb.
    ASIDE = re.compile(r",\s[^,]{1,40},\s(?=(?:is|are|was|were|equals?)\b)")
    TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]{1,300})\}")
    # A displayed formula.
    DISPLAY = re.compile(
        r"\\\[.{1,1500}?\\\]|\$\$[^$]{1,1500}\$\$|\\begin\{(\w+\*?)\}.{1,1500}?\\end\{\1\}", re.DOTALL
    )
    BULLET = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+(?=\S)")
    # A bulleted list at the end.
    BULLETS = re.compile(r"(?:(?:^|\n)[ \t]*(?:[-*•]|\d{1,2}[.)])[ \t]+\S[^\n]*){2,}\s*$")
    # A line break after an introduction.
    GAP = re.compile(rf"({LEAD_IN.pattern})[\s*_:：]*\n\s*", re.IGNORECASE)
    TAG = re.compile(r"</?(?:answer|think)>")
    WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
    CHINESE = re.compile(r"[\u4e00-\u9fff]")
    # A letter at the start, with or without brackets.
    OPTION = re.compile(
        rf"(?P<named>{_NAMED})?(?:\(\s*(?P<round>[A-J])\s*\)|\[\s*(?P<square>[A-J])\s*\]|(?P<bare>[A-J])(?![A-Za-z0-9_]|['’]))",
        re.IGNORECASE,
    )
    # Between a letter and the option's text.
    OPTION_MARK = re.compile(r"\s*[.):,;：、，。]\s*|-(?!>)\s*|\s+(?=[\d\\$(]|-\d)|(?=\([^()]*\)$)")
    # `..., so B`.
    OPTION_CONCLUDED = re.compile(rf"(?:{CONSEQUENCE.pattern})(?:{_NAMED})?\(?(?P<letter>[A-J])\)?[.。]?$")
    # A second letter right after the first: `A or B`.
    OPTION_JOINED = re.compile(
        rf"\s*\(?{_JOINED}\s*(?:{_JOINED}\s*)?(?:maybe\s+)?(?:{_NAMED})?\(?[A-J](?![A-Za-z0-9_'])", re.IGNORECASE
    )
    # The same without a word between them: `(A) (B)`.
    OPTION_AT_ONCE = re.compile(rf"[\s.:()\[\]-]*(?:{_NAMED})?[(\[]?(?P<letter>[A-J])(?:[^\w\s]|\s*$)")
    # A letter with a mark, anywhere.
    OPTION_MARKED = re.compile(
        r"(?<![A-Za-z_])(?:\((?P<round>[A-J])\)|\[(?P<square>[A-J])\]|(?P<marked>[A-J])[.):]\s?(?=\S))"
    )
    # A letter that the text answers by.
    OPTION_STATED = re.compile(
        rf"(?:^|{LEAD_IN.pattern})[\s*_:：$\\(\"']{{0,8}}(?:{_NAMED})?(?-i:\([A-J]\)|\[[A-J]\]|[A-J](?:\s?[.:]\W|\s?\)|，|,\s+(?:[Ii]t|[Tt]his|[Tt]hat|so|thus|hence|therefore)\b|-[A-Za-z$\\]|\s+(?=-?\d)|\*\*|\s*$|,?\s+(?:because|since|is)\b))",
        re.IGNORECASE,
    )
    # A further letter, joined or at the end.
    OPTION_LATER = re.compile(
        r"(?:[,;/、~&|和与或]|还是|以及|或者|or\s?者|\\+(?:quad|lor|land)?|\b(?:or|and|vs\.?|versus|but|unless|else|otherwise|nor)(?![A-Za-z]))[^A-Za-z0-9]{0,4}"
        rf"(?:(?:else|maybe|possibly|either)\s+)?(?:{_NAMED})?(?P<last>[A-J])(?![A-Za-z0-9_'’])|(?<!vitamin )(?<!point )(?<!Point )(?<!type )(?<!line )(?<!group )(?<!Figure )(?<!angle )(?<![A-Za-z])(?<=[\s(~])(?P<end>[A-HJ])\)?\W*$"
    )
    # A letter that is called right or wrong.
    OPTION_JUDGED = re.compile(
        rf"(?<![A-Za-z0-9_])(?:{_NAMED})?\(?(?P<letter>[A-J])\)?(?:[.:]\s.{{0,60}}?)?\s*(?:"
        r"(?:is|are|must be)\s+(?:(?:also|the|only|most)\s+)*(?P<verdict>correct|right|true|best|answer|wrong|incorrect|false|not)(?![A-Za-z])"
        r"|(?:选?项)?是?(?P<chinese>正确|对的|错误|错的|不对|不正确))"
    )
    # Begins the reason for a letter.
    OPTION_REASON = re.compile(
        r"\s*[,，;；]?\s*(?:(?:is|must be)\s+(?:the\s+)?(?:only\s+)?(?:correct|right|best|answer|true)\b|\b(?:because|since|as|for|so|due)\b|因为|由于|正确|是正确|对)"
    )
    # A line that is an option.
    OPTION_LINE = re.compile(r"\*{0,2}(?:\([A-J]\)|[A-J][.):])\*{0,2}(?:\s.{1,200})?")
    # Takes back a letter.
    OPTION_DENIED = re.compile(
        r"[?？]|,\s*no\W*$|吗|其他|别的|不对|错误|错的|不正确|\b(?:ruled out|out of the question|impossible|cannot be|can['’]t be|isn['’]t|or (?:whatever|none|anything|another|something|not)"
        r"|alternatively|maybe|perhaps|possibly|wrong|incorrect|not right|not correct|not the|unless|kidding|joking"
        r"|(?:so|thus|hence|therefore),?\s+(?:yes|no|true|false))\b",
        re.IGNORECASE,
    )
    # At the end: a question, or a list that goes on.
    OPEN_END = re.compile(
        r"[?？][\s*_$.)\"'”]*(?:(?:[Nn]o|[Nn]ot|不)\b[\s.!。*]*)?$|,\s*(?:\.{3}|…|\\[lc]?dots)[\s$.]*$"
    )
    # Says that a value is not equal, without what.
    UNEQUAL = re.compile(r"^[\s$*]*(?:\\n(?:e|eq|ot\s?=)(?![a-z])|≠|!=)|\\not(?![a-z])")
    # A question with a list of what to choose from, at the end.
    ASKED_LIST = re.compile(r"[?？][^\n]{0,40}\n\s*(?:(?:[-*•]|\d{1,2}[.)])\s[^\n]*\s*){2,}$")
    # Asks for an answer, in the last line of a question.
    INSTRUCTION = re.compile(
        r"\n\s*(?:please\s+)?(?:answer|select|choose|pick|provide|give|respond|reply)\b[^\n]*\b(?:options?|choices?|letters?)\b[^\n]*\s*$",
        re.IGNORECASE,
    )
    # Parts that are crossed out.
    STRUCK_OUT = re.compile(
        r"~~[^~\n]{1,200}~~|<(del|s|strike)>.{0,200}?</\1>|\\(?:x|b)?(?:cancel|sout|st)\s*\{[^{}]{0,100}\}", re.DOTALL
    )
    # At the end: says goodbye, and nothing of the answer.
    SIGN_OFF = re.compile(
        r"(?:(?<=[.!?。！？*}$])|(?<=\n)|(?<=\\\]))\s*(?![^\n]*\b(?:otherwise|but|actually|wait|instead|correction|or (?:is|it|maybe))\b)(?:I\s+)?(?:really\s+)?(?:hope(?:fully)?,?\s+(?:this|that|it|these|my explanation)\s+(?:all\s+)?"
        r"(?:helps?|helped|answers?|clarif\w+|makes? sense|was helpful|is helpful)|(?:please\s+)?(?:let|tell)\s+me\s+know\b|I\s+hope\s+(?:it|this)\s+is\s+(?:correct|right)\b|(?:please\s+)?(?:do not hesitate|don['’]t hesitate|feel free)\b"
        r"|(?:is|was)\s+there\s+anything\s+else|do\s+you\s+(?:have|need)\s+any|would\s+you\s+like\b|if\s+you\s+(?:have|need)\s+(?:any|more|further)"
        r"|(?:I['’]m\s+|I\s+am\s+)?(?:happy|glad)\s+to\s+help|thank(?:s| you)\b|have a (?:great|nice|good)|you['’]re welcome|good luck|happy (?:learning|studying)"
        r"|希望(?:这|以上|对你|能)|如果(?:你|您)?还?有(?:任何|其他|更多))[^\n]*\s*$",
        re.IGNORECASE,
    )
    # A block of code around the whole text.
    FENCE = re.compile(r"\s*```\w*\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
    # A heading that says that the answer follows.
    HEADING = re.compile(
        r"\s*#{1,6}\s*\**(?:final |the |my )*(?:answer|solution|result|答案)\**\s*[:：]?\**\s*(?:\n+\s*|(?<=[:：*])\s*)",
        re.IGNORECASE,
    )
    # What a value is called.
    VALUE_NAME = re.compile(r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?|\([A-Za-z]\))?|[A-Za-z]{2,12}|\\angle ?[A-Z]{1,3}")
    # What a number is compared with, and when or where it is so: `below 40`, `in 2010`, `at x = 4`.
    CONDITION = re.compile(
        r"\b(?:at least|at most|up to|(?:more|less|greater|fewer|other|larger|smaller|bigger|higher|lower|later|earlier|longer|shorter|older|younger"
        r"|cheaper|heavier|lighter|taller|faster|slower|warmer|colder) than(?: or equal to)?|(?<!\d )(?:over|under|above|below|after|before)|exceed\w*|not exceeding|divisible by|multiples? of)"
        rf"\s+(?:an?\s+)?(?:the\s+)?(?:(?:\\?\$|[£€¥])?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s?\\?%?|(?:{'|'.join((*_SMALL_WORDS, *TEN_WORDS, 'hundred'))})\b)(?![\d/^])(?:\s(?:hundred|thousand|million|billion)\b)?"
        r"|\b[Ii]n\s+(?:the year\s+|early\s+|late\s+)?(?:(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\s+)?(?P<year>1[5-9]\d\d|20\d\d)\b(?![-/–]\d|,\d)"
        r"|\b(?:at|when|where|for|if)\s+\$?[a-z]\s*=\s*-?\d+(?:\.\d+)?\$?(?![\w^*/+=])",
        re.IGNORECASE,
    )
    # Before a value, in Chinese: `共15人`, `等于15`.
    CHINESE_LEAD = re.compile(
        r"^\s*(?:答\s*[:：]\s*)?(?:一?共有?是?|总共有?|合计|总计|等于|大?约[为是]?|[为是得])\s*(?=[-−+]?(?:[\d¥￥零一二两三四五六七八九十百千负]|\$\s*[-+]?[\d\\]|\\(?:d?frac|sqrt|pi|boxed)))"
    )
    CHINESE_OPTION = re.compile(
        r"^\s*(?:应?选择?)?\s*[(（]?([A-JＡ-Ｊ])[)）]?\s*(?:选?项)[。.]?\s*$|^\s*(?:应?选择?)\s*[(（]?([A-J])[)）]?\s*项?[。.]?\s*$"
    )
    # The name of a point before its coordinates, and of a ratio before its terms: `P(3,-2)`, `S_1:S=7:32`.
    POINT_NAME = re.compile(r"^[\s$]*[A-Z]'?(?:_\{?\w\}?)?\s?(?=(?:\\left)?\((?=[^()]*\d)[^()]*,[^()]*\)[\s$.]*$)")
    RATIO_NAME = re.compile(
        r"^[\s$]*[A-Za-z]\w*(?:_\{?\w+\}?)?\s?:\s?[A-Za-z]\w*(?:_\{?\w+\}?)?\s?=\s?(?=\d+\s?:\s?\d+[\s$.]*$)"
    )
    BARE_POINT = re.compile(r"[\s$]*(?:\\left)?\(")
    BARE_RATIO = re.compile(r"[\s$]*\d+\s?:\s?\d")
    # A number that has a verb after it: `a profit of 120 is reached`.
    SUBJECT_NUMBER = re.compile(r"(?<=\bof )(\$?-?\d[\d,]*(?:\.\d+)?%?\$?) (?=(?:is|was|are|were|occurs?) )")
    # Joins two boxes to a list.
    BETWEEN_BOXES = re.compile(
        r"(?=[^A-Za-z]*(?:[,;、&]|and|\\q?quad|\\text|和|与))(?:[\s$.,;、&~]|\\[(),;\]\[]|\\q?quad|\\text\s*\{\s*and\s*\}|\band\b|和|与)*"
    )
    # A mark of layout before a text of one line; `- 24` is a negative number and `> 24` an inequality.
    LINE_MARK = re.compile(r"\s*(?:#{1,6}\s+|[*•]\s+|-\s+(?=[^\W\d])|>\s+(?=[^\W\d_]{2}))(?=\S)")
    # What the answer is called: `**Total:** 5`.
    TITLE = re.compile(
        r"^\s*[*_]{0,2}(?:the |final )?(?:total|sum|result|area|perimeter|volume|product|difference|quotient|mean|average|median|mode|length|width|height|distance|speed|count|number|value"
        r"|probability|cost|price|time|age|mass|weight|angle|slope|radius|diameter|circumference|year|day|month|color|colour|name|remainder|percentage|temperature|force|energy|结果|总数|总计)"
        r"(?: (?:area|number|cost|price|distance|time|value|sum|volume|length))?[*_]{0,2}\s*[:：][*_]{0,2}\s*(?=\S)",
        re.IGNORECASE,
    )
    # `8 (units)` and `8, because 3+5=8`.
    UNIT_REMARK = re.compile(r"^([^()\n]{1,60}?)\s*\(((?:sq\.?|square|cubic|cu\.?)?\s?[A-Za-z]{1,20})\)\W*$")
    REASON = re.compile(
        r"^([^,;()\n]{1,60}?)(?:,\s*(?:because|since|as)\b(?!\s+(?:well|opposed)).*|\s*\((?:because|since|as)\b(?!\s+well).*\)\W*)$"
    )
    # Between a letter and a text that is the option's, whatever it denies or names.
    OPTION_BEFORE_TEXT = re.compile(r"\s*[.):]?\s*")
    # Takes a marked letter back at the start of what follows it: `B. is wrong`.
    VERDICT_ON_OPTION = re.compile(
        r"\W*(?:(?:is|was|are)(?:n['’]t|\s+(?:also\s+)?(?:not\s+)?(?:the\s+)?(?:wrong|incorrect|false|right|correct|not|answer|impossible|out|ruled|excluded|unlikely))"
        r"|(?:can|could|must|should|would)(?:not|n['’]t| not)\s+be\s+(?:\w+\s+)?(?:right|correct|it|the answer|true|ruled|determined to)"
        r"|(?:wrong|incorrect|not(?: (?:right|correct|the answer|this|it))?)\W*$|(?:or|and|maybe|perhaps|possibly|no|not)\W*(?:option |choice )?\(?[A-J]\)?(?![A-Za-z])"
        r"|(?:or|maybe|perhaps|possibly|alternatively|unless|but|wait|actually)\b|(?:是|选项)?(?:不对|不正确|错误?的?|不是答案)\W*$)",
        re.IGNORECASE,
    )
    # In an option's text: leaves open which one it is.
    OPTION_OPEN = re.compile(
        r"[?？]|吗|\bor (?:whatever|none|anything|another|something|not|maybe)\b|\b(?:alternatively|maybe|perhaps|possibly|actually|instead|wait|kidding)\b|,\s*no\W*$"
        r"|[.;]\s*(?:wrong|no|not|incorrect|false)\b|\bis (?:wrong|incorrect|not (?:right|correct|the answer))\b|(?:不对|错误|错的|不正确)(?<!都不对)(?<!都错误)\W*$|还是",
        re.IGNORECASE,
    )
    # An option's text that is about letters: `Both A and B`, `A and C only`, `C, A, B, D`.
    ABOUT_OPTIONS = re.compile(
        r"\W*(?:(?:both|neither|either|all|only|none)\b.*|\(?[A-J]\)?(?:(?:,|,? and|,? &)\s*\(?[A-J]\)?)+\s+only|[A-J](?:\s?(?:,|>|<|→|-)\s?[A-J]){2,}|[A-J](?:\s?(?:>|<|=|→)\s?[A-J])+|.*\bgroups? [A-J]\b.*)\W*",
        re.IGNORECASE,
    )
    # A letter with a mark and a text after it: a further option.
    OPTION_OTHER = re.compile(r"\([A-J]\)\s*[^\s(),;]{2}|(?<![A-Za-z])[A-J][.:]\s?\S")
    # At the start of an option's text: denies, as `Cannot be determined` does.
    DENIAL_AS_TEXT = re.compile(
        r"\W*(?:(?:it|they|this|there|we|the \w+)\s+(?:is\s+|are\s+|was\s+)?)?(?:cannot|can['’]t|can not|could not|is not|are not|isn['’]t|aren['’]t|does not|doesn['’]t|do not|don['’]t"
        r"|not|no|none|neither|never|nothing|nobody|impossible|unknown|undetermined|insufficient|the wrong|false|wrong|incorrect|无法|不能|不|没有|以上|都不|均不|未)(?![A-Za-z])",
        re.IGNORECASE,
    )
    # A letter after the noun that it names: `vitamin A`, `Plan B`.
    NAMED_BY_NOUN = re.compile(
        r"\b(?:vitamins?|plans?|types?|groups?|hepatitis|figures?|graphs?|lines?|points?|models?|class(?:es)?|sections?|regions?|areas?|bottles?|samples?|solutions?|sets?|teams?"
        r"|compan(?:y|ies)|cit(?:y|ies)|substances?|objects?|circles?|box(?:es)?|trains?|cars?|countr(?:y|ies)|tubes?|cells?|parts?|stages?|steps?|phases?|players?|persons?|students?|schools?"
        r"|genes?|alleles?|blood|grades?|angles?|sides?|vert(?:ex|ices)|segments?|rows?|columns?|houses?|buildings?|stores?|rooms?|products?|planets?|species|organisms?|layers?|factor|allele|beakers?|flasks?)"
        r"\s[A-J](?![A-Za-z])",
        re.IGNORECASE,
    )
    # A whole value after a bare A: `A 12`; `A 12 cm rod` is a thing.
    VALUE_AFTER_A = re.compile(
        r"\s(?:-?[\d.,]+\s?%?|\\?\$.*|\\.*|\(.*\))\.?$|\s-?[\d.,/]+\s(?:[kcm]?m|[km]?g|s|min|h|degrees|\^\\circ|m/s|km/h|J|N|W|V)\.?$"
    )
    OPTIONS_ONLY = re.compile(r"(?:[\W_]|\b(?:or|and|[a-j])\b)*", re.IGNORECASE)
    # Between the parts of a sentence.
    PAUSE = re.compile(r"[,;:，；：]")
    # Joins a second introduction.
    FURTHER = re.compile(r"[\w$][^\w]+(?:and|but)\s|;")
    OR_NOT = re.compile(r"\b(?:or not|alternatively|wrong|kidding|joking)\b")
    # Before the subject.
    SUBJECT_LEAD = re.compile(r"^(?:so|thus|hence|therefore|option|choice|statement|point|选项)[\s,]+", re.IGNORECASE)
    PROPER_NAME = re.compile(r"(?:[A-Z][\w.-]+ ?)+")
    FIRST_WORD = re.compile(r"[^\s,;，；]+")
    SIMPLE_WORD = re.compile(r"(?<!-)\b[^\W\d_]+\b(?!-)")
    WORDS_ONLY = re.compile(r"[^,、|/;:$\\\d()]+")
    NUMBER_START = re.compile(r"-?[\d.]")
    SEVERAL_LINES = re.compile(r"\n|\\\[|\$\$")
    # Tells options apart by their text.
    DECIMAL = re.compile(r"\d+(?:\.\d+)?")
    TELLING_WORD = re.compile(r"[^\W\d_]{2,}|[\u4e00-\u9fff]")
    BOTH = re.compile(r"\bboth\b", re.IGNORECASE)
    GOLD_CHOICE = re.compile(r"(?:\([A-J]\)|[A-J](?:$|[).:])).*")
    NAMED_LETTER = re.compile(r"(?!(?i:not|or|and|non|either|neither)\b)[A-Za-z]{3,10} ([A-Z])")
    # What can be no number: of red and blue, `red or blue` names one.
    NAME_ONLY = re.compile(r"[A-Za-z\u4e00-\u9fff][A-Za-z\u4e00-\u9fff -]*")
    SIDE = re.compile(r"^([左右上下前后东南西北])[边面侧方]$")
    ARTICLE = re.compile(r"^(?:a|an|the)\s+(?=[a-z]{3})")
    LONG_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
    RESTATED = re.compile(r",?\s+(?:or equivalently|or,? in other words|equivalently|i\.e\.|that is|or)[,:]?\s+")
    ENGLISH_OR = re.compile(r"\bor\b")
    SEVERAL_ANSWERS = re.compile(
        r"^\s*(?:\(1\)\s*\S[^\n]*\(2\)\s*\S|1[.)]\s[^\n]*\n\s*2[.)]\s)"
        r"|=[^=]*(?:[与和或、|&~]|以及|\b(?:vs|but)\b|(?<=[\w)}])[ ][A-Za-z](?=\s*=))[^=]*="
        r"|=\s*-?[\d.]+\s+[a-z]\s*=|^[^{}]*=[^={}]*\\\\[^={}]*=[^{}]*$"
    )
    """Numbered answers, and two equations."""
    CHANGED_IN_CHINESE = re.compile(r"\d\s*(?:个半|折|半)$")
    POLAR_WORD = re.compile("yes|true|no|false|不是|是|对|否|错")
    POLAR_IN_ENGLISH = re.compile(r"(?<![A-Za-z])(?:yes|no|true|false)(?![A-Za-z])", re.IGNORECASE)
    POLAR_IN_CHINESE = re.compile(
        r"(?:^|[\s,，、;；。]|或者?|还是|[和与])(不是|是|对|否|错)(?=$|[\s,，、;；。.]|或|还是|[和与])"
    )
    POLAR_ONLY = re.compile(
        r"(?:\W|and|to|vs|versus|but|quad|lor|yes|true|no|false|不是|是|对|否|错|和|与|以及)*", re.IGNORECASE
    )
    DENIED_OUTRIGHT = re.compile(
        r"\b(?:wrong|incorrect|none of|nobody|doubt|no way|wonder|unlikely|impossible that|not the answer)\b",
        re.IGNORECASE,
    )
    REDUCED = re.compile(r"(\d{1,30})\s?(?:\\pmod\{|\(?mod )(\d{1,30})[})]?")
    AT_START = re.compile(
        r"^\s*(?:(?:in|on|at|by)\s+(?=\d)(?!\S+, [a-z])|(?:thus|so|hence|therefore|then),?\s+)", re.IGNORECASE
    )
    NAME_BEFORE = re.compile(
        r"^[\s$]*(?:\\(?:text|mathrm|vec|mathbf|overrightarrow|overline)\s*\{[^{}]{1,40}\}(?:_\{?\w+\}?)?"
        r"|[A-Z]\s*\\c[au]p\s*[A-Z]|\((?:[a-z],\s?)+[a-z]\)(?=\s*\\in)|(?:[A-Za-z]{2,}\s){0,4}[A-Za-z]{4,})\s*(?:=|\\in(?![a-z]))\s*(?=\S)"
    )
    BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
    SEVERAL_VALUES = re.compile(r"\b(?:or|and)\b|[,;]\s")
    FOREIGN_SENTENCE_END = re.compile(r"(?<=[!?。！？।\n])\s*|(?<=\.)\s+")
    DECIMAL_COMMA = re.compile(r"(?<![\d,.])(\d+),(\d{1,2}|\d{4,})(?![\d,])")
    DECIMAL_COMMA_MEASURED = re.compile(
        r"^(-?\d+),(\d{1,2}|\d{4,})(?=\s?(?:[kcdm]?m|[km]?g|m?[Ll]|km/h|m/s|s|h|min|N|J|W|V|A|Hz|Pa|€|%|\\%)(?:[²³]|\^\d)?$)"
    )
    CURRENCY_NAME = re.compile(r"[A-Za-z]+|[元角分]")
    DIGIT_OR_DOLLAR = re.compile(r"\d|\$")
    LETTER_TERM = re.compile(r"(?<!\\)\b\d*[a-z]\b")
    FOREIGN_DIGIT = re.compile(r"(?![0-9²³¹])\d")


POLAR = {"yes": True, "true": True, "no": False, "false": False, "是": True, "对": True, "否": False, "错": False}
SIDES = frozenset(
    "left right up down top bottom above below north south east west 左 右 上 下 左边 右边 上面 下面".split()
)
NOT_PROSE = frozenset("sin cos tan cot sec csc log ln exp sqrt pi lim mod max min gcd lcm and or".split())
NO_NUMBERS = frozenset(("one", "hundred", "thousand", "million"))
NO_UNIT_IN_PROSE = frozenset(("in", "a", "A", "at"))
_FULL_WIDTH = {0xFEE0 + ord(sign): sign for sign in string.digits + string.ascii_letters}
_INTRODUCING = (
    "answer", "option", "choice", "choose", "chose", "pick", "select", "go with", " be", "####", "答", "选", "【", "corresponds", "matches",
    "it is", "it's", "it’s", "this is", "that is", "that's", "that’s", "this's",
)  # fmt: skip


@lru_cache(maxsize=4096)
def introductions(text: str) -> tuple[re.Match[str], ...]:
    """Return the places at which the text introduces an answer, in order."""
    lowered = text.lower()
    return tuple(Token.LEAD_IN.finditer(text)) if any(words in lowered for words in _INTRODUCING) else ()


def span_content(match: re.Match[str]) -> str:
    """Return the formula of a match of `Token.FORMULA`."""
    return next(group for group in match.groups() if group is not None).strip()


def places_of(number: str, text: str) -> list[int]:
    """Return the ends of a number's places in a text; `5` is not in `15` or `5.2`."""
    return [match.end() for match in re.finditer(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text)]


def with_half_width(text: str) -> str:
    """Return the text with the full-width letters and digits of Chinese keyboards as ASCII."""
    return text.translate(_FULL_WIDTH)


WORD_VALUES = {word: value for value, word in enumerate(_SMALL_WORDS)} | {
    word: 10 * value for value, word in enumerate(TEN_WORDS, start=2)
}
WORD_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_PARTS = {
    2: "half halves",
    3: "third thirds",
    4: "quarter quarters fourth fourths",
    5: "fifth fifths",
    6: "sixth sixths",
    7: "seventh sevenths",
    8: "eighth eighths",
    9: "ninth ninths",
    10: "tenth tenths",
    12: "twelfth twelfths",
    20: "twentieth twentieths",
    100: "hundredth hundredths",
    1000: "thousandth thousandths",
    10**6: "millionth millionths",
}
PART_WORDS = {word: Fraction(1, parts) for parts, words in _PARTS.items() for word in words.split()}
"""What one of them is of a whole: `quarters` → 1/4."""
NUMBER_WORDS = frozenset((*WORD_VALUES, *WORD_SCALES, *PART_WORDS, "dozen", "trillion"))
