"""Tasks whose replies must follow instructions: rlvr-ifeval and if-multi; for evaluation ifeval and ifbench.

The prompt is only the user's text, and only the model's own terminator ends a reply: an instruction may
require any text that a stop string would cut. The text behind the reasoning is judged.
"""

from __future__ import annotations

import ast
import functools
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

from strop.errors import ConfigError
from strop.rollout import Example, Outcome, make_example
from strop.tasks.answers import text_after_thinking
from strop.tasks.instructions.rules import bind, has_substance, load_detector
from strop.tasks.registry import import_extra
from strop.tasks.rows.layout import Row, bad_row
from strop.tasks.rows.row_task import PublishedRows, RowTask, text_of
from strop.tasks.task import right_or_wrong

Constraint = Mapping[str, Any]
"""An instruction as examples have it: its `id`, and its `arguments` that are present."""


class InstructionSpec(PublishedRows):
    """Prompts with instructions that a program can check."""

    name: Literal["rlvr-ifeval", "if-multi", "ifeval", "ifbench"]


class InstructionTask(RowTask):
    """Follow every instruction of the prompt. Reward: the share that is followed; right: all.

    No right reply is known. A reply that only repeats the prompt follows none.
    `format_ok`: the reasoning has an end, and a text follows it.
    Metrics: `instructions_total`, `instructions_satisfied`.
    """

    def __init__(self, spec: InstructionSpec, verifier: str = "instructions-6", **limits: Any) -> None:
        load_detector()
        super().__init__(spec, verifier, max_goldless_frac=1.0, **limits)

    def to_example(self, row: Row) -> Example:
        """Read a row."""
        prompt, constraints = self.read(row)
        return make_example(self.name, {"prompt": prompt, "constraints": constraints}, None)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the rule of every instruction.

        Raises: DataError if an instruction of the example cannot be judged.
        """
        place = f"example {example.example_id} of task {example.task}"
        rules = [bind(one["id"], one["arguments"], place=place) for one in example.fields["constraints"]]
        # Some prompts ask for these tags.
        judged = (text_after_thinking(text) or "").replace("<answer>", "").replace("</answer>", "").strip()
        is_judged = bool(judged) and not is_echo(judged, example.fields["prompt"])
        followed = [is_judged and rule(judged) for rule in rules]
        num_followed = float(sum(followed))
        return Outcome(
            parts={"satisfied_frac": num_followed / len(followed)},
            is_correct=all(followed),
            format_ok=bool(judged),
            metrics={"instructions_total": float(len(followed)), "instructions_satisfied": num_followed},
        )

    def read(self, row: Row) -> tuple[str, list[Constraint]]:
        """Return a row's prompt and instructions, of `messages`, one of the user's, and `ground_truth`.

        Of RLVR-IFeval it is a table with `func_name` and arguments; of multi-constraint sets a table, in a
        list, with lists of instructions and of arguments.
        Raises: DataError naming the row, if it is malformed or an instruction cannot be judged.
        """
        match row.values.get("messages"):
            case [{"role": "user", "content": str(prompt)}] if prompt.strip():
                pass
            case other:
                raise bad_row(f"{row.place} has messages {str(other)[:120]!r}", "one text of role user")
        table = _read_ground_truth(row)
        if isinstance(name := table.pop("func_name", None), str):
            known = self._data.functions.get(name, {})
            given = {known.get(key, key): one for key, one in table.items()}
            constraints = pair_constraints(row, [known.get("id", name)], [given])
        else:
            constraints = pair_constraints(row, table.get("instruction_id"), table.get("kwargs"))
        for one in constraints:
            bind(one["id"], one["arguments"], place=row.place)
        return prompt, constraints


def pair_constraints(row: Row, ids: object, arguments: object) -> list[Constraint]:
    """Return instructions from two lists of a row. Raises: DataError naming the row for others."""
    tables = arguments if isinstance(arguments, list) else []
    is_formed = all(isinstance(one, Mapping | None) for one in tables)
    if not is_formed or not isinstance(ids, list) or not 0 < len(ids) == len(tables):
        raise bad_row(
            f"{row.place} has instructions {str(ids)[:80]} with arguments {str(arguments)[:80]}",
            "two lists of equal length: of ids, and of tables or null",
        )
    return [
        {"id": one, "arguments": {key: value for key, value in (table or {}).items() if value is not None}}
        for one, table in zip(ids, tables, strict=True)
    ]


def _read_ground_truth(row: Row) -> dict[str, Any]:
    """Read a table, or a list with one, as JSON or as a Python literal."""
    text = str(row.values.get("ground_truth"))
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            match read(text):
                case dict(table) | [dict(table)]:
                    return dict(table)
    raise bad_row(
        f"{row.place} has ground_truth {text[:120]!r}",
        "a table, or a list with one, as JSON or a Python literal",
    )


def is_echo(text: str, prompt: str) -> bool:
    """Whether a reply repeats the whole prompt and adds almost nothing."""
    reply, question = " ".join(text.split()), " ".join(prompt.split())
    return reply.startswith(question) and not has_substance(reply[len(question) :])


# IFEval and IFBench, for evaluation only, judged by the package if-verifiable. Its verdicts are the published
# ones, faults included, so its scores can be set beside others. They are not for training: some rules reward
# nothing. What it draws at random (an argument that a row leaves out, the guess of a language) has a fixed
# seed here.

PACKAGE, RELEASE = "if-verifiable", "0.1.2"
_TOKENIZERS = ("tokenizers/punkt_tab", "tokenizers/punkt")
NLTK_DATA: Mapping[str, Sequence[str]] = {
    "ifeval": _TOKENIZERS[:1],
    "ifbench": (*_TOKENIZERS, "taggers/averaged_perceptron_tagger_eng", "corpora/stopwords"),
}
"""What nltk needs for each; the package would fetch what it misses from the network."""
_MAX_CHARS = 32_768
"""Beginning of a reply that is judged: twice what its tokens hold of English."""


class PublishedInstructions(InstructionTask):
    """Follow every instruction of the prompt. Reward: 1 if all are followed, else 0.

    The score is the published one, strict for ifeval and loose for ifbench, where a reply may also follow an
    instruction without its first line, last line or asterisks.
    `format_ok`: the reasoning has an end, and a text follows it; that text is judged.
    Metrics: `instructions_total`, `instructions_satisfied` (strictly), `instructions_satisfied_loose`,
    `correct_strict` and `correct_loose`.
    """

    def __init__(self, spec: InstructionSpec) -> None:
        # The package's patterns take quadratic time on some replies, such as a thousand opening brackets.
        super().__init__(spec, f"{PACKAGE}-{RELEASE}", verify_limit_s=5.0)

    def warm_up(self) -> None:
        """Load the package and its rules. Raises: ConfigError like `load_package`."""
        judge(self.name, "", [], "a")

    async def verify(self, example: Example, text: str) -> Outcome:
        """Ask the package about every instruction. Raises: ConfigError like `load_package`."""
        said = text_after_thinking(text) or ""
        # White space behind the reasoning is not part of the reply.
        judged = said if said == text else said.lstrip()
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


def judge(name: str, prompt: str, constraints: Sequence[Constraint], reply: str) -> list[tuple[bool, bool]]:
    """Return the strict and the loose verdict on each instruction.

    Raises: LookupError if the package does not know one; ConfigError like `load_package`.
    """
    package = load_package(name)
    sample = SimpleNamespace(
        prompt=prompt,
        instruction_id_list=[one["id"] for one in constraints],
        kwargs=[dict(one["arguments"]) for one in constraints],
    )
    state = random.getstate()
    random.seed(0)
    try:
        results, _ = package.evaluate_output_for_sample(name, sample, reply[:_MAX_CHARS])
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
