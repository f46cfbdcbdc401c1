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

from strop.tasks.instructions.checkers import Checkers, Count, Position, Quantifier, Relation, Text, holds
from strop.tasks.instructions.google import GOOGLE, find_word
from strop.tasks.instructions.segments import (
    bare_words,
    find_words,
    paragraphs,
    parts_between,
    sentences,
    strip_marks,
)

MULTI = Checkers("multi-constraint sets", GOOGLE)

_SIX_STARS = re.compile(r"\*{6}")
_SPACED_STARS = re.compile(r"\*[^\S\n]*+\*[^\S\n]*+\*(?!\*)")
_BIGRAM = re.compile(r"<<\s*([^<>]*?)\s*>>")


def folded_words(text: str) -> list[str]:
    """Return the words between white space without marks at their edges, in small letters."""
    return [word.lower() for word in bare_words(text)]


def is_same_text(text: str, other: str) -> bool:
    """Whether two texts are equal except for case and white space at the ends."""
    return text.strip().lower() == other.strip().lower()


@MULTI.check("copy:repeat_phrase")
def repeats_phrase(text: str, *, phrase: Text, small_n: Count) -> bool:
    """The phrase occurs n times, each time with exactly one inner word replaced."""
    target, words = folded_words(phrase), folded_words(text)
    if len(target) < 3:
        return False
    windows = [words[start : start + len(target)] for start in range(len(words) - len(target) + 1)]
    changed = [[n for n, word in enumerate(window) if word != target[n]] for window in windows]
    return sum(len(one) == 1 and 0 < one[0] < len(target) - 1 for one in changed) == small_n


@MULTI.check("copy:copy", "copy:copying_simple")
def copies_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """The reply is the request and nothing else, in any case."""
    return is_same_text(text, prompt_to_repeat)


@MULTI.check("copy:copying_multiple")
def copies_prompt_often(text: str, *, prompt_to_repeat: Text, N: Position) -> bool:
    """The reply is the request N times, with six asterisks between."""
    parts = parts_between(text, _SIX_STARS)
    return len(parts) == N and all(is_same_text(part, prompt_to_repeat) for part in parts)


@MULTI.check("new:copy_span_idx")
def copies_span(text: str, *, prompt_to_repeat: Text, n_start: Count, n_end: Count) -> bool:
    """The reply is the request from character n_start to n_end, with or without the last one."""
    spans = (prompt_to_repeat[n_start:n_end], prompt_to_repeat[n_start : n_end + 1])
    return any(span.strip() and is_same_text(text, span) for span in spans)


@MULTI.check("detectable_format:sentence_hyphens")
def joins_sentences(text: str) -> bool:
    """Hyphens without white space around them join two or more sentences."""
    body = text.strip()
    joints = re.findall(r"[.!?][\"'”’)]?-(?=\S)", body)
    return bool(joints) and len(sentences(body)) == 1


@MULTI.check("keywords:no_adjacent_consecutive", needs_substance=True)
def avoids_consecutive_letters(text: str) -> bool:
    """No word starts with the letter of the alphabet after the initial of the word before."""
    initials = [word[0] for word in folded_words(text)]
    return all(ord(second) - ord(first) != 1 for first, second in pairwise(initials))


@MULTI.check("detectable_format:square_brackets", needs_substance=True)
def brackets_words(text: str) -> bool:
    """Every single word is in square brackets."""
    tokens = re.sub(r"\]\s*\[", "] [", text.strip()).split()
    return bool(tokens) and all(re.fullmatch(r"[^\w\[]*\[[^\[\]]+\][^\w\]]*", token) for token in tokens)


@MULTI.check("detectable_format:bigram_wrapping")
def wraps_bigrams(text: str) -> bool:
    """The reply is pairs of words, each in double angular brackets; the last may be one word."""
    pairs = [len(pair.split()) for pair in _BIGRAM.findall(text)]
    outside = _BIGRAM.sub("", text)
    has_pairs = bool(pairs) and all(size == 2 for size in pairs[:-1]) and pairs[-1] in (1, 2)
    return has_pairs and not any(character.isalnum() for character in outside) and max(pairs) == 2


@MULTI.check("keywords:word_once")
def includes_word(text: str, *, keyword: Text) -> bool:
    """The keyword occurs as a whole word, in any case."""
    return bool(find_word(text, keyword))


@MULTI.check("keywords:word_count_different_numbers", needs_substance=True)
def repeats_word(text: str, *, keyword: Text, frequency: Count, relation: Quantifier = "exactly") -> bool:
    """The keyword occurs as a whole word as often as required; the default relation is 'exactly'."""
    return holds(len(find_word(text, keyword)), relation, frequency)


@MULTI.check("keywords:exclude_word_harder", needs_substance=True)
def avoids_word(text: str, *, keyword: Text) -> bool:
    """The keyword does not occur as a whole word, in any case."""
    return not find_word(text, keyword)


@MULTI.check("keywords:palindrome")
def has_palindrome(text: str) -> bool:
    """A word of three or more letters, two of them different, reads the same backwards."""
    words = [word.lower() for word in find_words(text) if word.isalpha() and len(word) >= 3]
    return any(word == word[::-1] and len(set(word)) > 1 for word in words)


@MULTI.check("keywords:keyword_specific_position")
def places_word(text: str, *, keyword: Text, n: Position, m: Position) -> bool:
    """The keyword is the m-th word of the n-th sentence."""
    words = [folded_words(sentence) for sentence in sentences(text)[n - 1 : n]]
    return any(one[m - 1 : m] == [strip_marks(keyword.strip()).lower()] for one in words)


@MULTI.check("keywords:start_end")
def starts_and_ends_with(text: str, *, keyword: Text) -> bool:
    """The keyword is the first and the last word, and no mark follows it."""
    words = folded_words(text)
    word = keyword.strip().lower()
    opens = len(words) > 1 and words[0] == strip_marks(word) and text.strip().lower().endswith(word)
    return opens and words[-1] == strip_marks(word)


@MULTI.check("paragraphs:paragraphs")
def has_parts(text: str, *, num_parts: Count = 2) -> bool:
    """Spaced asterisks separate two parts, or another number of parts; none is blank."""
    parts = parts_between(text, _SPACED_STARS)
    return len(parts) == num_parts and all(parts)


@MULTI.check("paragraphs:paragraphs2")
def has_two_paragraphs(text: str) -> bool:
    """A blank line separates two paragraphs."""
    return len(paragraphs(text)) == 2


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


@MULTI.check("first_word:first_word_answer")
def opens_with(text: str, *, first_word: Text) -> bool:
    """The first word of the reply is the word."""
    return folded_words(text)[:1] == [strip_marks(first_word).lower()]


@MULTI.check("last_word:last_word_answer")
def closes_with(text: str, *, last_word: Text) -> bool:
    """The last word of the reply is the word, marks aside."""
    return folded_words(text)[-1:] == [strip_marks(last_word).lower()]


@MULTI.check("punctuation:punctuation_dot", needs_substance=True)
def avoids_dots(text: str) -> bool:
    """The reply has no dot."""
    return "." not in text


@MULTI.check("punctuation:punctuation_exclamation", needs_substance=True)
def avoids_exclamations(text: str) -> bool:
    """The reply has no exclamation mark."""
    return "!" not in text


@MULTI.check("count:lowercase_counting", needs_substance=True)
def limits_lowercase(text: str, *, N: Count) -> bool:
    """At most N words have small letters only."""
    return sum(1 for word in find_words(text) if word.islower()) <= N


@MULTI.check("letters:letter_counting", needs_substance=True)
def counts_letters(text: str, *, N: Count, relation: Relation) -> bool:
    """The reply has fewer, or at least as many, letters as required."""
    return holds(sum(character.isalpha() for character in text), relation, N)


MULTI["letters:letter_counting2"] = GOOGLE["keywords:letter_frequency"]


@MULTI.check("count:counting_composition")
def composes_paragraphs(text: str, *, n_sent: Count, n_words: Count) -> bool:
    """Spaced asterisks separate three parts of `n_sent` sentences of `n_words` words."""
    parts = [sentences(part) for part in parts_between(text, _SPACED_STARS)]
    has_form = len(parts) == 3 and all(len(part) == n_sent for part in parts)
    return has_form and all(len(bare_words(sentence)) == n_words for part in parts for sentence in part)


@MULTI.check("count:count_unique", needs_substance=True)
def has_unique_words(text: str) -> bool:
    """No word occurs twice."""
    return max(Counter(folded_words(text)).values(), default=2) == 1


@MULTI.check("count:count_increment_word")
def increments_words(text: str, *, keyword1: Text, keyword2: Text) -> bool:
    """The first keyword occurs once and the second twice, as whole words."""
    return len(find_word(text, keyword1)) == 1 and len(find_word(text, keyword2)) == 2
