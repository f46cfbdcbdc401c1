"""What follows the instructions of IFBench that lists and tables decide, and what nearly does."""

from __future__ import annotations

import pytest

from strop.tasks.instructions.bench import BENCH, count_syllables
from strop.tasks.instructions.bench_customs import CAPITALS as NORTHERN

OPTIONS = "A) one\nB) two\nC) three\nD) four\nE) five"
ASKED = [f"Question {n}: {'Why ' * n}so?\n{OPTIONS}" for n in (1, 2, 3, 4)]
COUNTRIES = ["Zimbabwe", *(f"{a}{b}x" for a in "XWVU" for b in "zyxwvutsrqpon")]  # 1 + 4 * 13 = 53 lines
CAPITALS = ", ".join(NORTHERN)
CITY = ["ID,Country,City,Year,Count", *(f"{n},Peru,Lima,2001,5" for n in range(7))]
PRODUCT = ["ProductID,Category,Brand,Price,Stock", *(f"{n},Tool,Acme,2,5" for n in range(14))]
STUDENT = [
    "\t".join(f'"{field}"' for field in row)
    for row in (("StudentID", "Subject", "Grade", "Semester", "Score"), *(("1", "Art", "A", "2", "9"),) * 3)
]
SPECIAL = [*PRODUCT[:-1], '13,Tool,"A&B",2,5']

# Instruction, arguments, replies that follow it, replies that do not.
PLAIN_VECTORS: list[tuple[str, dict[str, object], list[str], list[str]]] = [
    (
        "count:person_names",
        {"N": 2},
        ["Emma met Liam.", "Zoe/Leo"],
        ["Emma met Emma.", "Emma went to Miami", "emma met liam"],
    ),
    # she, her, hers; it (of it's), that, all
    ("count:pronouns", {"N": 3}, ["she/her/hers", "It's that, all."], ["she and the sheriff heard her"]),
    (
        "count:words_japanese",
        {"N": 2},
        ["the \u6d77 is \u9752\u3044.", "it 7 big \u6d77"],
        ["the sea is \u9752\u3044", "\u6d77 the \u6d77 is", "\u6d77"],
    ),
    # 'the' and 'and' are 2 of 4 words: 50 %.
    ("ratio:stop_words", {"percentage": 50}, ["the cat and dog"], ["the cat and the dog", "and the"]),
    # Four trigrams, two of which are the reference's: a b c, b c d | c d x, d x y.
    (
        "ratio:overlap",
        {"reference_text": "a b c d", "percentage": 52},
        ["a b c d x y"],
        ["a b c d x", "a b c d", "a b"],
    ),
    # Odd, even: one (1), apple (2), go (1), many (2).
    ("words:odd_even_syllables", {}, ["One apple goes many"], ["One two apples", "apple"]),
    (
        "words:start_verb",
        {},
        ["Consider this.", "Walking helps.", "Tries fail.", "**Stopped** there", "Let's go"],
        ["The walk", "Morning comes", "Sea and sun", "7 walk"],
    ),
    (
        "words:vowel",
        {},
        ["Green trees sway near me"],
        ["Green trees sway, or you do", "Green trees\nare here"],
    ),
    (
        "format:thesis",
        {},
        ["<i>Bread is good.</i> It feeds us.", "# One\n<em>Bread.</em>\nIt feeds."],
        ["<i></i> It feeds us.", "<i>Bread is good.</i>", "*Bread* feeds.", "<i>Bread feeds."],
    ),
    (
        "format:title_case",
        {},
        ["The Sea Is Blue", "My iPhone Is 3 Years Old", "Don't Go Alone"],
        ["The Sea is Blue", "the Sea Here"],
    ),
    (
        "format:quotes",
        {},
        ['"a \'b "c" d\' e"', "\u201ca \u2018b \u201cc\u201d d\u2019 e\u201d"],
        ["\"a 'b' c\"", 'it\'s "a" and don\'t "b" or can\'t', '"a" \'b\' "c"'],
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": "Tell me why the sea is blue", "n_start": 0, "n_end": 2},
        ["tell me why", " Tell me why\n"],
        ["me why the", "Tell me", "Tell me why."],
    ),
    (
        "custom:word_reverse",
        {},
        ["eagle bald the is symbol The"],
        ["The symbol is the bald eagle", "eagle the bald is", "eagle bald. the is"],
    ),
    ("custom:character_reverse", {}, [".elgae dlab ehT"], ["the bald eagle", "elgaedlab"]),
]
TABLE_VECTORS: list[tuple[str, dict[str, object], list[str], list[str]]] = [
    (
        "custom:mcq_count_length",
        {},
        ["\n\n".join(ASKED)],
        [
            "\n\n".join(ASKED[:3]),
            "\n\n".join(ASKED[::-1]),
            "Sure!\n" + "\n\n".join(ASKED),
            "\n\n".join(ASKED).replace("E) five", ""),
        ],
    ),
    (
        "custom:reverse_newline",
        {},
        ["Here they are:\n" + "\n".join(COUNTRIES), "\n".join(f"- {line}" for line in COUNTRIES)],
        ["\n".join(COUNTRIES[:51]), "\n".join(COUNTRIES[::-1]), "Zimbabwe\n" * 53, "\n".join(COUNTRIES[1:])],
    ),
    (
        "custom:european_capitals_sort",
        {},
        [
            CAPITALS,
            f"{CAPITALS}.",
            CAPITALS.replace("Prague", "Kyiv, Prague"),
            CAPITALS.replace("Chis", "Chi\u0219"),
        ],
        [
            CAPITALS.replace("Oslo, ", ""),
            f"{CAPITALS}, Rome",
            CAPITALS.replace("Riga, Moscow", "Moscow, Riga"),
        ],
    ),
    (
        "custom:csv_city",
        {},
        ["\n".join(CITY)],
        ["\n".join(CITY[:-1]), "\n".join([*CITY[:-1], "7,Peru,Lima,2001"])],
    ),
    (
        "custom:csv_special_character",
        {},
        ["\n".join(SPECIAL)],
        ["\n".join(PRODUCT), "\n".join(SPECIAL[1:]), "\n".join(SPECIAL).replace("A&B", "AB")],
    ),
    (
        "custom:csv_quotes",
        {},
        ["\n".join(STUDENT)],
        [
            "\n".join(STUDENT).replace('"Art"', "Art"),
            "\n".join(STUDENT[:-1]),
            "\n".join(STUDENT).replace("\t", ","),
        ],
    ),
]
VECTORS = [*PLAIN_VECTORS, *TABLE_VECTORS]


@pytest.mark.parametrize(("instruction_id", "arguments", "good", "bad"), VECTORS)
def test_vectors(instruction_id: str, arguments: dict[str, object], good: list[str], bad: list[str]) -> None:
    constraint = BENCH.bind(instruction_id, arguments, place="a vector")
    assert [text for text in good if not constraint.is_met(text)] == []
    assert [text for text in bad if constraint.is_met(text)] == []


@pytest.mark.parametrize(
    ("word", "num_syllables"),
    [
        ("cake", 1),
        ("table", 2),
        ("goes", 1),
        ("wanted", 2),
        ("walked", 1),
        ("banana", 3),
        ("the", 1),
        ("sky", 1),
    ],
)
def test_syllables_by_rule(word: str, num_syllables: int) -> None:
    assert count_syllables(word) == num_syllables
