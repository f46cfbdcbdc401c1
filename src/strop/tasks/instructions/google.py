"""The 25 instructions of IFEval, judged by their meaning.

arXiv:2311.07911 describes them. The published verdicts are those of `evaluations.py`; those of this module
differ where the published rules reward nothing or depend on chance: keywords are texts and not patterns, an
argument of 0 stays 0, an undetected language is not the required one, and a reply that merely avoids
something must have content. A reply truncated at its budget does not have the required end.
"""

from __future__ import annotations

import json
import re
from typing import Annotated

from pydantic import AfterValidator

from strop.tasks.instructions.checkers import (
    MIN_WORDS,
    Checkers,
    Count,
    Position,
    Quantifier,
    Relation,
    Stage,
    Text,
    Texts,
    holds,
    nearest,
)
from strop.tasks.instructions.replies import FILLER, SPOKEN, deal, fill_sentences, lengthen, repeat_words
from strop.tasks.instructions.segments import (
    detect_language,
    find_words,
    known_languages,
    parts_between,
    sentences,
)

GOOGLE = Checkers("IFEval")

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The answers that `detectable_format:constrained_response` allows; part of every such prompt."""
_FENCE_WORDS = ("```json", "```Json", "```JSON", "```")
_TITLE = re.compile(r"<<([^\n<>]++)>>")
_BULLET = re.compile(r"^[^\S\n]*+(?:\*[^*\n]|-)", re.MULTILINE)
_STARS = re.compile(r"[^\S\n]?\*\*\*(?!\*)\s?")
_FIRST_WORD = re.compile(r"[\"'“‘]*([^\s.,?!'\"]*)")


def _require_language(code: str) -> str:
    if code not in known_languages():
        raise ValueError(f"not one of {', '.join(sorted(known_languages()))}")
    return code


Language = Annotated[str, AfterValidator(_require_language)]


def count_text(text: str, phrase: str) -> int:
    """Count the occurrences of a phrase, in any case, also inside words."""
    return text.casefold().count(phrase.casefold())


def contains_word(text: str, word: str) -> bool:
    """Whether a text contains a word or phrase as a whole word, in any case."""
    return re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE) is not None


@GOOGLE.check("keywords:existence")
def includes_keywords(text: str, *, keywords: Texts) -> bool:
    """Every keyword occurs, also inside words, in any case."""
    return all(count_text(text, keyword) for keyword in keywords)


@GOOGLE.edit("keywords:existence", stage=Stage.CONTENT)
def _add_keywords(draft: str, *, keywords: tuple[str, ...]) -> str:
    missing = [keyword for keyword in keywords if not count_text(draft, keyword)]
    return " ".join([draft, *missing])


@GOOGLE.check("keywords:frequency", needs_substance=True)
def repeats_keyword(text: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """The keyword occurs less often, or at least as often, as required; also inside words."""
    return holds(count_text(text, keyword.strip()), relation, frequency)


@GOOGLE.edit("keywords:frequency", stage=Stage.CONTENT)
def _repeat_keyword(draft: str, *, keyword: str, frequency: int, relation: str) -> str:
    keyword = keyword.strip()
    count = count_text(draft, keyword)
    if relation == "at least":
        return f"{draft} {repeat_words([keyword], frequency - count)}".strip()
    return remove_text(draft, keyword) if count >= frequency else draft


def remove_text(draft: str, unwanted: str) -> str:
    """Remove a text from a draft, in any case."""
    return re.sub(re.escape(unwanted), "", draft, flags=re.IGNORECASE)


@GOOGLE.check("keywords:forbidden_words", needs_substance=True)
def avoids_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs as a whole word, in any case."""
    return not any(contains_word(text, word) for word in forbidden_words)


@GOOGLE.edit("keywords:forbidden_words", stage=Stage.OMISSION)
def _remove_words(draft: str, *, forbidden_words: tuple[str, ...]) -> str:
    for word in forbidden_words:
        draft = re.sub(rf"(?<!\w){re.escape(word.strip())}(?!\w)", "", draft, flags=re.IGNORECASE)
    return draft


@GOOGLE.check("keywords:letter_frequency", needs_substance=True)
def counts_letter(text: str, *, letter: Text, let_frequency: Count, let_relation: Quantifier) -> bool:
    """The letter, or another single mark, occurs as often as required, in any case."""
    return holds(text.lower().count(letter.strip().lower() or letter), let_relation, let_frequency)


@GOOGLE.edit("keywords:letter_frequency", stage=Stage.CONTENT)
def _repeat_letter(draft: str, *, letter: str, let_frequency: int, let_relation: str) -> str:
    letter = letter.strip() or letter
    count = draft.lower().count(letter.lower())
    if nearest(count, let_relation, let_frequency) < count:
        draft, count = remove_text(draft, letter), 0
    return f"{draft} {letter * (nearest(count, let_relation, let_frequency) - count)}".strip()


@GOOGLE.check("language:response_language")
def speaks_language(text: str, *, language: Language) -> bool:
    """The most probable language is the required one; a text without letters has none."""
    return any(character.isalpha() for character in text) and detect_language(text) == language


@GOOGLE.edit("language:response_language", stage=Stage.LANGUAGE)
def _speak_language(draft: str, *, language: str) -> str:
    return SPOKEN.get(language, draft)


@GOOGLE.check("length_constraints:number_sentences")
def counts_sentences(text: str, *, num_sentences: Count, relation: Quantifier) -> bool:
    """The reply has as many sentences as required, and never none; 'around' allows one more or less."""
    count = len(sentences(text))
    return count > 0 and holds(count, relation, num_sentences, slack=1)


@GOOGLE.edit("length_constraints:number_sentences", stage=Stage.LENGTH)
def _fill_sentences(draft: str, *, num_sentences: int, relation: str) -> str:
    return " ".join(fill_sentences(draft, nearest(len(sentences(draft)), relation, num_sentences)))


@GOOGLE.check("length_constraints:number_paragraphs")
def counts_parts(text: str, *, num_paragraphs: Count) -> bool:
    """Three asterisks separate as many parts as required, and none is blank."""
    parts = parts_between(text, _STARS)
    return all(parts) and len(parts) == num_paragraphs


@GOOGLE.edit("length_constraints:number_paragraphs", stage=Stage.STRUCTURE)
def _divide_parts(draft: str, *, num_paragraphs: int) -> str:
    return "\n***\n".join(deal(draft, num_paragraphs))


@GOOGLE.check("length_constraints:number_words")
def counts_words(text: str, *, num_words: Count, relation: Quantifier) -> bool:
    """The reply has as many words as required, at least three if so many are allowed.

    'around' allows a tenth more or less.
    """
    count = len(find_words(text))
    floor = min(MIN_WORDS, nearest(MIN_WORDS, relation, num_words))
    return count >= max(floor, 1) and holds(count, relation, num_words, slack=a_tenth(num_words))


def a_tenth(bound: int) -> int:
    """Return a tenth of a number of words, and 1 at least."""
    return max(round(bound / 10), 1)


@GOOGLE.edit("length_constraints:number_words", stage=Stage.LENGTH)
def _fill_words(draft: str, *, num_words: int, relation: str) -> str:
    if relation in ("at least", "more than"):
        return lengthen(draft, num_words + (relation == "more than"))
    if relation in ("exactly", "around"):
        return " ".join(lengthen(draft, num_words).split()[:num_words])
    # Other edits may add words: one in five stays free for them.
    return " ".join(draft.split()[: max(1, min(num_words - 1, num_words * 4 // 5))])


@GOOGLE.check("length_constraints:nth_paragraph_first_word")
def opens_paragraph(text: str, *, num_paragraphs: Count, nth_paragraph: Position, first_word: Text) -> bool:
    """Two line breaks separate as many paragraphs as required, and the n-th begins with the word."""
    parts = text.split("\n\n")
    num_filled = sum(1 for part in parts if part.strip())
    if num_filled != num_paragraphs or nth_paragraph > num_filled:
        return False
    match = _FIRST_WORD.match(parts[nth_paragraph - 1].strip())
    return match is not None and match.group(1).lower() == first_word.strip().lower()


@GOOGLE.edit("length_constraints:nth_paragraph_first_word", stage=Stage.STRUCTURE)
def _open_paragraph(draft: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> str:
    pieces = deal(draft, num_paragraphs)
    if nth_paragraph <= len(pieces):
        pieces[nth_paragraph - 1] = f"{first_word.strip()} {pieces[nth_paragraph - 1]}"
    return "\n\n".join(pieces)


@GOOGLE.check("detectable_content:number_placeholders")
def counts_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """The reply has at least as many texts in square brackets as required."""
    return len(find_bracketed(text)) >= num_placeholders


def find_bracketed(text: str) -> list[str]:
    """Return the texts between an opening square bracket and the next closing one, in one line."""
    contents: list[str] = []
    for line in text.split("\n"):
        end = -1
        while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
            contents.append(line[start + 1 : end])
    return contents


@GOOGLE.edit("detectable_content:number_placeholders", stage=Stage.CONTENT)
def _add_placeholders(draft: str, *, num_placeholders: int) -> str:
    return f"{draft} {repeat_words(['[name]'], num_placeholders)}".strip()


@GOOGLE.check("detectable_content:postscript")
def has_postscript(text: str, *, postscript_marker: Text) -> bool:
    """The marker occurs, in any case; spaces inside P.S. and P.P.S do not matter."""
    marker = postscript_marker.strip()
    forms = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(forms.get(marker, re.escape(marker)), text, re.IGNORECASE) is not None


@GOOGLE.edit("detectable_content:postscript", stage=Stage.EDGES)
def _add_postscript(draft: str, *, postscript_marker: str) -> str:
    return f"{draft}\n{postscript_marker.strip()} See you soon"


@GOOGLE.check("detectable_format:number_bullet_lists")
def counts_bullets(text: str, *, num_bullets: Count) -> bool:
    """Exactly as many lines as required start with an asterisk or a hyphen."""
    return len(_BULLET.findall(text)) == num_bullets


@GOOGLE.edit("detectable_format:number_bullet_lists", stage=Stage.STRUCTURE)
def _write_bullets(draft: str, *, num_bullets: int) -> str:
    # Short ones, from the draft's words: other instructions may limit words or the language.
    return "\n".join([draft, *([f"* {' '.join(draft.split()[:2])}"] * num_bullets)])


@GOOGLE.check("detectable_format:constrained_response")
def gives_choice(text: str) -> bool:
    """The reply contains one of the three answers."""
    return any(choice in text for choice in CHOICES)


@GOOGLE.edit("detectable_format:constrained_response", stage=Stage.CONTENT)
def _give_choice(draft: str) -> str:
    del draft
    return CHOICES[0]


@GOOGLE.check("detectable_format:number_highlighted_sections")
def counts_highlights(text: str, *, num_highlights: Count) -> bool:
    """At least as many texts as required are between asterisks; double asterisks count as single ones."""
    return count_highlights(text) >= num_highlights


def count_highlights(text: str) -> int:
    """Count texts between single or double asterisks, inside a line and not blank."""
    num_found = 0
    for line in text.split("\n"):
        pieces = re.split(r"\*+", line)
        # Between the first and the last asterisks, every second piece is inside a pair.
        num_found += sum(1 for piece in pieces[1:-1:2] if piece.strip())
    return num_found


@GOOGLE.edit("detectable_format:number_highlighted_sections", stage=Stage.CONTENT)
def _add_highlights(draft: str, *, num_highlights: int) -> str:
    return " ".join([draft, *(["*good point*"] * num_highlights)])


@GOOGLE.check("detectable_format:multiple_sections")
def counts_sections(text: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """At least as many sections as required have a heading of the splitter and a number."""
    heading = re.compile(re.escape(section_spliter.strip()) + r"\s?\d")
    return len(heading.findall(text)) >= num_sections


@GOOGLE.edit("detectable_format:multiple_sections", stage=Stage.STRUCTURE)
def _write_sections(draft: str, *, section_spliter: str, num_sections: int) -> str:
    pieces = deal(draft, num_sections)
    return "\n".join(f"{section_spliter.strip()} {number}\n{piece}" for number, piece in enumerate(pieces, 1))


@GOOGLE.check("detectable_format:json_format")
def is_json(text: str) -> bool:
    """The whole reply, without a code fence around it, is a JSON table or list that is not empty."""
    body = text.strip()
    for fence in _FENCE_WORDS:
        if body.startswith(fence):
            body = body.removeprefix(fence).removesuffix("```").strip()
            break
    try:
        # Numbers are not converted: a number of any length is JSON, and Python refuses to parse long ones.
        value = json.loads(body, parse_int=lambda _: None, parse_float=lambda _: None)
    except (ValueError, RecursionError):  # nested a thousand deep is no answer either
        return False
    return isinstance(value, dict | list) and bool(value)


@GOOGLE.edit("detectable_format:json_format", stage=Stage.WRAPPING)
def _wrap_in_json(draft: str) -> str:
    return json.dumps({"reply": draft}, ensure_ascii=False)


@GOOGLE.check("detectable_format:title")
def has_title(text: str) -> bool:
    """A line contains a text in double angular brackets."""
    return any(title.strip() for title in _TITLE.findall(text))


@GOOGLE.edit("detectable_format:title", stage=Stage.EDGES)
def _add_title(draft: str) -> str:
    return f"<<good morning>>\n{draft}"


@GOOGLE.check("combination:two_responses")
def gives_two_replies(text: str) -> bool:
    """Six asterisks separate two different replies."""
    parts = parts_between(text, re.compile(r"\*{6}"))
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@GOOGLE.edit("combination:two_responses", stage=Stage.STRUCTURE)
def _give_two_replies(draft: str) -> str:
    return f"{draft}\n******\n{FILLER[2]}"


@GOOGLE.check("combination:repeat_prompt")
def repeats_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """The reply starts with the request, in any case, and continues."""
    request = prompt_to_repeat.strip().lower()
    return text.strip().lower().startswith(request) and len(text.strip()) > len(request)


@GOOGLE.edit("combination:repeat_prompt", stage=Stage.EDGES)
def _repeat_prompt(draft: str, *, prompt_to_repeat: str) -> str:
    return f"{prompt_to_repeat.strip()}\n{draft}"


@GOOGLE.check("startend:end_checker")
def ends_with(text: str, *, end_phrase: Text) -> bool:
    """The phrase ends the reply, in any case; double quotes around the whole do not matter."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@GOOGLE.edit("startend:end_checker", stage=Stage.EDGES)
def _end_with(draft: str, *, end_phrase: str) -> str:
    return f"{draft.rstrip()} {end_phrase.strip()}"


@GOOGLE.check("startend:quotation")
def is_quoted(text: str) -> bool:
    """The reply is wrapped in double quotes and has something inside."""
    body = text.strip()
    return len(body) > 2 and body[0] == body[-1] == '"' and bool(body.strip('"').strip())


@GOOGLE.edit("startend:quotation", stage=Stage.WRAPPING)
def _quote(draft: str) -> str:
    return f'"{draft}"'


@GOOGLE.check("change_case:capital_word_frequency", needs_substance=True)
def counts_capital_words(text: str, *, capital_frequency: Count, capital_relation: Quantifier) -> bool:
    """Words without small letters occur as often as required; 'around' allows a tenth more or less."""
    count, slack = count_capital_words(text), a_tenth(capital_frequency)
    return holds(count, capital_relation, capital_frequency, slack=slack)


def count_capital_words(text: str) -> int:
    """Count the words that have capital letters and no small ones."""
    return sum(1 for word in re.findall(r"[\w'’.-]+", text) if word.isupper())


@GOOGLE.edit("change_case:capital_word_frequency", stage=Stage.CASE)
def _write_capital_words(draft: str, *, capital_frequency: int, capital_relation: str) -> str:
    count = count_capital_words(draft)
    if nearest(count, capital_relation, capital_frequency) < count:
        draft, count = draft.lower(), 0
    missing = nearest(count, capital_relation, capital_frequency) - count
    return f"{repeat_words(['YES'], missing)} {draft}".strip()


@GOOGLE.check("change_case:english_capital", needs_substance=True)
def is_english_capitals(text: str) -> bool:
    """The reply has no small letter, some capital one, and is in English."""
    # In small letters, because the detector skips words of capitals.
    return text.isupper() and detect_language(text.lower()) == "en"


@GOOGLE.edit("change_case:english_capital", stage=Stage.CASE)
def _capitalize(draft: str) -> str:
    return draft.upper()


@GOOGLE.check("change_case:english_lowercase", needs_substance=True)
def is_english_lowercase(text: str) -> bool:
    """The reply has no capital letter, some small one, and is in English."""
    return text.islower() and detect_language(text) == "en"


@GOOGLE.edit("change_case:english_lowercase", stage=Stage.CASE)
def _lower(draft: str) -> str:
    return draft.lower()


@GOOGLE.check("punctuation:no_comma", needs_substance=True)
def avoids_commas(text: str) -> bool:
    """The reply has no comma."""
    return "," not in text


@GOOGLE.edit("punctuation:no_comma", stage=Stage.OMISSION)
def _remove_commas(draft: str) -> str:
    return draft.replace(",", "")
