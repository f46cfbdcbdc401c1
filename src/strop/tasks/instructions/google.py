"""The 25 instructions of IFEval, judged by their meaning.

arXiv:2311.07911 describes them. The published verdicts are those of `evaluations.py`; those of this module
differ where the published rules reward nothing, depend on chance, or miss the plain meaning: keywords are
texts and not patterns, an argument of 0 stays 0, an undetected language is not the required one, a reply that
merely avoids something must have content, a horizontal rule is no bullet and no paragraph, and marks of
Markdown around a required text are not part of it. A reply truncated at its budget does not have the required
end.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator

from strop.tasks.instructions.checkers import (
    MIN_WORDS,
    Checkers,
    Count,
    Position,
    Quantifier,
    Relation,
    Text,
    Texts,
    holds,
)
from strop.tasks.instructions.segments import (
    bare_words,
    detect_language,
    find_words,
    known_languages,
    paragraphs,
    parts_between,
    sentences,
    strip_marks,
)

GOOGLE = Checkers("IFEval")

CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The answers that `detectable_format:constrained_response` allows; part of every such prompt."""
_FENCE = re.compile(r"\s*```(?:json)?\s*", re.IGNORECASE)
_TITLE = re.compile(r"<<([^\n<>]++)>>")
_BULLET = re.compile(r"^[^\S\n]*+[*+-][^\S\n]++(?!(?:[*-][^\S\n]*+)+$)\S", re.MULTILINE)
_BULLET_MARK = re.compile(r"^[^\S\n]*+\*[^\S\n]++", re.MULTILINE)
_HIGHLIGHT = re.compile(r"(?<!\*)\*++(?![\s*])[^*\n]*(?<!\s)\*++")
_STARS = re.compile(r"[^\S\n]?\*\*\*(?!\*)\s?")
_SIX_STARS = re.compile(r"\*{6}")
_DASH = re.compile(r"[—–…:]|--")
_EDGE_MARKS = ' \t\n"“”*_`'
_COMMAS = (",", "，", "،", "、")


def _require_language(code: str) -> str:
    if code not in known_languages():
        raise ValueError(f"not one of {', '.join(sorted(known_languages()))}")
    return code


Language = Annotated[str, AfterValidator(_require_language)]


def count_text(text: str, phrase: str) -> int:
    """Count the occurrences of a phrase, in any case, also inside words."""
    return text.casefold().count(phrase.casefold())


def find_word(text: str, word: str) -> list[str]:
    """Return the occurrences of a word or phrase as a whole word, in any case."""
    return re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE)


def _fold(text: str) -> str:
    return " ".join(text.split()).lower()


@GOOGLE.check("keywords:existence")
def includes_keywords(text: str, *, keywords: Texts) -> bool:
    """Every keyword occurs, also inside words, in any case."""
    return all(count_text(text, keyword) for keyword in keywords)


@GOOGLE.check("keywords:frequency", needs_substance=True)
def repeats_keyword(text: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """The keyword occurs less often, or at least as often, as required; also inside words."""
    return holds(count_text(text, keyword.strip()), relation, frequency)


@GOOGLE.check("keywords:forbidden_words", needs_substance=True)
def avoids_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs as a whole word, in any case."""
    return not any(find_word(text, word) for word in forbidden_words)


@GOOGLE.check("keywords:letter_frequency", needs_substance=True)
def counts_letter(text: str, *, letter: Text, let_frequency: Count, let_relation: Quantifier) -> bool:
    """The letter, or another single mark, occurs as often as required, in any case."""
    return holds(text.lower().count(letter.strip().lower() or letter), let_relation, let_frequency)


@GOOGLE.check("language:response_language")
def speaks_language(text: str, *, language: Language) -> bool:
    """The most probable language is the required one; a text without letters has none."""
    return any(character.isalpha() for character in text) and detect_language(text) == language


@GOOGLE.check("length_constraints:number_sentences")
def counts_sentences(text: str, *, num_sentences: Count, relation: Quantifier) -> bool:
    """The reply has as many sentences as required, and never none; 'around' allows one more or less."""
    count = len(sentences(text))
    return count > 0 and holds(count, relation, num_sentences, slack=1)


@GOOGLE.check("length_constraints:number_paragraphs")
def counts_parts(text: str, *, num_paragraphs: Count) -> bool:
    """Three asterisks separate as many parts as required, and none is blank."""
    parts = parts_between(text, _STARS)
    return all(parts) and len(parts) == num_paragraphs


@GOOGLE.check("length_constraints:number_words")
def counts_words(text: str, *, num_words: Count, relation: Quantifier) -> bool:
    """The reply has as many words as required, at least three if so many are allowed.

    'around' allows a tenth more or less.
    """
    count = len(find_words(text))
    most = MIN_WORDS if relation in ("at least", "more than") else num_words - (relation == "less than")
    return count >= max(min(MIN_WORDS, most), 1) and holds(
        count, relation, num_words, slack=a_tenth(num_words)
    )


def a_tenth(bound: int) -> int:
    """Return a tenth of a number of words, and 1 at least."""
    return max(round(bound / 10), 1)


@GOOGLE.check("length_constraints:nth_paragraph_first_word")
def opens_paragraph(text: str, *, num_paragraphs: Count, nth_paragraph: Position, first_word: Text) -> bool:
    """Blank lines separate as many paragraphs as required, and the n-th begins with the word."""
    parts = [part for part in paragraphs(text) if any(map(str.isalnum, part))]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = bare_words(_DASH.sub(" ", parts[nth_paragraph - 1][:1000]))
    return [word.lower() for word in words[:1]] == [strip_marks(first_word.strip()).lower()]


@GOOGLE.check("detectable_content:number_placeholders")
def counts_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """The reply has at least as many texts in square brackets as required; a link is none."""
    return len(find_placeholders(text)) >= num_placeholders


def find_placeholders(text: str) -> list[str]:
    """Return the texts between an opening square bracket and the next closing one, in one line."""
    found: list[str] = []
    for line in text.split("\n"):
        end = -1
        while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
            content = line[start + 1 : end]
            if any(map(str.isalnum, content)) and line[end + 1 : end + 2] != "(":
                found.append(content)
    return found


@GOOGLE.check("detectable_content:postscript")
def has_postscript(text: str, *, postscript_marker: Text) -> bool:
    """The marker occurs, in any case; spaces inside P.S. and P.P.S do not matter."""
    marker = postscript_marker.strip()
    forms = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"(?<!p\.)(?<!p\.\s)p\.\s?s\."}
    return re.search(forms.get(marker, re.escape(marker)), text, re.IGNORECASE) is not None


@GOOGLE.check("detectable_format:number_bullet_lists")
def counts_bullets(text: str, *, num_bullets: Count) -> bool:
    """Exactly as many lines as required start with a bullet of Markdown; a rule of them is none."""
    return len(_BULLET.findall(text)) == num_bullets


@GOOGLE.check("detectable_format:constrained_response")
def gives_choice(text: str) -> bool:
    """The reply contains one of the three answers, and no other one."""
    return sum(choice in text for choice in CHOICES) == 1


@GOOGLE.check("detectable_format:number_highlighted_sections")
def counts_highlights(text: str, *, num_highlights: Count) -> bool:
    """At least as many texts as required are between asterisks, inside a line; a bullet's is no such one."""
    return len(_HIGHLIGHT.findall(_BULLET_MARK.sub("", text))) >= num_highlights


@GOOGLE.check("detectable_format:multiple_sections")
def counts_sections(text: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """At least as many sections as required have a heading of the splitter and a number of their own."""
    # In JSON a line break is the letter n.
    numbers = re.findall(rf"(?:(?<!\w)|(?<=\\n)){re.escape(section_spliter.strip())}\s?(\d+)", text)
    return len(set(numbers)) >= num_sections


@GOOGLE.check("detectable_format:json_format")
def is_json(text: str) -> bool:
    """The whole reply, without a code fence around it, is a JSON table or list that is not empty."""
    opening = _FENCE.match(text)
    body = text[opening.end() :].strip().removesuffix("```") if opening else text
    try:
        # Numbers are not converted: a number of any length is JSON, and Python refuses to parse long ones.
        value = json.loads(
            body,
            parse_int=lambda _: None,
            parse_float=lambda _: None,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError):  # nested a thousand deep is no answer either
        return False
    return isinstance(value, dict | list) and bool(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@GOOGLE.check("detectable_format:title")
def has_title(text: str) -> bool:
    """A line contains a text in double angular brackets."""
    return any(title.strip() for title in _TITLE.findall(text))


@GOOGLE.check("combination:two_responses")
def gives_two_replies(text: str) -> bool:
    """Six asterisks separate two different replies."""
    parts = parts_between(text, _SIX_STARS)
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


@GOOGLE.check("combination:repeat_prompt")
def repeats_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """The reply starts with the request, in any case and with any white space, and continues."""
    request, reply = _fold(prompt_to_repeat), _fold(text.lstrip(_EDGE_MARKS + ">"))
    return reply.startswith(request) and any(map(str.isalnum, reply[len(request) :]))


@GOOGLE.check("startend:end_checker")
def ends_with(text: str, *, end_phrase: Text) -> bool:
    """The phrase ends the reply, in any case; quotation marks and marks of Markdown do not matter."""
    phrase = end_phrase.strip(_EDGE_MARKS)
    return bool(phrase) and _fold(text.rstrip(_EDGE_MARKS)).endswith(_fold(phrase))


@GOOGLE.check("startend:quotation")
def is_quoted(text: str) -> bool:
    """The reply is wrapped in double quotation marks and has something inside."""
    body = text.strip()
    is_wrapped = len(body) > 2 and (body[0] + body[-1] in ('""', "“”"))
    return is_wrapped and any(map(str.isalnum, body))


@GOOGLE.check("change_case:capital_word_frequency", needs_substance=True)
def counts_capital_words(text: str, *, capital_frequency: Count, capital_relation: Quantifier) -> bool:
    """Words without small letters occur as often as required; 'around' allows a tenth more or less."""
    count, slack = count_capital_words(text), a_tenth(capital_frequency)
    return holds(count, capital_relation, capital_frequency, slack=slack)


def count_capital_words(text: str) -> int:
    """Count the words that have capital letters and no small ones."""
    return sum(1 for word in re.findall(r"[\w'’.-]+", text) if word.isupper())


@GOOGLE.check("change_case:english_capital", needs_substance=True)
def is_english_capitals(text: str) -> bool:
    """The reply has no small letter, some capital one, and is in English."""
    # In small letters, because the detector skips words of capitals.
    return text.isupper() and detect_language(text.lower()) == "en"


@GOOGLE.check("change_case:english_lowercase", needs_substance=True)
def is_english_lowercase(text: str) -> bool:
    """The reply has no capital letter, some small one, and is in English."""
    return text.islower() and detect_language(text) == "en"


@GOOGLE.check("punctuation:no_comma", needs_substance=True)
def avoids_commas(text: str) -> bool:
    """The reply has no comma."""
    return not any(comma in text for comma in _COMMAS)
