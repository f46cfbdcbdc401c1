"""Tasks whose replies must follow instructions, for training: rlvr-ifeval and if-multi.

The prompt is only the user's text, and only the model's own terminator ends a reply: an instruction may
require any text that a stop string would cut. The text behind the reasoning is judged.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, TaskSection
from strop.tasks.answers import text_after_thinking
from strop.tasks.instructions.checkers import Checkers, has_substance
from strop.tasks.instructions.multi import MULTI
from strop.tasks.instructions.rlvr import FUNCTIONS, RLVR, as_instruction
from strop.tasks.instructions.segments import require_language_detection
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask
from strop.tasks.task import TaskLimits

# An example holds `prompt` and `constraints` (ids and present arguments). A row with an instruction that
# cannot be judged is refused.

Call = tuple[object, Mapping[str, Any]]
"""An instruction's id and its arguments; None: absent."""


def read_function(row: Row) -> list[Call]:
    """Read the column of RLVR-IFeval: `ground_truth`, a JSON table with `func_name` and arguments.

    Raises: DataError naming the row, if it is malformed.
    """
    table = _read_ground_truth(row)
    function = table.get("func_name")
    if not isinstance(function, str) or function not in FUNCTIONS:
        raise _refuse(row, f"a ground_truth with func_name {function!r}", f"one of {', '.join(FUNCTIONS)}")
    return [as_instruction(function, {key: value for key, value in table.items() if key != "func_name"})]


def read_literal(row: Row) -> list[Call]:
    """Read the column of multi-constraint sets: `ground_truth`, a list with one table of two lists.

    Raises: DataError naming the row, if it is malformed.
    """
    table = _read_ground_truth(row)
    columns = "ground_truth: instruction_id and kwargs"
    return pair_calls(row, columns, table.get("instruction_id"), table.get("kwargs"))


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


def pair_calls(row: Row, columns: str, ids: object, arguments: object) -> list[Call]:
    """Return instructions from two lists of a row. Raises: DataError naming the row for others."""
    # None stands for an empty table.
    tables = [{} if one is None else one for one in arguments] if isinstance(arguments, list) else []
    is_list = isinstance(ids, list) and bool(ids) and all(isinstance(one, Mapping) for one in tables)
    if not isinstance(ids, list) or not is_list or len(ids) != len(tables):
        content = f"{columns}: {str(ids)[:80]} and {str(arguments)[:80]}"
        raise _refuse(row, content, "two lists of equal length: of ids, and of tables or null")
    return list(zip(ids, tables, strict=True))


def _read_ground_truth(row: Row) -> dict[str, Any]:
    """Read a table, or a list with one, as a value, as JSON or as a Python literal."""
    value = column = row.values.get("ground_truth")
    if isinstance(text := value, str):
        value = None
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = read(text)
                break
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        allowed = "a table, or a list with one, as JSON or a Python literal"
        raise _refuse(row, f"ground_truth {str(column)[:120]!r}", allowed)
    return value


def _refuse(row: Row, content: str, allowed: str) -> DataError:
    return bad_row(f"{row.place} has {content}", allowed=allowed)


def judged_text(reply: str) -> str | None:
    """Return the text behind the reasoning, or None if the reasoning has no end."""
    text = text_after_thinking(reply)
    # White space behind the reasoning is not part of the reply.
    return text if text is None or text == reply else text.lstrip()


def is_echo(text: str, prompt: str) -> bool:
    """Whether a reply repeats the whole prompt and adds almost nothing."""
    reply, question = " ".join(text.split()), " ".join(prompt.split())
    return reply.startswith(question) and not has_substance(reply[len(question) :])


_PROMPT = "{prompt}"
_VERIFIER = "instructions-4"
_MAX_REPLY_TOKENS = 2048
_LAYOUT = DataLayout(train=("data/train-00000-of-00001.parquet",), held_out=())


class _UnsplitRows(TaskSection):
    """Sizes of the splits of training data that is published without splits."""

    num_train: int | None = Field(
        default=None, ge=1, le=10**7, description="Training prompts used, from the first. none = all."
    )
    num_held_out: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Prompts kept out of training, chosen by their content. none = a tenth.",
    )


class RlvrIfevalSpec(_UnsplitRows):
    """Prompts with one instruction each that a program can check, for training."""

    name: Literal["rlvr-ifeval"]
    source: Unhashed[str] = Field(
        default="allenai/RLVR-IFeval",
        min_length=1,
        description=SOURCE_HELP.format("allenai/RLVR-IFeval"),
    )


class IfMultiSpec(_UnsplitRows):
    """Prompts with one to five instructions that a program can check, for training."""

    name: Literal["if-multi"]
    source: Unhashed[str] = Field(
        default="allenai/IF_multi_constraints_upto5",
        min_length=1,
        description=SOURCE_HELP.format("allenai/IF_multi_constraints_upto5"),
    )
    all_or_nothing: bool = Field(
        default=False,
        description="Pay only for replies that follow every instruction. false = the share that is followed.",
        json_schema_extra=expert("published rewards differ by whether parts of a prompt count"),
    )


class InstructionTask(RowTask):
    """Follow every instruction of the prompt.

    Reward: 1 if all are followed, else 0; for if-multi the share that is followed, unless
    `task.all_or_nothing`. A reply that only repeats the prompt follows none.
    `format_ok`: the reasoning has an end, and a text follows it.
    Metrics: `instructions_total`, `instructions_satisfied`.
    """

    def __init__(self, spec: RlvrIfevalSpec | IfMultiSpec) -> None:
        require_language_detection()
        self._is_multi = isinstance(spec, IfMultiSpec)
        self._pays_shares = isinstance(spec, IfMultiSpec) and not spec.all_or_nothing
        self.checkers: Checkers = MULTI if self._is_multi else RLVR
        reading = RowReading(
            layout=_LAYOUT,
            to_example=self._to_example,
            question=lambda example: str(example.fields["prompt"]),
            # All rows with the same prompt must be in the same split.
            split_key=lambda row: " ".join(read_messages(row).split()),
        )
        limits = TaskLimits(max_reply_tokens=_MAX_REPLY_TOKENS, max_goldless_frac=1.0)
        super().__init__(spec, reading, limits, source=spec.source, prompt=_PROMPT, verifier=_VERIFIER)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the user's text."""
        prompt = example.fields["prompt"]
        return pose(_PROMPT.format(prompt=prompt), base=prompt, thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the checker of every instruction.

        Raises: DataError if an instruction of the example cannot be judged.
        """
        place = f"example {example.example_id} of task {example.task}"
        constraints = [
            self.checkers.bind(item["id"], item["arguments"], place=place)
            for item in example.fields["constraints"]
        ]
        judged = judged_text(text)
        if judged is not None and self._is_multi:
            # Some prompts ask for these tags.
            judged = judged.replace("<answer>", "").replace("</answer>", "").strip()
        is_reply = judged is not None and bool(judged.strip())
        is_judged = is_reply and not is_echo(judged or "", example.fields["prompt"])
        followed = [is_judged and constraint(judged or "") for constraint in constraints]
        num_followed = float(sum(followed))
        metrics = {"instructions_total": float(len(followed)), "instructions_satisfied": num_followed}
        parts: dict[str, float | None] = {"correct": float(all(followed))}
        if self._pays_shares:
            parts = {"satisfied_frac": num_followed / len(followed)}
        return Outcome(parts=parts, is_correct=all(followed), format_ok=is_reply, metrics=metrics)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return none: no right reply is known."""
        return ()

    def _to_example(self, row: Row) -> Example:
        constraints = []
        for instruction_id, arguments in read_literal(row) if self._is_multi else read_function(row):
            self.checkers.bind(instruction_id, arguments, place=row.place)
            present = {key: value for key, value in arguments.items() if value is not None}
            constraints.append({"id": instruction_id, "arguments": present})
        return make_example(self.name, {"prompt": read_messages(row), "constraints": constraints}, None)
