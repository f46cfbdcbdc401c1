"""Tasks whose prompts hold instructions that a program can check."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.task_base import EvaluationRows, TaskSection

_SOURCE_DESCRIPTION = (
    "Where the rows are, in the columns of {hub_id}: a hub id, or a folder or file of Parquet or JSONL. A"
    " text that starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a path, and a relative"
    " one is taken from the file that names it."
)


class IfEvalSpec(EvaluationRows):
    """Prompts with instructions that a program can check: IFEval, for evaluation only."""

    name: Literal["ifeval"] = Field(description="Which task: the instructions of IFEval.")
    source: str = Field(
        default="google/IFEval",
        min_length=1,
        description=_SOURCE_DESCRIPTION.format(hub_id="google/IFEval"),
    )
    rules: Literal["own", "lm-eval"] = Field(
        default="own",
        description="Who says what follows an instruction. own = rules that pay nothing for silence and"
        " chance; lm-eval = the verdicts of lm-eval 0.4.13 with their faults, for comparison with published"
        " scores; they need nltk and its data package punkt_tab.",
    )
    strictness: Literal["strict", "loose"] = Field(
        default="strict",
        description="Which verdict is the score. loose = the reply may also follow an instruction without its"
        " first line, last line or asterisks. Both are reported.",
    )


class IfBenchSpec(EvaluationRows):
    """Prompts with instructions that a program can check: IFBench, for evaluation only."""

    name: Literal["ifbench"] = Field(description="Which task: the instructions of IFBench.")
    source: str = Field(
        default="allenai/IFBench_test",
        min_length=1,
        description=_SOURCE_DESCRIPTION.format(hub_id="allenai/IFBench_test"),
    )
    skip_unjudged: bool = Field(
        default=False,
        description="Leave out the rows with an instruction that strop has no checker for. The score is then"
        " one over fewer prompts than the published ones. false = such a row is refused.",
    )
    strictness: Literal["strict", "loose"] = Field(
        default="loose",
        description="Which verdict is the score; published scores are loose. Both are reported.",
    )


class _UnsplitRows(TaskSection):
    """What the tasks for training share, whose data has no split of its own."""

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

    name: Literal["rlvr-ifeval"] = Field(description="Which task: one instruction of RLVR-IFeval a prompt.")
    source: str = Field(
        default="allenai/RLVR-IFeval",
        min_length=1,
        description=_SOURCE_DESCRIPTION.format(hub_id="allenai/RLVR-IFeval"),
    )


class IfMultiSpec(_UnsplitRows):
    """Prompts with one to five instructions that a program can check, for training."""

    name: Literal["if-multi"] = Field(description="Which task: up to five instructions a prompt.")
    source: str = Field(
        default="allenai/IF_multi_constraints_upto5",
        min_length=1,
        description=_SOURCE_DESCRIPTION.format(hub_id="allenai/IF_multi_constraints_upto5"),
    )
    all_or_nothing: bool = Field(
        default=False,
        description="Pay only for replies that follow every instruction. false = the share that is followed.",
    )
