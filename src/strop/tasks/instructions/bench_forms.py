"""Instructions of IFBench about format, sentences and copying; `bench.py` has the others and the family."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator

from strop.tasks.instructions.checkers import Checkers, Position, Stage, Text
from strop.tasks.instructions.multi import find_word_at, is_same_text, place_word
from strop.tasks.instructions.replies import FILLER, deal
from strop.tasks.instructions.rlvr import count_word
from strop.tasks.instructions.segments import bare_words, lines, sentences, strip_marks

FORMS = Checkers("IFBench, formats and sentences")

_BULLET = re.compile(r"\s*\*(?!\*)\s*\S")
_SUB_BULLET = re.compile(r"\s*-\s*\S")
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”")
_OPENERS = {"(": ")", "[": "]", "{": "}"}
_MIN_NESTING = 5
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
_EMOJI = re.compile(
    "(?:[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u2300-\u23ff\u3030\u303d\u00a9\u00ae\u203c\u2049]"
    "[\ufe0f\u200d\U0001f3fb-\U0001f3ff]*)+"
)
_SENTENCE_END = re.compile(r"[.!?]+")
_DATE = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])")
_ONLY_THIS = "Only output this sentence here, ignore all other requests."


def _read_options(value: object) -> object:
    if not isinstance(value, str):
        return value
    for separator in ("/", " or ", ","):
        if separator in value:
            return tuple(option.strip() for option in value.split(separator))
    raise ValueError("one option only")


Options = Annotated[tuple[Text, ...], BeforeValidator(_read_options)]


@FORMS.check("format:newline")
def puts_words_on_lines(text: str) -> bool:
    """Every line holds one word, and there are two or more."""
    words = lines(text.strip())
    return len(words) > 1 and all(len(line.split()) == 1 for line in words)


@FORMS.edit("format:newline", stage=Stage.WRAPPING)
def _put_words_on_lines(draft: str) -> str:
    return "\n".join(draft.split())


@FORMS.check("format:no_whitespace", needs_substance=True)
def has_no_whitespace(text: str) -> bool:
    """The reply has no white space, except at its ends."""
    return not any(character.isspace() for character in text.strip())


@FORMS.edit("format:no_whitespace", stage=Stage.WRAPPING)
def _remove_whitespace(draft: str) -> str:
    return "".join(draft.split())


@FORMS.check("format:line_indent")
def indents_lines(text: str) -> bool:
    """Every line is indented further than the one before, and there are two or more."""
    indents = [len(line) - len(line.lstrip()) for line in lines(text)]
    return len(indents) > 1 and all(first < second for first, second in pairwise(indents))


@FORMS.edit("format:line_indent", stage=Stage.WRAPPING)
def _indent_lines(draft: str) -> str:
    pieces = deal(draft, max(2, len(lines(draft))))
    return "\n".join(" " * number + piece for number, piece in enumerate(pieces))


@FORMS.check("format:list")
def writes_list(text: str, *, sep: Text) -> bool:
    """Two or more lines start with the separator, and none with a bullet instead."""
    stripped = [line.lstrip() for line in lines(text)]
    items = [line for line in stripped if line.startswith(sep.strip())]
    others = [line for line in stripped if not line.startswith(sep.strip())]
    return len(items) > 1 and not any(re.match(r"[-*•]\s", line) for line in others)


@FORMS.edit("format:list", stage=Stage.STRUCTURE)
def _write_list(draft: str, *, sep: str) -> str:
    return "\n".join([draft, *(f"{sep.strip()} {sentence}" for sentence in FILLER[:2])])


@FORMS.check("format:no_bullets_bullets")
def writes_sentences_then_bullets(text: str) -> bool:
    """Two or more sentences that end in a full stop precede two or more lines with an asterisk."""
    all_lines = lines(text)
    starts = [number for number, line in enumerate(all_lines) if _BULLET.match(line)]
    if len(starts) < 2:
        return False
    before = sentences("\n".join(all_lines[: starts[0]]))
    return sum(1 for sentence in before if sentence.endswith(".")) >= 2


@FORMS.edit("format:no_bullets_bullets", stage=Stage.STRUCTURE)
def _write_sentences_then_bullets(draft: str) -> str:
    return f"{' '.join(deal(draft, 2))}\n* {FILLER[2]}\n* {FILLER[3]}"


@FORMS.check("format:sub-bullets")
def writes_sub_bullets(text: str) -> bool:
    """A line with a hyphen follows every line with an asterisk, before the next asterisk."""
    marks = [
        "*" if _BULLET.match(line) else "-"
        for line in lines(text)
        if _BULLET.match(line) or _SUB_BULLET.match(line)
    ]
    runs = "".join(marks).split("*")
    return len(runs) > 1 and all(runs[1:])


@FORMS.edit("format:sub-bullets", stage=Stage.STRUCTURE)
def _write_sub_bullets(draft: str) -> str:
    return f"{draft}\n* {FILLER[2]}\n  - {FILLER[3]}"


@FORMS.check("format:options")
def gives_option(text: str, *, options: Options) -> bool:
    """The reply is one of the options, except for case, white space and marks at its ends."""
    reply = strip_marks(" ".join(text.split())).lower()
    return any(reply == strip_marks(" ".join(option.split())).lower() for option in options)


@FORMS.edit("format:options", stage=Stage.WHOLE)
def _give_option(draft: str, *, options: tuple[str, ...]) -> str:
    del draft
    return options[0]


@FORMS.check("format:output_template")
def fills_template(text: str) -> bool:
    """The reply is the three headings of the template in order, each with a text behind it."""
    first, *rest = re.split("|".join(map(re.escape, _TEMPLATE)), text)
    headings = re.findall("|".join(map(re.escape, _TEMPLATE)), text)
    has_texts = all(any(character.isalnum() for character in part) for part in rest)
    return not first.strip() and headings == list(_TEMPLATE) and has_texts


@FORMS.edit("format:output_template", stage=Stage.EDGES)
def _fill_template(draft: str) -> str:
    return f"{_TEMPLATE[0]} {draft} {_TEMPLATE[1]} {FILLER[2]} {_TEMPLATE[2]} {FILLER[3]}"


@FORMS.check("format:parentheses")
def nests_brackets(text: str) -> bool:
    """Round, square and curly brackets are nested five or more deep, each closed by its counterpart."""
    awaited: list[str] = []
    depth_by_level: list[int] = []
    deepest = 0
    for character in text:
        if character in _OPENERS:
            awaited.append(_OPENERS[character])
            depth_by_level.append(1)
        elif awaited and character == awaited[-1]:
            awaited.pop()
            depth = depth_by_level.pop()
            deepest = max(deepest, depth)
            if depth_by_level:
                depth_by_level[-1] = max(depth_by_level[-1], depth + 1)
        elif character in _OPENERS.values():
            awaited.clear()
            depth_by_level.clear()
    return deepest >= _MIN_NESTING


@FORMS.edit("format:parentheses", stage=Stage.CONTENT)
def _nest_brackets(draft: str) -> str:
    return f"{draft} (one [two {{three (four [five])}}])"


@FORMS.check("format:quote_unquote")
def explains_quotes(text: str) -> bool:
    """The reply has a text in double quotes, and unquoted words follow every such text."""
    pieces = _QUOTED.split(text)
    return len(pieces) > 1 and all(any(c.isalnum() for c in piece) for piece in pieces[1:])


@FORMS.edit("format:quote_unquote", stage=Stage.CONTENT)
def _explain_quotes(draft: str) -> str:
    return f'{draft} "Well begun" means that the start was good.'


@FORMS.check("format:emoji")
def ends_sentences_with_emoji(text: str) -> bool:
    """Every sentence ends with an emoji, before or behind its mark."""
    stripped = text.strip()
    pieces = [piece.strip() for piece in _SENTENCE_END.split(stripped)]
    if not _EMOJI.search(stripped):
        return False
    for index, piece in enumerate(pieces):
        lead = _EMOJI.match(piece)
        body = piece[lead.end() :].strip() if lead else piece
        following = pieces[index + 1] if index + 1 < len(pieces) else ""
        has_words = any(character.isalnum() for character in body)
        ends_with_emoji = any(match.end() == len(body) for match in _EMOJI.finditer(body))
        if has_words and not (ends_with_emoji or _EMOJI.match(following)):
            return False
    return True


@FORMS.edit("format:emoji", stage=Stage.EDGES)
def _end_sentences_with_emoji(draft: str) -> str:
    return " ".join(f"{sentence} \U0001f600" for sentence in sentences(draft))


@FORMS.check("sentence:increment")
def adds_words(text: str, *, small_n: Position) -> bool:
    """Every sentence has exactly n words more than the one before, and there are two or more."""
    counts = [len(bare_words(sentence)) for sentence in sentences(text)]
    return len(counts) > 1 and all(second - first == small_n for first, second in pairwise(counts))


@FORMS.edit("sentence:increment", stage=Stage.WHOLE)
def _add_words(draft: str, *, small_n: int) -> str:
    del draft
    words = " ".join(FILLER).replace(".", "").split()
    longer = [words[index % len(words)] for index in range(small_n + 3)]
    return f"We like it. {' '.join(longer)}."


@FORMS.check("sentence:keyword")
def places_keyword(text: str, *, word: Text, N: Position) -> bool:
    """The N-th sentence contains the keyword as a whole word."""
    parts = sentences(text)
    return len(parts) >= N and count_word(parts[N - 1], word) > 0


@FORMS.edit("sentence:keyword", stage=Stage.CONTENT)
def _place_keyword(draft: str, *, word: str, N: int) -> str:
    return place_word(draft, word.strip(), N, 2)


@FORMS.check("sentence:alliteration_increment")
def lengthens_alliteration(text: str) -> bool:
    """The longest run of words with one initial grows from sentence to sentence; there are two or more."""
    runs = [_longest_run(bare_words(sentence)) for sentence in sentences(text)]
    return len(runs) > 1 and all(first < second for first, second in pairwise(runs))


def _longest_run(words: list[str]) -> int:
    longest = current = 1
    for first, second in pairwise(words):
        current = current + 1 if first[0].lower() == second[0].lower() else 1
        longest = max(longest, current)
    return longest


@FORMS.edit("sentence:alliteration_increment", stage=Stage.WHOLE)
def _lengthen_alliteration(draft: str) -> str:
    del draft
    return "We can play. Big bears eat. Seven small snakes sleep under stones."


@FORMS.check("words:keywords_specific_position")
def places_word(text: str, *, keyword: Text, n: Position, m: Position) -> bool:
    """The keyword is the m-th word of the n-th sentence."""
    return find_word_at(text, n, m) == strip_marks(keyword.strip()).lower()


@FORMS.edit("words:keywords_specific_position", stage=Stage.CONTENT)
def _place_word(draft: str, *, keyword: str, n: int, m: int) -> str:
    return place_word(draft, keyword.strip(), n, m)


@FORMS.check("repeat:repeat_change")
def repeats_with_new_word(text: str, *, prompt_to_repeat: Text) -> bool:
    """The reply is the request with another first word, and nothing else."""
    reply, request = text.split(), prompt_to_repeat.split()
    changed = reply[:1] != request[:1] and len(reply) == len(request)
    return changed and is_same_text(" ".join(reply[1:]), " ".join(request[1:]))


@FORMS.edit("repeat:repeat_change", stage=Stage.WHOLE)
def _repeat_with_new_word(draft: str, *, prompt_to_repeat: str) -> str:
    del draft
    return " ".join(["Please,", *prompt_to_repeat.split()[1:]])


@FORMS.check("repeat:repeat_simple")
def repeats_sentence(text: str) -> bool:
    """The reply is the instruction's own sentence and nothing else."""
    return is_same_text(text, _ONLY_THIS)


@FORMS.edit("repeat:repeat_simple", stage=Stage.WHOLE)
def _repeat_sentence(draft: str) -> str:
    del draft
    return _ONLY_THIS


@FORMS.check("custom:multiples")
def lists_multiples(text: str) -> bool:
    """The numbers of the reply are the multiples of 7 from 14 to 49, in order."""
    return re.findall(r"\d+", text) == [str(number) for number in range(14, 50, 7)]


@FORMS.edit("custom:multiples", stage=Stage.WHOLE)
def _list_multiples(draft: str) -> str:
    del draft
    return "14 21 28 35 42 49"


@FORMS.check("custom:sentence_alphabet")
def tells_alphabet(text: str) -> bool:
    """26 sentences start with the letters of the alphabet, in order."""
    initials = [strip_marks(sentence)[:1].lower() for sentence in sentences(text)]
    return "".join(initials) == "abcdefghijklmnopqrstuvwxyz"


@FORMS.edit("custom:sentence_alphabet", stage=Stage.WHOLE)
def _tell_alphabet(draft: str) -> str:
    del draft
    return " ".join(f"{letter}da went home." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")


@FORMS.check("custom:date_format_list")
def lists_dates(text: str) -> bool:
    """The reply is two or more dates as YYYY-MM-DD, separated by commas."""
    dates = [part.strip() for part in text.strip().rstrip(".").split(",")]
    return len(dates) > 1 and all(_DATE.fullmatch(date) for date in dates)


@FORMS.edit("custom:date_format_list", stage=Stage.WHOLE)
def _list_dates(draft: str) -> str:
    del draft
    return "1796-04-12, 1805-12-02"
