"""Short Python functions in the schema of MBPP, judged by running their tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from strop.errors import DataError, explain_refusal
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import MbppSpec
from strop.tasks.code.extraction import defines, extract_python, import_lines, module_names, used_names
from strop.tasks.code.outcome import SPARE_VERIFY_S, WALL_S, fence, judged_outcome, no_code_outcome
from strop.tasks.code.python_judge import JudgeJob, JudgeMode, judge_python
from strop.tasks.contract import TaskLimits
from strop.tasks.rows.layout import DataLayout, Row
from strop.tasks.rows.reading import RowReading, SplitExamples, read_examples, require_texts
from strop.tasks.version import hash_version, limit_reply

_MAX_REPLY_TOKENS = 1024
_STOP_STRINGS = ("[DONE]",)
_PROMPT = (
    "{text}\n\nYour code should pass these tests:\n\n```python\n{tests}\n```\n\n"
    "Answer with one fenced block of Python code, and no tests in it."
)
_VERIFIER = "python-statements-1"


class Mbpp:
    """Right if every test passes; the challenge tests of held-out problems count and are not shown.

    `format_ok`: the reply has code that compiles and defines the first tested name.
    """

    name = "mbpp"

    def __init__(self, spec: MbppSpec) -> None:
        self._spec = spec
        limits = TaskLimits(
            max_reply_tokens=_MAX_REPLY_TOKENS,
            stop_strings=_STOP_STRINGS,
            verify_limit_s=WALL_S + SPARE_VERIFY_S,
            verify_keeps_time=True,
        )
        self.limits = limit_reply(limits, spec.max_reply_tokens)

    @cached_property
    def version(self) -> str:
        """Hash over settings, prompt, limits and the ids of all examples; reads the data."""
        return hash_version(self.name, _PROMPT, _VERIFIER, self.limits, self._spec, self._splits.digest)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the problems of a split, in the order of the data.

        Raises: DataError if the data is missing, empty or malformed, or a problem is in both splits.
        """
        return self._splits.of(split)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Give the problem and the visible tests, and ask for one fenced block."""
        tests = "\n".join(example.fields["tests"])
        return (Message(role="user", content=_PROMPT.format(text=example.fields["text"], tests=tests)),)

    def verify(self, example: Example, text: str) -> Outcome:
        """Run the tests over the reply's code.

        Raises: SandboxError if this host has no sandbox of the wanted level, or the judge in it failed.
        """
        fields = example.fields
        entry_point = fields["names"][0]
        code = extract_python(text, entry_point=entry_point)
        if code is None or not defines(code, entry_point):
            return no_code_outcome(code)
        tests = (*fields["tests"], *fields["hidden_tests"])
        job = JudgeJob(
            source=code,
            mode=JudgeMode.STATEMENTS,
            names=tuple(fields["names"]),
            imports=import_lines(fields["setup"]),
            definitions="\n".join(import_lines(example.answer or "")),
            setup=fields["setup"],
            tests=tests,
            num_tests=len(tests),
            wall_s=WALL_S,
        )
        return judged_outcome(code, judge_python(job, min_isolation=self._spec.min_isolation))

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the reference code: fenced, and with the marker that ends it in few-shot prompts."""
        answer = example.answer or ""
        return fence(answer), f"{answer}\n[DONE]"

    @cached_property
    def _splits(self) -> SplitExamples:
        splits = read_examples(
            _READING, self._spec.source, num_train=self._spec.num_train, num_held_out=self._spec.num_held_out
        )
        # What training may learn by heart, evaluation must not ask alone.
        return replace(splits, train=tuple(_without_hidden_tests(example) for example in splits.train))


def _without_hidden_tests(example: Example) -> Example:
    return make_example(example.task, {**example.fields, "hidden_tests": []}, example.answer)


def _to_example(row: Row) -> Example:
    text, answer = require_texts(row, "text", "code")
    tests, hidden = _texts(row, "test_list"), _texts(row, "challenge_test_list")
    setup = str(row.values.get("test_setup_code") or "")
    code = answer.replace("\r\n", "\n")
    defined = module_names(code)
    defined -= module_names("\n".join(import_lines(code)))
    in_tests = used_names("\n".join(tests))
    everywhere = dict.fromkeys((*in_tests, *used_names("\n".join([setup, *hidden]))))
    names = [name for name in everywhere if name in defined]
    if not defined.intersection(in_tests):
        raise DataError(
            explain_refusal(
                f"{row.place}: {len(tests)} tests use {list(in_tests)[:5]}, and its code defines"
                f" {sorted(defined)[:5]}",
                allowed="at least one test of a name that `code` defines, in Python",
                next_step="mend or remove the row",
            )
        )
    fields = {
        "text": text,
        "tests": tests,
        "hidden_tests": hidden,
        "setup": setup.replace("\r\n", "\n"),
        "names": names,
    }
    return make_example("mbpp", fields, code)


def _texts(row: Row, column: str) -> list[str]:
    """Return a column of texts; a missing one is empty.

    Raises: DataError naming the row, if it holds something else.
    """
    values = row.values.get(column)
    values = [] if values is None else values
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise DataError(
            explain_refusal(
                f"{row.place} has a {column} of type {type(values).__name__}",
                allowed="a list of texts",
                next_step="mend or remove the row",
            )
        )
    return [value.replace("\r\n", "\n") for value in values]


_READING = RowReading(
    layout=DataLayout(
        train=("full/train-00000-of-00001.parquet",), held_out=("full/test-00000-of-00001.parquet",)
    ),
    to_example=_to_example,
    question=lambda example: f"{example.fields['text']}\n{example.fields['tests'][0]}",
)
