"""Instructions of IFBench that a list of words decides: names, pronouns, stop words, verbs, syllables.

The lists are written down here, because which words they hold decides the score. Names, pronouns and
capitals are those of the published checkers (github.com/allenai/IFBench), stop words the English ones of the
Snowball project without their apostrophes. Which word is a verb and how many syllables it has is told by
rules: other programs ask a tagger and a dictionary, and differ on some words.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from strop.tasks.instructions.bench_customs import CUSTOMS
from strop.tasks.instructions.checkers import Checkers, Count, Position, Stage, Text
from strop.tasks.instructions.drafts import FILLER, lengthen
from strop.tasks.instructions.multi import folded_words
from strop.tasks.instructions.segments import bare_words, find_words

LISTS = Checkers("IFBench, words of lists", on=CUSTOMS)

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
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_VOWEL_RUN = re.compile(r"[aeiouy]+")
_OVERLAP_SLACK = 2
"""Points of a hundred that an overlap may miss the wanted one by."""


@LISTS.check("count:person_names")
def counts_names(text: str, *, N: Count) -> bool:
    """At least N different names of the fifty that the prompt lists, each a word of its own."""
    return len(set(find_words(text)) & set(_NAMES)) >= N


@LISTS.edit("count:person_names", stage=Stage.CONTENT)
def _add_names(draft: str, *, N: int) -> str:
    return f"{draft} We met {' and '.join(_NAMES[:N])}."


@LISTS.check("count:pronouns")
def counts_pronouns(text: str, *, N: Count) -> bool:
    """At least N words are pronouns; 'she/her' holds two, and 'it's' one."""
    return sum(1 for word in find_words(text.lower()) if word in _PRONOUNS) >= N


@LISTS.edit("count:pronouns", stage=Stage.CONTENT)
def _add_pronouns(draft: str, *, N: int) -> str:
    return f"{draft} {' '.join(['They know it.'] * (N // 2 + 1))}"


@LISTS.check("count:words_japanese", needs_substance=True)
def writes_japanese(text: str, *, N: Position) -> bool:
    """Every N-th word has a Japanese character, but for numbers and marks; there are N or more words."""
    tokens = text.split()
    words = [bare_words(token) for token in tokens[N - 1 :: N]]
    return bool(words) and all(_JAPANESE.search(word) or word.isdigit() for found in words for word in found)


@LISTS.edit("count:words_japanese", stage=Stage.CONTENT)
def _write_japanese(draft: str, *, N: int) -> str:
    words = lengthen(draft, N).split()
    return " ".join("海" if number % N == 0 else word for number, word in enumerate(words, start=1))


@LISTS.check("ratio:stop_words", needs_substance=True)
def limits_stop_words(text: str, *, percentage: Percentage) -> bool:
    """At most so many of a hundred words are stop words; an apostrophe divides a word."""
    words = find_words(text.lower())
    num_stop_words = sum(1 for word in words if word in _STOP_WORDS)
    return bool(words) and 100 * num_stop_words <= percentage * len(words)


@LISTS.edit("ratio:stop_words", stage=Stage.WHOLE)
def _limit_stop_words(draft: str, *, percentage: int) -> str:
    del draft, percentage
    return "Small gardens need patience, little rain, good soil."


@LISTS.check("ratio:overlap")
def overlaps_reference(text: str, *, reference_text: Text, percentage: Percentage) -> bool:
    """So many of a hundred different trigrams of words and marks stand in the reference, give or take two."""
    own, theirs = _trigrams(text), _trigrams(reference_text)
    if not own:
        return False
    return abs(100 * len(own & theirs) - percentage * len(own)) <= _OVERLAP_SLACK * len(own)


def _trigrams(text: str) -> set[tuple[str, ...]]:
    tokens = _TOKEN.findall(text)
    return {tuple(tokens[start : start + 3]) for start in range(len(tokens) - 2)}


@LISTS.edit("ratio:overlap", stage=Stage.WHOLE)
def _overlap_reference(draft: str, *, reference_text: str, percentage: int) -> str:
    """Follow the reference and then leave it; the longest beginning that is in range."""
    others = [f"word{number}" for number in range(100 * len(reference_text.split()) // max(percentage, 1))]
    text = reference_text
    for other in others[:2000]:
        if overlaps_reference(text, reference_text=reference_text, percentage=percentage):
            return text
        text = f"{text} {other}"
    return draft


@LISTS.check("words:odd_even_syllables", needs_substance=True)
def alternates_syllables(text: str) -> bool:
    """Words with an odd and with an even number of syllables take turns; there are two or more."""
    parities = [count_syllables(word) % 2 for word in folded_words(text)]
    return len(parities) > 1 and all(first != second for first, second in pairwise(parities))


def count_syllables(word: str) -> int:
    """Count the runs of vowels but for a silent e at the end; one at least."""
    letters = "".join(character for character in word.lower() if character.isalpha())
    count = len(_VOWEL_RUN.findall(letters))
    is_silent = letters.endswith("e") and not re.search(r"(?:[^aeiouy]l|[aeiouy])e$", letters)
    has_silent_ending = re.search(r"[^aeiouytd]ed$|[^aeiouysxzcghl]es$|[aeiouy]les$", letters) is not None
    return max(1, count - (is_silent or has_silent_ending))


@LISTS.edit("words:odd_even_syllables", stage=Stage.WHOLE)
def _alternate_syllables(draft: str) -> str:
    del draft
    return "My sister likes apples and water."


@LISTS.check("words:start_verb")
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


@LISTS.edit("words:start_verb", stage=Stage.EDGES)
def _start_with_verb(draft: str) -> str:
    return f"Consider this: {draft or FILLER[0]}"
