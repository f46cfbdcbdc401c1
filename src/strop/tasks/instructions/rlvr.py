"""The 25 functions of RLVR-IFeval, judged by their meaning.

Source of names and arguments: the columns of allenai/RLVR-IFeval. Own implementations of the described
conditions, stricter than the published functions where those reward nothing: an option must be the whole
reply and not a piece of it, capitals need a letter, and avoiding something needs words.
"""

from __future__ import annotations

import ast
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from strop.tasks.instructions.checkers import (
    MIN_WORDS,
    Checkers,
    Count,
    Position,
    Quantifier,
    Stage,
    Text,
    Texts,
    holds,
)
from strop.tasks.instructions.google import (
    GOOGLE,
    count_capital_words,
    count_highlights,
    count_text,
    find_bracketed,
    remove_text,
)
from strop.tasks.instructions.replies import BASE_DRAFT, FILLER, deal, fill_sentences, lengthen, repeat_words
from strop.tasks.instructions.segments import paragraphs, parts_between, sentences, strip_marks

RLVR = Checkers("RLVR-IFeval")

SPACED_STARS = re.compile(r"\*[^\S\n]*+\*[^\S\n]*+\*(?!\*)")
_TITLE = re.compile(r"<<([^\n<>]++)>>")
_BULLET = re.compile(r"^[^\S\n]*+[*-]", re.MULTILINE)
_NUM_AROUND_SENTENCES = 1
_AROUND_FRAC = 0.1


def _read_options(value: Any) -> Any:
    """Accept options as a list, as the text of one, or between slashes."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text[:1] in ("[", "(", "{") and text[-1:] in ("]", ")", "}"):
        try:
            return tuple(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError("not a list of texts") from error
    if "/" not in text:
        raise ValueError("not a list of texts, and no slash stands between two")
    return tuple(option.strip() for option in text.split("/"))


Options = Annotated[Texts, BeforeValidator(_read_options)]

for _name, _google_id in (
    ("validate_response_language", "language:response_language"),
    ("validate_end", "startend:end_checker"),
    ("validate_quotation", "startend:quotation"),
    ("validate_no_commas", "punctuation:no_comma"),
    ("validate_json_format", "detectable_format:json_format"),
):
    RLVR.share(GOOGLE, _google_id, as_id=_name)


@RLVR.check("verify_keywords")
def includes_keywords(text: str, *, keyword_list: Texts) -> bool:
    """Every keyword occurs, also inside words, in any case."""
    return all(count_text(text, keyword) for keyword in keyword_list)


@RLVR.edit("verify_keywords", stage=Stage.CONTENT)
def _add_keywords(draft: str, *, keyword_list: tuple[str, ...]) -> str:
    return " ".join([draft, *(keyword for keyword in keyword_list if not count_text(draft, keyword))])


def count_word(text: str, word: str) -> int:
    """Count the occurrences of a word or phrase as a whole word, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE))


@RLVR.check("verify_keyword_frequency", needs_substance=True)
def repeats_word(text: str, *, word: Text, N: Count) -> bool:
    """The word occurs exactly N times as a whole word, in any case."""
    return count_word(text, word) == N


@RLVR.edit("verify_keyword_frequency", stage=Stage.CONTENT)
def _repeat_word(draft: str, *, word: str, N: int) -> str:
    missing = N - count_word(draft, word)
    if missing < 0:
        draft, missing = remove_text(draft, word.strip()), N
    return f"{draft} {repeat_words([word.strip()], missing)}".strip()


@RLVR.check("validate_forbidden_words", needs_substance=True)
def avoids_texts(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs, not even inside another one, in any case."""
    return not any(count_text(text, word) for word in forbidden_words)


@RLVR.edit("validate_forbidden_words", stage=Stage.OMISSION)
def _remove_texts(draft: str, *, forbidden_words: tuple[str, ...]) -> str:
    for word in forbidden_words:
        draft = remove_text(draft, word)
    return draft


@RLVR.check("verify_letter_frequency", needs_substance=True)
def counts_letter(text: str, *, letter: Text, N: Count) -> bool:
    """The letter, in this case, occurs exactly N times."""
    return text.count(letter) == N


@RLVR.edit("verify_letter_frequency", stage=Stage.CONTENT)
def _repeat_letter(draft: str, *, letter: str, N: int) -> str:
    missing = N - draft.count(letter)
    return f"{draft} {letter * missing}" if missing >= 0 else f"{draft.replace(letter, '')} {letter * N}"


@RLVR.check("verify_paragraph_count")
def counts_parts(text: str, *, N: Count) -> bool:
    """Spaced asterisks separate N parts, and none is blank."""
    parts = parts_between(text, SPACED_STARS)
    return all(parts) and len(parts) == N


@RLVR.edit("verify_paragraph_count", stage=Stage.STRUCTURE)
def _divide_parts(draft: str, *, N: int) -> str:
    return "\n* * *\n".join(deal(draft, N))


@RLVR.check("validate_word_constraint")
def counts_words(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """The words between white space; 'around' allows a tenth. At least three, if so many are allowed."""
    words = [token for token in text.split() if strip_marks(token)]
    most = {"at most": N, "less than": N - 1, "exactly": N, "around": N}.get(quantifier, MIN_WORDS)
    slack = max(round(_AROUND_FRAC * N), 1)
    return len(words) >= max(1, min(MIN_WORDS, most)) and holds(len(words), quantifier, N, slack=slack)


@RLVR.edit("validate_word_constraint", stage=Stage.LENGTH)
def _fit_words(draft: str, *, N: int, quantifier: str) -> str:
    target = N + (quantifier == "more than") - (quantifier == "less than")
    words = lengthen(draft, target).split()
    return " ".join(words if quantifier in ("at least", "more than") else words[:target])


@RLVR.check("verify_sentence_constraint")
def counts_sentences(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """The sentences; 'around' allows one more or less. Three words at least."""
    count = len(sentences(text))
    has_words = len(text.split()) >= MIN_WORDS
    return has_words and count > 0 and holds(count, quantifier, N, slack=_NUM_AROUND_SENTENCES)


@RLVR.edit("verify_sentence_constraint", stage=Stage.LENGTH)
def _fit_sentences(draft: str, *, N: int, quantifier: str) -> str:
    return " ".join(fill_sentences(draft, N + (quantifier == "more than") - (quantifier == "less than")))


@RLVR.check("validate_paragraphs")
def opens_paragraph(text: str, *, N: Count, first_word: Text, i: Position) -> bool:
    """Blank lines separate N paragraphs, and the i-th starts with the word, in any case."""
    parts = paragraphs(text)
    if len(parts) != N or i > N:
        return False
    word = first_word.strip().lower()
    opening = parts[i - 1].lower().lstrip("\"'“‘*_#([ ")
    return re.match(rf"{re.escape(word)}(?!\w)", opening) is not None


@RLVR.edit("validate_paragraphs", stage=Stage.STRUCTURE)
def _open_paragraph(draft: str, *, N: int, first_word: str, i: int) -> str:
    pieces = deal(draft, N)
    if i <= len(pieces):
        pieces[i - 1] = f"{first_word.strip()} {pieces[i - 1]}"
    return "\n\n".join(pieces)


@RLVR.check("verify_postscript")
def has_postscript(text: str, *, postscript_marker: Text) -> bool:
    """The reply contains the marker, and a text behind it."""
    _, marker, rest = text.partition(postscript_marker.strip())
    return bool(marker) and any(character.isalnum() for character in rest)


@RLVR.edit("verify_postscript", stage=Stage.EDGES)
def _add_postscript(draft: str, *, postscript_marker: str) -> str:
    return f"{draft}\n{postscript_marker.strip()} See you soon"


@RLVR.check("validate_placeholders", needs_substance=True)
def counts_placeholders(text: str, *, N: Count) -> bool:
    """At least N texts are in square brackets."""
    return len(find_bracketed(text)) >= N


@RLVR.edit("validate_placeholders", stage=Stage.CONTENT)
def _add_placeholders(draft: str, *, N: int) -> str:
    return f"{draft} {repeat_words(['[name]'], N)}".strip()


@RLVR.check("verify_bullet_points", needs_substance=True)
def counts_bullets(text: str, *, N: Count) -> bool:
    """Exactly N lines start with an asterisk or a hyphen."""
    return len(_BULLET.findall(text)) == N


@RLVR.edit("verify_bullet_points", stage=Stage.STRUCTURE)
def _write_bullets(draft: str, *, N: int) -> str:
    return "\n".join([draft, *(f"* {sentence}" for sentence in fill_sentences(draft, N))])


@RLVR.check("validate_title")
def has_one_title(text: str) -> bool:
    """Exactly one text is in double angular brackets, within a line."""
    return sum(1 for title in _TITLE.findall(text) if title.strip()) == 1


@RLVR.edit("validate_title", stage=Stage.EDGES)
def _add_title(draft: str) -> str:
    return f"<<good morning>>\n{draft}"


@RLVR.check("validate_choice")
def gives_option(text: str, *, options: Options) -> bool:
    """The reply is one of the options, but for white space and case."""
    reply = " ".join(text.split()).casefold()
    return any(reply == " ".join(option.split()).casefold() for option in options)


@RLVR.edit("validate_choice", stage=Stage.WHOLE)
def _give_option(draft: str, *, options: tuple[str, ...]) -> str:
    del draft
    return options[0]


@RLVR.check("validate_highlighted_sections", needs_substance=True)
def counts_highlights(text: str, *, N: Count) -> bool:
    """At least N texts are between asterisks."""
    return count_highlights(text) >= N


@RLVR.edit("validate_highlighted_sections", stage=Stage.CONTENT)
def _add_highlights(draft: str, *, N: int) -> str:
    return " ".join([draft, *(["*good point*"] * N)])


@RLVR.check("validate_sections", needs_substance=True)
def counts_sections(text: str, *, N: Count, section_splitter: Text) -> bool:
    """Exactly N sections begin with the splitter, and none is empty."""
    sections = text.split(section_splitter.strip())[1:]
    return len(sections) == N and all(any(c.isalnum() for c in section) for section in sections)


@RLVR.edit("validate_sections", stage=Stage.STRUCTURE)
def _write_sections(draft: str, *, N: int, section_splitter: str) -> str:
    pieces = deal(draft, N) or [BASE_DRAFT]
    headed = [f"{section_splitter.strip()} {number}\n{piece}" for number, piece in enumerate(pieces, 1)]
    return "\n".join(headed if N else pieces)


@RLVR.check("validate_repeat_prompt")
def repeats_prompt(text: str, *, original_prompt: Text) -> bool:
    """The reply starts with the request, and continues."""
    request = original_prompt.strip()
    return text.strip().startswith(request) and len(text.strip()) > len(request)


@RLVR.edit("validate_repeat_prompt", stage=Stage.EDGES)
def _repeat_prompt(draft: str, *, original_prompt: str) -> str:
    return f"{original_prompt.strip()}\n{draft}"


@RLVR.check("validate_two_responses")
def gives_two_replies(text: str) -> bool:
    """Six asterisks occur once in the reply, between two different texts."""
    first, second = (part.strip() for part in text.partition("******")[::2])
    is_once = "******" not in second and not second.startswith("*")
    return is_once and bool(first) and bool(second) and first != second


@RLVR.edit("validate_two_responses", stage=Stage.STRUCTURE)
def _give_two_replies(draft: str) -> str:
    return f"{draft}\n******\n{FILLER[2]}"


@RLVR.check("validate_uppercase", needs_substance=True)
def is_uppercase(text: str) -> bool:
    """The reply has letters and no small one."""
    return text == text.upper() and text.isupper()


@RLVR.edit("validate_uppercase", stage=Stage.CASE)
def _upper(draft: str) -> str:
    return draft.upper()


@RLVR.check("validate_lowercase", needs_substance=True)
def is_lowercase(text: str) -> bool:
    """The reply has letters and no capital one."""
    return text == text.lower() and text.islower()


@RLVR.edit("validate_lowercase", stage=Stage.CASE)
def _lower(draft: str) -> str:
    return draft.lower()


@RLVR.check("validate_frequency_capital_words", needs_substance=True)
def counts_capital_words(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """The words that have capital letters and no small ones; 'around' allows a tenth."""
    return holds(count_capital_words(text), quantifier, N, slack=max(round(_AROUND_FRAC * N), 1))


@RLVR.edit("validate_frequency_capital_words", stage=Stage.CASE)
def _write_capital_words(draft: str, *, N: int, quantifier: str) -> str:
    target = N + (quantifier == "more than") - (quantifier == "less than")
    missing = target - count_capital_words(draft)
    if missing > 0 and quantifier not in ("at most", "less than"):
        return f"{repeat_words(['YES'], missing)} {draft}"
    return draft.lower() if missing < 0 and quantifier not in ("at least", "more than") else draft
