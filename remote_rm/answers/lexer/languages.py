"""How ten languages say numbers, yes and no, and that something is the answer, and the patterns made of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Language:
    """The words of one language; the alternatives in a text are separated by `|`."""

    numbers: str
    """From zero on, separated by spaces; other forms of one number by `/`, and `_` for a number without a word here."""
    yes: str
    no: str
    answer: str
    """What introduces an answer, without the verb: a pattern."""
    verb: str = ""
    """Between that and the answer: a pattern."""
    with_verb: str = ""
    """Introduces an answer with the verb in front: a pattern."""
    denied: str
    """Denies an answer: a pattern."""
    maybe: str
    either: str
    """Joins alternatives: a pattern."""
    ending: str = ""
    """After the answer: a pattern for a verb at the end of a sentence."""
    option: str = ""
    """Before a letter: a pattern."""
    has_decimal_comma: bool = True


LANGUAGES = (
    Language(
        numbers="cero uno/una dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince dieciséis "
        "diecisiete dieciocho diecinueve veinte",
        yes="sí|verdadero|cierto",
        no="falso",
        answer=r"\b(?:la |el )?(?:respuesta|resultado|solución|opción)(?: (?:correcta?|final))?",
        verb=r"es|sería|son|será",
        denied=r"\bno (?:es|son|sería|creo|puede)\b",
        maybe=r"\b(?:quizás?|tal vez|a lo mejor|posiblemente|puede que|podría|tampoco)\b",
        either=r"\b[ou]\b",
        option=r"(?:la )?(?:opción|letra|alternativa)",
    ),
    Language(
        numbers="zéro un/une deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept "
        "dix-huit dix-neuf vingt",
        yes="oui|vrai",
        no="non|faux",
        answer=r"\b(?:la |le )?(?:bonne )?(?:réponse|résultat|solution(?= est))(?: (?:correcte?|finale?|exacte?))?",
        verb=r"est|vaut|serait",
        denied=r"\b(?:n['’](?:est|a)|ne (?:vaut|sont|serait|peut)) (?:pas|jamais|plus)\b|\bce n['’]est\b",
        maybe=r"\b(?:peut-être|possiblement|il est possible|pourrait)\b",
        either=r"\bou\b",
        option=r"(?:l['’]option|la lettre)",
    ),
    Language(
        numbers="null eins/ein/eine zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn "
        "sechzehn siebzehn achtzehn neunzehn zwanzig",
        yes="ja|wahr|richtig",
        no="nein|falsch",
        answer=r"\b(?:die |das )?(?:richtige |endgültige |korrekte )?(?:antwort|ergebnis|lösung|resultat)",
        verb=r"ist|lautet|beträgt|wäre|also|somit|daher",
        with_verb=r"\b(?:ist|lautet|beträgt) (?:die|das) (?:richtige |endgültige )?(?:antwort|ergebnis|lösung)",
        denied=r"\b(?:ist|sind|lautet|beträgt|wäre) (?:nicht|kein|keine)\b|^\W*nicht\b|(?<=\d) nicht\b|\bnicht (?=[\dA-J]\b)",
        maybe=r"\b(?:vielleicht|möglicherweise|eventuell|womöglich|könnte)\b",
        either=r"\boder\b",
        option=r"(?:option|buchstabe|antwort)",
    ),
    Language(
        numbers="zero um/uma dois/duas três quatro cinco seis sete oito nove dez onze doze treze quatorze/catorze quinze "
        "dezesseis/dezasseis dezessete/dezassete dezoito dezenove/dezanove vinte",
        yes="sim|verdadeiro",
        no="não|falso",
        answer=r"\b(?:a |o )?(?:resposta|resultado|solução|alternativa)(?: (?:correta|correto|certa|final))?",
        verb=r"é|são|seria",
        denied=r"\bnão (?:é|são|seria|pode)\b",
        maybe=r"\b(?:talvez|possivelmente|poderia)\b",
        either=r"\bou\b",
        option=r"(?:a )?(?:opção|letra|alternativa)",
    ),
    Language(
        numbers="ноль/нуль один/одна/одно два/две три четыре пять шесть семь восемь девять десять одиннадцать двенадцать "
        "тринадцать четырнадцать пятнадцать шестнадцать семнадцать восемнадцать девятнадцать двадцать",
        yes="да|верно|правда",
        no="нет|неверно|ложь",
        answer=r"\b(?:правильный |верный |окончательный )?(?:ответ|результат)(?:ом)?",
        verb=r"равен|равно|это|есть|является|будет|—|–|-",
        denied=r"\bне\b(?! менее| более)",
        maybe=r"\b(?:возможно|может быть|наверное|вероятно)\b",
        either=r"\bили\b",
        option=r"(?:вариант|буква)",
    ),
    Language(
        numbers="không một hai ba bốn năm sáu bảy tám chín mười",
        yes="có|đúng|phải",
        no="không|sai",
        answer=r"\b(?:đáp án|đáp số|kết quả|câu trả lời)(?: (?:đúng|chính xác|cuối cùng))?",
        verb=r"là|bằng",
        denied=r"\b(?:không phải|không là|không bằng)\b",
        maybe=r"\b(?:có lẽ|có thể|hoặc là)\b",
        either=r"\b(?:hoặc|hay)\b",
        option=r"(?:phương án|đáp án)",
    ),
    Language(
        numbers="零/ゼロ 一つ/ひとつ 二つ/ふたつ 三つ/みっつ 四つ/よっつ 五つ/いつつ 六つ/むっつ 七つ/ななつ 八つ/やっつ 九つ/ここのつ 十",
        yes="はい|ええ|正しい",
        no="いいえ|いえ|正しくない",
        answer=r"(?:正しい|最終的な)?(?:(?:答え|正解|(?<=^)答)(?=は|[:：]|が)|解答(?=は))",
        verb=r"は|が",
        denied=r"(?:では|じゃ)(?:ない|ありません|なく)|でない|違います|間違い|ません",
        maybe=r"たぶん|おそらく|かもしれ|でしょうか",
        either=r"または|もしくは|あるいは|(?<=\d)か(?=\d)",
        ending=r"です|である|だ|になります|となります",
        has_decimal_comma=False,
    ),
    Language(
        numbers="영 하나/한 둘/두 셋/세 넷/네 다섯 여섯 일곱 여덟 아홉 열",
        yes="예|네|참|맞습니다",
        no="아니요|아니오|아뇨|거짓",
        answer=r"(?:올바른 |최종 )?(?:정답|(?<![가-힣])답)(?=[은는이]|\s?[:：])",
        verb=r"은|는|이",
        denied=r"(?:이|가)?\s?아니(?:다|에요|라|고)|아닙니다|아닌|틀렸|틀린",
        maybe=r"아마|일지도|수도 있",
        either=r"또는|혹은|이나",
        ending=r"입니다|이다|이에요|예요|임",
        option=r"(?:선택지|보기)",
        has_decimal_comma=False,
    ),
    Language(
        numbers="صفر واحد/واحدة اثنان/اثنين ثلاثة/ثلاث أربعة/أربع خمسة/خمس ستة/ست سبعة/سبع ثمانية/ثماني تسعة/تسع عشرة/عشر",
        yes="نعم|صحيح|أجل",
        no="لا|كلا|خطأ",
        answer=r"(?:الإجابة|الاجابة|الجواب|النتيجة|الحل)(?: (?:الصحيحة|الصحيح|النهائية|النهائي))?",
        verb=r"هي|هو|يساوي|تساوي",
        denied=r"(?:^|\s)(?:ليست?|غير|لا يساوي)\s",
        maybe=r"ربما|لعل|(?:^|\s)قد\s",
        either=r"\sأو\s",
        option=r"(?:الخيار|الحرف)",
        has_decimal_comma=False,
    ),
    Language(
        numbers="शून्य एक दो तीन चार पाँच/पांच छह/छः सात आठ नौ दस",
        yes="हाँ|हां|जी हाँ|सही",
        no="नहीं|जी नहीं|गलत",
        answer=r"(?:सही |अंतिम )?(?:उत्तर|जवाब)(?=\s?[:：=]|\s.*(?:है|होगा))",
        verb=r"है",
        denied=r"नहीं|गलत है",
        maybe=r"शायद|हो सकता",
        either=r"\s(?:या|अथवा)\s",
        ending=r"है|हैं|होगा",
        option=r"(?:विकल्प)",
        has_decimal_comma=False,
    ),
)


def _words() -> dict[str, str]:
    """What an answer of one word is in English; a word of two meanings is none."""
    meanings: dict[str, set[str]] = {}
    for language in LANGUAGES:
        for number, forms in enumerate(language.numbers.split()):
            for form in forms.split("/"):
                meanings.setdefault(form.casefold(), set()).add(str(number))
        for english, forms in (("yes", language.yes), ("no", language.no)):
            for form in forms.split("|"):
                meanings.setdefault(form.casefold(), set()).add(english)
    return {word: english.pop() for word, english in meanings.items() if len(english) == 1}


# English has these words, too.
_ENGLISH = frozenset("once six null une ein eine um".split())
WORDS = {word: english for word, english in _words().items() if word not in _ENGLISH} | {"không": "no"}
WHOLE_WORD = "sept"
"""The abbreviation of a month if it has a capital or a full stop."""


def _pattern(*alternatives: str) -> str:
    return "|".join(f"(?:{alternative})" for alternative in alternatives if alternative)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile(_pattern(*patterns), re.IGNORECASE)


def _introduction(language: Language) -> re.Pattern[str]:
    """What introduces an answer, with its verb; in a language with the verb at the end, it may be missing here."""
    joined = f"|{language.verb}" if language.ending else ""
    verb = rf"(?:\s*(?:(?:{language.verb})(?![^\W\d_]){joined}|[:：=]))"
    often = "*" if language.ending else "+"
    return re.compile(_pattern(f"(?:{language.answer}){verb}{often}", language.with_verb), re.IGNORECASE)


DENIED = _any_of(language.denied for language in LANGUAGES)
MAYBE = _any_of(language.maybe for language in LANGUAGES)
ANSWER = _any_of(language.answer for language in LANGUAGES)
INTRODUCED = tuple(map(_introduction, LANGUAGES))
"""What introduces an answer in each of LANGUAGES, with its verb."""


def bare_answer(said: str, language: Language) -> str:
    """Return an answer without the verb after it and the noun before its letter, and with alternatives joined by `or`."""
    if language.ending:
        said = re.sub(rf"\s*(?:{language.ending})(?=\W*$)", "", said)
    if language.option:
        said = re.sub(rf"^(?:{language.option})\s+(?=\(?[A-J]\b)", "", said, flags=re.IGNORECASE)
    return re.sub(language.either, " or ", said, flags=re.IGNORECASE)
