"""The instructions of IFBench about words, word lists, counts and ratios, and the ids without a checker.

Source of ids and arguments: arXiv:2507.02833. Own implementations; the docstring of each checker states our
reading of its instruction. `bench_forms.py` has the instructions about format, `bench_customs.py` those that
ask a specific question. Together they are the 58 of the published checkers; any other id is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from strop.tasks.instructions.bench_customs import CUSTOMS
from strop.tasks.instructions.checkers import Checkers, Count, Position, Stage, Text
from strop.tasks.instructions.google import remove_text
from strop.tasks.instructions.multi import folded_words, is_palindrome
from strop.tasks.instructions.replies import FILLER, lengthen, repeat_words
from strop.tasks.instructions.rlvr import count_word
from strop.tasks.instructions.segments import bare_words, find_words, lines, sentences, strip_marks

BENCH = Checkers("IFBench", on=CUSTOMS)

UNJUDGED = MappingProxyType(
    {"count:words_french": "the paper names it; the published checkers have count:words_japanese instead"}
)
"""Ids of IFBench without a checker, with the reason."""

# These lists decide scores. Names, pronouns and capitals are those of the published checkers
# (github.com/allenai/IFBench), stop words the English ones of the Snowball project without their apostrophes.
# Verbs and syllables are found by rules; other programs use a tagger and a dictionary.

Percentage = Annotated[int, Field(ge=0, le=100)]


def _read_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _read_words(
    """
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia
    Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob
    Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora
    Andrew Aria Joseph Claire Ryan Stella Jonathan
    """
)
_PRONOUNS = frozenset(
    _read_words("""
    i me we us you he him she her it they them my mine our ours your yours his hers its their theirs
    myself ourselves yourself yourselves himself herself itself themselves this that these those who whom
    whose which what whoever whomever whatever whichever anybody anyone anything everybody everyone
    everything nobody nothing somebody someone something each either neither both all some any none
    """)
)
_STOP_WORDS = frozenset(
    _read_words("""
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her
    hers herself it its itself they them their theirs themselves what which who whom this that these those
    am is are was were be been being have has had having do does did doing a an the and but if or because
    as until while of at by for with about against between into through during before after above below to
    from up down in out on off over under again further then once here there when where why how all any
    both each few more most other some such no nor not only own same so than too very can will just don
    should now s t d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn
    shan shouldn wasn weren won wouldn
    """)
)
_VERBS = frozenset(
    _read_words("""
    accept achieve act adapt add address adjust admire adopt advance advise agree aim allow analyze
    announce answer appear apply appreciate approach argue arrange arrive ask assess assign assist assume
    attempt attend avoid bake balance be bear beat become begin believe belong bend blend block boil boost
    borrow bounce break breathe bring build burn buy calculate call carry catch cause celebrate challenge
    change chase check choose claim clean clear climb close collect combine come compare complete compose
    compute conduct confirm connect consider contact contain continue contribute control convert convince
    cook copy count cover crash craft create cross cry cultivate cut dance dare deal decide define deliver
    demand demonstrate depend describe design destroy determine develop die dig discover discuss divide do
    double draft draw dream dress drink drive drop earn eat embrace employ empty encourage end enjoy
    ensure enter escape establish evaluate examine exist expand expect experience explain explore express
    extend face fail fall feed feel fight figure fill find finish fit fix fly focus follow force forget
    form gain gather generate get give glance go grab grant grasp grow guard guess guide handle hang
    happen have head hear help hide highlight hit hold hope identify ignore imagine implement improve
    include increase inspire install introduce invest invite involve join journey jump keep kick know lack
    laugh launch lead lean learn leave lend let leverage lie lift like limit list listen live load look
    lose love maintain make manage mark master match matter measure meet mention mix move multiply name
    navigate need notice observe obtain occur offer open operate order organize outline own paint pass
    pause pay perform pick place plan plant play point possess pour practice prefer prepare present press
    prevent print produce promote protect prove provide pull purchase push put question raise reach read
    realize receive recognize recommend record reduce refer reflect refuse relate relax release rely
    remain remember remove repeat replace report represent request require research respect respond rest
    return reveal review ride ring rise roll run save say search see seek select sell send separate serve
    set shake shape share shine shoot show shut sing sit sleep slide smile solve sort sound speak spend
    spin split spread stand start state stay steal step stick stop store strike strive struggle study
    submit succeed suggest summarize supply support suppose surround swim switch take talk taste teach
    tear tell test thank think throw touch trace track trade train transform translate travel treat trust
    try turn twist understand unlock unite update use utilize value verify visit wait wake walk want warn
    wash watch wear weave weigh win wipe wish wonder work worry wrap write yield am is are was were been
    did done had has went gone made took taken said saw seen came gave given found knew known thought told
    became left felt brought began begun kept held wrote written stood heard meant met ran paid sat spoke
    spoken led grew grown lost fell fallen sent built understood drew drawn broke broken spent rose risen
    drove driven bought wore worn chose chosen ate eaten flew flown sang sung swam
    """)
)
_NOT_FORMS = frozenset(
    _read_words("""
    during king ring thing nothing something anything everything morning evening spring string wing
    sibling ceiling wedding red bed seed indeed need speed hundred sacred his its this us
    """)
)
_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_VOWEL_RUN = re.compile(r"[aeiouy]+")
_OVERLAP_SLACK = 2
"""Allowed deviation of an overlap, in percentage points."""


@BENCH.check("count:person_names")
def counts_names(text: str, *, N: Count) -> bool:
    """At least N different names of the fifty that the prompt lists, as whole words."""
    return len(set(find_words(text)) & set(_NAMES)) >= N


@BENCH.edit("count:person_names", stage=Stage.CONTENT)
def _add_names(draft: str, *, N: int) -> str:
    return f"{draft} We met {' and '.join(_NAMES[:N])}."


@BENCH.check("count:pronouns")
def counts_pronouns(text: str, *, N: Count) -> bool:
    """At least N words are pronouns; 'she/her' holds two, and 'it's' one."""
    return sum(1 for word in find_words(text.lower()) if word in _PRONOUNS) >= N


@BENCH.edit("count:pronouns", stage=Stage.CONTENT)
def _add_pronouns(draft: str, *, N: int) -> str:
    return f"{draft} {' '.join(['They know it.'] * (N // 2 + 1))}"


@BENCH.check("count:words_japanese", needs_substance=True)
def writes_japanese(text: str, *, N: Position) -> bool:
    """Every N-th word has a Japanese character, except numbers and marks; there are N or more words."""
    tokens = text.split()[N - 1 :: N]
    return bool(tokens) and all(
        re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", word) or word.isdigit()
        for token in tokens
        for word in bare_words(token)
    )


@BENCH.edit("count:words_japanese", stage=Stage.CONTENT)
def _write_japanese(draft: str, *, N: int) -> str:
    words = lengthen(draft, N).split()
    return " ".join("海" if number % N == 0 else word for number, word in enumerate(words, start=1))


@BENCH.check("ratio:stop_words", needs_substance=True)
def limits_stop_words(text: str, *, percentage: Percentage) -> bool:
    """At most this percentage of the words are stop words; an apostrophe divides a word."""
    words = find_words(text.lower())
    num_stop_words = sum(1 for word in words if word in _STOP_WORDS)
    return bool(words) and 100 * num_stop_words <= percentage * len(words)


@BENCH.edit("ratio:stop_words", stage=Stage.WHOLE)
def _limit_stop_words(draft: str, *, percentage: int) -> str:
    del draft, percentage
    return "Small gardens need patience, little rain, good soil."


@BENCH.check("ratio:overlap")
def overlaps_reference(text: str, *, reference_text: Text, percentage: Percentage) -> bool:
    """This percentage, within two points, of the distinct trigrams of tokens occurs in the reference."""
    own, theirs = _trigrams(text), _trigrams(reference_text)
    if not own:
        return False
    return abs(100 * len(own & theirs) - percentage * len(own)) <= _OVERLAP_SLACK * len(own)


def _trigrams(text: str) -> set[tuple[str, ...]]:
    tokens = _TOKEN.findall(text)
    return {tuple(tokens[start : start + 3]) for start in range(len(tokens) - 2)}


@BENCH.edit("ratio:overlap", stage=Stage.WHOLE)
def _overlap_reference(draft: str, *, reference_text: str, percentage: int) -> str:
    """Append other words to the reference until the overlap is in range."""
    others = [f"word{number}" for number in range(100 * len(reference_text.split()) // max(percentage, 1))]
    text = reference_text
    for other in others[:2000]:
        if overlaps_reference(text, reference_text=reference_text, percentage=percentage):
            return text
        text = f"{text} {other}"
    return draft


@BENCH.check("words:odd_even_syllables", needs_substance=True)
def alternates_syllables(text: str) -> bool:
    """Words with an odd and an even number of syllables alternate; there are two or more."""
    parities = [count_syllables(word) % 2 for word in folded_words(text)]
    return len(parities) > 1 and all(first != second for first, second in pairwise(parities))


def count_syllables(word: str) -> int:
    """Count the runs of vowels except a silent e at the end; at least one."""
    letters = "".join(character for character in word.lower() if character.isalpha())
    count = len(_VOWEL_RUN.findall(letters))
    is_silent = letters.endswith("e") and not re.search(r"(?:[^aeiouy]l|[aeiouy])e$", letters)
    has_silent_ending = re.search(r"[^aeiouytd]ed$|[^aeiouysxzcghl]es$|[aeiouy]les$", letters) is not None
    return max(1, count - (is_silent or has_silent_ending))


@BENCH.edit("words:odd_even_syllables", stage=Stage.WHOLE)
def _alternate_syllables(draft: str) -> str:
    del draft
    return "My sister likes apples and water."


@BENCH.check("words:start_verb")
def starts_with_verb(text: str) -> bool:
    """The first word is a verb of the list, in any of its regular forms, or ends like one."""
    words = folded_words(text)
    return bool(words) and _is_verb(words[0].partition("'")[0].partition("’")[0])


def _is_verb(word: str) -> bool:
    if word in _NOT_FORMS:
        return False
    if word in _VERBS or re.fullmatch(r"[a-z]{2,}(?:ize|ise|ify)[sd]?", word):
        return True
    if re.fullmatch(r"[a-z]{3,}ing", word):
        return True
    stems = [word[: -len(ending)] for ending in ("s", "es", "d", "ed") if word.endswith(ending)]
    stems += [f"{stem[:-1]}y" for stem in stems if stem.endswith("i")]
    stems += [stem[:-1] for stem in stems if stem[-1:] == stem[-2:-1]]
    return any(stem in _VERBS for stem in stems)


@BENCH.edit("words:start_verb", stage=Stage.EDGES)
def _start_with_verb(draft: str) -> str:
    return f"Consider this: {draft or FILLER[0]}"


_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:[.,]\d+)*(?!\w)")
_CLUSTER = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)
_NUM_PALINDROMES = 10
_MIN_PALINDROME_LETTERS = 5
_CONJUNCTIONS = ("for", "and", "nor", "but", "or", "yet", "so")
_PALINDROMES = ("level", "radar", "rotor", "kayak", "civic", "madam", "refer", "tenet", "solos", "stats")
_TIMES_OF_KEYWORDS = (1, 2, 3, 5, 7)
_PRIMES = frozenset(n for n in range(2, 200) if all(n % divisor for divisor in range(2, n)))


@BENCH.check("count:conjunctions")
def counts_conjunctions(text: str, *, small_n: Count) -> bool:
    """At least n different ones of for, and, nor, but, or, yet, so."""
    return len(set(folded_words(text)) & set(_CONJUNCTIONS)) >= small_n


@BENCH.edit("count:conjunctions", stage=Stage.CONTENT)
def _add_conjunctions(draft: str, *, small_n: int) -> str:
    return " ".join([draft, *_CONJUNCTIONS[:small_n]])


@BENCH.check("count:numbers", needs_substance=True)
def counts_numbers(text: str, *, N: Count) -> bool:
    """Exactly N numbers in digits; separators of thousands and decimals belong to the number."""
    return len(_NUMBER.findall(text)) == N


@BENCH.edit("count:numbers", stage=Stage.CONTENT)
def _add_numbers(draft: str, *, N: int) -> str:
    return f"{draft} {repeat_words(['7'], N)}".strip()


@BENCH.check("count:punctuation")
def uses_all_marks(text: str) -> bool:
    """All of . , ! ? ; : and an interrobang, whose marks do not count as others."""
    interrobang = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return interrobang is not None and set(text.replace(interrobang, "", 1)) >= set(".,!?;:")


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
    """The number of words between white space is in the range."""
    return min_words <= len(bare_words(text)) <= max_words


@BENCH.edit("count:word_count_range", stage=Stage.LENGTH)
def _fit_words(draft: str, *, min_words: int, max_words: int) -> str:
    middle = (min_words + max_words) // 2
    return " ".join(lengthen(draft, middle).split()[:middle])


@BENCH.check("count:keywords_multiple")
def repeats_keywords(
    text: str, *, keyword1: Text, keyword2: Text, keyword3: Text, keyword4: Text, keyword5: Text
) -> bool:
    """The five keywords occur as whole words once, twice, and three, five and seven times."""
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
    """Three sentences with the same number of characters, and no word twice."""
    lengths = [len(sentence) for sentence in sentences(text)]
    words = folded_words(text)
    return len(lengths) == 3 and len(set(lengths)) == 1 and len(set(words)) == len(words)


@BENCH.edit("ratio:sentence_words", stage=Stage.WHOLE)
def _write_equal_sentences(draft: str) -> str:
    del draft
    return "We bake bread. You read maps. They ran home."


@BENCH.check("words:alphabet")
def follows_alphabet(text: str) -> bool:
    """Initials follow the alphabet, cyclically, from word to word; there are two or more."""
    words = folded_words(text)
    steps = all((ord(b[0]) - ord(a[0])) % 26 == 1 for a, b in pairwise(words))
    return len(words) > 1 and steps and all("a" <= word[0] <= "z" for word in words)


@BENCH.edit("words:alphabet", stage=Stage.WHOLE)
def _follow_alphabet(draft: str) -> str:
    del draft
    return "A bear can dance every Friday."


@BENCH.check("words:consonants", needs_substance=True)
def has_clusters(text: str) -> bool:
    """Every word has two adjacent consonants; y counts as one."""
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
    """Every line ends with its first word, and has two or more words."""
    return all(len(words) > 1 and words[0] == words[-1] for words in map(folded_words, lines(text)))


@BENCH.edit("words:paragraph_last_first", stage=Stage.WHOLE)
def _frame_paragraphs(draft: str) -> str:
    del draft
    return "Bread is what we like: bread.\nHome is where we eat at home."


@BENCH.check("words:no_consecutive", needs_substance=True)
def varies_initials(text: str) -> bool:
    """No word starts with the initial of the word before."""
    initials = [word[0] for word in folded_words(text)]
    return all(first != second for first, second in pairwise(initials))


@BENCH.edit("words:no_consecutive", stage=Stage.WHOLE)
def _vary_initials(draft: str) -> str:
    del draft
    return "We can bring fresh bread home every morning."


@BENCH.check("words:palindrome")
def has_palindromes(text: str) -> bool:
    """Ten or more different words of five or more letters read the same backwards."""
    palindromes = {word for word in folded_words(text) if is_palindrome(word, _MIN_PALINDROME_LETTERS)}
    return len(palindromes) >= _NUM_PALINDROMES


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
    """No word occurs more than n times."""
    return max(Counter(folded_words(text)).values(), default=0) <= small_n


@BENCH.edit("words:repeats", stage=Stage.WHOLE)
def _limit_repeats(draft: str, *, small_n: int) -> str:
    del draft, small_n
    return FILLER[4]


@BENCH.check("words:words_position")
def places_keyword(text: str, *, keyword: Text) -> bool:
    """The second and the second-to-last word are the keyword."""
    words = folded_words(text)
    return len(words) > 3 and words[1] == words[-2] == strip_marks(keyword.strip()).lower()


@BENCH.edit("words:words_position", stage=Stage.EDGES)
def _place_keyword(draft: str, *, keyword: str) -> str:
    return f"Now {keyword.strip()} {draft} {keyword.strip()} again."
