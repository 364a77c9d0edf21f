"""The words by which answers are stated, denied, bounded and left open, in English and Chinese: each list stands here only."""

import re
from functools import lru_cache

IS = re.compile(
    r"\b(?:is|are|was|were|be|been|equals?|becomes?|such that|satisfying|namely|gives?|yields?|reads?|says?|shows?|displays?|made of"
    r"|called|named|(?:signed|written|painted|made|composed|won) by|consists? of|comes? (?:to|out to)|amounts? to|lasts?|takes?|costs?"
    r"|measures?|weighs?|contains?|has|have|had|takes? place|occurs?|happens?|located)\b"
    r"|(?:(?<=\bit)|(?<=that)|(?<=here)|(?<=what))['’]s\b(?=\s)|[是为](?!\W*$)|等于|等於|共有|一共|总共|合计|得到|得出|写着|显示",
    re.IGNORECASE,
)
"""What stands between a subject and what is said of it."""

LEAD_IN = re.compile(
    r"(?<!wrong )(?<!incorrect )(?<!not the )\b(?:answers?(?=:)|answer|option|choice)\b(?:\s?\d)?[\s*_\"')\]]{0,5}(?:(?:(?:should|must|would|will|has to|to) be\b|(?:is|are|was)\b|[:：=])[\s*_]*)+"
    r"|\bI(?:\s+would|\s+will|['’]ll|['’]d)?\s+(?:choose|chose|pick|picked|select|selected|go with)\b"
    r"|\b(?:corresponds to|matches)\s+(?=(?:option|choice)\s+\(?[A-J]\b)"
    r"|\b(?:it|this|that)(?:\s+is|['’]s)\s+(?=[\s*$]{0,4}(?:\\[a-z]+\{)?(?:option |choice )?(?-i:[(\[]?[A-J](?:[)\]]\s*[^\s(),;]{0,12}\W*|\s?\([^\s(),;]{1,12}\)\W*|\.\s\w{1,12}\W*|[\s.*$})]*)$))"
    r"|####|【答案】|\b(?:it|this) (?:should|must|has to) be\b"
    r"|(?:答案|选项)[\s*]{0,4}(?:应该|应当|应|就)?(?:[是为选]\s*[:：=]?|[:：=])"
    r"|(?:故选|应选|选择|(?<![可不别要])选)(?:项|答案)?\s*[:：]?(?=[\s(（\[【$\\*{]{0,6}(?:text|mathrm|boxed)?[{(\s]{0,3}[A-JＡ-Ｊ])"
    r"|(?:^|[\n。])\s*答\s*[:：]",
    re.IGNORECASE,
)
"""What a final answer is introduced by."""

FILLING = re.compile(
    r"(?:(?:[\s:：=]|\*\*|__)+|(?:an?|the|exactly|simply|just|only|therefore|thus|hence|then|also|equal to|given by|either)\s+"
    r"|(?:option|choice|about|approximately|around|roughly)\s+(?=[\d$\\(A-J])|(?:大约|大概|约|选项?)\s*(?=[\d$\\(A-J]))+"
)
"""What may stand between the verb and what is said."""

DENIED = re.compile(
    r"\b(?:not|never|cannot|neither|nor|except|unlike|wrong|incorrect|impossible|unsure|unclear|doubt\w*|unlikely|hardly|unknown"
    r"|anything but|other than|bounded by|far from|ruled? out|exclude[sd]?|opposite|no longer|mistaken?|no way|nobody|no one|none of (?:them|these)|who says|out of the question|false that|differs? from|different from|nowhere near|unequal)\b|n['’]t\b|,\s*no\b\W*$"
    r"|不是|并非|不可能|不能|不对|不正确|错误|排除|不等于|不应|不选|无法|不确定|未必|绝非|怎么会|不认为|不一定|不会|不要|别选|除了|以外|吗",
    re.IGNORECASE,
)
"""What denies, or says that nothing is known."""

CONTRAST = re.compile(
    r"(?:,\s+(?:and\s+|but\s+)?not|[.,]?\s+(?:rather than|instead of|as opposed to))(?:\s+|(?=\())(?!only\b|sure\b|certain\b)[^,;.]{1,40}(?=[,;.]|$)"
    r"|\bnot\s+[^,;.]{1,40}?,?\s+but\s+(?:rather\s+)?"
    r"|[，,]?\s*(?:而不是|而非)[^，。,;]{1,30}(?=[，。,;]|$)|[，,]\s*不是[^，。,;]{1,30}(?=[，。,;]|$)",
    re.IGNORECASE,
)
"""A denial of something else behind a value: `5, not 6`."""

OPEN = re.compile(
    r"\b(?:maybe|perhaps|candidates?|wonder|one of|possibly|might|could|guess\w*|whether|depends|unless|likely|alternatively|otherwise|or else|if so|if\b.*\belse|for this\b.*\bfor that)\b|(?-i:\bmay\b)(?! \d)|可能|也许|或许|抑或|要么|还是",
    re.IGNORECASE,
)
"""What leaves open whether that is the answer."""

OR = re.compile(r"\bor\b|或者?|还是")
"""What joins alternatives."""

_NUMBER = r"(?:\$|[£€¥]|\\\(|-|about |the |year )?(?:[\d\\]|(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\b)"
BOUND = re.compile(
    r"\b(?:at least|at most|up to|(?:more|less|greater|fewer|other|larger|smaller|bigger|higher|lower|later|earlier|longer|shorter|older"
    rf"|younger) than|(?<!\d )(?:over|under|above|below|after|before)|since|until|exceed\w*|nearly|almost|divisible by|multiples? of)[\s:]+{_NUMBER}"
    r"|\band (?:above|below|over|under|more|up)\b|\bor (?:more|less|fewer|greater|later|earlier|above|below|over|under)\b"
    r"|(?:超过|至少|至多|最多|大于|小于|不到|多于|少于|不足|不超过|高于|低于)[有是为需要\s]{0,3}[-−£€¥\d一二两三四五六七八九十百$\\]|\d\s*[^\d\s，。,]{0,3}(?:以上|以下|多[个人只])",
    re.IGNORECASE,
)
"""A number that bounds the answer and is not the answer."""

CORRECTED = re.compile(
    r"(?:(?:oh|but|no|hmm),?\s+)?(?:actually|wait|no|correction|sorry|on second thoughts?|scratch that|hmm|不对|不，|等等|更正|其实)(?:[\s,:;!.，：。]+|(?<=[，]))",
    re.IGNORECASE,
)
"""What opens a sentence that takes back the one before."""

ALTERNATIVE = re.compile(
    r"(?:but\s+)?(?:or|alternatively|maybe|perhaps|possibly|otherwise|also|it (?:could|might|may)|could|might|then again)\b"
    r"|或者?|但?也?可能|或许|也许|还是|但也",
    re.IGNORECASE,
)
"""What opens a sentence that names a further answer."""

CONSEQUENCE = re.compile(
    r"(?:^|[,;，；。]\s*|\s+(?=therefore|thus|hence))(?:(?:and\s+)?(?:so|thus|hence|therefore|consequently|meaning|which means)\b(?! that\b)|(?:for|giving|making) a total of|(?:that is|i\.e\.|in other words),|所以|因此|因而|故)[\s,，:：]*",
    re.IGNORECASE,
)
"""What opens a conclusion within a sentence."""

COMMENT = re.compile(
    r"[,;，；—–]\s*(?:(?:which|because|since|as|in|to the|on the|next to|where|when|with|whose|while|who|though|although|making|and (?:it|this|they|he|she)|at|for|by|but"
    r"|followed by|due to|according to)\b|因为|由于|其中)|(?:因为|由于)|\s+(?:because|since)\b(?! \d)",
    re.IGNORECASE,
)
"""What opens a comment on what was said before it."""

BEHIND_VALUE = re.compile(
    r"(?=,? (?:when|where|at|for|if|since|because|which|with|by|as|achieved|attained|in total|in all|altogether|because of)\b)"
)
"""What may follow a value without changing it."""

VERDICT = re.compile(
    r"(?:the\s+)?(?:only\s+|most\s+)?(?:correct|right|true|best|accurate|answer|final answer|one|solution|appropriate)"
    r"(?:\s+(?:answer|one|option|choice|statement|value|result|solution))?(?:\s+(?:here|to\b.*|for\b.*|among\b.*|of\b.*))?[.!]?$"
    r"|the\s+(?:\w+\s+){0,3}?(?:\w{2,}est|most|least|first|last|winner|only|one)\b.*$"
    r"|(?:\w{2,}er|more \w+|less \w+) than\b.*$"
    r"|正确的?(?:答案|选项)?(?:的)?[。！]?$|对的[。！]?$|最\S+[。！]?$",
    re.IGNORECASE,
)
"""What is said of a subject that is itself the answer: `B is the answer`, `Evelyn is the fastest`."""

POLAR = {"yes": True, "true": True, "no": False, "false": False, "是": True, "对": True, "否": False, "错": False}
SIDES = frozenset(
    "left right up down top bottom above below north south east west 左 右 上 下 左边 右边 上面 下面".split()
)

USED = re.compile(
    r"(?!undefined)\w{2,}ed|left|there|visible|possible|present|available|remaining|sold|made|won|lost|seen|shown|taken|eaten|given|born|built|drawn"
    r"|written|known|found|in total|in all|altogether",
    re.IGNORECASE,
)
"""What is said of a number of things without being the answer: `48 tiles are needed`."""

IGNORANCE = re.compile(
    r"\bI(?:['’]m| am)? (?:do not|don['’]t|cannot|can['’]t|could not|couldn['’]t|not|have no) (?:know|tell|say|determine|see|sure|idea|able)\b|不知道",
    re.IGNORECASE,
)
"""What says that the writer has no answer."""

ADVERBIAL = re.compile(
    r"(?:after|before|since|in|on|at|by|from|for|with|over|under|when|if)\s[^,]*?(?:,\s*|\s(?=(?:it|he|she|they|we|there|the)\s))",
    re.IGNORECASE,
)
"""What opens a sentence by saying when or where: `After 3 hours it has gone 150 km`."""

CHANGED_BEFORE = re.compile(
    r"\b(?:half|thirds?|quarters?|twice|double|triple|times|squared?|cubed?|root|reciprocal|inverse|opposite|negative|minus|factorial"
    r"|logarithm|multiples?|power)\s+(?:of\s+)?(?:the\s+)?$",
    re.IGNORECASE,
)
"""Words in front of a number that make it another one: `half of 5`."""

CHANGED_BEHIND = re.compile(
    r"\s*(?:的(?:平方|立方|一半|两倍|[一二三四五六七八九十]倍|倒数|阶乘|相反数)|分之|折|又|除以|乘以?|加上?|减去?|半)"
)
"""The same behind a number, in Chinese."""

_INTRODUCING = (
    "answer", "option", "choice", "choose", "chose", "pick", "select", "go with", " be", "####", "答", "选", "【", "corresponds", "matches",
    "it is", "it's", "it’s", "this is", "that is", "that's", "that’s", "this's",
)  # fmt: skip


@lru_cache(maxsize=4096)
def introductions(text: str) -> tuple[re.Match[str], ...]:
    """Return where the text introduces an answer, in order."""
    lowered = text.lower()
    return tuple(LEAD_IN.finditer(text)) if any(words in lowered for words in _INTRODUCING) else ()
