"""IFEval and IFBench, for evaluation only, judged by the package if-verifiable.

Its verdicts are the published ones, faults included, so its scores can be set beside others. They are not for
training: some rules reward nothing. What it draws at random (an argument that a row leaves out, the guess of
a language) is drawn from a fixed seed here.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

from strop.errors import ConfigError
from strop.rollout import Example, Outcome
from strop.tasks.instructions.rules import load_detector
from strop.tasks.instructions.tasks import Constraint, InstructionTask, judged_text, pair_constraints
from strop.tasks.registry import import_extra
from strop.tasks.rows.layout import Row, bad_row
from strop.tasks.rows.row_task import PublishedRows, text_of
from strop.tasks.task import right_or_wrong

PACKAGE, RELEASE = "if-verifiable", "0.1.2"
_TOKENIZERS = ("tokenizers/punkt_tab", "tokenizers/punkt")
NLTK_DATA: Mapping[str, Sequence[str]] = {
    "ifeval": _TOKENIZERS[:1],
    "ifbench": (*_TOKENIZERS, "taggers/averaged_perceptron_tagger_eng", "corpora/stopwords"),
}
"""What nltk needs for each; the package would fetch what it misses from the network."""
_MAX_CHARS = 32_768
"""Beginning of a reply that is judged: twice what its tokens hold of English."""


class EvaluationSpec(PublishedRows):
    """Prompts with instructions that a program can check, for evaluation only."""

    name: Literal["ifeval", "ifbench"]


class PublishedInstructions(InstructionTask):
    """Follow every instruction of the prompt. Reward: 1 if all are followed, else 0.

    The score is the published one, strict for ifeval and loose for ifbench, where a reply may also follow an
    instruction without its first line, last line or asterisks.
    `format_ok`: the reasoning has an end, and a text follows it; that text is judged.
    Metrics: `instructions_total`, `instructions_satisfied` (strictly), `instructions_satisfied_loose`,
    `correct_strict` and `correct_loose`.
    """

    def __init__(self, spec: EvaluationSpec) -> None:
        # The package's patterns take quadratic time on some replies, such as a thousand opening brackets.
        super().__init__(spec, f"{PACKAGE}-{RELEASE}", verify_limit_s=5.0)

    def warm_up(self) -> None:
        """Load the package and its rules. Raises: ConfigError like `load_package`."""
        judge(self.name, "", [], "a")

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the package about every instruction. Raises: ConfigError like `load_package`."""
        judged = judged_text(text) or ""
        verdicts = judge(self.name, example.fields["prompt"], example.fields["constraints"], judged)
        strict, loose = ([verdict[place] for verdict in verdicts] for place in (0, 1))
        is_correct = all(strict if self.name == "ifeval" else loose)
        metrics = {
            "instructions_total": float(len(verdicts)),
            "instructions_satisfied": float(sum(strict)),
            "instructions_satisfied_loose": float(sum(loose)),
            "correct_strict": float(all(strict)),
            "correct_loose": float(all(loose)),
        }
        outcome = right_or_wrong(is_correct, format_ok=bool(judged.strip()))
        return replace(outcome, metrics=metrics)

    def read(self, row: Row) -> tuple[str, list[Constraint]]:
        """Read the published columns."""
        prompt = text_of(row, "prompt")
        columns = (row.values.get(name) for name in ("instruction_id_list", "kwargs"))
        constraints = pair_constraints(row, *columns)
        load_package(self.name)
        try:
            judge(self.name, prompt, constraints, prompt)
        except Exception as error:
            raise bad_row(
                f"{row.place} has the instructions {constraints!s:.300} ({type(error).__name__}: {error})",
                allowed=f"instructions and arguments by which {PACKAGE} can judge a reply",
            ) from error
        return prompt, constraints


def judge(
    benchmark: str, prompt: str, constraints: Sequence[Mapping[str, Any]], reply: str
) -> list[tuple[bool, bool]]:
    """Return the strict and the loose verdict on each instruction.

    Raises: LookupError if the package does not know one; ConfigError like `load_package`.
    """
    package = load_package(benchmark)
    sample = SimpleNamespace(
        prompt=prompt,
        instruction_id_list=[one["id"] for one in constraints],
        kwargs=[dict(one["arguments"]) for one in constraints],
    )
    state = random.getstate()
    random.seed(0)
    try:
        results, _ = package.evaluate_output_for_sample(benchmark, sample, reply[:_MAX_CHARS])
    finally:
        random.setstate(state)
    if reply.strip() and len(results) < len(constraints):
        raise LookupError("no checker for an instruction")
    # No result stands for a blank reply.
    return [(one.strict_pass, one.loose_pass) for one in results] or [(False, False)] * len(constraints)


@functools.cache
def load_package(benchmark: str) -> Any:
    """Return the package, with what it needs of nltk on this machine; nothing is fetched.

    It takes seconds: it imports `datasets`, and reads the letters of languages.
    Raises: ConfigError if something is missing.
    """
    package = import_extra("if_verifiable", "ifeval")
    if package.__version__ != RELEASE:
        raise ConfigError(
            f"task.name={benchmark} is judged by the package {PACKAGE}, and here is {package.__version__}",
            allowed=f"{PACKAGE} {RELEASE}, part of the extra 'ifeval'",
            next_step="pip install 'strop[ifeval]'",
        )
    load_detector()
    import nltk

    try:
        for place in NLTK_DATA[benchmark]:
            nltk.data.find(place)
    except LookupError as error:
        names = " ".join(place.partition("/")[2] for place in NLTK_DATA[benchmark])
        raise ConfigError(
            f"task.name={benchmark} needs data of nltk that is not here: {place}",
            allowed=f"{names} in a folder of NLTK_DATA, or in nltk_data of the home folder",
            next_step=f"python -m nltk.downloader {names}, or copy them from a machine with a network",
        ) from error
    return package
