"""The 55 instructions of the training tasks, each with the rule that judges a reply.

25 are those of IFEval (arXiv:2311.07911), 29 those of multi-constraint sets (the columns of
allenai/IF_multi_constraints_upto5, and arXiv:2507.02833), and one is the choice of RLVR-IFeval. All are own
implementations and judge by the plain meaning of an instruction. The published verdicts
differ where the published rules reward nothing, depend on chance or miss that meaning: keywords are texts and
not patterns, an argument of 0 stays 0, an undetected language is not the required one, a reply that merely
avoids something must have content, a horizontal rule is no bullet and no paragraph, and marks of Markdown
around a required text are not part of it.

A rule's parameters behind the text are the instruction's arguments. An id without a rule, or an argument
that is missing, of the wrong type or unknown, is a DataError when the row is read, never a 0 when a reply is
judged (REW-6). Rules take linear time, without a model or a word list to download.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from strop.tasks.registry import import_extra
from strop.tasks.rows.layout import bad_row

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The answers that `detectable_format:constrained_response` allows; part of every such prompt."""
_MIN_WORDS = 3
_MIN_LETTERS = 20
_FENCE = re.compile(r"\s*```(?:json)?\s*", re.IGNORECASE)
_TITLE = re.compile(r"<<([^\n<>]++)>>")
_BULLET = re.compile(r"^[^\S\n]*+[*+-][^\S\n]++(?!(?:[*-][^\S\n]*+)+$)\S", re.MULTILINE)
_BULLET_MARK = re.compile(r"^[^\S\n]*+\*[^\S\n]++", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)\*++(?![\s*])[^*\n]*(?<!\s)\*++")
_STARS = re.compile(r"[^\S\n]?\*\*\*(?!\*)\s?")
_SPACED_STARS = re.compile(r"\*[^\S\n]*+\*[^\S\n]*+\*(?!\*)")
_SIX_STARS = re.compile(r"\*{6}")
_BIGRAM = re.compile(r"<<\s*([^<>]*?)\s*>>")
_JOINT = re.compile(r"[.!?][\"'”’)]?-(?=\S)")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]*+)\](?!\()")
_BRACKETED = re.compile(r"[^\w\[]*\[[^\[\]]+\][^\w\]]*")
_DASH = re.compile(r"[—–…:]|--")
_EDGE_MARKS = ' \t\n"“”*_`'
_COMMAS = (",", "，", "،", "、")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"(?<!p\.)(?<!p\.\s)p\.\s?s\."}
_WORD = re.compile(r"\w+")
_BARE_WORD = re.compile(r"[^\W_](?:\S*[^\W_])?")
"""What stands between white space, without the marks at its edges."""
_CLOSING = r"[\"'”’»)\]}*_~]*+"
_TERMINATORS = re.compile(rf"[.!?…]++{_CLOSING}(?=\s|\Z)|[。！？।۔]++[”’」』）]*+")
_BLANK_LINE = re.compile(r"\n[^\S\n]*+\n\s*")
_TITLES = (
    r"(?i:mrs?|ms|dr|prof|st|mt|messrs|mme|gen|col|lt|sgt|capt|rev|hon|gov|sen|rep|vs|fig|eq|no|vol|pp|cf"
    r"|approx|e\.g|i\.e|viz|al|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)"
)
"""Abbreviations that never end a sentence."""
_ENDINGS = r"(?i:etc|jr|sr|inc|ltd|co|corp|bros|a\.m|p\.m|u\.s|u\.k|u\.n|ph\.d|b\.c|a\.d|d\.c|est|dept)"
"""Abbreviations that end a sentence only if a capital letter follows."""
_NO_END = re.compile(
    rf"(?<![^\s\"'“‘«(\[{{*_。！？])(?:{_TITLES}|[A-HJ-Z]|{_ENDINGS}(?=\.{_CLOSING}\s+[^\sA-ZÀ-ÖØ-Þ]))"
    rf"\.(?={_CLOSING}(?:\s|\Z))"
    rf"|(?:^[^\S\n]*+|(?<=[.!?…]\s)|(?<=[.!?…][\"'”’»)*]\s))\(?\d{{1,3}}\.(?={_CLOSING}\s)",
    re.MULTILINE,
)
"""An abbreviation, an initial other than I, or a list number, with its full stop."""
_KEPT = "\ue000"
"""Stands for a full stop that ends no sentence."""


def words_of(text: str) -> list[str]:
    """Return what stands between white space in small letters, without marks at its edges."""
    return [word.lower() for word in _BARE_WORD.findall(text)]


def paragraphs(text: str) -> list[str]:
    """Return the parts between blank lines, without blank ones."""
    return [part.strip() for part in _BLANK_LINE.split(text) if part.strip()]


def parts_between(text: str, divider: re.Pattern[str]) -> list[str]:
    """Return the parts between dividers, which may also begin and end the text; none if a part is blank."""
    parts = [part.strip() for part in divider.split(text)]
    inner = parts[not parts[0] : len(parts) - (not parts[-1])]
    return inner if all(inner) else []


def sentences(text: str) -> list[str]:
    """Return the sentences with their terminators.

    A terminator ends a sentence if white space or the end follows; a blank line always does. Titles,
    initials and list numbers do not. Marks without any letter or digit belong to the sentence before.
    """
    pieces: list[str] = []
    for part in paragraphs(_NO_END.sub(lambda match: match.group().replace(".", _KEPT), text)):
        start = 0
        for end in [*(match.end() for match in _TERMINATORS.finditer(part)), len(part)]:
            piece, start = part[start:end].strip().replace(_KEPT, "."), end
            if any(map(str.isalnum, piece)):
                pieces.append(piece)
            elif piece and pieces:
                pieces[-1] += f" {piece}"
    return pieces


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the most probable language, or None if the text has no known letter.

    Chinese is 'zh-cn' or 'zh-tw'; an ambiguous text is 'unknown'. Equal texts have equal codes. Only the
    first ten thousand characters count.
    Raises: ConfigError like `load_detector`.
    """
    package = load_detector()
    try:
        return str(package.detect(text))
    except package.LangDetectException:
        return None


@functools.cache
def load_detector() -> Any:
    """Return the package langdetect, its languages read. Raises: ConfigError if it is not installed."""
    package = import_extra("langdetect")
    # By itself it draws from an unseeded generator (REW-5).
    package.DetectorFactory.seed = 0
    package.detector_factory.init_factory()
    return package


def has_substance(text: str) -> bool:
    """Whether a reply has content: three words, or twenty letters, as some scripts have no spaces."""
    return len(_WORD.findall(text)) >= _MIN_WORDS or sum(map(str.isalpha, text)) >= _MIN_LETTERS


def _holds(count: int, quantifier: str, bound: int, *, slack: int | None = None) -> bool:
    """Compare a count with a bound; 'around' allows `slack` more or less: a tenth, one at least."""
    return {
        "at least": count >= bound,
        "at most": count <= bound,
        "less than": count < bound,
        "more than": count > bound,
        "exactly": count == bound,
        "around": abs(count - bound) <= (slack or max(round(bound / 10), 1)),
    }[quantifier]


def _count_text(text: str, phrase: str) -> int:
    """Count the occurrences of a phrase, in any case, also inside words."""
    return text.casefold().count(phrase.casefold())


def _count_word(text: str, word: str) -> int:
    """Count the occurrences of a word or phrase as a whole word, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE))


def _fold(text: str) -> str:
    return " ".join(text.split()).casefold()


def is_copy(text: str, prompt_to_repeat: str) -> bool:
    """The reply is the request and nothing else, in any case."""
    return text.strip().lower() == prompt_to_repeat.strip().lower()


def _bare(word: str) -> str:
    """Return a word that an instruction names as `words_of` does."""
    return " ".join(words_of(word))


def _words_at(text: str, index: int) -> list[str]:
    """Return the first (0) or last (-1) word of each sentence."""
    return [words_of(sentence)[index] for sentence in sentences(text)]


def counts_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """As many sentences as required, and never none; 'around' allows one more or less."""
    count = len(sentences(text))
    return count > 0 and _holds(count, relation, num_sentences, slack=1)


def counts_words(text: str, num_words: int, relation: str) -> bool:
    """As many words as required, three at least if so many are allowed."""
    count = len(_WORD.findall(text))
    most = _MIN_WORDS if relation in ("at least", "more than") else num_words - (relation == "less than")
    return count >= max(min(_MIN_WORDS, most), 1) and _holds(count, relation, num_words)


def opens_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Blank lines separate as many paragraphs as required, and the n-th begins with the word."""
    parts = [part for part in paragraphs(text) if any(map(str.isalnum, part))]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    return words_of(_DASH.sub(" ", parts[nth_paragraph - 1][:1000]))[:1] == [_bare(first_word)]


def has_postscript(text: str, postscript_marker: str) -> bool:
    """The marker occurs, in any case; spaces inside P.S. and P.P.S do not matter."""
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker)), text, re.IGNORECASE) is not None


def counts_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least as many sections as required have a heading and a number of their own."""
    # In JSON a line break is the letter n.
    numbers = re.findall(rf"(?:(?<!\w)|(?<=\\n)){re.escape(section_spliter.strip())}\s?(\d+)", text)
    return len(set(numbers)) >= num_sections


def is_json(text: str) -> bool:
    """The whole reply, without a code fence around it, is a JSON table or list that is not empty."""
    opening = _FENCE.match(text)
    body = text[opening.end() :].strip().removesuffix("```") if opening else text
    try:
        # A number of any length is JSON, and Python refuses to convert long ones. NaN is none, for int.
        value = json.loads(body, parse_int=str, parse_float=str, parse_constant=int)
    except (ValueError, RecursionError):  # nested a thousand deep is no answer either
        return False
    return isinstance(value, dict | list) and bool(value)


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The reply starts with the request, in any case and with any white space, and continues."""
    request, reply = _fold(prompt_to_repeat), _fold(text.lstrip(_EDGE_MARKS + ">"))
    return reply.startswith(request) and any(map(str.isalnum, reply[len(request) :]))


def ends_with(text: str, end_phrase: str) -> bool:
    """The phrase ends the reply, in any case; quotes and marks of Markdown do not matter."""
    phrase = end_phrase.strip(_EDGE_MARKS)
    return bool(phrase) and _fold(text.rstrip(_EDGE_MARKS)).endswith(_fold(phrase))


def repeats_phrase(text: str, phrase: str, small_n: int) -> bool:
    """The phrase occurs n times, each time with exactly one inner word replaced."""
    target, words = words_of(phrase), words_of(text)
    if len(target) < 3:
        return False
    windows = [words[start : start + len(target)] for start in range(len(words) - len(target) + 1)]
    changed = [[n for n, word in enumerate(window) if word != target[n]] for window in windows]
    return sum(len(one) == 1 and 0 < one[0] < len(target) - 1 for one in changed) == small_n


def wraps_bigrams(text: str) -> bool:
    """The reply is pairs of words, each in double angular brackets; the last may be one word."""
    sizes = [len(pair.split()) for pair in _BIGRAM.findall(text)]
    has_pairs = 2 in sizes and set(sizes[:-1]) <= {2} and sizes[-1] in (1, 2)
    return has_pairs and not any(map(str.isalnum, _BIGRAM.sub("", text)))


def starts_and_ends_with(text: str, keyword: str) -> bool:
    """The keyword is the first and the last word, and no mark follows it."""
    words, word = words_of(text), keyword.strip().lower()
    is_edge = len(words) > 1 and words[0] == words[-1] == _bare(word)
    return is_edge and text.strip().lower().endswith(word)


def composes_paragraphs(text: str, n_sent: int, n_words: int) -> bool:
    """Spaced asterisks separate three parts of `n_sent` sentences of `n_words` words."""
    parts = [sentences(part) for part in parts_between(text, _SPACED_STARS)]
    has_form = len(parts) == 3 and all(len(part) == n_sent for part in parts)
    return has_form and all(len(words_of(sentence)) == n_words for part in parts for sentence in part)


def counts_letter(text: str, letter: str, let_frequency: int, let_relation: str = "exactly") -> bool:
    """The letter, or another single mark, occurs as often as required, in any case."""
    return _holds(text.lower().count(letter.strip().lower() or letter), let_relation, let_frequency)


Rule = Callable[..., bool]

_DEMANDS: Mapping[str, Rule] = {
    "keywords:existence": lambda text, keywords: all(_count_text(text, one) for one in keywords),
    # The most probable language is the required one; a text without letters has none.
    "language:response_language": lambda text, language: detect_language(text) == language,
    "length_constraints:number_sentences": counts_sentences,
    # Three asterisks separate as many parts as required, and none is blank.
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(parts_between(text, _STARS)) == num_paragraphs
    ),
    "length_constraints:number_words": counts_words,
    "length_constraints:nth_paragraph_first_word": opens_paragraph,
    # The reply has at least as many texts in square brackets as required; a link is none.
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        sum(any(map(str.isalnum, one)) for one in _PLACEHOLDER.findall(text)) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(_BULLET.findall(text)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: sum(choice in text for choice in CHOICES) == 1,
    # As many texts as required, or more, are between asterisks, inside a line; a bullet's is no such one.
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        len(_HIGHLIGHT.findall(_BULLET_MARK.sub("", text))) >= num_highlights
    ),
    "detectable_format:multiple_sections": counts_sections,
    "detectable_format:json_format": is_json,
    # A line contains a text in double angular brackets.
    "detectable_format:title": lambda text: any(title.strip() for title in _TITLE.findall(text)),
    "combination:two_responses": lambda text: (
        len(set(parts := parts_between(text, _SIX_STARS))) == len(parts) == 2
    ),
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with,
    # The reply is wrapped in double quotation marks and has something inside.
    "startend:quotation": lambda text: (
        text.strip()[0] + text.strip()[-1] in ('""', "“”") and any(map(str.isalnum, text))
    ),
    "copy:repeat_phrase": repeats_phrase,
    "copy:copy": is_copy,
    "copy:copying_simple": is_copy,
    # The reply is the request N times, with six asterisks between.
    "copy:copying_multiple": lambda text, prompt_to_repeat, N: (
        [is_copy(part, prompt_to_repeat) for part in parts_between(text, _SIX_STARS)] == [True] * N
    ),
    # The reply is the request from character n_start to n_end, with or without the last one.
    "new:copy_span_idx": lambda text, prompt_to_repeat, n_start, n_end: (
        is_copy(text, prompt_to_repeat[n_start:n_end]) or is_copy(text, prompt_to_repeat[n_start : n_end + 1])
    ),
    # Hyphens without white space around them join two or more sentences.
    "detectable_format:sentence_hyphens": lambda text: (
        bool(_JOINT.search(text.strip())) and len(sentences(text)) == 1
    ),
    "detectable_format:bigram_wrapping": wraps_bigrams,
    "keywords:word_once": lambda text, keyword: _count_word(text, keyword) > 0,
    # A word of three or more letters, two of them different, reads the same backwards.
    "keywords:palindrome": lambda text: any(
        word == word[::-1] and len(set(word)) > 1 and len(word) > 2 and word.isalpha()
        for word in _WORD.findall(text.lower())
    ),
    # The keyword is the m-th word of the n-th sentence.
    "keywords:keyword_specific_position": lambda text, keyword, n, m: any(
        words_of(sentence)[m - 1 : m] == [_bare(keyword)] for sentence in sentences(text)[n - 1 : n]
    ),
    "keywords:start_end": starts_and_ends_with,
    # Spaced asterisks separate two parts, or another number of parts; none is blank.
    "paragraphs:paragraphs": lambda text, num_parts=2: len(parts_between(text, _SPACED_STARS)) == num_parts,
    "paragraphs:paragraphs2": lambda text: len(paragraphs(text)) == 2,
    # Every sentence starts, or ends, with the word, marks aside.
    "first_word:first_word_sent": lambda text, first_word: set(_words_at(text, 0)) == {_bare(first_word)},
    "last_word:last_word_sent": lambda text, last_word: set(_words_at(text, -1)) == {_bare(last_word)},
    # The first, or last, word of the reply is the word, marks aside.
    "first_word:first_word_answer": lambda text, first_word: words_of(text)[:1] == [_bare(first_word)],
    "last_word:last_word_answer": lambda text, last_word: words_of(text)[-1:] == [_bare(last_word)],
    "count:counting_composition": composes_paragraphs,
    # The first keyword occurs once and the second twice, as whole words.
    "count:count_increment_word": lambda text, keyword1, keyword2: (
        _count_word(text, keyword1) == 1 and _count_word(text, keyword2) == 2
    ),
    # The reply is one of the options, but for white space and case.
    "validate_choice": lambda text, options: any(_fold(text) == _fold(option) for option in options),
}
_LIMITS: Mapping[str, Rule] = {
    # The keyword occurs less often, or at least as often, as required; also inside words.
    "keywords:frequency": lambda text, keyword, frequency, relation: _holds(
        _count_text(text, keyword.strip()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count_word(text, word) for word in forbidden_words)
    ),
    "keywords:letter_frequency": counts_letter,
    "letters:letter_counting2": counts_letter,
    # Words without small letters occur as often as required.
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _holds(
        sum(map(str.isupper, re.findall(r"[\w'’.-]+", text))), capital_relation, capital_frequency
    ),
    # The reply has no small letter, some capital one, and is in English. (Of capitals nothing is detected.)
    "change_case:english_capital": lambda text: text.isupper() and detect_language(text.lower()) == "en",
    # The reply has no capital letter, some small one, and is in English.
    "change_case:english_lowercase": lambda text: text.islower() and detect_language(text) == "en",
    "punctuation:no_comma": lambda text: not any(comma in text for comma in _COMMAS),
    "punctuation:punctuation_dot": lambda text: "." not in text,
    "punctuation:punctuation_exclamation": lambda text: "!" not in text,
    # No word starts with the letter of the alphabet after the initial of the word before.
    "keywords:no_adjacent_consecutive": lambda text: all(
        ord(second[0]) - ord(first[0]) != 1 for first, second in pairwise(words_of(text))
    ),
    # Every single word is in square brackets.
    "detectable_format:square_brackets": lambda text: all(
        _BRACKETED.fullmatch(token) for token in re.sub(r"\]\s*\[", "] [", text.strip()).split()
    ),
    "keywords:word_count_different_numbers": lambda text, keyword, frequency, relation="exactly": _holds(
        _count_word(text, keyword), relation, frequency
    ),
    "keywords:exclude_word_harder": lambda text, keyword: not _count_word(text, keyword),
    "count:lowercase_counting": lambda text, N: sum(map(str.islower, _WORD.findall(text))) <= N,
    "letters:letter_counting": lambda text, N, relation: _holds(sum(map(str.isalpha, text)), relation, N),
    "count:count_unique": lambda text: max(Counter(words_of(text)).values(), default=2) == 1,
}
"""Rules that next to nothing may follow: a reply must have content beside."""
RULES: Mapping[str, Rule] = {**_DEMANDS, **_LIMITS}


def _read_options(value: Any) -> Any:
    """Accept options as a list, as the text of one, or between slashes."""
    if not isinstance(value, str):
        return value
    if value.strip()[:1] not in ("[", "(", "{"):
        return value.split("/")
    try:
        return list(ast.literal_eval(value.strip()))
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError("not a list of texts") from error


def _require_language(code: str) -> str:
    if code not in (known := os.listdir(load_detector().PROFILES_DIRECTORY)):
        raise ValueError(f"not one of {', '.join(sorted(known))}")
    return code


_COUNTS = """
frequency let_frequency num_sentences num_paragraphs num_words num_placeholders num_bullets num_highlights
num_sections capital_frequency small_n n_start n_end num_parts N n_sent n_words
"""
_Text = Annotated[str, Field(min_length=1)]
_Count = Annotated[int, Field(ge=0, le=10**6)]
_Position = Annotated[int, Field(ge=1, le=10**6)]
_Quantifier = Literal["at least", "at most", "around", "exactly", "less than", "more than"]
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(_COUNTS.split(), _Count),
    **dict.fromkeys(("n", "m", "nth_paragraph"), _Position),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _Quantifier),
    **dict.fromkeys(("keywords", "forbidden_words"), Annotated[tuple[_Text, ...], Field(min_length=1)]),
    "options": Annotated[tuple[_Text, ...], Field(min_length=2), BeforeValidator(_read_options)],
    "language": Annotated[str, AfterValidator(_require_language)],
}
"""What an argument of each name may be; all others are texts."""


@functools.cache
def _arguments_of(instruction_id: str) -> Any:
    parameters = list(inspect.signature(RULES[instruction_id]).parameters.values())[1:]
    fields: dict[str, Any] = {
        one.name: (_TYPES.get(one.name, _Text), ... if one.default is one.empty else one.default)
        for one in parameters
    }
    return create_model(instruction_id, __config__=ConfigDict(extra="forbid"), **fields)


def bind(instruction_id: object, arguments: Mapping[str, Any], *, place: str) -> Callable[[str], bool]:
    """Return whether a reply follows an instruction, which a blank one never does.

    Raises: DataError naming the `place`, if the id or an argument cannot be judged.
    """
    if not isinstance(instruction_id, str) or instruction_id not in RULES:
        raise bad_row(
            f"{place} asks for the instruction {instruction_id!r}, which has no rule",
            allowed=f"the {len(RULES)} ids {', '.join(sorted(RULES))}",
        )
    try:
        given = dict(_arguments_of(instruction_id).model_validate(arguments))
    except ValidationError as error:
        faults = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
        raise bad_row(
            f"{place} gives {instruction_id} the arguments {dict(arguments)} ({faults})",
            allowed="the arguments of the instruction, each of its type",
        ) from error
    rule, needs_content = RULES[instruction_id], instruction_id in _LIMITS

    def is_followed(text: str) -> bool:
        return bool(text.strip() and rule(text, **given)) and (not needs_content or has_substance(text))

    return is_followed
