"""Tasks whose replies must follow instructions: ifeval, ifbench, rlvr-ifeval and if-multi.

The prompt is the user's text and nothing else, and no text ends a reply but the model's own terminator: any
stop string could cut what an instruction asks for. Judged is what stands behind the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import IfBenchSpec, IfEvalSpec, IfMultiSpec, RlvrIfevalSpec
from strop.tasks.contract import TaskLimits
from strop.tasks.instructions import rows
from strop.tasks.instructions.bench import BENCH, UNJUDGED
from strop.tasks.instructions.checkers import Checkers, Constraint
from strop.tasks.instructions.google import GOOGLE
from strop.tasks.instructions.harness import HARNESS, SENTENCES_ID, is_drawn, require_punkt
from strop.tasks.instructions.language import require_language_detection
from strop.tasks.instructions.multi import MULTI
from strop.tasks.instructions.replies import (
    is_echo,
    judge_instructions,
    judged_text,
    without_answer_tags,
    write_replies,
)
from strop.tasks.instructions.rlvr import RLVR
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, SplitExamples, read_examples
from strop.tasks.rows.row_task import RowTask

_PROMPT = "{prompt}"
_VERIFIER = "instructions-2"
_HARNESS_VERIFIER = "lm-eval-instructions-3"
_MAX_REPLY_TOKENS = {"ifeval": 4096, "ifbench": 4096, "rlvr-ifeval": 2048, "if-multi": 2048}
_MAX_GOLDLESS_FRAC = 0.5
"""Gold replies are written by edits, which do not find one for every mix of instructions."""
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
    read_calls: Callable[[Row], list[rows.Call]]


_EVALUATION_FILES = {
    "ifeval": "ifeval_input_data.jsonl",
    "ifbench": "data/train-00000-of-00001.parquet",
}
_TRAINING_FILES = {
    "rlvr-ifeval": "data/train-00000-of-00001.parquet",
    "if-multi": "data/train-00000-of-00001.parquet",
}
_SOURCES: Mapping[str, _Source] = MappingProxyType(
    {
        name: _Source(
            layout=DataLayout(train=(), held_out=(file,)),
            read_prompt=rows.read_prompt,
            read_calls=rows.read_instruction_lists,
        )
        for name, file in _EVALUATION_FILES.items()
    }
    | {
        name: _Source(
            layout=DataLayout(train=(file,), held_out=()),
            read_prompt=rows.read_messages,
            read_calls=rows.read_function if name == "rlvr-ifeval" else rows.read_literal,
        )
        for name, file in _TRAINING_FILES.items()
    }
)


class InstructionTask(RowTask):
    """Follow every instruction of the prompt.

    Reward: 1 if all are followed, else 0; for if-multi the share that is followed, unless
    `task.all_or_nothing`. Under the task's own rules a reply that only repeats the prompt follows none.
    `format_ok`: something stands behind the reasoning, and the reasoning has an end.
    Metrics: `instructions_total`, `instructions_satisfied` (strictly), and for the two evaluations
    also `instructions_satisfied_loose`, `correct_strict` and `correct_loose`.
    """

    def __init__(self, spec: IfEvalSpec | IfBenchSpec | RlvrIfevalSpec | IfMultiSpec) -> None:
        self._has_harness_rules = isinstance(spec, IfEvalSpec) and spec.rules == "lm-eval"
        self._has_loose = isinstance(spec, IfEvalSpec | IfBenchSpec)
        self._skips_rows = isinstance(spec, IfBenchSpec) and spec.skip_unjudged
        rows_of = _SOURCES[spec.name]
        reading = RowReading(
            layout=rows_of.layout,
            to_example=self._to_example,
            question=lambda example: str(example.fields["prompt"]),
            # One prompt may come with several instructions: they must not part.
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
        """Give the user's text as it stands."""
        prompt = example.fields["prompt"]
        return pose(_PROMPT.format(prompt=prompt), base=prompt, thinking=self._spec.thinking)

    def verify(self, example: Example, text: str) -> Outcome:
        """Ask the checker of every instruction.

        Raises: DataError if an instruction of the example cannot be judged.
        """
        constraints = self._bind(example)
        # The harness knows nothing of thinking: it judges all of a reply.
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
        """Return a reply that follows all instructions and answers nothing; none where none was found."""
        replies = write_replies(self._bind(example))
        return tuple(reply for reply in replies if self.verify(example, reply).is_correct)

    @property
    def _is_loose(self) -> bool:
        return isinstance(self._spec, IfEvalSpec | IfBenchSpec) and self._spec.strictness == "loose"

    def _bind(self, example: Example) -> list[Constraint]:
        place = f"example {example.example_id} of task {example.task}"
        return [
            self.checkers.bind(item["id"], item["arguments"], place=place)
            for item in example.fields["constraints"]
        ]

    def _read_splits(self) -> SplitExamples:
        if self._skips_rows:
            splits = self._drop_unjudged(read_examples(self._reading, self._source))
        else:
            splits = super()._read_splits()
        used = {item["id"] for part in Split for e in splits.of(part) for item in e.fields["constraints"]}
        if used & _LANGUAGE_IDS:
            require_language_detection()
        if self._has_harness_rules and SENTENCES_ID in used:
            require_punkt()
        return splits

    def _drop_unjudged(self, splits: SplitExamples) -> SplitExamples:
        kept = tuple(example for example in splits.held_out if example.fields["constraints"])
        if not kept:
            raise DataError(
                explain_refusal(
                    f"all {len(splits.held_out)} rows of {self._source} have an instruction without a"
                    " checker",
                    allowed="at least one row without such an instruction",
                    next_step="use more of the data set",
                )
            )
        left_out = {"no checker": len(splits.held_out) - len(kept)}
        return replace(splits, held_out=kept[: self._spec.num_held_out], left_out=left_out)

    def _to_example(self, row: Row) -> Example:
        source = _SOURCES[self.name]
        prompt, calls = source.read_prompt(row), source.read_calls(row)
        if self._skips_rows and any(instruction_id in UNJUDGED for instruction_id, _ in calls):
            return make_example(self.name, {"prompt": prompt, "constraints": []}, None)
        return rows.make_instruction_example(self.name, self.checkers, row, prompt, calls)
