"""Tasks whose answers are numbers, formulas or letters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict
from strop.spec.task_base import SOURCE_HELP, EvaluationRows, FewShot, TrainingRows


class _MathAnswer(Section):
    """How formulas are compared."""

    strictness: Literal["strict", "standard", "symbolic"] = Field(
        default="symbolic",
        description="When an answer is right. 'strict': it stands in the one box of the reply and is spelled"
        " like the gold answer, but for spacing, units and the like. 'standard': also if both are the same"
        " number. 'symbolic': also if sympy finds both formulas equal.",
    )


class Gsm8kSpec(FewShot, TrainingRows):
    """Grade-school word problems, in the columns `question` and `answer` of gsm8k."""

    name: Literal["gsm8k"] = Field(description="Which task: grade-school word problems.")
    source: str = Field(
        default="openai/gsm8k",
        min_length=1,
        description="Where the problems are: a hub id such as openai/gsm8k, a folder or file of Parquet or"
        " JSONL, or such a one in a store, as s3://bucket/path. A text that starts with '/', '~' or '.',"
        " or ends in .parquet, .jsonl or .json, is a path, and a relative one is taken from the file that"
        " names it.",
    )
    mode: Literal["auto", "strict", "hash", "flex"] = Field(
        default="auto",
        description="Which number of the reply is judged. 'auto': behind 'The answer is', else behind '####',"
        " else in the last box, else the last one. The others are the filters of lm-eval 0.4.13 with their"
        " flaws, for comparison with published scores: 'strict' and 'flex' of gsm8k_cot, 'hash' of gsm8k.",
    )


class MathSpec(_MathAnswer, FewShot, TrainingRows):
    """Competition problems with worked solutions, in the columns of MATH."""

    name: Literal["math"] = Field(description="Which task: competition problems of MATH.")
    source: str = Field(
        default="EleutherAI/hendrycks_math",
        min_length=1,
        description=SOURCE_HELP.format("EleutherAI/hendrycks_math"),
    )
    min_level: int = Field(default=1, ge=1, le=5, description="Easiest level used, included.")
    max_level: int = Field(default=5, ge=1, le=5, description="Hardest level used, included.")

    @model_validator(mode="after")
    def _check_levels(self) -> MathSpec:
        if self.min_level > self.max_level:
            raise SpecConflict(
                {"task.min_level": self.min_level, "task.max_level": self.max_level},
                "no level is left",
                allowed="an easiest level that is at most the hardest one",
                next_step="swap the two values",
            )
        return self


class Math500Spec(_MathAnswer, EvaluationRows):
    """Five hundred test problems of MATH, for evaluation only."""

    name: Literal["math500"] = Field(description="Which task: 500 test problems of MATH.")
    source: str = Field(
        default="HuggingFaceH4/MATH-500",
        min_length=1,
        description=SOURCE_HELP.format("HuggingFaceH4/MATH-500"),
    )


class DeepscalerSpec(_MathAnswer, TrainingRows):
    """Forty thousand competition problems; some are held out, chosen by content."""

    name: Literal["deepscaler"] = Field(description="Which task: competition problems of DeepScaleR.")
    source: str = Field(
        default="agentica-org/DeepScaleR-Preview-Dataset",
        min_length=1,
        description=SOURCE_HELP.format("agentica-org/DeepScaleR-Preview-Dataset"),
    )


class AimeSpec(EvaluationRows):
    """Problems of the AIME, whose answers are whole numbers; for evaluation only."""

    name: Literal["aime"] = Field(description="Which task: problems of the AIME.")
    year: Literal["2024", "2025", "2022-2024"] = Field(
        default="2025", description="Which examinations: 30 problems a year, or the 90 of 2022 to 2024."
    )
    source: str | None = Field(
        default=None,
        min_length=1,
        description=SOURCE_HELP.format("math-ai/aime25") + " none = the hub's data set of the year.",
    )


class _MmluRows(FewShot):
    """Which multiple-choice questions."""

    source: str = Field(default="cais/mmlu", min_length=1, description=SOURCE_HELP.format("cais/mmlu"))
    subject: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Held-out questions of one subject, for example 'astronomy'; training rows name none."
        " none = all.",
    )


class MmluSpec(_MmluRows, TrainingRows):
    """Multiple-choice questions of 57 subjects; the model writes the letter."""

    name: Literal["mmlu"] = Field(description="Which task: multiple-choice questions of MMLU.")


class MmluChoiceSpec(_MmluRows, EvaluationRows):
    """The same questions, answered by the likeliest letter: nothing is generated, so for evaluation only."""

    name: Literal["mmlu-choice"] = Field(description="Which task: MMLU, scored by log-likelihood.")

    @model_validator(mode="after")
    def _check_unwritten(self) -> MmluChoiceSpec:
        given: dict[str, object] = {}
        if self.thinking == "on":
            given["task.thinking"] = self.thinking
        if self.max_reply_tokens is not None:
            given["task.max_reply_tokens"] = self.max_reply_tokens
        if self.stop is not None:
            given["task.stop"] = self.stop
        if given:
            raise SpecConflict(
                given,
                "the model writes no reply: the likeliest of four letters is taken",
                allowed="thinking off or model_default, no reply budget, and no texts that end a reply",
                next_step="remove the setting, or use task mmlu, where the model writes",
            )
        return self


class RlvrMixedSpec(_MathAnswer, TrainingRows):
    """Grade-school, competition and instruction problems in one data set, for training."""

    name: Literal["rlvr-mixed"] = Field(description="Which task: GSM, MATH and instructions mixed.")
    source: str = Field(
        default="allenai/RLVR-GSM-MATH-IF-Mixed-Constraints",
        min_length=1,
        description=SOURCE_HELP.format("allenai/RLVR-GSM-MATH-IF-Mixed-Constraints"),
    )
