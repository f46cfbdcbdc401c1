"""The instructions of IFBench: those about words, counts and ratios, and what has no checker.

Source of ids and arguments: arXiv:2507.02833. Own implementations of what each instruction says; the
first line of each checker says what that was taken to be. `bench_forms.py` has those about format,
`bench_customs.py` those with a question of their own, `bench_lists.py` those that a list of words decides.
Together they are the 58 of the published checkers; any other id is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from types import MappingProxyType

from strop.tasks.instructions.bench_lists import LISTS
from strop.tasks.instructions.checkers import Checkers, Count, Position, Stage, Text
from strop.tasks.instructions.drafts import FILLER, lengthen, repeat_words
from strop.tasks.instructions.google import remove_text
from strop.tasks.instructions.multi import folded_words, is_palindrome
from strop.tasks.instructions.rlvr import count_word
from strop.tasks.instructions.segments import bare_words, lines, sentences, strip_marks

BENCH = Checkers("IFBench", on=LISTS)

UNJUDGED = MappingProxyType(
    {"count:words_french": "the paper names it; the published checkers have count:words_japanese instead"}
)
"""Ids named with IFBench without a checker, and why."""

_CONJUNCTIONS = ("for", "and", "nor", "but", "or", "yet", "so")
_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:[.,]\d+)*(?!\w)")
_STANDARD_MARKS = frozenset(".,!?;:")
_INTERROBANGS = ("?!", "!?", "‽")
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)
_NUM_PALINDROMES = 10
_MIN_PALINDROME_LETTERS = 5
_PALINDROMES = ("level", "radar", "rotor", "kayak", "civic", "madam", "refer", "tenet", "solos", "stats")
_TIMES_OF_KEYWORDS = (1, 2, 3, 5, 7)
_PRIMES = frozenset(
    number for number in range(2, 200) if all(number % divisor for divisor in range(2, number))
)


@BENCH.check("count:conjunctions")
def counts_conjunctions(text: str, *, small_n: Count) -> bool:
    """At least n different ones of for, and, nor, but, or, yet, so."""
    return len(set(folded_words(text)) & set(_CONJUNCTIONS)) >= small_n


@BENCH.edit("count:conjunctions", stage=Stage.CONTENT)
def _add_conjunctions(draft: str, *, small_n: int) -> str:
    return " ".join([draft, *_CONJUNCTIONS[:small_n]])


@BENCH.check("count:numbers", needs_substance=True)
def counts_numbers(text: str, *, N: Count) -> bool:
    """Exactly N numbers in digits; thousands and decimals belong to one number."""
    return len(_NUMBER.findall(text)) == N


@BENCH.edit("count:numbers", stage=Stage.CONTENT)
def _add_numbers(draft: str, *, N: int) -> str:
    return f"{draft} {repeat_words(['7'], N)}".strip()


@BENCH.check("count:punctuation")
def uses_all_marks(text: str) -> bool:
    """Every one of . , ! ? ; : and an interrobang, whose marks count for nothing else."""
    found = next((mark for mark in _INTERROBANGS if mark in text), None)
    return found is not None and set(text.replace(found, "", 1)) >= _STANDARD_MARKS


@BENCH.edit("count:punctuation", stage=Stage.CONTENT)
def _use_all_marks(draft: str) -> str:
    return f"{draft} Wait: is it so, or not; what?! Yes! Is it?"


@BENCH.check("count:unique_word_count")
def counts_unique_words(text: str, *, N: Count) -> bool:
    """At least N different words."""
    words = set(folded_words(text))
    return bool(words) and len(words) >= N


@BENCH.edit("count:unique_word_count", stage=Stage.LENGTH)
def _add_unique_words(draft: str, *, N: int) -> str:
    missing = N - len(set(folded_words(draft)))
    return " ".join([draft, *(f"item{number}" for number in range(missing))])


@BENCH.check("count:word_count_range", needs_substance=True)
def counts_words_in_range(text: str, *, min_words: Count, max_words: Count) -> bool:
    """The words between white space are so many at least and at most."""
    return min_words <= len(bare_words(text)) <= max_words


@BENCH.edit("count:word_count_range", stage=Stage.LENGTH)
def _fit_words(draft: str, *, min_words: int, max_words: int) -> str:
    middle = (min_words + max_words) // 2
    return " ".join(lengthen(draft, middle).split()[:middle])


@BENCH.check("count:keywords_multiple")
def repeats_keywords(
    text: str, *, keyword1: Text, keyword2: Text, keyword3: Text, keyword4: Text, keyword5: Text
) -> bool:
    """The five keywords stand on their own once, twice, and three, five and seven times."""
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(
        count_word(text, keyword) == times
        for keyword, times in zip(keywords, _TIMES_OF_KEYWORDS, strict=True)
    )


@BENCH.edit("count:keywords_multiple", stage=Stage.CONTENT)
def _repeat_keywords(draft: str, **keywords: str) -> str:
    ordered = [keywords[f"keyword{number}"].strip() for number in range(1, 6)]
    for keyword in ordered:
        draft = remove_text(draft, keyword)
    repeated = [
        repeat_words([keyword], times) for keyword, times in zip(ordered, _TIMES_OF_KEYWORDS, strict=True)
    ]
    return " ".join([draft, *repeated])


@BENCH.check("ratio:sentence_type")
def balances_questions(text: str) -> bool:
    """Twice as many sentences end in a full stop as in a question mark, and some do."""
    ends = _sentence_ends(text)
    return ends["?"] > 0 and ends["."] == 2 * ends["?"]


@BENCH.check("ratio:sentence_balance")
def balances_sentence_types(text: str) -> bool:
    """As many sentences end in a full stop as in a question mark and as in an exclamation mark."""
    ends = _sentence_ends(text)
    return ends["."] == ends["?"] == ends["!"] > 0


def _sentence_ends(text: str) -> Counter[str]:
    return Counter(sentence.rstrip("\"'”’»)]}*_~ ")[-1:] for sentence in sentences(text))


@BENCH.edit("ratio:sentence_type", stage=Stage.WHOLE)
def _balance_questions(draft: str) -> str:
    del draft
    return "We walk to the market. The bread is fresh. Do you like it?"


@BENCH.edit("ratio:sentence_balance", stage=Stage.WHOLE)
def _balance_sentence_types(draft: str) -> str:
    del draft
    return "We walk to the market. The bread is fresh! Do you like it?"


@BENCH.check("ratio:sentence_words")
def writes_equal_sentences(text: str) -> bool:
    """Three sentences of equally many characters, and no word twice."""
    found = sentences(text)
    words = folded_words(text)
    return len(found) == 3 and len({len(s) for s in found}) == 1 and len(set(words)) == len(words)


@BENCH.edit("ratio:sentence_words", stage=Stage.WHOLE)
def _write_equal_sentences(draft: str) -> str:
    del draft
    return "We bake bread. You read maps. They ran home."


@BENCH.check("words:alphabet")
def follows_alphabet(text: str) -> bool:
    """Every word starts with the letter behind the one of the word before; a follows z; two or more."""
    words = folded_words(text)
    steps = all((ord(b[0]) - ord(a[0])) % 26 == 1 for a, b in pairwise(words))
    return len(words) > 1 and steps and all("a" <= word[0] <= "z" for word in words)


@BENCH.edit("words:alphabet", stage=Stage.WHOLE)
def _follow_alphabet(draft: str) -> str:
    del draft
    return "A bear can dance every Friday."


@BENCH.check("words:consonants", needs_substance=True)
def has_clusters(text: str) -> bool:
    """Every word has two consonants side by side; y is one."""
    words = bare_words(text)
    return bool(words) and all(_CLUSTER.search(word) for word in words)


@BENCH.edit("words:consonants", stage=Stage.WHOLE)
def _use_clusters(draft: str) -> str:
    del draft
    return "Strong plants grow best when children help them."


@BENCH.check("words:last_first")
def chains_sentences(text: str) -> bool:
    """The last word of each sentence is the first of the next, and there are two or more."""
    words = [folded_words(sentence) for sentence in sentences(text)]
    return len(words) > 1 and all(first[-1] == second[0] for first, second in pairwise(words))


@BENCH.edit("words:last_first", stage=Stage.WHOLE)
def _chain_sentences(draft: str) -> str:
    del draft
    return "We walk to the market. Market days are good."


@BENCH.check("words:paragraph_last_first")
def frames_paragraphs(text: str) -> bool:
    """Every line ends with the word that it starts with, and has two words or more."""
    found = [folded_words(line) for line in lines(text)]
    return all(len(words) > 1 and words[0] == words[-1] for words in found)


@BENCH.edit("words:paragraph_last_first", stage=Stage.WHOLE)
def _frame_paragraphs(draft: str) -> str:
    del draft
    return "Bread is what we like: bread.\nHome is where we eat at home."


@BENCH.check("words:no_consecutive", needs_substance=True)
def varies_initials(text: str) -> bool:
    """No word starts with the letter of the word before."""
    initials = [word[0] for word in folded_words(text)]
    return all(first != second for first, second in pairwise(initials))


@BENCH.edit("words:no_consecutive", stage=Stage.WHOLE)
def _vary_initials(draft: str) -> str:
    del draft
    return "We can bring fresh bread home every morning."


@BENCH.check("words:palindrome")
def has_palindromes(text: str) -> bool:
    """Ten or more different words of five or more letters read the same backwards."""
    found = {word for word in folded_words(text) if is_palindrome(word, _MIN_PALINDROME_LETTERS)}
    return len(found) >= _NUM_PALINDROMES


@BENCH.edit("words:palindrome", stage=Stage.CONTENT)
def _add_palindromes(draft: str) -> str:
    return " ".join([draft, *_PALINDROMES])


@BENCH.check("words:prime_lengths", needs_substance=True)
def has_prime_lengths(text: str) -> bool:
    """The number of letters of every word is prime."""
    words = bare_words(text)
    return bool(words) and all(sum(c.isalnum() for c in word) in _PRIMES for word in words)


@BENCH.edit("words:prime_lengths", stage=Stage.WHOLE)
def _use_prime_lengths(draft: str) -> str:
    del draft
    return "We can bring fresh bread."


@BENCH.check("words:repeats", needs_substance=True)
def limits_repeats(text: str, *, small_n: Position) -> bool:
    """No word stands more often than n times."""
    return max(Counter(folded_words(text)).values(), default=0) <= small_n


@BENCH.edit("words:repeats", stage=Stage.WHOLE)
def _limit_repeats(draft: str, *, small_n: int) -> str:
    del draft, small_n
    return FILLER[4]


@BENCH.check("words:words_position")
def places_keyword(text: str, *, keyword: Text) -> bool:
    """The second and the second to last word are the keyword."""
    words = folded_words(text)
    return len(words) > 3 and words[1] == words[-2] == strip_marks(keyword.strip()).lower()


@BENCH.edit("words:words_position", stage=Stage.EDGES)
def _place_keyword(draft: str, *, keyword: str) -> str:
    return f"Now {keyword.strip()} {draft} {keyword.strip()} again."
