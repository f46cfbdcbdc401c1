"""The 25 instructions of IFEval with the verdicts of lm-eval 0.4.13, its faults included.

For scores that are compared with published ones; never for training, because some of these rules reward
nothing: a text without letters is in every language, and an empty reply has no commas. Keywords, section
names and postscript markers are patterns, as in lm-eval. `tests/tasks/instructions/test_harness.py` compares
the verdicts with those of lm-eval's own code on recorded texts.

Two random draws of lm-eval cannot be reproduced: its language detector has no seed, and it replaces some
arguments (every 0, a letter outside a to z, a paragraph beyond the last) at random. Here the detector is
seeded and the row's own argument is used; `is_drawn` recognises such arguments.

`length_constraints:number_sentences` needs the sentence splitter of nltk (Punkt) and its data. They must be
installed on this machine and are never downloaded; without them such a row is refused.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from strop.errors import ConfigError
from strop.tasks.instructions.checkers import Checkers, Constraint, Count, Position, Relation, Text, holds
from strop.tasks.instructions.google import CHOICES, GOOGLE
from strop.tasks.instructions.segments import detect_language, find_words

HARNESS = Checkers("IFEval as judged by lm-eval 0.4.13")

SENTENCES_ID = "length_constraints:number_sentences"
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_SINGLE_HIGHLIGHT = re.compile(r"\*[^\n\*]*\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*[^\n\*]*\*\*")
_STAR_BULLET = re.compile(r"^\s*\*[^\*].*$", re.MULTILINE)
_HYPHEN_BULLET = re.compile(r"^\s*-.*$", re.MULTILINE)
_TITLE = re.compile(r"<<[^\n]+>>")
# Treebank tokens: nltk 3.10 separates marks from words, and words from each other, by these patterns.
_MARKS = re.compile(r"[«»“”„‘’`\"?!;@#$%&*\[\](){}<>‒-―]|''|--|\.{2,}|[:,](?!\d)")
_OPENING_APOSTROPHE = re.compile(r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", re.IGNORECASE)
_FULL_STOP = re.compile(r"(?<!\.)\.(?=[\])}>\"'»”’]*(?:\s|\Z))")
_SHORT_CLITIC = re.compile(r"([^' ])('[sS]|'[mM]|'[dD]|') ")
_LONG_CLITIC = re.compile(r"([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) ")
_JOINED_WORDS = re.compile(
    r"\b(?:(can)(not)|(d)('ye)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(more)('n)|(wan)(na)(?=\s))\b",
    re.IGNORECASE,
)


def _require_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"as a pattern it cannot be read ({error})") from error
    return text


Pattern = Annotated[Text, AfterValidator(_require_pattern)]
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1)]


def is_drawn(constraint: Constraint) -> bool:
    """Whether lm-eval replaces an argument of this constraint at random, so that its verdict varies."""
    arguments = constraint.arguments
    if any(not value for value in arguments.values()):
        return True
    letter = arguments.get("letter", "a")
    if len(letter) > 1 or not "a" <= letter.lower() <= "z":
        return True
    return bool(arguments.get("nth_paragraph", 0) > arguments.get("num_paragraphs", 10**9))


@HARNESS.check("keywords:existence")
def includes_keywords(text: str, *, keywords: Patterns) -> bool:
    """Every keyword is found as a pattern, in any case."""
    return all(re.search(keyword, text, flags=re.IGNORECASE) for keyword in keywords)


@HARNESS.check("keywords:frequency")
def repeats_keyword(text: str, *, keyword: Pattern, frequency: Count, relation: Relation) -> bool:
    """The number of matches of the keyword as a pattern."""
    return holds(len(re.findall(keyword.strip(), text, flags=re.IGNORECASE)), relation, frequency)


@HARNESS.check("keywords:forbidden_words")
def avoids_words(text: str, *, forbidden_words: Patterns) -> bool:
    """No word is found as a pattern between word boundaries."""
    return not any(re.search(rf"\b{word}\b", text, flags=re.IGNORECASE) for word in forbidden_words)


@HARNESS.check("keywords:letter_frequency")
def counts_letter(text: str, *, letter: Text, let_frequency: Count, let_relation: Relation) -> bool:
    """The number of occurrences of the letter in either case."""
    return holds(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


@HARNESS.check("language:response_language")
def speaks_language(text: str, *, language: Text) -> bool:
    """The detected language is the required one, or none is detected."""
    return detect_language(text) in (language, None)


@HARNESS.check(SENTENCES_ID)
def counts_sentences(text: str, *, num_sentences: Count, relation: Relation) -> bool:
    """The number of Punkt's sentences."""
    return holds(len(load_punkt().tokenize(text)), relation, num_sentences)


@functools.cache
def load_punkt() -> Any:
    """Load nltk's sentence splitter. Raises: ConfigError if nltk or its data is not on this machine."""
    try:
        from nltk.tokenize import PunktTokenizer

        return PunktTokenizer("english")
    except (ImportError, LookupError) as error:
        cause = next(line.strip(" *") for line in str(error).splitlines() if line.strip(" *"))
        raise ConfigError(
            f"task.rules=lm-eval judges {SENTENCES_ID} by the sentences of nltk, and it or its data is"
            f" not here ({type(error).__name__}: {cause})",
            allowed="nltk 3.9.1 or later with the data package punkt_tab in a folder of NLTK_DATA",
            next_step="install both, or set task.rules=own",
        ) from error


@HARNESS.check("length_constraints:number_paragraphs")
def counts_parts(text: str, *, num_paragraphs: Count) -> bool:
    """Parts between three asterisks; a blank inner part fails, a blank one at an edge does not count."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    if not all(part.strip() for part in parts[1:-1]):
        return False
    # A single blank part is the first and the last, and counts once.
    edges = parts[:1] if len(parts) == 1 else [parts[0], parts[-1]]
    return len(parts) - sum(1 for part in edges if not part.strip()) == num_paragraphs


@HARNESS.check("length_constraints:number_words")
def counts_words(text: str, *, num_words: Count, relation: Relation) -> bool:
    """Runs of word characters."""
    return holds(len(find_words(text)), relation, num_words)


@HARNESS.check("length_constraints:nth_paragraph_first_word")
def opens_paragraph(text: str, *, num_paragraphs: Count, nth_paragraph: Position, first_word: Text) -> bool:
    """Paragraphs between two line breaks; blank ones count for the position and not for the number."""
    parts = text.split("\n\n")
    num_filled = sum(1 for part in parts if part.strip())
    if nth_paragraph > num_filled or not (part := parts[nth_paragraph - 1].strip()):
        return False
    token = part.split()[0].lstrip("'").lstrip('"')
    word = re.split(r"[.,?!'\"]", token, maxsplit=1)[0]
    return num_filled == num_paragraphs and "".join(c.lower() for c in word) == first_word.lower()


@HARNESS.check("detectable_content:number_placeholders")
def counts_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """Texts between square brackets in one line."""
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


@HARNESS.check("detectable_content:postscript")
def has_postscript(text: str, *, postscript_marker: Pattern) -> bool:
    """The marker in small letters, as a pattern, anywhere."""
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, marker.lower()), text.lower()) is not None


@HARNESS.check("detectable_format:number_bullet_lists")
def counts_bullets(text: str, *, num_bullets: Count) -> bool:
    """Lines that begin with a single asterisk, and lines that begin with a hyphen."""
    return len(_STAR_BULLET.findall(text)) + len(_HYPHEN_BULLET.findall(text)) == num_bullets


@HARNESS.check("detectable_format:constrained_response")
def gives_choice(text: str) -> bool:
    """One of the three answers anywhere."""
    return any(choice in text for choice in CHOICES)


@HARNESS.check("detectable_format:number_highlighted_sections")
def counts_highlights(text: str, *, num_highlights: Count) -> bool:
    """Texts between single asterisks plus texts between double ones."""
    single = sum(1 for match in _SINGLE_HIGHLIGHT.findall(text) if match.strip("*").strip())
    double = sum(1 for match in _DOUBLE_HIGHLIGHT.findall(text) if match[2:-2].strip())
    return single + double >= num_highlights


@HARNESS.check("detectable_format:multiple_sections")
def counts_sections(text: str, *, section_spliter: Pattern, num_sections: Count) -> bool:
    """Headings of the section name, as a pattern, and a number."""
    pieces = re.split(r"\s?" + section_spliter.strip() + r"\s?\d+\s?", text)
    return len(pieces) - 1 >= num_sections


@HARNESS.check("detectable_format:json_format")
def is_json(text: str) -> bool:
    """Any JSON value, with or without a code fence.

    Raises: RecursionError like lm-eval.
    """
    body = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except ValueError:
        return False
    return True


@HARNESS.check("detectable_format:title")
def has_title(text: str) -> bool:
    """Something between double angular brackets in one line."""
    return any(title.lstrip("<").rstrip(">").strip() for title in _TITLE.findall(text))


@HARNESS.check("combination:two_responses")
def gives_two_replies(text: str) -> bool:
    """Two different parts around six asterisks; blank parts at the edges do not count."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


@HARNESS.check("combination:repeat_prompt")
def repeats_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """The request at the start."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@HARNESS.check("startend:end_checker")
def ends_with(text: str, *, end_phrase: Text) -> bool:
    """The phrase at the end, in any case, double quotes aside."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@HARNESS.check("startend:quotation")
def is_quoted(text: str) -> bool:
    """Two double quotes, one at each end."""
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


@HARNESS.check("change_case:capital_word_frequency")
def counts_capital_words(text: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Treebank tokens without small letters."""
    return holds(count_capital_tokens(text), capital_relation, capital_frequency)


def count_capital_tokens(text: str) -> int:
    """Count the tokens of nltk's word splitter that have capital letters and no small ones.

    Source: the Penn Treebank conventions as nltk 3.10 applies them. Marks have no case, so only the cuts
    between words matter, and every full stop behind a word counts as the end of a sentence.
    """
    # A full stop at the end of a sentence is a separate token, so a clitic before it ends its word.
    marked = _FULL_STOP.sub(" ", _OPENING_APOSTROPHE.sub(" ", text))
    spaced = " ".join(("", *_MARKS.sub(" ", marked).split(), ""))
    for clitic in (_SHORT_CLITIC, _LONG_CLITIC):
        spaced = clitic.sub(r"\1 \2 ", spaced)
    spaced = _JOINED_WORDS.sub(lambda match: f" {' '.join(filter(None, match.groups()))} ", spaced)
    return sum(1 for token in spaced.split() if token.isupper())


@HARNESS.check("change_case:english_capital")
def is_english_capitals(text: str) -> bool:
    """No small letter, and English or no language at all."""
    return text.isupper() and detect_language(text) in ("en", None)


@HARNESS.check("change_case:english_lowercase")
def is_english_lowercase(text: str) -> bool:
    """No capital letter, and English or no language at all."""
    return text.islower() and detect_language(text) in ("en", None)


@HARNESS.check("punctuation:no_comma")
def avoids_commas(text: str) -> bool:
    """No comma."""
    return "," not in text


HARNESS.share_edits(GOOGLE)
