"""The 54 instructions of multi-constraint training sets: the 25 of IFEval and 29 others.

Source of ids and arguments: the columns of allenai/IF_multi_constraints_upto5 and arXiv:2507.02833. Own
implementations; the docstring of each checker states our reading of its instruction. White space separates
words, which are compared without the marks at their edges and without case; sentences, paragraphs and lines
are those of `segments.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from strop.tasks.instructions.checkers import (
    Checkers,
    Count,
    Position,
    Quantifier,
    Relation,
    Stage,
    Text,
    holds,
)
from strop.tasks.instructions.google import GOOGLE, contains_word, remove_text
from strop.tasks.instructions.replies import BASE_DRAFT, FILLER, deal, fill_sentences, repeat_words
from strop.tasks.instructions.segments import (
    bare_words,
    find_words,
    paragraphs,
    parts_between,
    sentences,
    strip_marks,
)

MULTI = Checkers("multi-constraint sets", on=GOOGLE)

_SIX_STARS = re.compile(r"\*{6}")
_SPACED_STARS = re.compile(r"\*[^\S\n]*+\*[^\S\n]*+\*(?!\*)")
_BIGRAM = re.compile(r"<<\s*([^<>]*?)\s*>>")
_END_MARKS = ".!?…。！？"
_MIN_PALINDROME_LETTERS = 3


def folded_words(text: str) -> list[str]:
    """Return the words between white space without marks at their edges, in small letters."""
    return [word.lower() for word in bare_words(text)]


def count_word(text: str, word: str) -> int:
    """Count the occurrences of a word or phrase as a whole word, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, flags=re.IGNORECASE))


def is_same_text(text: str, other: str) -> bool:
    """Whether two texts are equal except for case and white space at the ends."""
    return text.strip().lower() == other.strip().lower()


def find_word_at(text: str, sentence_number: int, word_number: int) -> str | None:
    """Return the m-th word of the n-th sentence in small letters, or None if there is none."""
    parts = sentences(text)
    words = folded_words(parts[sentence_number - 1]) if sentence_number <= len(parts) else []
    return words[word_number - 1] if word_number <= len(words) else None


def place_word(draft: str, keyword: str, sentence_number: int, word_number: int) -> str:
    """Replace the m-th word of the n-th sentence of a draft."""
    missing = sentence_number - len(sentences(draft))
    if missing > 0:
        draft = " ".join([draft, *fill_sentences(draft, missing)])
    parts = sentences(draft)
    if sentence_number > len(parts):  # The draft does not end in a mark.
        return draft
    replaced = parts[sentence_number - 1]
    words = replaced.rstrip(_END_MARKS).split()
    words += ["indeed"] * (word_number - len(words))
    words[word_number - 1] = keyword
    # In place, so that line breaks between sentences stay.
    before, _, after = draft.partition(replaced)
    return f"{before}{' '.join(words)}.{after}"


@MULTI.check("copy:repeat_phrase")
def repeats_phrase(text: str, *, phrase: Text, small_n: Count) -> bool:
    """The phrase occurs n times, each time with exactly one inner word replaced."""
    target = folded_words(phrase)
    words = folded_words(text)
    if len(target) < 3:
        return False
    windows = [words[start : start + len(target)] for start in range(len(words) - len(target) + 1)]
    near = [
        window
        for window in windows
        if window[0] == target[0]
        and window[-1] == target[-1]
        and sum(a != b for a, b in zip(window, target, strict=True)) == 1
    ]
    return len(near) == small_n


@MULTI.edit("copy:repeat_phrase", stage=Stage.WHOLE)
def _repeat_phrase(draft: str, *, phrase: str, small_n: int) -> str:
    del draft
    words = phrase.split()
    changed = [[*words[:1], FILLER[0].split()[n % 5], *words[2:]] for n in range(small_n)]
    return "\n".join(" ".join(line) for line in changed)


@MULTI.check("copy:copy", "copy:copying_simple")
def copies_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """The reply is the request and nothing else, in any case."""
    return is_same_text(text, prompt_to_repeat)


@MULTI.edit("copy:copy", "copy:copying_simple", stage=Stage.WHOLE)
def _copy_prompt(draft: str, *, prompt_to_repeat: str) -> str:
    del draft
    return prompt_to_repeat


@MULTI.check("copy:copying_multiple")
def copies_prompt_often(text: str, *, prompt_to_repeat: Text, N: Position) -> bool:
    """The reply is the request N times, with six asterisks between."""
    parts = parts_between(text, _SIX_STARS)
    return len(parts) == N and all(is_same_text(part, prompt_to_repeat) for part in parts)


@MULTI.edit("copy:copying_multiple", stage=Stage.WHOLE)
def _copy_prompt_often(draft: str, *, prompt_to_repeat: str, N: int) -> str:
    del draft
    return "\n******\n".join([prompt_to_repeat] * N)


@MULTI.check("new:copy_span_idx")
def copies_span(text: str, *, prompt_to_repeat: Text, n_start: Count, n_end: Count) -> bool:
    """The reply is the request from character n_start to n_end, with or without the last one."""
    spans = (prompt_to_repeat[n_start:n_end], prompt_to_repeat[n_start : n_end + 1])
    return any(span.strip() and is_same_text(text, span) for span in spans)


@MULTI.edit("new:copy_span_idx", stage=Stage.WHOLE)
def _copy_span(draft: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> str:
    del draft
    return prompt_to_repeat[n_start : n_end + 1]


@MULTI.check("detectable_format:sentence_hyphens")
def joins_sentences(text: str) -> bool:
    """Hyphens without white space around them join two or more sentences."""
    body = text.strip()
    joints = re.findall(r"[.!?][\"'”’)]?-(?=\S)", body)
    return bool(joints) and len(sentences(body)) == 1


@MULTI.edit("detectable_format:sentence_hyphens", stage=Stage.EDGES)
def _join_sentences(draft: str) -> str:
    parts = sentences(draft)
    return "-".join(parts if len(parts) > 1 else fill_sentences(draft, 2))


@MULTI.check("keywords:no_adjacent_consecutive", needs_substance=True)
def avoids_consecutive_letters(text: str) -> bool:
    """No word starts with the letter of the alphabet after the initial of the word before."""
    initials = [word[0] for word in folded_words(text)]
    return all(ord(second) - ord(first) != 1 for first, second in pairwise(initials))


@MULTI.edit("keywords:no_adjacent_consecutive", stage=Stage.WHOLE)
def _avoid_consecutive_letters(draft: str) -> str:
    del draft
    return "We walk to the market every morning."


@MULTI.check("detectable_format:square_brackets", needs_substance=True)
def brackets_words(text: str) -> bool:
    """Every single word is in square brackets."""
    tokens = re.sub(r"\]\s*\[", "] [", text.strip()).split()
    return bool(tokens) and all(re.fullmatch(r"[^\w\[]*\[[^\[\]]+\][^\w\]]*", token) for token in tokens)


@MULTI.edit("detectable_format:square_brackets", stage=Stage.WRAPPING)
def _bracket_words(draft: str) -> str:
    return " ".join(f"[{word}]" for word in draft.split())


@MULTI.check("detectable_format:bigram_wrapping")
def wraps_bigrams(text: str) -> bool:
    """The reply is pairs of words, each in double angular brackets; the last may be one word."""
    pairs = [len(pair.split()) for pair in _BIGRAM.findall(text)]
    outside = _BIGRAM.sub("", text)
    has_pairs = bool(pairs) and all(size == 2 for size in pairs[:-1]) and pairs[-1] in (1, 2)
    return has_pairs and not any(character.isalnum() for character in outside) and max(pairs) == 2


@MULTI.edit("detectable_format:bigram_wrapping", stage=Stage.WRAPPING)
def _wrap_bigrams(draft: str) -> str:
    words = draft.split()
    return " ".join(f"<<{' '.join(words[n : n + 2])}>>" for n in range(0, len(words), 2))


@MULTI.check("keywords:word_once")
def includes_word(text: str, *, keyword: Text) -> bool:
    """The keyword occurs as a whole word, in any case."""
    return contains_word(text, keyword)


@MULTI.edit("keywords:word_once", stage=Stage.CONTENT)
def _add_word(draft: str, *, keyword: str) -> str:
    return draft if contains_word(draft, keyword) else f"{draft} {keyword.strip()}"


@MULTI.check("keywords:word_count_different_numbers", needs_substance=True)
def repeats_word(text: str, *, keyword: Text, frequency: Count, relation: Quantifier = "exactly") -> bool:
    """The keyword occurs as a whole word as often as required; the default relation is 'exactly'."""
    return holds(count_word(text, keyword), relation, frequency)


@MULTI.edit("keywords:word_count_different_numbers", stage=Stage.CONTENT)
def _repeat_word(draft: str, *, keyword: str, frequency: int, relation: str = "exactly") -> str:
    target = frequency + (relation == "more than") - (relation == "less than")
    count = count_word(draft, keyword)
    if count > target and relation not in ("at least", "more than"):
        draft, count = remove_text(draft, keyword.strip()), 0
    missing = 0 if relation in ("less than", "at most") else target - count
    return f"{draft} {repeat_words([keyword.strip()], missing)}".strip()


@MULTI.check("keywords:exclude_word_harder", needs_substance=True)
def avoids_word(text: str, *, keyword: Text) -> bool:
    """The keyword does not occur as a whole word, in any case."""
    return not contains_word(text, keyword)


@MULTI.edit("keywords:exclude_word_harder", stage=Stage.OMISSION)
def _remove_word(draft: str, *, keyword: str) -> str:
    return remove_text(draft, keyword.strip())


@MULTI.check("keywords:palindrome")
def has_palindrome(text: str) -> bool:
    """A word of three or more letters reads the same backwards."""
    return any(is_palindrome(word) for word in find_words(text))


def is_palindrome(word: str, min_letters: int = _MIN_PALINDROME_LETTERS) -> bool:
    """Whether a word of that many letters reads the same backwards and has two different letters."""
    folded = word.lower()
    is_long = len(folded) >= min_letters and folded.isalpha()
    return is_long and folded == folded[::-1] and len(set(folded)) > 1


@MULTI.edit("keywords:palindrome", stage=Stage.CONTENT)
def _add_palindrome(draft: str) -> str:
    return f"{draft} level"


@MULTI.check("keywords:keyword_specific_position")
def places_word(text: str, *, keyword: Text, n: Position, m: Position) -> bool:
    """The keyword is the m-th word of the n-th sentence."""
    return find_word_at(text, n, m) == strip_marks(keyword.strip()).lower()


@MULTI.edit("keywords:keyword_specific_position", stage=Stage.CONTENT)
def _place_word(draft: str, *, keyword: str, n: int, m: int) -> str:
    return place_word(draft, keyword.strip(), n, m)


@MULTI.check("keywords:start_end")
def starts_and_ends_with(text: str, *, keyword: Text) -> bool:
    """The keyword is the first and the last word, and no mark follows it."""
    words = folded_words(text)
    word = keyword.strip().lower()
    opens = len(words) > 1 and words[0] == strip_marks(word) and text.strip().lower().endswith(word)
    return opens and words[-1] == strip_marks(word)


@MULTI.edit("keywords:start_end", stage=Stage.EDGES)
def _start_and_end_with(draft: str, *, keyword: str) -> str:
    return f"{keyword.strip()} {draft} {keyword.strip()}"


@MULTI.check("paragraphs:paragraphs")
def has_parts(text: str, *, num_parts: Count = 2) -> bool:
    """Spaced asterisks separate two parts, or another number of parts; none is blank."""
    parts = parts_between(text, _SPACED_STARS)
    return len(parts) == num_parts and all(parts)


@MULTI.edit("paragraphs:paragraphs", stage=Stage.STRUCTURE)
def _write_parts(draft: str, *, num_parts: int = 2) -> str:
    return "\n* * *\n".join(deal(draft, num_parts))


@MULTI.check("paragraphs:paragraphs2")
def has_two_paragraphs(text: str) -> bool:
    """A blank line separates two paragraphs."""
    return len(paragraphs(text)) == 2


@MULTI.edit("paragraphs:paragraphs2", stage=Stage.STRUCTURE)
def _write_two_paragraphs(draft: str) -> str:
    return "\n\n".join(deal(draft, 2))


@MULTI.check("first_word:first_word_sent")
def opens_sentences_with(text: str, *, first_word: Text) -> bool:
    """Every sentence starts with the word."""
    return _all_sentences_have(text, 0, first_word)


@MULTI.check("last_word:last_word_sent")
def ends_sentences_with(text: str, *, last_word: Text) -> bool:
    """Every sentence ends with the word, marks aside."""
    return _all_sentences_have(text, -1, last_word)


def _all_sentences_have(text: str, index: int, word: str) -> bool:
    parts = [folded_words(sentence) for sentence in sentences(text)]
    return bool(parts) and all(words[index] == strip_marks(word).lower() for words in parts)


@MULTI.edit("first_word:first_word_sent", stage=Stage.EDGES)
def _open_sentences_with(draft: str, *, first_word: str) -> str:
    return " ".join(f"{first_word.strip()} {sentence}" for sentence in sentences(draft))


@MULTI.edit("last_word:last_word_sent", stage=Stage.EDGES)
def _end_sentences_with(draft: str, *, last_word: str) -> str:
    stems = [sentence.rstrip(_END_MARKS) for sentence in sentences(draft)]
    return " ".join(f"{stem} {last_word.strip()}." for stem in stems)


@MULTI.check("first_word:first_word_answer")
def opens_with(text: str, *, first_word: Text) -> bool:
    """The first word of the reply is the word."""
    return folded_words(text)[:1] == [strip_marks(first_word).lower()]


@MULTI.edit("first_word:first_word_answer", stage=Stage.EDGES)
def _open_with(draft: str, *, first_word: str) -> str:
    return f"{first_word.strip()} {draft}"


@MULTI.check("last_word:last_word_answer")
def closes_with(text: str, *, last_word: Text) -> bool:
    """The last word of the reply is the word, marks aside."""
    return folded_words(text)[-1:] == [strip_marks(last_word).lower()]


@MULTI.edit("last_word:last_word_answer", stage=Stage.EDGES)
def _close_with(draft: str, *, last_word: str) -> str:
    return f"{draft} {last_word.strip()}"


@MULTI.check("punctuation:punctuation_dot", needs_substance=True)
def avoids_dots(text: str) -> bool:
    """The reply has no dot."""
    return "." not in text


@MULTI.edit("punctuation:punctuation_dot", stage=Stage.OMISSION)
def _replace_dots(draft: str) -> str:
    return draft.replace(".", "?")


@MULTI.check("punctuation:punctuation_exclamation", needs_substance=True)
def avoids_exclamations(text: str) -> bool:
    """The reply has no exclamation mark."""
    return "!" not in text


@MULTI.edit("punctuation:punctuation_exclamation", stage=Stage.OMISSION)
def _replace_exclamations(draft: str) -> str:
    return draft.replace("!", "?")


@MULTI.check("count:lowercase_counting", needs_substance=True)
def limits_lowercase(text: str, *, N: Count) -> bool:
    """At most N words have small letters only."""
    return sum(1 for word in find_words(text) if word.islower()) <= N


@MULTI.edit("count:lowercase_counting", stage=Stage.CASE)
def _limit_lowercase(draft: str, *, N: int) -> str:
    del N
    return draft.upper()


@MULTI.check("letters:letter_counting", needs_substance=True)
def counts_letters(text: str, *, N: Count, relation: Relation) -> bool:
    """The reply has fewer, or at least as many, letters as required."""
    return holds(sum(character.isalpha() for character in text), relation, N)


@MULTI.edit("letters:letter_counting", stage=Stage.LENGTH)
def _fit_letters(draft: str, *, N: int, relation: str) -> str:
    if relation == "at least":
        missing = N - sum(character.isalpha() for character in draft)
        return f"{draft} {repeat_words(['yes'], -(-missing // 3))}".strip()
    return draft[: N - 1]


MULTI.share(GOOGLE, "keywords:letter_frequency", as_id="letters:letter_counting2")


@MULTI.check("count:counting_composition")
def composes_paragraphs(text: str, *, n_sent: Count, n_words: Count) -> bool:
    """Spaced asterisks separate three parts of `n_sent` sentences of `n_words` words."""
    parts = [sentences(part) for part in parts_between(text, _SPACED_STARS)]
    has_form = len(parts) == 3 and all(len(part) == n_sent for part in parts)
    return has_form and all(len(bare_words(sentence)) == n_words for part in parts for sentence in part)


@MULTI.edit("count:counting_composition", stage=Stage.WHOLE)
def _compose_paragraphs(draft: str, *, n_sent: int, n_words: int) -> str:
    del draft
    words = " ".join(FILLER).replace(".", "").lower().split()
    sentence = " ".join(words[index % len(words)] for index in range(n_words)) + "."
    return "\n* * *\n".join([" ".join([sentence] * n_sent)] * 3)


@MULTI.check("count:count_unique", needs_substance=True)
def has_unique_words(text: str) -> bool:
    """No word occurs twice."""
    return max(Counter(folded_words(text)).values(), default=2) == 1


@MULTI.edit("count:count_unique", stage=Stage.CASE)
def _keep_unique_words(draft: str) -> str:
    by_word = {strip_marks(token).lower(): token for token in reversed(draft.split())}
    return " ".join(reversed(by_word.values()))


@MULTI.check("count:count_increment_word")
def increments_words(text: str, *, keyword1: Text, keyword2: Text) -> bool:
    """The first keyword occurs once and the second twice, as whole words."""
    return count_word(text, keyword1) == 1 and count_word(text, keyword2) == 2


@MULTI.edit("count:count_increment_word", stage=Stage.CONTENT)
def _increment_words(draft: str, *, keyword1: str, keyword2: str) -> str:
    for keyword in (keyword1, keyword2):
        draft = remove_text(draft, keyword.strip())
    return f"{draft or BASE_DRAFT} {keyword1.strip()} {keyword2.strip()} {keyword2.strip()}"
