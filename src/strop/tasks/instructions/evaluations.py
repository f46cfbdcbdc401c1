"""IFEval and IFBench, for evaluation only, judged by the package if-verifiable.

Its verdicts are the published ones, faults included, so its scores can be set beside others. They are not for
training: some rules reward nothing. What it draws at random (an argument that a row leaves out, the guess of
a language) is drawn from a fixed seed here.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import Field

from strop.errors import ConfigError
from strop.rollout import Example, Message, Outcome, make_example
from strop.spec.base import Unhashed
from strop.spec.task import SOURCE_HELP, EvaluationRows
from strop.tasks.instructions.tasks import judged_text, pair_calls
from strop.tasks.prompt import pose
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import RowReading, RowTask, require_texts
from strop.tasks.task import TaskLimits

PACKAGE, RELEASE = "if-verifiable", "0.1.2"
_TOKENIZERS = ("tokenizers/punkt_tab", "tokenizers/punkt")
NLTK_DATA: Mapping[str, Sequence[str]] = {
    "ifeval": _TOKENIZERS[:1],
    "ifbench": (*_TOKENIZERS, "taggers/averaged_perceptron_tagger_eng", "corpora/stopwords"),
}
"""What nltk needs for each; the package would fetch what it misses from the network."""
_LAYOUTS = {
    "ifeval": DataLayout(train=(), held_out=("ifeval_input_data.jsonl",)),
    "ifbench": DataLayout(train=(), held_out=("data/train-00000-of-00001.parquet",)),
}
_PROMPT = "{prompt}"
_MAX_REPLY_TOKENS = 4096
_PATTERN_LIMIT_S = 20.0
"""The package's patterns can take quadratic time on a long reply."""


class IfEvalSpec(EvaluationRows):
    """Prompts with instructions that a program can check: IFEval, for evaluation only."""

    name: Literal["ifeval"]
    source: Unhashed[str] = Field(
        default="google/IFEval", min_length=1, description=SOURCE_HELP.format("google/IFEval")
    )


class IfBenchSpec(EvaluationRows):
    """Prompts with instructions that a program can check: IFBench, for evaluation only."""

    name: Literal["ifbench"]
    source: Unhashed[str] = Field(
        default="allenai/IFBench_test",
        min_length=1,
        description=SOURCE_HELP.format("allenai/IFBench_test"),
    )


class PublishedInstructions(RowTask):
    """Follow every instruction of the prompt. Reward: 1 if all are followed, else 0.

    The score is the published one, strict for ifeval and loose for ifbench, where a reply may also follow an
    instruction without its first line, last line or asterisks.
    `format_ok`: the reasoning has an end, and a text follows it; that text is judged.
    Metrics: `instructions_total`, `instructions_satisfied` (strictly), `instructions_satisfied_loose`,
    `correct_strict` and `correct_loose`.
    """

    def __init__(self, spec: IfEvalSpec | IfBenchSpec) -> None:
        reading = RowReading(
            layout=_LAYOUTS[spec.name],
            to_example=self._to_example,
            question=lambda example: str(example.fields["prompt"]),
        )
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS, max_goldless_frac=1.0, verify_limit_s=_PATTERN_LIMIT_S
        )
        verifier = f"{PACKAGE}-{RELEASE}"
        super().__init__(spec, reading, limits, source=spec.source, prompt=_PROMPT, verifier=verifier)

    def warm_up(self) -> None:
        """Load the package. Raises: ConfigError like `require_package`."""
        require_package(self.name)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the user's text."""
        prompt = example.fields["prompt"]
        return pose(_PROMPT.format(prompt=prompt), base=prompt, thinking=self._spec.thinking)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the package about every instruction. Raises: ConfigError like `require_package`."""
        judged = judged_text(text)
        is_reply = judged is not None and bool(judged.strip())
        verdicts = judge(self.name, example.fields["prompt"], example.fields["constraints"], judged or "")
        strict, loose = ([verdict[place] for verdict in verdicts] for place in (0, 1))
        is_correct = all(strict if self.name == "ifeval" else loose)
        metrics = {
            "instructions_total": float(len(verdicts)),
            "instructions_satisfied": float(sum(strict)),
            "instructions_satisfied_loose": float(sum(loose)),
            "correct_strict": float(all(strict)),
            "correct_loose": float(all(loose)),
        }
        parts: dict[str, float | None] = {"correct": float(is_correct)}
        return Outcome(parts=parts, is_correct=is_correct, format_ok=is_reply, metrics=metrics)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return none: no right reply is known."""
        return ()

    def _to_example(self, row: Row) -> Example:
        (prompt,) = require_texts(row, "prompt")
        columns = [row.values.get(name) for name in ("instruction_id_list", "kwargs")]
        constraints = []
        for instruction_id, arguments in pair_calls(row, "instruction_id_list and kwargs", *columns):
            present = {key: value for key, value in arguments.items() if value is not None}
            constraints.append({"id": instruction_id, "arguments": present})
        require_package(self.name)
        try:
            judge(self.name, prompt, constraints, prompt)
        except Exception as error:
            raise bad_row(
                f"{row.place} has the instructions {constraints!s:.300} ({type(error).__name__}: {error})",
                allowed=f"instructions and arguments by which {PACKAGE} can judge a reply",
            ) from error
        return make_example(self.name, {"prompt": prompt, "constraints": constraints}, None)


def judge(
    benchmark: str, prompt: str, constraints: Sequence[Mapping[str, Any]], reply: str
) -> list[tuple[bool, bool]]:
    """Return the strict and the loose verdict on each instruction.

    Raises: LookupError if the package does not know one; ConfigError like `require_package`.
    """
    require_package(benchmark)
    package = importlib.import_module("if_verifiable")
    kind = package.IFEvalSample if benchmark == "ifeval" else package.IFBenchSample
    sample = kind(
        key=0,
        prompt=prompt,
        instruction_id_list=[one["id"] for one in constraints],
        kwargs=[dict(one["arguments"]) for one in constraints],
    )
    state = random.getstate()
    random.seed(0)
    try:
        results, _ = package.evaluate_output_for_sample(benchmark, sample, reply)
    finally:
        random.setstate(state)
    if reply.strip() and len(results) < len(constraints):
        raise LookupError("no checker for an instruction")
    # No result stands for a blank reply.
    return [(one.strict_pass, one.loose_pass) for one in results] or [(False, False)] * len(constraints)


@functools.cache
def require_package(benchmark: str) -> None:
    """Require the package, and what it needs of nltk, on this machine; nothing is fetched.

    Raises: ConfigError.
    """
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = "none"
    if found != RELEASE:
        raise ConfigError(
            f"task.name={benchmark} is judged by the package {PACKAGE}, and here is {found}",
            allowed=f"{PACKAGE} {RELEASE}, part of the extra 'ifeval'",
            next_step="pip install 'strop[ifeval]'",
        )
    import langdetect
    import nltk

    missing: list[str] = []
    for place in NLTK_DATA[benchmark]:
        try:
            nltk.data.find(place)
        except LookupError:
            missing.append(place)
    if missing:
        names = " ".join(place.partition("/")[2] for place in missing)
        raise ConfigError(
            f"task.name={benchmark} needs data of nltk that is not here: {names}",
            allowed="its data packages in a folder of NLTK_DATA, or in nltk_data of the home folder",
            next_step=f"python -m nltk.downloader {names}, or copy them from a machine with a network",
        )
    langdetect.DetectorFactory.seed = 0
