"""Instructions of IFBench that ask a specific question or require a specific table.

Their reading follows the published checkers (github.com/allenai/IFBench); the code is our own. It rejects
replies that the published checkers accept although they plainly do not comply, such as one repeated line.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from strop.tasks.instructions.bench_forms import FORMS
from strop.tasks.instructions.checkers import Checkers, Count, Stage, Text
from strop.tasks.instructions.multi import folded_words, is_same_text
from strop.tasks.instructions.replies import FILLER
from strop.tasks.instructions.segments import bare_words, lines, sentences, strip_marks

CUSTOMS = Checkers("IFBench, questions of their own", on=FORMS)

_ITALICS = re.compile(r"<(i|em)>(.*?)</\1>", re.DOTALL)
_QUESTION = re.compile(r"^[^\S\n]*Question\b[^\S\n]*\d*[.):;]*", re.MULTILINE)
_OPTION = re.compile(r"[A-Ea-e][.)]\s*\w")
_NUM_QUESTIONS, _NUM_OPTIONS = 4, 5
_LAST_COUNTRY = "Zimbabwe"
_MIN_COUNTRIES = 52
CAPITALS = (
    "Reykjavik",
    "Helsinki",
    "Oslo",
    "Tallinn",
    "Stockholm",
    "Riga",
    "Moscow",
    "Copenhagen",
    "Vilnius",
    "Minsk",
    "Dublin",
    "Berlin",
    "Amsterdam",
    "Warsaw",
    "London",
    "Brussels",
    "Prague",
    "Luxembourg",
    "Paris",
    "Vienna",
    "Bratislava",
    "Budapest",
    "Vaduz",
    "Chisinau",
    "Bern",
    "Ljubljana",
    "Zagreb",
)
"""European capitals north of 45 degrees, from north to south, as published, without Kyiv."""
_LEFT_OUT_CAPITALS = frozenset({"Kyiv", "Kiev"})
_CITY_HEADER = ("ID", "Country", "City", "Year", "Count")
_PRODUCT_HEADER = ("ProductID", "Category", "Brand", "Price", "Stock")
_STUDENT_HEADER = ("StudentID", "Subject", "Grade", "Semester", "Score")
_SPECIAL_FIELD = re.compile(r'"[^"]*[^\w\s"][^"]*"')
_QUOTES = {"“": '"', "”": '"', "‘": "'", "’": "'"}
_MIN_QUOTE_DEPTH = 3


@CUSTOMS.check("words:vowel", needs_substance=True)
def uses_three_vowels(text: str) -> bool:
    """One line of words with at most three of the vowels a, e, i, o and u."""
    return "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= 3


@CUSTOMS.edit("words:vowel", stage=Stage.WHOLE)
def _use_three_vowels(draft: str) -> str:
    del draft
    return "The green seas are warm and calm."


@CUSTOMS.check("format:thesis")
def opens_with_italics(text: str) -> bool:
    """The reply has a text in HTML italics, and another text behind it."""
    match = _ITALICS.search(text)
    return match is not None and _has_word(match.group(2)) and _has_word(text[match.end() :])


def _has_word(text: str) -> bool:
    return any(character.isalnum() for character in text)


@CUSTOMS.edit("format:thesis", stage=Stage.EDGES)
def _open_with_italics(draft: str) -> str:
    return f"<i>Bread is good.</i> {draft}"


@CUSTOMS.check("format:title_case", needs_substance=True)
def writes_title_case(text: str) -> bool:
    """Every word that starts with a letter starts with a capital one; 'iPhone' is allowed."""
    words = [word for word in bare_words(text) if word[0].isalpha()]
    return bool(words) and all(not word[0].islower() or not word[1:].islower() for word in words if word[1:])


@CUSTOMS.edit("format:title_case", stage=Stage.CASE)
def _write_title_case(draft: str) -> str:
    return re.sub(r"(?<!\S)\W*\w", lambda match: match.group().upper(), draft)


@CUSTOMS.check("format:quotes")
def nests_quotes(text: str) -> bool:
    """Quotes are nested three deep, with alternating marks; an apostrophe in a word is no quote."""
    awaited: list[str] = []
    heights: list[int] = []
    for match in re.finditer(r"[\"'“”‘’]", text):
        mark = _QUOTES.get(match.group(), match.group())
        before, behind = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
        if mark == "'" and before.isalnum() and behind.isalnum():
            continue
        if awaited and mark == awaited[-1]:
            awaited.pop()
            height = heights.pop()
            if height >= _MIN_QUOTE_DEPTH:
                return True
            if heights:
                heights[-1] = max(heights[-1], height + 1)
        else:
            awaited.append(mark)
            heights.append(1)
    return False


@CUSTOMS.edit("format:quotes", stage=Stage.CONTENT)
def _nest_quotes(draft: str) -> str:
    return f'{draft} She wrote: "He told me \'they call it "home" here\' today."'


@CUSTOMS.check("repeat:repeat_span")
def repeats_span(text: str, *, prompt_to_repeat: Text, n_start: Count, n_end: Count) -> bool:
    """The reply is the words from one index to the other, both included; the first word has index 0."""
    span = " ".join(prompt_to_repeat.split()[n_start : n_end + 1])
    return bool(span) and is_same_text(text, span)


@CUSTOMS.edit("repeat:repeat_span", stage=Stage.WHOLE)
def _repeat_span(draft: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> str:
    del draft
    return " ".join(prompt_to_repeat.split()[n_start : n_end + 1])


@CUSTOMS.check("custom:mcq_count_length")
def asks_four_questions(text: str) -> bool:
    """Four questions begin with 'Question', have options A to E each, and grow longer; nothing precedes."""
    opening, *parts = _QUESTION.split(text.strip())
    if opening.strip() or len(parts) != _NUM_QUESTIONS:
        return False
    lengths = []
    for part in parts:
        part_lines = [line.strip() for line in part.strip().split("\n")]
        options = [number for number, line in enumerate(part_lines) if _OPTION.match(line)]
        if len(options) != _NUM_OPTIONS:
            return False
        lengths.append(len(" ".join(part_lines[: options[0]]).strip()))
    return lengths[0] > 0 and all(first < second for first, second in pairwise(lengths))


@CUSTOMS.edit("custom:mcq_count_length", stage=Stage.WHOLE)
def _ask_four_questions(draft: str) -> str:
    del draft
    options = "\n".join(f"{letter}) Painter {letter}" for letter in "ABCDE")
    return "\n\n".join(
        f"Question {number}. Who painted {'very ' * number}well?\n{options}" for number in range(1, 5)
    )


@CUSTOMS.check("custom:reverse_newline")
def lists_countries(text: str) -> bool:
    """From Zimbabwe on, 52 or more different lines are in descending alphabetical order."""
    names = [name for line in lines(text) if (name := _folded(strip_marks(line)))]
    start = next((number for number, name in enumerate(names) if _LAST_COUNTRY in name), len(names))
    countries = names[start:]
    return len(countries) >= _MIN_COUNTRIES and all(first > second for first, second in pairwise(countries))


def _folded(text: str) -> str:
    """Return a text without accents and other characters outside of ASCII."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


@CUSTOMS.edit("custom:reverse_newline", stage=Stage.WHOLE)
def _list_countries(draft: str) -> str:
    del draft
    return "\n".join(["Zimbabwe", *(f"{a}{b}land" for a in "YXWVUTS" for b in "zyxwvuts")])


@CUSTOMS.check("custom:word_reverse")
def reverses_words(text: str) -> bool:
    """The reply is one sentence whose words, in reverse order, contain 'bald eagle'."""
    words = folded_words(text)[::-1]
    return len(sentences(text)) == 1 and ("bald", "eagle") in pairwise(words)


@CUSTOMS.edit("custom:word_reverse", stage=Stage.WHOLE)
def _reverse_words(draft: str) -> str:
    del draft
    return "eagle bald the is symbol national The"


@CUSTOMS.check("custom:character_reverse")
def reverses_letters(text: str) -> bool:
    """The reply, read backwards by letters, contains 'bald eagle'."""
    return "bald eagle" in text.lower()[::-1]


@CUSTOMS.edit("custom:character_reverse", stage=Stage.WHOLE)
def _reverse_letters(draft: str) -> str:
    del draft
    return "elgae dlab eht si tI"


@CUSTOMS.check("custom:european_capitals_sort")
def sorts_capitals(text: str) -> bool:
    """The capitals north of 45 degrees from north to south, separated by commas; Kyiv is optional."""
    names = [_folded(part).strip() for part in text.strip().rstrip(".").split(",")]
    place = CAPITALS.index("Prague")
    if len(names) > place and names[place] in _LEFT_OUT_CAPITALS:
        del names[place]
    return tuple(names) == CAPITALS


@CUSTOMS.edit("custom:european_capitals_sort", stage=Stage.WHOLE)
def _sort_capitals(draft: str) -> str:
    del draft
    return ", ".join(CAPITALS)


def _read_table(text: str, delimiter: str) -> list[list[str]] | None:
    """Return the fields of all lines, with their quotes, or None if a quote is not closed."""
    rows = []
    for line in text.strip().split("\n"):
        # Doubled inside quotes, so that the parsed fields keep their quotes.
        quoted = line.strip("\r").replace('"', '"""')
        try:
            rows.append(next(csv.reader([quoted], delimiter=delimiter, skipinitialspace=True, strict=True)))
        except (csv.Error, StopIteration):
            return None
    return rows


def _is_table(rows: list[list[str]] | None, header: Sequence[str], num_rows: int) -> bool:
    if rows is None or len(rows) != num_rows + 1:
        return False
    names = [field.strip().strip('"') for field in rows[0]]
    return names == list(header) and all(len(row) == len(header) for row in rows)


@CUSTOMS.check("custom:csv_city")
def writes_city_table(text: str) -> bool:
    """Only a header and seven rows of five fields, separated by commas."""
    return _is_table(_read_table(text, ","), _CITY_HEADER, 7)


@CUSTOMS.edit("custom:csv_city", stage=Stage.WHOLE)
def _write_city_table(draft: str) -> str:
    del draft
    return "\n".join([",".join(_CITY_HEADER), *(f"{n},Peru,Lima,200{n},{n}0" for n in range(1, 8))])


@CUSTOMS.check("custom:csv_special_character")
def writes_product_table(text: str) -> bool:
    """A header and fourteen rows of five fields; one holds a special character between double quotes."""
    rows = _read_table(text, ",")
    if rows is None or not _is_table(rows, _PRODUCT_HEADER, 14):
        return False
    return any(_SPECIAL_FIELD.fullmatch(field.strip()) for row in rows[1:] for field in row)


@CUSTOMS.edit("custom:csv_special_character", stage=Stage.WHOLE)
def _write_product_table(draft: str) -> str:
    del draft
    body = [f'{n},Tools,"Nut & Co",{n}.50,{n}0' for n in range(1, 15)]
    return "\n".join([",".join(_PRODUCT_HEADER), *body])


@CUSTOMS.check("custom:csv_quotes")
def writes_quoted_table(text: str) -> bool:
    """A header and three rows of five fields, separated by tabs, every field in double quotes."""
    rows = _read_table(text, "\t")
    if rows is None or not _is_table(rows, _STUDENT_HEADER, 3):
        return False
    fields = [field.strip() for row in rows for field in row]
    return all(len(field) > 1 and field[0] == field[-1] == '"' for field in fields)


@CUSTOMS.edit("custom:csv_quotes", stage=Stage.WHOLE)
def _write_quoted_table(draft: str) -> str:
    del draft
    rows = [_STUDENT_HEADER, *((str(n), FILLER[4].split()[1], "A", "1", "90") for n in range(1, 4))]
    return "\n".join("\t".join(f'"{field}"' for field in row) for row in rows)
