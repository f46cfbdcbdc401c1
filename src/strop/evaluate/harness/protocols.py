"""Protocols of lm-eval 0.4.13 for each of its tasks that strop has, too.

A protocol pins everything that changes a score: lm-eval's task file with its prompt, stops and filters, the
number of few-shot examples, and a sufficient budget. The rows are those of strop's task in lm-eval's columns.
`prompt` is lm-eval's form of the problem; a run whose logged prompts do not end like that is refused. Source
of the forms: the task files under lm_eval/tasks (MIT).

Left out: mmlu_generative, for which no scores are published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from strop.errors import DataError
from strop.rollout import Example


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessProtocol:
    """The pinned conditions of a task of lm-eval."""

    task: str
    """lm-eval's name of the task or group."""
    files: Mapping[str, str]
    """lm-eval's task files, by the names of its tasks: one, or those of a group."""
    own_task: str
    """strop's task with the examples."""
    own_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of strop's task that belong to the protocol and override the user's."""
    num_fewshot: int
    num_written: int = 0
    """Number of few-shot examples in lm-eval's task file; unused if they come from strop's data."""
    draws_shown: bool = False
    """Whether the few-shot examples are drawn from the training split; else the task file has them."""
    shows_own_split: bool = False
    """Whether they are the first ones of the split `dev`, which strop's task has as `shots`."""
    chooses: bool = False
    """Whether lm-eval takes the likeliest of several replies: nothing is generated."""
    max_reply_tokens: int
    """Budget of a reply; for a choice, its largest number of tokens."""
    row: Callable[[Example], Mapping[str, Any]]
    """The row of an example in the columns of lm-eval's task.

    Raises: DataError if lm-eval's task cannot pose this example."""
    prompt: Callable[[Example], str]
    """lm-eval's form of the problem, without few-shot examples."""
    part_of: Callable[[Example], str] | None = None
    """Returns the task, in a group, of an example. None: there is one task."""
    runs_code: bool = False
    """Whether lm-eval runs code that the model wrote, without a sandbox."""

    @property
    def stages_shown(self) -> bool:
        """Whether the few-shot examples come from strop's data."""
        return self.draws_shown or self.shows_own_split


def _gsm8k_row(example: Example) -> Mapping[str, Any]:
    return {"question": example.fields["question"], "answer": example.fields["solution"]}


def _math_row(example: Example) -> Mapping[str, Any]:
    fields = example.fields
    return {
        "problem": fields["problem"],
        "level": fields["level"],
        "type": fields["subject"],
        "solution": fields["solution"],
    }


def _mbpp_row(example: Example) -> Mapping[str, Any]:
    if len(example.fields["tests"]) < _MBPP_TESTS:
        raise DataError(
            f"example {example.example_id} of mbpp has {len(example.fields['tests'])} visible tests",
            allowed=f"{_MBPP_TESTS} or more: the harness's prompt shows so many",
            next_step="leave the example out of the data",
        )
    return {"text": example.fields["text"], "code": example.answer, "test_list": example.fields["tests"]}


def _mbpp_prompt(example: Example) -> str:
    tests = "\n".join(example.fields["tests"][:_MBPP_TESTS])
    return (
        f"You are an expert Python programmer, and here is your task: {example.fields['text']}"
        f" Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


def _humaneval_row(example: Example) -> Mapping[str, Any]:
    fields = example.fields
    return {
        "prompt": fields["prompt"],
        "canonical_solution": example.answer,
        "test": fields["test"],
        "entry_point": fields["entry_point"],
    }


def _ifeval_row(example: Example) -> Mapping[str, Any]:
    constraints = example.fields["constraints"]
    # A column of tables has the same keys in every row; lm-eval drops nulls.
    nulls = dict.fromkeys(_IFEVAL_ARGUMENTS)
    return {
        "key": int(example.example_id[:8], 16),
        "prompt": example.fields["prompt"],
        "instruction_id_list": [item["id"] for item in constraints],
        "kwargs": [{**nulls, **item["arguments"]} for item in constraints],
    }


def _math_part(group: str) -> Callable[[Example], str]:
    def part_of(example: Example) -> str:
        subject = example.fields["subject"]
        if subject not in _SUBJECTS:
            raise DataError(
                f"example {example.example_id} of math is of the subject {subject!r}",
                allowed=", ".join(_SUBJECTS),
                next_step="correct the column `type` of the data",
            )
        return f"{group}_{_SUBJECTS[subject]}"

    return part_of


def _mmlu_row(example: Example) -> Mapping[str, Any]:
    fields = example.fields
    return {
        "question": fields["question"],
        "subject": fields["subject"],
        "choices": fields["choices"],
        "answer": "ABCD".index(example.answer or ""),
    }


def _mmlu_prompt(example: Example) -> str:
    a, b, c, d = example.fields["choices"]
    return f"{example.fields['question'].strip()}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"


def _mmlu_part(example: Example) -> str:
    subject = example.fields["subject"]
    if subject not in _MMLU_SUBJECTS:
        raise DataError(
            f"example {example.example_id} of mmlu is of the subject {subject!r}",
            allowed=", ".join(_MMLU_SUBJECTS),
            next_step="correct the column `subject` of the data",
        )
    return f"mmlu_{subject}"


def _math_files(group: str) -> Mapping[str, str]:
    return {f"{group}_{name}": f"{group}/{group}_{name}.yaml" for name in _SUBJECTS.values()}


_MBPP_TESTS = 3
_SUBJECTS: Mapping[str, str] = MappingProxyType(
    {
        "Algebra": "algebra",
        "Counting & Probability": "counting_and_prob",
        "Geometry": "geometry",
        "Intermediate Algebra": "intermediate_algebra",
        "Number Theory": "num_theory",
        "Prealgebra": "prealgebra",
        "Precalculus": "precalc",
    }
)
"""The values of MATH's column `type`, and lm-eval's short forms."""
_MMLU_SUBJECTS = (
    *("abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge"),
    *("college_biology", "college_chemistry", "college_computer_science", "college_mathematics"),
    *("college_medicine", "college_physics", "computer_security", "conceptual_physics", "econometrics"),
    *("electrical_engineering", "elementary_mathematics", "formal_logic", "global_facts"),
    *("high_school_biology", "high_school_chemistry", "high_school_computer_science"),
    *("high_school_european_history", "high_school_geography", "high_school_government_and_politics"),
    *("high_school_macroeconomics", "high_school_mathematics", "high_school_microeconomics"),
    *("high_school_physics", "high_school_psychology", "high_school_statistics", "high_school_us_history"),
    *("high_school_world_history", "human_aging", "human_sexuality", "international_law", "jurisprudence"),
    *("logical_fallacies", "machine_learning", "management", "marketing", "medical_genetics"),
    *("miscellaneous", "moral_disputes", "moral_scenarios", "nutrition", "philosophy", "prehistory"),
    *("professional_accounting", "professional_law", "professional_medicine", "professional_psychology"),
    *("public_relations", "security_studies", "sociology", "us_foreign_policy", "virology"),
    "world_religions",
)
"""The values of MMLU's column `subject`."""
_IFEVAL_ARGUMENTS = (
    *("capital_frequency", "capital_relation", "end_phrase", "first_word", "forbidden_words", "frequency"),
    *("keyword", "keywords", "language", "let_frequency", "let_relation", "letter", "nth_paragraph"),
    *("num_bullets", "num_highlights", "num_paragraphs", "num_placeholders", "num_sections"),
    *("num_sentences", "num_words", "postscript_marker", "prompt_to_repeat", "relation", "section_spliter"),
)


# The numbers of few-shot examples are lm-eval's default for gsm8k, and those of the published baselines for
# the rest. lm-eval's default budget of 256 tokens truncated 13 % of the answers (EVA-2).
def _number_protocols() -> tuple[HarnessProtocol, ...]:
    return (
        HarnessProtocol(
            task="gsm8k",
            files={"gsm8k": "gsm8k/gsm8k.yaml"},
            own_task="gsm8k",
            num_fewshot=5,
            draws_shown=True,
            max_reply_tokens=1024,
            row=_gsm8k_row,
            prompt=lambda example: f"Question: {example.fields['question']}\nAnswer:",
        ),
        HarnessProtocol(
            task="gsm8k_cot",
            files={"gsm8k_cot": "gsm8k/gsm8k-cot.yaml"},
            own_task="gsm8k",
            num_fewshot=4,
            num_written=8,
            max_reply_tokens=1024,
            row=_gsm8k_row,
            prompt=lambda example: f"Q: {example.fields['question']}\nA:",
        ),
        HarnessProtocol(
            task="aime24",
            files={"aime24": "aime/aime24.yaml"},
            own_task="aime",
            own_settings={"year": "2024"},
            num_fewshot=0,
            max_reply_tokens=32768,
            row=lambda example: {"Problem": example.fields["problem"], "Answer": example.answer},
            prompt=lambda example: f"Question: {example.fields['problem']}\nAnswer:",
        ),
        HarnessProtocol(
            task="aime25",
            files={"aime25": "aime/aime25.yaml"},
            own_task="aime",
            own_settings={"year": "2025"},
            num_fewshot=0,
            max_reply_tokens=32768,
            row=lambda example: {"problem": example.fields["problem"], "answer": example.answer},
            prompt=lambda example: f"Question: {example.fields['problem']}\nAnswer:",
        ),
    )


def _formula_protocols() -> tuple[HarnessProtocol, ...]:
    return (
        HarnessProtocol(
            task="minerva_math",
            files=_math_files("minerva_math"),
            own_task="math",
            num_fewshot=4,
            num_written=4,
            max_reply_tokens=2048,
            row=_math_row,
            prompt=lambda example: f"Problem:\n{example.fields['problem']}\n\nSolution:",
            part_of=_math_part("minerva_math"),
        ),
        HarnessProtocol(
            task="hendrycks_math",
            files=_math_files("hendrycks_math"),
            own_task="math",
            num_fewshot=4,
            draws_shown=True,
            max_reply_tokens=2048,
            row=_math_row,
            prompt=lambda example: f"Problem: {example.fields['problem']}\nAnswer:",
            part_of=_math_part("hendrycks_math"),
        ),
    )


def _checked_protocols() -> tuple[HarnessProtocol, ...]:
    return (
        HarnessProtocol(
            task="mbpp",
            files={"mbpp": "mbpp/mbpp.yaml"},
            own_task="mbpp",
            num_fewshot=3,
            num_written=3,
            max_reply_tokens=512,
            row=_mbpp_row,
            prompt=_mbpp_prompt,
            runs_code=True,
        ),
        HarnessProtocol(
            task="humaneval",
            files={"humaneval": "humaneval/humaneval.yaml"},
            own_task="humaneval",
            num_fewshot=0,
            max_reply_tokens=1024,
            row=_humaneval_row,
            prompt=lambda example: str(example.fields["prompt"]),
            runs_code=True,
        ),
        HarnessProtocol(
            task="ifeval",
            files={"ifeval": "ifeval/ifeval.yaml"},
            own_task="ifeval",
            num_fewshot=0,
            max_reply_tokens=4096,
            row=_ifeval_row,
            prompt=lambda example: str(example.fields["prompt"]),
        ),
    )


def _choosing_protocols() -> tuple[HarnessProtocol, ...]:
    return (
        HarnessProtocol(
            task="mmlu",
            files={f"mmlu_{name}": f"mmlu/default/mmlu_{name}.yaml" for name in _MMLU_SUBJECTS},
            own_task="mmlu-choice",
            num_fewshot=5,
            shows_own_split=True,
            chooses=True,
            max_reply_tokens=4,
            row=_mmlu_row,
            prompt=_mmlu_prompt,
            part_of=_mmlu_part,
        ),
    )


_ALL = (*_number_protocols(), *_formula_protocols(), *_checked_protocols(), *_choosing_protocols())
GENERATING: Mapping[str, HarnessProtocol] = MappingProxyType(
    {protocol.task: protocol for protocol in _ALL if not protocol.chooses}
)
"""Protocols with generated replies, by lm-eval's name of the task."""
PROTOCOLS: Mapping[str, HarnessProtocol] = MappingProxyType({protocol.task: protocol for protocol in _ALL})
"""All protocols, by lm-eval's name of the task."""
