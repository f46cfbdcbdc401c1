"""The user's own rows: how they are read, asked and judged, and what of them is refused by name."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import CheckRefused, ConfigError, DataError, find_place
from strop.rollout import FailureOwner, Split
from strop.tasks import Task, build_task, task_builder
from strop.tasks.judging import Judge
from strop.tasks.rows.judged_rows import RowsSpec
from strop.tasks.task import describe_counts
from tests.fixtures.judging import failed, run_self_test
from tests.fixtures.judging import judge_replies as judge
from tests.fixtures.row_files import write_rows

ROWS: Sequence[dict[str, Any]] = [
    {"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(2, 42)
]
PLAIN = "def score(reply, answer, **columns):\n    return reply.strip() == answer\n"


def spec_of(tmp_path: Path, rows: Sequence[Any] = ROWS, code: str = PLAIN, **settings: Any) -> RowsSpec:
    write_rows(tmp_path / "q.jsonl", rows)
    (tmp_path / "reward.py").write_text(code)
    given: dict[str, Any] = {
        "source": str(tmp_path / "q.jsonl"),
        "prompt": "question",
        "answer": "answer",
        "reward": f"{tmp_path / 'reward.py'}:score",
    }
    return RowsSpec(name="rows", **{**given, **settings})


def task_of(tmp_path: Path, *arguments: Any, **settings: Any) -> Task:
    return build_task(spec_of(tmp_path, *arguments, **settings))


def test_rows_are_split_asked_and_judged(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    task = build_task(spec)
    assert [len(task.examples(split)) for split in Split] == [36, 4]
    first = task.examples(Split.TRAIN)[0]
    assert [message.text for message in task.render(first)] == [first.fields["question"]]
    right, wrong = judge(spec, f" {first.answer}\n", "no")
    assert (right.parts, right.is_correct, wrong.parts, wrong.is_correct) == (
        {"score": 1.0},
        True,
        {"score": 0.0},
        False,
    )
    assert run_self_test(task, task.examples(Split.TRAIN)[:8]) == []


@pytest.mark.parametrize(
    ("prompt", "row", "expected"),
    [
        ("question", {"question": "Why?"}, [("user", "Why?")]),
        ("{question} Be {how}.", {"question": "Why?", "how": "brief"}, [("user", "Why? Be brief.")]),
        ("{{x}} {n}", {"n": 4.5}, [("user", "{x} 4.5")]),
        (
            "chat",
            {"chat": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
            [("system", "Be brief."), ("user", "Why?")],
        ),
    ],
)
def test_a_prompt_is_a_column_a_template_or_a_chat(
    tmp_path: Path, prompt: str, row: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    # A second row, because both splits need one.
    other = {key: [{"role": "user", "content": "b"}] if key == "chat" else "b" for key in row}
    task = task_of(tmp_path, [row, other], prompt=prompt, answer=None, code="def score(reply): ...")
    asked = [
        [(message.role, message.text) for message in task.render(example)]
        for split in Split
        for example in task.examples(split)
    ]
    assert expected in asked


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("True", {"score": 1.0}),
        ("0.25", {"score": 0.25}),
        ("None", {"score": None}),
        ("{'right': True, 'brief': 0.5}", {"score.right": 1.0, "score.brief": 0.5}),
        ("__import__('numpy').float32(0.5)", {"score": 0.5}),
    ],
)
def test_a_function_returns_numbers_or_parts(
    tmp_path: Path, returned: str, expected: dict[str, float | None]
) -> None:
    (found,) = judge(spec_of(tmp_path, code=f"def score(reply): return {returned}\n"), "x")
    assert found.parts == expected
    assert found.failure is None
    assert found.is_scored is (None not in expected.values())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 'good'", ["TypeError", "reward.py:score (line 1) returned 'good'", "a finite number"]),
        ("return float('nan')", ["ValueError", "returned nan", "a finite number"]),
        ("return [1.0]", ["TypeError", "a list"]),
        ("return {}", ["ValueError", "an empty table"]),
        ("return {'a': 'b'}", ["TypeError", "returned 'b'"]),
        ("return {}['missing']", ["KeyError", "missing", 'reward.py", line 2']),
        ("import sys; sys.exit(0)", ["SystemExit"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ["ended"]),
        ("return bytearray(1 << 36)", ["MemoryError"]),
    ],
)
def test_a_function_that_fails_leaves_its_reply_unscored(tmp_path: Path, body: str, words: list[str]) -> None:
    (found,) = judge(spec_of(tmp_path, code=f"def score(reply, answer):\n    {body}\n"), "x")
    assert found.failure is not None
    assert (found.reward, found.is_correct) == (None, None)
    said = f"{found.failure.kind} {found.failure.detail}"
    assert all(word in said for word in words), said


def test_a_function_that_hangs_prints_and_forks_costs_its_own_rollout(tmp_path: Path) -> None:
    code = """
import os, sys, time

def score(reply, answer):
    print("x" * 100000)
    sys.stderr.write("x" * 100000)
    if reply == "fork" and os.fork() == 0:
        time.sleep(600)
    while reply == "hang":
        time.sleep(1)
    return 1
"""
    found = judge(spec_of(tmp_path, code=code, judge_limit_s=0.5), "a", "hang", "fork", "b")
    kinds = [None if one.failure is None else one.failure.kind for one in found]
    assert kinds == [None, "verifier_timeout", None, None]
    assert [one.reward for one in found] == [1.0, None, 1.0, 1.0]


VERIFIES = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
from math_verify import parse, verify

def judge(reply, answer):
    return verify(parse(answer), parse(reply))

def plain(reply, answer):
    return judge(reply, answer)

def trl(completions, answer, **columns):
    return [judge(reply, right) for reply, right in zip(completions, answer)]

def thread(reply, answer):
    with ThreadPoolExecutor() as pool:
        return pool.submit(judge, reply, answer).result()

async def to_thread(reply, answer):
    return await asyncio.to_thread(judge, reply, answer)
"""


@pytest.mark.parametrize("name", ["plain", "trl", "thread", "to_thread"])
def test_math_verify_gives_its_value_or_none_with_file_and_line(tmp_path: Path, name: str) -> None:
    """Its alarm needs the main thread; elsewhere it must not become a 0."""
    right, wrong = judge(
        spec_of(tmp_path, code=VERIFIES, reward=f"{tmp_path / 'reward.py'}:{name}"), "$4$", "5"
    )
    if name in ("plain", "trl"):
        assert (right.reward, wrong.reward) == (1.0, 0.0)
        return
    for lost in (right, wrong):
        assert (lost.reward, *failed(lost)) == (None, FailureOwner.TASK, "ValueError")
        assert lost.failure is not None
        assert find_place(lost.failure.detail) == "reward.py:7"


def test_an_async_function_is_awaited(tmp_path: Path) -> None:
    code = "import asyncio\nasync def score(reply):\n    await asyncio.sleep(0)\n    return 0.5\n"
    assert judge(spec_of(tmp_path, code=code), "x")[0].reward == 0.5


CHAT = """
def score(prompts, completions, **kwargs):
    return [float(len(one[0]["content"])) + 10 * len(prompts[0]) for one in completions]
"""


def test_a_function_written_for_trl_gets_messages_of_a_chat(tmp_path: Path) -> None:
    chats = [{"chat": [{"role": "user", "content": text}]} for text in ("a", "b")]
    spec = spec_of(tmp_path, chats, CHAT, prompt="chat", answer=None, max_reward=14.0)
    assert judge(spec, "four")[0].reward == 14.0


def test_several_rewards_are_weighted_and_added(tmp_path: Path) -> None:
    rewards = ["exact", f"{tmp_path / 'reward.py'}:score"]
    code = "def score(reply): return len(reply) / 2\n"
    spec = spec_of(tmp_path, code=code, reward=rewards, reward_weights=[1.0, 0.5], max_reward=1.5)
    right = build_task(spec).examples(Split.TRAIN)[0].answer or ""
    found, wrong = judge(spec, right, "no")
    assert found.parts == {"exact": 1.0, "score": 0.5 * len(right) / 2}
    assert (found.is_correct, wrong.is_correct, wrong.reward) == (len(right) == 2, False, 0.5)


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        (
            "exact",
            "two  words",
            ["two words", " two words\n", "<think>no</think>two words"],
            ["two", "<think>two words"],
        ),
        ("exact", True, ["True", "true"], ["False", "1"]),
        ("contains", "TRUE", ["It is true."], ["It is untrue."]),
        ("exact", 18.0, ["18"], ["180"]),
        ("contains", "4", ["It is 4.", "4"], ["42", "14", "four"]),
        ("math", "1/2", ["\\boxed{0.5}", "It is $\\frac{1}{2}$"], ["\\boxed{2}", ""]),
        ("math", 0.5, ["\\boxed{1/2}"], ["\\boxed{5}"]),
        (
            "math",
            r"\frac{1}{2}x^2+x",
            [r"\boxed{x + \frac{x^2}{2}}", "It is $x(x+2)/2$."],
            [r"\boxed{x^2/2}"],
        ),
        ("number", "1,200", ["So 3 boxes cost $1200."], ["1201", ""]),
        *(
            ("math", gold, [r"\boxed{72}", "The answer is 72."], [r"\boxed{24}"])
            for gold in ("He has 48+24=72.\n#### 72", "<answer>72</answer>", r"So \boxed{72}.", "**72**")
        ),
        ("exact", [[1, 2], [3]], ["[[1, 2], [3]]"], ["[1, 2]"]),
        ("letter", 1, ["(B)", "The answer is B."], ["A or B", "C"]),
    ],
)
def test_built_in_rewards(
    tmp_path: Path, reward: str, answer: Any, right: list[str], wrong: list[str]
) -> None:
    rows = [{"question": f"{number}?", "answer": answer} for number in range(4)]
    spec = spec_of(tmp_path, rows, reward=reward)
    assert [one.reward for one in judge(spec, *right, *wrong)] == [1.0] * len(right) + [0.0] * len(wrong)
    # The others in this process: their time is bounded by the text, and that of sympy is not.
    assert (build_task(spec).limits.verify_limit_s is None) is (reward != "math")


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        (None, {"prompt": "problem"}, ["row 1", "problem", "question, answer"]),
        (None, {"prompt": "Solve: {problem}"}, ["row 1", "no problem"]),
        (None, {"answer": "gold"}, ["row 1", "no gold"]),
        (None, {"gold": "#### {solution}"}, ["row 1", "no solution"]),
        (None, {"reward": "python-tests"}, ["row 1", "python-tests"]),
        ({"other": 1}, {}, ["row 41", "no answer and question"]),
        ({"question": 3, "answer": "3"}, {}, ["row 41"]),
        ({"question": " ", "answer": "3"}, {}, ["row 41"]),
        ({"question": [{"role": "robot", "content": ""}], "answer": "3"}, {}, ["row 41", "assistant"]),
        ({**ROWS[0], "answer": "5"}, {}, ["row 41", "row 1", "'5'"]),
        *(
            ({"question": "Who?", "answer": one}, {"reward": reward}, ["row 41", reward])
            for reward, answers in (
                ("exact", [{"a": 1}, ["a"]]),
                ("contains", [["a", "b"]]),
                *(("math", ["a " * 21]), ("number", ["5!"])),
            )
            for one in answers
        ),
    ],
)
def test_rows_and_settings_that_do_not_fit_are_refused_by_row(
    tmp_path: Path, row: dict[str, Any] | None, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(DataError) as refusal:
        task_of(tmp_path, [*ROWS, *([row] if row else [])], **settings).examples(Split.TRAIN)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    "template", ["{question", "}", "{}", "{0}", "{question!r}", "{question:>5}", "{a.b}", "{a[0]}"]
)
def test_a_template_names_columns_alone(tmp_path: Path, template: str) -> None:
    with pytest.raises((ValueError, DataError), match=r"task\.prompt=|row 1 has no"):
        task_of(tmp_path, prompt=template).examples(Split.TRAIN)


def test_an_answer_may_stand_in_a_table(tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "truth": {"value": str(number)}} for number in range(9)]
    task = task_of(tmp_path, rows, answer="truth.value", reward="number")
    example = task.examples(Split.TRAIN)[0]
    assert example.answer == example.fields["question"].removesuffix("?")
    with pytest.raises(DataError, match=r"row 1 has no truth\.other"):
        task_of(tmp_path, rows, answer="truth.other", reward="number").examples(Split.TRAIN)


def test_a_row_without_an_answer_is_left_out_only_where_one_is_compared(tmp_path: Path) -> None:
    unknown = [{"question": "Who knows?", "answer": None}, {"question": "Who?", "answer": float("nan")}]
    rows = [*ROWS, *unknown]
    assert describe_counts(task_of(tmp_path, rows, reward="exact")) == "rows left out, without an answer: 2"
    task = task_of(tmp_path, rows)
    assert describe_counts(task) == ""
    assert any(example.answer is None for split in Split for example in task.examples(split))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def score(text): ...", ["takes text, and no reply", "completions"]),
        ("def score(): ...", ["takes nothing, and no reply"]),
        ("def score(reply, hint): ...", ["has no hint"]),
        ("def score(completions, completion_ids): ...", ["has no completion_ids"]),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_runs(
    tmp_path: Path, code: str, words: list[str]
) -> None:
    with pytest.raises((ConfigError, DataError)) as refusal:
        task_of(tmp_path, code=code).examples(Split.TRAIN)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_built_in_reward_without_answers_is_refused(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": ""} for n in range(4)]
    for answer in ("answer", None):
        with pytest.raises(
            DataError, match="0 training and 0 held-out examples; rows left out: 4 without an"
        ):
            task_of(tmp_path, rows, reward="exact", answer=answer).examples(Split.TRAIN)


def test_the_version_covers_code_data_and_settings(tmp_path: Path) -> None:
    seen = {task_of(tmp_path).version}
    changed = [
        task_of(tmp_path, ROWS[:-1]).version,
        task_of(tmp_path, code=PLAIN + "\n").version,
        task_of(tmp_path, prompt="{question} ").version,
        task_of(tmp_path, max_reward=2.0).version,
        task_of(tmp_path, reward="exact").version,
        task_of(tmp_path, reward_weights=[0.5]).version,
    ]
    assert len(seen.union(changed)) == 7
    assert task_of(tmp_path).version in seen


def test_what_json_cannot_hold_is_kept_from_functions(tmp_path: Path) -> None:
    import datetime as dt

    path = tmp_path / "q.parquet"
    rows = [
        {"question": f"{n}?", "answer": str(n), "day": dt.date(2026, 1, 1), "raw": [b"x"]} for n in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    columns = task_of(tmp_path, source=str(path)).examples(Split.TRAIN)[0].fields
    assert (columns["day"], columns["raw"]) == ("2026-01-01", [None])


def test_an_edit_does_not_reach_who_judges_already(tmp_path: Path) -> None:
    judged_by = tmp_path / "judged-by"
    code = f"""
import os

def score(reply, answer):
    with open({str(judged_by)!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{os.getsid(0)}}\\n")
    return 1.0
"""
    spec = spec_of(tmp_path, code=code)

    async def work() -> tuple[list[float | None], str]:
        task = build_task(spec)
        example = task.examples(Split.TRAIN)[0]
        found = Judge(task, task_builder(spec))
        try:
            rewards = [(await found.judge(example, "")).reward]
            (tmp_path / "reward.py").write_text(code.replace("1.0", "0.0"))
            rewards.append((await found.judge(example, "")).reward)
            worker, server = map(int, judged_by.read_text().splitlines()[0].split())
            # Another worker takes its place.
            os.kill(worker, signal.SIGKILL)
            rewards.append((await found.judge(example, "")).reward)
            # What workers are forked from has to be made anew.
            os.kill(server, signal.SIGKILL)
            with pytest.raises(CheckRefused) as refused:
                # Its last worker goes a moment later.
                await asyncio.gather(*[found.judge(example, "") for _ in range(8)])
            return rewards, str(refused.value)
        finally:
            await found.close()

    rewards, refusal = asyncio.run(work())
    assert rewards == [1.0, 1.0, 1.0]
    assert len(set(judged_by.read_text().splitlines())) == 2
    assert f"{tmp_path / 'reward.py'} was edited since it was looked at" in refusal
