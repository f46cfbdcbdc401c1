"""Tasks whose replies must follow instructions: ifeval, ifbench, rlvr-ifeval and if-multi.

The prompt is only the user's text, and only the model's own terminator ends a reply: an instruction may
require any text that a stop string would cut. The text behind the reasoning is judged.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import EvaluationRows, TaskSection
from strop.tasks.contract import TaskLimits
from strop.tasks.instructions.bench import BENCH, UNJUDGED
from strop.tasks.instructions.checkers import Checkers, Constraint
from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.harness import HARNESS, SENTENCES_ID, is_drawn, load_punkt
from strop.tasks.instructions.multi import MULTI
from strop.tasks.instructions.replies import (
    is_echo,
    judge_instructions,
    judged_text,
    without_answer_tags,
    write_replies,
)
from strop.tasks.instructions.rlvr import RLVR
from strop.tasks.instructions.segments import require_language_detection
from strop.tasks.prompt import pose
from strop.tasks.registry import built_in
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, SplitExamples, read_examples, require_texts

# An example holds `prompt` and `constraints` (ids and present arguments). A row with an instruction that
# cannot be judged is refused.

Call = tuple[object, Mapping[str, Any]]
"""An instruction's id and its arguments; None: absent."""


def read_instruction_lists(row: Row) -> list[Call]:
    """Read the columns of IFEval and IFBench: `instruction_id_list`, and `kwargs`, aligned.

    Raises: DataError naming the row, if one is missing or their lengths differ.
    """
    return _pair(row, "instruction_id_list and kwargs", row.values)


def read_function(row: Row) -> list[Call]:
    """Read the column of RLVR-IFeval: `ground_truth`, a JSON table with `func_name` and arguments.

    Raises: DataError naming the row, if it is malformed.
    """
    table = _read_ground_truth(row)
    if not isinstance(table.get("func_name"), str):
        raise _refuse(row, f"ground_truth with the keys {sorted(table)}", "a table with func_name, a text")
    return [(table["func_name"], {key: value for key, value in table.items() if key != "func_name"})]


def read_literal(row: Row) -> list[Call]:
    """Read the column of multi-constraint sets: `ground_truth`, a list with one table of two lists.

    Raises: DataError naming the row, if it is malformed.
    """
    table = _read_ground_truth(row)
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
        present = {key: value for key, value in arguments.items() if value is not None}
        constraints.append({"id": bound.instruction_id, "arguments": present})
    return make_example(task, {"prompt": prompt, "constraints": constraints}, None)


def _pair(row: Row, columns: str, values: Mapping[str, Any]) -> list[Call]:
    ids, arguments = values.get("instruction_id_list"), values.get("kwargs")
    if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
        lengths = f"{_length(ids)} ids and {_length(arguments)} argument tables"
        raise _refuse(row, f"{columns}: {lengths}", "two lists of equal length")
    # None stands for an empty table.
    tables = [{} if table is None else table for table in arguments]
    if not all(isinstance(table, Mapping) for table in tables):
        raise _refuse(row, f"{columns}: arguments {str(arguments)[:120]!r}", "tables, or null for none")
    return list(zip(ids, tables, strict=True))


def _length(value: object) -> str:
    return str(len(value)) if isinstance(value, list) else f"a {type(value).__name__} for"


def _read_ground_truth(row: Row) -> dict[str, Any]:
    """Read a table, or a list with one, as a value, as JSON or as a Python literal."""
    value = column = row.values.get("ground_truth")
    if isinstance(value, str):
        value = _parse_literal(value)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        allowed = "a table, or a list with one, as JSON or a Python literal"
        raise _refuse(row, f"ground_truth {str(column)[:120]!r}", allowed)
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


def _refuse(row: Row, content: str, allowed: str) -> DataError:
    return bad_row(f"{row.place} has {content}", allowed=allowed)


_PROMPT = "{prompt}"
_VERIFIER = "instructions-2"
_HARNESS_VERIFIER = "lm-eval-instructions-3"
_MAX_REPLY_TOKENS = {"ifeval": 4096, "ifbench": 4096, "rlvr-ifeval": 2048, "if-multi": 2048}
_MAX_GOLDLESS_FRAC = 0.5
"""Edits do not find a gold reply for every combination of instructions."""
_PATTERN_LIMIT_S = 20.0
"""The patterns of lm-eval's rules can take quadratic time on a long reply."""
_LANGUAGE_IDS = frozenset(
    {
        "language:response_language",
        "change_case:english_capital",
        "change_case:english_lowercase",
        "validate_response_language",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    layout: DataLayout
    read_prompt: Callable[[Row], str]
    read_calls: Callable[[Row], list[Call]]


_PARQUET = "data/train-00000-of-00001.parquet"
_TRAINING = DataLayout(train=(_PARQUET,), held_out=())
_SOURCES: Mapping[str, _Source] = MappingProxyType(
    {
        "ifeval": _Source(
            layout=DataLayout(train=(), held_out=("ifeval_input_data.jsonl",)),
            read_prompt=read_prompt,
            read_calls=read_instruction_lists,
        ),
        "ifbench": _Source(
            layout=DataLayout(train=(), held_out=(_PARQUET,)),
            read_prompt=read_prompt,
            read_calls=read_instruction_lists,
        ),
        "rlvr-ifeval": _Source(layout=_TRAINING, read_prompt=read_messages, read_calls=read_function),
        "if-multi": _Source(layout=_TRAINING, read_prompt=read_messages, read_calls=read_literal),
    }
)


_SOURCE_HELP = (
    "Source of the rows, in the columns of {hub_id}: a hub id, or a folder or file of Parquet or JSONL. A"
    " text that starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a path; a relative one"
    " is relative to the file that names it."
)


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


class IfEvalSpec(EvaluationRows):
    """Prompts with instructions that a program can check: IFEval, for evaluation only."""

    name: Literal["ifeval"]
    source: Unhashed[str] = Field(
        default="google/IFEval",
        min_length=1,
        description=_SOURCE_HELP.format(hub_id="google/IFEval"),
    )
    rules: Literal["own", "lm-eval"] = Field(
        default="own",
        description="Who says what follows an instruction. own = rules that pay nothing for silence and"
        " chance; lm-eval = the verdicts of lm-eval 0.4.13 with their faults, for comparison with published"
        " scores; they need nltk and its data package punkt_tab.",
        json_schema_extra=expert("scores of lm-eval are repeated by its own rules"),
    )
    strictness: Literal["strict", "loose"] = Field(
        default="strict",
        description="Which verdict is the score. loose = the reply may also follow an instruction without its"
        " first line, last line or asterisks. Both are reported.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
    )


class IfBenchSpec(EvaluationRows):
    """Prompts with instructions that a program can check: IFBench, for evaluation only."""

    name: Literal["ifbench"]
    source: Unhashed[str] = Field(
        default="allenai/IFBench_test",
        min_length=1,
        description=_SOURCE_HELP.format(hub_id="allenai/IFBench_test"),
    )
    skip_unjudged: bool = Field(
        default=False,
        description="Leave out the rows with an instruction that strop has no checker for. The score is then"
        " one over fewer prompts than the published ones. false = such a row is refused.",
        json_schema_extra=expert("some instructions need libraries that are not everywhere"),
    )
    strictness: Literal["strict", "loose"] = Field(
        default="loose",
        description="Which verdict is the score; published scores are loose. Both are reported.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
    )


class RlvrIfevalSpec(_UnsplitRows):
    """Prompts with one instruction each that a program can check, for training."""

    name: Literal["rlvr-ifeval"]
    source: Unhashed[str] = Field(
        default="allenai/RLVR-IFeval",
        min_length=1,
        description=_SOURCE_HELP.format(hub_id="allenai/RLVR-IFeval"),
    )


class IfMultiSpec(_UnsplitRows):
    """Prompts with one to five instructions that a program can check, for training."""

    name: Literal["if-multi"]
    source: Unhashed[str] = Field(
        default="allenai/IF_multi_constraints_upto5",
        min_length=1,
        description=_SOURCE_HELP.format(hub_id="allenai/IF_multi_constraints_upto5"),
    )
    all_or_nothing: bool = Field(
        default=False,
        description="Pay only for replies that follow every instruction. false = the share that is followed.",
        json_schema_extra=expert("published rewards differ by whether parts of a prompt count"),
    )


@built_in(
    "ifeval",
    IfEvalSpec,
    "IFEval: prompts with checkable instructions; evaluation only (extra: tasks).",
    rank=150,
)
@built_in("ifbench", IfBenchSpec, "IFBench: harder checkable instructions; evaluation only.", rank=160)
@built_in(
    "rlvr-ifeval",
    RlvrIfevalSpec,
    "RLVR-IFeval: one checkable instruction a prompt, for training (extra: tasks).",
    rank=170,
)
@built_in(
    "if-multi",
    IfMultiSpec,
    "Up to five checkable instructions a prompt, for training (extra: tasks).",
    rank=180,
)
class InstructionTask(RowTask):
    """Follow every instruction of the prompt.

    Reward: 1 if all are followed, else 0; for if-multi the share that is followed, unless
    `task.all_or_nothing`. Under the task's own rules a reply that only repeats the prompt follows none.
    `format_ok`: the reasoning has an end, and a text follows it.
    Metrics: `instructions_total`, `instructions_satisfied` (strictly), and for the two evaluations
    also `instructions_satisfied_loose`, `correct_strict` and `correct_loose`.
    """

    def __init__(self, spec: IfEvalSpec | IfBenchSpec | RlvrIfevalSpec | IfMultiSpec) -> None:
        self._has_harness_rules = isinstance(spec, IfEvalSpec) and spec.rules == "lm-eval"
        self._has_loose = isinstance(spec, IfEvalSpec | IfBenchSpec)
        self._is_loose = isinstance(spec, IfEvalSpec | IfBenchSpec) and spec.strictness == "loose"
        self._skips_rows = isinstance(spec, IfBenchSpec) and spec.skip_unjudged
        rows_of = _SOURCES[spec.name]
        reading = RowReading(
            layout=rows_of.layout,
            to_example=self._to_example,
            question=lambda example: str(example.fields["prompt"]),
            # All rows with the same prompt must be in the same split.
            split_key=lambda row: " ".join(rows_of.read_prompt(row).split()),
        )
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS[spec.name],
            max_goldless_frac=_MAX_GOLDLESS_FRAC,
            verify_limit_s=_PATTERN_LIMIT_S if self._has_harness_rules else None,
        )
        verifier = _HARNESS_VERIFIER if self._has_harness_rules else _VERIFIER
        super().__init__(spec, reading, limits, source=spec.source, prompt=_PROMPT, verifier=verifier)

    @property
    def checkers(self) -> Checkers:
        """The instructions that this task can judge."""
        if self._has_harness_rules:
            return HARNESS
        return {"ifeval": GOOGLE, "ifbench": BENCH, "rlvr-ifeval": RLVR, "if-multi": MULTI}[self.name]

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the prompts of a split, in the order of the data; ifeval and ifbench have no training split.

        Raises: DataError if the data is missing, empty or malformed, or an instruction cannot be judged;
            ConfigError if a package that an instruction needs is not installed.
        """
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the user's text."""
        prompt = example.fields["prompt"]
        return pose(_PROMPT.format(prompt=prompt), base=prompt, thinking=self._spec.thinking)

    def verify(self, example: Example, text: str) -> Outcome:
        """Ask the checker of every instruction.

        Raises: DataError if an instruction of the example cannot be judged.
        """
        constraints = self._bind(example)
        # lm-eval does not separate thinking: it judges all of a reply.
        judged = text if self._has_harness_rules else judged_text(text)
        if judged is not None and self.name == "if-multi":
            judged = without_answer_tags(judged)
        is_reply = judged is not None and bool(judged.strip())
        is_judged = is_reply and (
            self._has_harness_rules or not is_echo(judged or "", example.fields["prompt"])
        )
        verdict = judge_instructions(
            constraints, (judged or "") if is_judged else "", with_loose=self._has_loose
        )
        counted = verdict.loose if self._is_loose else verdict.strict
        metrics = {
            "instructions_total": float(len(constraints)),
            "instructions_satisfied": float(sum(verdict.strict)),
        }
        if self._has_loose:
            metrics |= {
                "instructions_satisfied_loose": float(sum(verdict.loose)),
                "correct_strict": float(all(verdict.strict)),
                "correct_loose": float(all(verdict.loose)),
            }
        if self._has_harness_rules:
            metrics["instructions_drawn"] = float(sum(map(is_drawn, constraints)))
        if isinstance(self._spec, IfMultiSpec) and not self._spec.all_or_nothing:
            parts: dict[str, float | None] = {"satisfied_frac": sum(counted) / len(counted)}
        else:
            parts = {"correct": float(all(counted))}
        return Outcome(parts=parts, is_correct=all(counted), format_ok=is_reply, metrics=metrics)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return a reply that follows all instructions and answers nothing; none if the edits find none."""
        replies = write_replies(self._bind(example))
        return tuple(reply for reply in replies if self.verify(example, reply).is_correct)

    def _bind(self, example: Example) -> list[Constraint]:
        place = f"example {example.example_id} of task {example.task}"
        return [
            self.checkers.bind(item["id"], item["arguments"], place=place)
            for item in example.fields["constraints"]
        ]

    def _read_splits(self) -> SplitExamples:
        if self._skips_rows:
            splits = read_examples(self._reading, self._source)
            kept = tuple(example for example in splits.held_out if example.fields["constraints"])
            if not kept:
                raise DataError(
                    f"all {len(splits.held_out)} rows of {self._source} have an instruction without a"
                    " checker",
                    allowed="at least one row without such an instruction",
                    next_step="use more of the data set",
                )
            left_out = {"no checker": len(splits.held_out) - len(kept)}
            splits = replace(splits, held_out=kept[: self._spec.num_held_out], left_out=left_out)
        else:
            splits = super()._read_splits()
        used = {item["id"] for part in Split for e in splits.of(part) for item in e.fields["constraints"]}
        if used & _LANGUAGE_IDS:
            require_language_detection()
        if self._has_harness_rules and SENTENCES_ID in used:
            load_punkt()
        return splits

    def _to_example(self, row: Row) -> Example:
        source = _SOURCES[self.name]
        prompt, calls = source.read_prompt(row), source.read_calls(row)
        if self._skips_rows and any(instruction_id in UNJUDGED for instruction_id, _ in calls):
            return make_example(self.name, {"prompt": prompt, "constraints": []}, None)
        return make_instruction_example(self.name, self.checkers, row, prompt, calls)
