"""From the rows of the four data sets to examples: the prompt and its instructions with their arguments.

An example holds `prompt`, `constraints` (id and arguments, without those that are not given) and, for
the data sets that have one, `key`. A row whose instructions cannot be judged is refused with its place.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, make_example
from strop.tasks.instructions.checkers import Checkers
from strop.tasks.rows.layout import Row
from strop.tasks.rows.reading import require_texts

Call = tuple[object, Mapping[str, Any]]
"""An instruction's id and its arguments, None where one is not given."""


def read_instruction_lists(row: Row) -> list[Call]:
    """Read the columns of IFEval and IFBench: `instruction_id_list`, and `kwargs`, aligned.

    Raises: DataError naming the row, if one is missing or they are not equally long.
    """
    return _pair(row, "instruction_id_list and kwargs", row.values)


def read_function(row: Row) -> list[Call]:
    """Read the column of RLVR-IFeval: `ground_truth`, a JSON table with `func_name` and arguments.

    Raises: DataError naming the row, if it is not that.
    """
    table = _read_table(row, "ground_truth")
    if not isinstance(table.get("func_name"), str):
        raise _refuse(row, f"ground_truth with the keys {sorted(table)}", "a table with func_name, a text")
    return [(table["func_name"], {key: value for key, value in table.items() if key != "func_name"})]


def read_literal(row: Row) -> list[Call]:
    """Read the column of multi-constraint sets: `ground_truth`, a list with one table of two lists.

    Raises: DataError naming the row, if it is not that.
    """
    table = _read_table(row, "ground_truth")
    renamed = {"instruction_id_list": table.get("instruction_id"), "kwargs": table.get("kwargs")}
    return _pair(row, "ground_truth: instruction_id and kwargs", renamed)


def read_messages(row: Row) -> str:
    """Return the text of the only message, the user's.

    Raises: DataError naming the row, if `messages` is anything else.
    """
    messages = row.values.get("messages")
    if isinstance(messages, Sequence) and len(messages) == 1 and isinstance(messages[0], Mapping):
        content = messages[0].get("content")
        if messages[0].get("role") == "user" and isinstance(content, str) and content.strip():
            return content
    raise _refuse(row, f"messages {str(messages)[:120]!r}", "one message of role user with a text")


def read_prompt(row: Row) -> str:
    """Return the column `prompt`.

    Raises: DataError naming the row, if it is not a text or empty.
    """
    return require_texts(row, "prompt")[0]


def make_instruction_example(
    task: str, checkers: Checkers, row: Row, prompt: str, calls: Sequence[Call]
) -> Example:
    """Build an example whose instructions can all be judged.

    Raises: DataError naming the row and the instruction, if one cannot.
    """
    if not calls:
        raise _refuse(row, "no instruction", "at least one instruction")
    constraints = []
    for instruction_id, arguments in calls:
        bound = checkers.bind(instruction_id, arguments, place=row.place)
        given = {key: value for key, value in arguments.items() if value is not None}
        constraints.append({"id": bound.instruction_id, "arguments": given})
    return make_example(task, {"prompt": prompt, "constraints": constraints}, None)


def _pair(row: Row, columns: str, values: Mapping[str, Any]) -> list[Call]:
    ids, arguments = values.get("instruction_id_list"), values.get("kwargs")
    if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
        given = f"{_length(ids)} ids and {_length(arguments)} argument tables"
        raise _refuse(row, f"{columns}: {given}", "two lists of equal length")
    # None instead of a table: the instruction has no argument.
    tables = [{} if table is None else table for table in arguments]
    if not all(isinstance(table, Mapping) for table in tables):
        raise _refuse(row, f"{columns}: arguments {str(arguments)[:120]!r}", "tables, or null for none")
    return list(zip(ids, tables, strict=True))


def _length(value: object) -> str:
    return str(len(value)) if isinstance(value, list) else f"a {type(value).__name__} for"


def _read_table(row: Row, column: str) -> dict[str, Any]:
    """Read a table, or a list with one, that may be written as JSON or as a Python literal."""
    value = row.values.get(column)
    if isinstance(value, str):
        value = _parse_literal(value)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        shown = str(row.values.get(column))[:120]
        raise _refuse(row, f"{column} {shown!r}", "a table, or a list with one, as JSON or a Python literal")
    return value


def _parse_literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(row: Row, given: str, allowed: str) -> DataError:
    return DataError(
        explain_refusal(f"{row.place} has {given}", allowed=allowed, next_step="mend or remove the row")
    )
