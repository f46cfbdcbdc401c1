"""Record how lm-eval 0.4.13 judges generated replies, for tests/tasks/instructions/test_harness.py.

Needs an environment of its own with lm-eval==0.4.13, langdetect==1.0.9, immutabledict, and nltk with its
data package punkt_tab in a folder of NLTK_DATA; nothing is downloaded. The detector of languages is
given a seed, which the harness does not do. The texts are made here, from strop's own sentences.

Usage: python -m tools.record_ifeval_parity tests/tasks/instructions/ifeval_parity.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.replies import FILLER, SPOKEN

_HARNESS_VERSION = "0.4.13"
_SHORT = "Mr. Ito paid $3.50 at 9 a.m. to J. Doe. He left... Why? Nobody (not even I) knows! It's done."
_LOUD = "STOP! NASA and the U.S. CAN'T go (OK?) It's A-OK: YES, NO; \"END.\""

CASES: Sequence[tuple[str, dict[str, Any]]] = (
    ("keywords:existence", {"keywords": ["harbor", "walk"]}),
    ("keywords:existence", {"keywords": ["h.rb", "\\d"]}),
    ("keywords:frequency", {"keyword": "the", "frequency": 3, "relation": "at least"}),
    ("keywords:frequency", {"keyword": "bread", "frequency": 2, "relation": "less than"}),
    ("keywords:forbidden_words", {"forbidden_words": ["bread", "riv"]}),
    ("keywords:letter_frequency", {"letter": "r", "let_frequency": 9, "let_relation": "at least"}),
    ("keywords:letter_frequency", {"letter": "Q", "let_frequency": 1, "let_relation": "less than"}),
    ("language:response_language", {"language": "de"}),
    ("language:response_language", {"language": "en"}),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
    ("length_constraints:number_sentences", {"num_sentences": 5, "relation": "less than"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}),
    ("length_constraints:number_words", {"num_words": 30, "relation": "less than"}),
    ("length_constraints:number_words", {"num_words": 30, "relation": "at least"}),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "weekend"},
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "We"},
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": FILLER[3]}),
    ("startend:end_checker", {"end_phrase": "Any other questions?"}),
    ("startend:quotation", {}),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "at least"}),
    ("change_case:capital_word_frequency", {"capital_frequency": 4, "capital_relation": "less than"}),
    ("change_case:english_capital", {}),
    ("change_case:english_lowercase", {}),
    ("punctuation:no_comma", {}),
)
"""An instruction and arguments that the harness takes as they are: none of them is replaced by chance."""

_CHANGES: Sequence[Callable[[str], str]] = (
    str.upper,
    str.lower,
    lambda text: f"Sure, here it is:\n{text}",
    lambda text: f"{text}\nI hope that this helps, friend.",
    lambda text: f"Sure!\n\n{text}\n\nBye",
    lambda text: f"**{text}**",
    lambda text: text.replace(" ", " *", 2).replace(".", "*.", 2),
    lambda text: f"```json\n{text}\n```",
    lambda text: json.dumps([text]),
    lambda text: f'"{text}"',
    lambda text: text.replace(". ", ".\n\n"),
    lambda text: text.replace(". ", ".\n***\n"),
    lambda text: text.replace(". ", ".\n* "),
    lambda text: text.replace(". ", ".\n- "),
    lambda text: text[: len(text) // 2],
    lambda text: f"{text} {_SHORT}",
    lambda text: f"{_LOUD} {text}",
    lambda text: f"<<{text}>> [a] [b]",
    lambda text: f"{text}\n******\n{text}",
    lambda text: f"{text}\np. s. later\nSection 1 x Section2 y",
    lambda text: re.sub(r"\w+", "bread", text, count=2),
    lambda text: re.sub(r"[A-Za-z]", "", text),
)


def make_texts(instruction_id: str, arguments: dict[str, Any], stream: random.Random) -> Iterator[str]:
    """Yield replies: one that follows the instruction, changed ones, unrelated ones and next to nothing."""
    constraint = GOOGLE.bind(instruction_id, arguments, place="a recorded case")
    followed = constraint.improve(" ".join(stream.sample(FILLER, 2)))
    yield followed
    for _ in range(5):
        yield stream.choice(_CHANGES)(followed)
    for _ in range(4):
        draft = " ".join(stream.sample([*FILLER, _SHORT, _LOUD, SPOKEN["de"], SPOKEN["fr"]], 2))
        yield stream.choice(_CHANGES)(stream.choice(_CHANGES)(draft))
    yield from stream.sample(["", " ", "a", "asdf", "123", "12, 3!", "{}", "My answer is no.", "...", '"'], 2)


def load_harness() -> Any:
    """Import the harness's own code, after what it would otherwise download was found.

    Raises: SystemExit naming what is missing.
    """
    if version("lm-eval") != _HARNESS_VERSION:
        sys.exit(
            f"lm-eval {version('lm-eval')} is installed. Allowed: {_HARNESS_VERSION}. Next: install that."
        )
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab/english")
    except LookupError:
        sys.exit("punkt_tab is not found. Allowed: a folder of NLTK_DATA with it. Next: put it there.")
    import langdetect
    from lm_eval.tasks.ifeval import utils

    langdetect.DetectorFactory.seed = 0
    return utils


def main() -> None:
    """Write one JSON line per case and text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output
    harness = load_harness()
    lines = []
    for number, (instruction_id, arguments) in enumerate(CASES):
        stream = random.Random(f"ifeval/{number}")
        for text in dict.fromkeys(make_texts(instruction_id, arguments, stream)):
            row = SimpleNamespace(
                key=number, prompt="", instruction_id_list=[instruction_id], kwargs=[arguments]
            )
            strict = harness.test_instruction_following_strict(row, text).follow_all_instructions
            loose = harness.test_instruction_following_loose(row, text).follow_all_instructions
            record = {"id": instruction_id, "arguments": arguments, "text": text}
            lines.append(json.dumps({**record, "strict": strict, "loose": loose}, ensure_ascii=False))
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{output}: {len(lines)} verdicts on {len({case[0] for case in CASES})} instructions")


if __name__ == "__main__":
    main()
