"""The 25 functions of RLVR-IFeval: names of instructions of IFEval and of multi-constraint sets.

Source of names and arguments: the columns of allenai/RLVR-IFeval.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from strop.tasks.instructions.checkers import Checkers, Texts
from strop.tasks.instructions.multi import MULTI

RLVR = Checkers("RLVR-IFeval", MULTI)
_TABLE = """
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
"""A function, its instruction, and the names of arguments that differ."""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
FUNCTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    name: (instruction_id, dict(pair.split("=") for pair in pairs)) for name, instruction_id, *pairs in _ROWS
}


def as_instruction(function: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a function of `FUNCTIONS` as an instruction with its arguments."""
    instruction_id, names = FUNCTIONS[function]
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    # The letter occurs exactly N times.
    return instruction_id, renamed | (
        {"let_relation": "exactly"} if function == "verify_letter_frequency" else {}
    )


def _read_options(value: Any) -> Any:
    """Accept options as a list, as the text of one, or between slashes."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text[:1] in ("[", "(", "{") and text[-1:] in ("]", ")", "}"):
        try:
            return tuple(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError("not a list of texts") from error
    if "/" not in text:
        raise ValueError("not a list of texts, and no slash stands between two")
    return tuple(option.strip() for option in text.split("/"))


@RLVR.check("validate_choice")
def gives_option(text: str, *, options: Annotated[Texts, BeforeValidator(_read_options)]) -> bool:
    """The reply is one of the options, but for white space and case."""
    reply = " ".join(text.split()).casefold()
    return any(reply == " ".join(option.split()).casefold() for option in options)
