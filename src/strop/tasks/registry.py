"""From a task's section of the run spec to the task, and the list of what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from strop.errors import ConfigError
from strop.rollout import Split
from strop.spec.run import code_of_task
from strop.spec.task import (
    BlendSpec,
    BoxedMathSpec,
    MixtureSpec,
    ReasoningGymSpec,
    RlvrMixedSpec,
    RowsSpec,
    TaskSpec,
    UserTaskSpec,
    judge_sections,
    plain_sections,
)
from strop.tasks.contract import Task
from strop.user_code import edited, hash_sources

# By name: a run imports its own task alone.
_TASKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "arithmetic": (
            "generated.arithmetic:Arithmetic",
            "What is a + b, a - b or a * b? Ranges are settings; needs no data.",
        ),
        "dummy": (
            "generated.dummy:Dummy",
            "One fixed question, over and over, to see that a run learns; needs no data.",
        ),
        "reverse-text": (
            "generated.reverse_text:ReverseText",
            "Write a short text backwards; graded by similarity; needs no data.",
        ),
        "reasoning-gym": (
            "generated.reasoning_gym:ReasoningGym",
            "Any data set of the reasoning-gym package (extra: tasks).",
        ),
        "gsm8k": ("mathematics.gsm8k:Gsm8k", "Grade-school word problems from a hub, Parquet or JSONL."),
        "math": (
            "mathematics.boxed_math:HendrycksMath",
            "Competition problems of MATH by level; formulas compared by sympy (extra: tasks).",
        ),
        "math500": (
            "mathematics.boxed_math:Math500",
            "500 test problems of MATH, for evaluation (extra: tasks).",
        ),
        "deepscaler": (
            "mathematics.boxed_math:Deepscaler",
            "40,000 competition problems to train on (extra: tasks).",
        ),
        "aime": (
            "mathematics.aime:Aime",
            "AIME of 2024, 2025, or 2022 to 2024, for evaluation; whole numbers.",
        ),
        "mmlu": ("mmlu:Mmlu", "Multiple choice of 57 subjects; the model writes the letter."),
        "mmlu-choice": (
            "mmlu:MmluChoice",
            "MMLU by log-likelihood: the likeliest letter counts; evaluation only.",
        ),
        "mbpp": ("code.mbpp:Mbpp", "Short Python functions with tests, run in a sandbox."),
        "humaneval": (
            "code.humaneval:HumanEval",
            "Python functions to complete, run in a sandbox; for evaluation only.",
        ),
        "apps": ("code.apps:Apps", "Programming contests: programs and functions, run in a sandbox."),
        "ifeval": (
            "instructions:InstructionTask",
            "IFEval: prompts with checkable instructions; evaluation only (extra: tasks).",
        ),
        "ifbench": (
            "instructions:InstructionTask",
            "IFBench: harder checkable instructions; evaluation only.",
        ),
        "rlvr-ifeval": (
            "instructions:InstructionTask",
            "RLVR-IFeval: one checkable instruction a prompt, for training (extra: tasks).",
        ),
        "if-multi": (
            "instructions:InstructionTask",
            "Up to five checkable instructions a prompt, for training (extra: tasks).",
        ),
        "llm-judge": (
            "llm_judge.task:LlmJudge",
            "Open questions; another model grades the replies over HTTP (extra: tasks).",
        ),
        "sft-jsonl": (
            "sft_jsonl:SftJsonl",
            "Demonstrations with gold answers, in the rows that sft.source takes.",
        ),
        "rows": ("user.rows:Rows", "Your own rows, judged by your own function or a built-in one."),
        "rlvr-mixed": (
            "rlvr_mixed:RlvrMixed",
            "GSM, MATH and instruction rows in one data set, for training (extra: tasks).",
        ),
        "mixture": ("mixture:Mixture", "Several tasks trained as one, by weight, by size or in sequence."),
        "blend": ("blend:Blend", "One task judged by several verifiers, whose weighted scores are added up."),
    }
)
"""Class in this room, and what the task is, by `task.name`."""
TASK_SUMMARIES: Mapping[str, str] = MappingProxyType({name: words for name, (_, words) in _TASKS.items()})
"""What each built-in task is, by name."""


def build_task(spec: TaskSpec) -> Task:
    """Build the task that a spec names; no data is read yet.

    Raises: ConfigError if a setting cannot work with this task.
    """
    task: Task = _build(spec)
    if isinstance(spec, UserTaskSpec) and task.name in TASK_SUMMARIES:
        raise ConfigError(
            f"task.name={spec.name}: two tasks are called {task.name}, and one of them is strop's own",
            allowed="a name that no built-in task has",
            next_step="rename the class, or the entry point",
        )
    if spec.prompting:
        from strop.tasks.prompting import Prompted

        task = Prompted(task, spec)
    if spec.order_file is None:
        return task
    from strop.tasks.curriculum import Curriculum

    return Curriculum(task, spec)


def _build(spec: TaskSpec) -> Any:
    place = "user.own_task:OwnTask" if isinstance(spec, UserTaskSpec) else _TASKS[spec.name][0]
    kind = resolve_name(f"strop.tasks.{place}")
    if isinstance(spec, MixtureSpec | BlendSpec):
        return kind(spec, {label: build_task(part.task) for label, part in spec.read_parts().items()})
    return kind(spec)


def task_builder(spec: TaskSpec) -> Callable[[], Task]:
    """Return what makes the task anew, and warm, in other processes; it refuses code edited since."""
    return partial(build_warm_task, spec, _hash_code(spec))


def _hash_code(spec: TaskSpec) -> Mapping[str, str]:
    return {ref.place: hash_sources(ref.path) for ref in code_of_task(spec)}


def build_warm_task(spec: TaskSpec, code: Mapping[str, str] | None = None) -> Task:
    """Build a task that has loaded what its verifier needs: processes forked from here find it there.

    `code` are the hashes of the user's files that it must be made of.
    Raises: like `build_task`, and like `examples` where judging needs the data; ConfigError for other code.
    """
    if code is not None and code != (found := _hash_code(spec)):
        raise edited([path for path, digest in found.items() if code.get(path) != digest])
    task = build_task(spec)
    if isinstance(spec, ReasoningGymSpec | MixtureSpec | BlendSpec):
        # A scorer that wants the generated problem; a mixture must know whose an example is.
        for example in task.examples(Split.HELD_OUT)[:1]:
            task.gold_replies(example)
    for part in plain_sections(spec):
        if isinstance(part, RowsSpec | UserTaskSpec):
            _build(part).load_code()
    for judge in judge_sections(spec):
        from strop.tasks.llm_judge.task import LlmJudge

        LlmJudge(judge).require_ready()
    if any(
        isinstance(part, BoxedMathSpec | RlvrMixedSpec) and part.strictness == "symbolic"
        for part in plain_sections(spec)
    ):
        from strop.tasks.mathematics.symbolic import warm_up

        warm_up()
    return task
