"""Tasks whose replies must follow instructions, for training: rlvr-ifeval and if-multi.

The prompt is only the user's text, and only the model's own terminator ends a reply: an instruction may
require any text that a stop string would cut. The text behind the reasoning is judged.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from strop.rollout import Example, Outcome, make_example
from strop.tasks.answers import text_after_thinking
from strop.tasks.instructions.rules import bind, has_substance, load_detector
from strop.tasks.rows.layout import Row, bad_row
from strop.tasks.rows.row_task import PublishedRows, RowTask, read_preset

_RLVR = """
verify_keywords keywords:existence keyword_list=keywords
verify_keyword_frequency keywords:word_count_different_numbers word=keyword N=frequency
validate_forbidden_words keywords:forbidden_words
verify_letter_frequency keywords:letter_frequency N=let_frequency
validate_response_language language:response_language
verify_paragraph_count paragraphs:paragraphs N=num_parts
validate_word_constraint length_constraints:number_words N=num_words quantifier=relation
verify_sentence_constraint length_constraints:number_sentences N=num_sentences quantifier=relation
validate_paragraphs length_constraints:nth_paragraph_first_word N=num_paragraphs i=nth_paragraph
verify_postscript detectable_content:postscript
validate_placeholders detectable_content:number_placeholders N=num_placeholders
verify_bullet_points detectable_format:number_bullet_lists N=num_bullets
validate_title detectable_format:title
validate_choice validate_choice
validate_highlighted_sections detectable_format:number_highlighted_sections N=num_highlights
validate_sections detectable_format:multiple_sections N=num_sections section_splitter=section_spliter
validate_json_format detectable_format:json_format
validate_repeat_prompt combination:repeat_prompt original_prompt=prompt_to_repeat
validate_two_responses combination:two_responses
validate_uppercase change_case:english_capital
validate_lowercase change_case:english_lowercase
validate_frequency_capital_words change_case:capital_word_frequency \
N=capital_frequency quantifier=capital_relation
validate_end startend:end_checker
validate_quotation startend:quotation
validate_no_commas punctuation:no_comma
"""
"""The functions of RLVR-IFeval: name, instruction, and the arguments whose names differ."""
FUNCTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    name: (instruction_id, dict(pair.split("=") for pair in pairs))
    for name, instruction_id, *pairs in map(str.split, _RLVR.strip().splitlines())
}

Constraint = dict[str, Any]
"""An instruction as examples have it: its `id`, and its `arguments` that are present."""


class InstructionSpec(PublishedRows):
    """Prompts with instructions that a program can check, for training."""

    name: Literal["rlvr-ifeval", "if-multi"]


class InstructionTask(RowTask):
    """Follow every instruction of the prompt. Reward: the share that is followed; right: all.

    No right reply is known. A reply that only repeats the prompt follows none.
    `format_ok`: the reasoning has an end, and a text follows it.
    Metrics: `instructions_total`, `instructions_satisfied`.
    """

    def __init__(self, spec: PublishedRows, verifier: str = "instructions-6", **limits: Any) -> None:
        load_detector()
        super().__init__(spec, read_preset(spec.name), spec.source, verifier, max_goldless_frac=1.0, **limits)

    def to_example(self, row: Row) -> Example:
        """Read a row."""
        prompt, constraints = self.read(row)
        return make_example(self.name, {"prompt": prompt, "constraints": constraints}, None)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the rule of every instruction.

        Raises: DataError if an instruction of the example cannot be judged.
        """
        place = f"example {example.example_id} of task {example.task}"
        rules = [bind(one["id"], one["arguments"], place=place) for one in example.fields["constraints"]]
        # Some prompts ask for these tags.
        judged = (judged_text(text) or "").replace("<answer>", "").replace("</answer>", "").strip()
        is_judged = bool(judged) and not is_echo(judged, example.fields["prompt"])
        followed = [is_judged and rule(judged) for rule in rules]
        num_followed = float(sum(followed))
        return Outcome(
            parts={"satisfied_frac": num_followed / len(followed)},
            is_correct=all(followed),
            format_ok=bool(judged),
            metrics={"instructions_total": float(len(followed)), "instructions_satisfied": num_followed},
        )

    def read(self, row: Row) -> tuple[str, list[Constraint]]:
        """Return a row's prompt and instructions, of `messages`, one of the user's, and `ground_truth`.

        Of RLVR-IFeval it is a table with `func_name` and arguments; of multi-constraint sets a table, in a
        list, with lists of instructions and of arguments.
        Raises: DataError naming the row, if it is malformed or an instruction cannot be judged.
        """
        match row.values.get("messages"):
            case [{"role": "user", "content": str(prompt)}] if prompt.strip():
                pass
            case other:
                raise bad_row(f"{row.place} has messages {str(other)[:120]!r}", "one text of role user")
        table = _read_ground_truth(row)
        if isinstance(name := table.pop("func_name", None), str):
            instruction_id, names = FUNCTIONS.get(name, (name, {}))
            given = {names.get(key, key): one for key, one in table.items()}
            constraints = pair_constraints(row, [instruction_id], [given])
        else:
            constraints = pair_constraints(row, table.get("instruction_id"), table.get("kwargs"))
        for one in constraints:
            bind(one["id"], one["arguments"], place=row.place)
        return prompt, constraints


def pair_constraints(row: Row, ids: object, arguments: object) -> list[Constraint]:
    """Return instructions from two lists of a row. Raises: DataError naming the row for others."""
    tables = arguments if isinstance(arguments, list) else []
    is_formed = all(isinstance(one, Mapping | None) for one in tables)
    if not is_formed or not isinstance(ids, list) or not 0 < len(ids) == len(tables):
        raise bad_row(
            f"{row.place} has instructions {str(ids)[:80]} with arguments {str(arguments)[:80]}",
            "two lists of equal length: of ids, and of tables or null",
        )
    return [
        {"id": one, "arguments": {key: value for key, value in (table or {}).items() if value is not None}}
        for one, table in zip(ids, tables, strict=True)
    ]


def _read_ground_truth(row: Row) -> dict[str, Any]:
    """Read a table, or a list with one, as JSON or as a Python literal."""
    text = str(row.values.get("ground_truth"))
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            match read(text):
                case dict(table) | [dict(table)]:
                    return dict(table)
    raise bad_row(
        f"{row.place} has ground_truth {text[:120]!r}",
        "a table, or a list with one, as JSON or a Python literal",
    )


def judged_text(reply: str) -> str | None:
    """Return the text behind the reasoning, or None if the reasoning has no end."""
    text = text_after_thinking(reply)
    # White space behind the reasoning is not part of the reply.
    return text if text is None or text == reply else text.lstrip()


def is_echo(text: str, prompt: str) -> bool:
    """Whether a reply repeats the whole prompt and adds almost nothing."""
    reply, question = " ".join(text.split()), " ".join(prompt.split())
    return reply.startswith(question) and not has_substance(reply[len(question) :])
