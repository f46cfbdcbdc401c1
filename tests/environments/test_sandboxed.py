"""Environments whose class lives in a sandbox: the same rollouts, and what code may do to its process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.environments import choose_environment, run_rollout, sandboxed
from strop.environments.printed import forget_prints, keep_prints
from strop.errors import ConfigError, SandboxRefused
from strop.rollout import FailureOwner, Rollout, Split
from strop.sandbox.choose import make_backend
from strop.sandbox.contract import MIB, SandboxSpec
from strop.spec.reader import load_spec
from strop.tasks import Task, self_test
from strop.tokenizer import Tokenizer
from tests.environments.test_worlds import COUNTING, attempt, build, call, plan_of, tokenizer_of
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.sandboxes import DOCKER, needs_bubblewrap, needs_podman

pytestmark = needs_bubblewrap
INSIDE = "environment.lane=sandbox"

WALK = '''
import random
from strop.environments import Done

class Walk:
    """Walk to a place that the seed draws, told in words and messages."""

    max_turns = 4

    def examples(self, split):
        return [{"start": 3 if split == "train" else 4, "hard": {"list": [1, None, 2.5]}}]

    def reset(self, example, seed):
        print("reset", seed)
        self.draw = random.Random(f"{example.example_id}/{seed}")
        self.at, self.goal = example.fields["start"], self.draw.randint(0, 9)
        return [{"role": "system", "content": "Walk."}, {"role": "user", "content": f"You are at {self.at}."}]

    async def step(self, text):
        self.at += {"left": -1, "right": 1}.get(text.strip(), 0)
        if text == "stop":
            return Done("stopped")
        if text == "list":
            return [{"role": "user", "content": f"Drawn: {self.draw.random()}"}, "And now?"]
        return {"at": self.at, "drawn": self.draw.random()}

    def score(self):
        return {"near": 0.1 * (10 - abs(self.at - self.goal)), "far": None}
'''


def told(rollout: Rollout) -> tuple[Any, ...]:
    """Return all of a rollout but its times."""
    turns = [(one.role, one.text, one.token_ids.tolist(), one.finish_reason) for one in rollout.turns]
    outcome = rollout.outcome
    return turns, outcome.parts, outcome.metrics, outcome.is_correct, outcome.format_ok, outcome.truncated


def kind_of(rollout: Rollout) -> tuple[FailureOwner, str] | None:
    failure = rollout.outcome.failure
    return None if failure is None else (failure.owner, failure.kind)


@pytest.mark.parametrize(
    ("source", "name", "scripts"),
    [
        (
            COUNTING,
            "Counting",
            [
                [call("add", number=3), call("add", number=-1, times=2), "It is done."],
                [call("break_it", how="told"), call("break_it", how="much"), call("add", number=1), "So."],
                [call("add", number="three"), call("nothing"), "```tool\n{", "Now."],
                [call("break_it", how="surrogate"), call("break_it", how="bytes"), call("give_up")],
                [call("wait", seconds=0.01), call("break_it", how="raise")],
                [call("break_it", how="object")],
            ],
        ),
        (WALK, "Walk", [["left", "list", "right", "what?"], ["right", "stop"]]),
    ],
)
def test_both_lanes_give_identical_rollouts(
    tmp_path: Path, source: str, name: str, scripts: list[list[str]]
) -> None:
    tokenizer = tokenizer_of(tmp_path)
    here, inside = build(source, name=name), build(source, INSIDE, name=name)
    for seed, replies in enumerate(scripts):
        one, other = (attempt(task, tokenizer, replies, run_seed=seed) for task in (here, inside))
        assert told(one) == told(other)
        assert kind_of(one) == kind_of(other)


@pytest.mark.parametrize(
    "backend",
    [
        "process",
        pytest.param("podman", marks=[needs_podman, pytest.mark.slow]),
        DOCKER,
        pytest.param("remote", marks=pytest.mark.slow),
    ],
)
def test_every_backend_gives_identical_rollouts(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, backend: str
) -> None:
    words = [INSIDE, f"environment.sandbox={backend}"]
    words += {"process": ["environment.min_isolation=rlimit"], "remote": ["runtime.serve=here"]}.get(
        backend, []
    )
    if backend == "remote":
        request.getfixturevalue("service")
    for source, name, replies in (
        (WALK, "Walk", ["left", "list", "right", "what?"]),
        (
            COUNTING,
            "Counting",
            [call("break_it", how="told"), call("add", number="x"), call("add", number=1)],
        ),
        (COUNTING, "Counting", [call("break_it", how="raise")]),
    ):
        here, inside = build(source, name=name), build(source, *words, name=name)
        one, other = (attempt(task, tokenizer, replies, run_seed=1) for task in (here, inside))
        assert told(one) == told(other)
        assert kind_of(one) == kind_of(other)
    task = build(NASTY, *words, name="Nasty")
    for what, kinds in (("_exit", {"exited"}), ("forge", {"forged"})):
        failure = attempt(task, tokenizer, [call("do", what=what)]).outcome.failure
        assert failure is not None
        assert (failure.owner, failure.kind in kinds) == (FailureOwner.TASK, True), failure


@pytest.mark.slow
def test_a_service_prepares_sandboxes_for_strops_own_program_alone(service: None) -> None:
    async def make() -> None:
        await make_backend("remote").create_prepared(SandboxSpec(), "os.path")

    with pytest.raises(SandboxRefused) as refused:
        asyncio.run(make())
    assert refused.value.kind == "limits"


NASTY = '''
import asyncio, os, signal, sys, time

class Nasty:
    """Its tool does what no tool should."""

    max_turns = 3

    def examples(self, split):
        return [{"place": split}]

    def reset(self, example, seed):
        self.is_well = False
        return "Go."

    def fine(self) -> str:
        """Do it."""
        self.is_well = True
        return "well"

    def do(self, what: str) -> str:
        """Do it."""
        print("about to", what)
        if what == "compute":
            while True: pass
        if what == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        if what == "print":
            while True: os.write(1, b"x" * 65536)
        if what == "_exit": os._exit(0)
        if what == "exit": sys.exit("enough")
        if what == "signal": os.kill(os.getpid(), signal.SIGKILL)
        if what == "sandbox":
            if os.fork() == 0: os.kill(-1, signal.SIGKILL)
            time.sleep(60)
        if what == "memory": self.kept = [b'x' * (1 << 24) for _ in range(1000)]
        if what == "close": os.closerange(3, 256)
        if what == "forge":
            for descriptor in range(3, 256):
                try:
                    os.write(descriptor, b"\\0\\0\\0\\2" + bytes(8) + b"{}")
                except OSError:
                    pass
        if what == "junk":
            for descriptor in range(3, 256):
                try:
                    os.write(descriptor, b"junk" * 100)
                except OSError:
                    pass
        return "done"

    def score(self):
        return self.is_well
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("compute", {"tool_timeout"}),
        ("ignore", {"tool_timeout"}),
        ("print", {"output_flood"}),
        ("_exit", {"exited"}),
        ("exit", {"SystemExit"}),
        ("signal", {"killed"}),
        ("sandbox", {"killed", "sandbox_killed"}),
        # The kernel's limit ends it where there is one; else Python is refused memory by the watch's kill.
        ("memory", {"out_of_memory", "over_limit", "killed"}),
        ("close", {"OSError", "exited", "killed", "disconnected"}),
        ("forge", {"forged"}),
        ("junk", {"forged"}),
    ],
)
def test_what_a_tool_does_to_its_process_is_no_score_and_holds_up_nobody(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, what: str, kinds: set[str]
) -> None:
    limits = replace(sandboxed.LIMITS, memory_bytes=512 * MIB)
    monkeypatch.setattr(sandboxed, "LIMITS", limits)
    limit_s = 1.5 if "tool_timeout" in kinds else 60.0
    attempts = (
        (build(NASTY, INSIDE, f"environment.tool_limit_s={limit_s}", name="Nasty"), call("do", what=what)),
        (build(NASTY, INSIDE, name="Nasty"), call("fine")),
    )

    async def both() -> list[Rollout]:
        return await asyncio.gather(
            *(
                run_rollout(
                    choose_environment(task)(),
                    DummyEngine(tokenizer, [reply, "So."]),
                    tokenizer,
                    plan_of(task),
                )
                for task, reply in attempts
            )
        )

    bad, good = asyncio.run(both())
    assert bad.outcome.reward is None
    failure = bad.outcome.failure
    assert failure is not None
    assert failure.owner is FailureOwner.TASK
    assert failure.kind in kinds, failure
    assert good.outcome.reward == 1.0


def test_a_step_a_reset_and_a_score_have_their_time_too(tokenizer: Tokenizer) -> None:
    for edit, kind in (
        (("self.is_well = False", "while example.example_id and seed: time.sleep(1)"), "reset_timeout"),
        (("return self.is_well", "time.sleep(600)"), "score_timeout"),
    ):
        task = build(NASTY.replace(*edit), INSIDE, "environment.tool_limit_s=1.5", name="Nasty")
        failure = attempt(task, tokenizer, ["So."], run_seed=1).outcome.failure
        assert failure is not None
        assert failure.kind == kind


def test_a_class_sees_its_sources_and_packages_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = f"""
    import os, socket
    from strop.environments import ToolError

    class Looking:
        max_turns = 2
        def examples(self, split): return [{{"split": split}}]
        def reset(self, example, seed): return "Look."
        def step(self, text):
            found = [path for path in ({str(tmp_path)!r}, "/home", "/etc/passwd") if os.path.exists(path)]
            try:
                socket.create_connection(("127.0.0.1", 22), 1)
                found.append("network")
            except OSError:
                pass
            left = [name for name in os.listdir(".") if name == "left"]
            open("left", "w").close()
            return str([found, left, sorted(os.environ), os.listdir("sources")])
        def score(self): return 1.0
    """
    task = build(source, INSIDE, name="Looking")
    for _ in range(2):
        rollout = attempt(task, tokenizer, ["a", "b"])
        first, second = rollout.turns[2].text, rollout.outcome.reward
        names = "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR']"
        assert f"[[], [], {names}, ['own.py']]" in first
        assert second == 1.0


def test_a_class_that_cannot_be_imported_inside_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("data")
    source = f"DATA = open({str(tmp_path / 'beside.txt')!r}).read()\n" + WALK
    task = build(source, INSIDE, name="Walk")
    with pytest.raises(ConfigError, match=r"cannot be imported: FileNotFoundError.*own.py:1"):
        asyncio.run(self_test(task, task.examples(Split.TRAIN)))


@pytest.mark.parametrize("words", [(), (INSIDE,)])
def test_an_opening_that_another_process_would_not_give_is_refused(words: tuple[str, ...]) -> None:
    """Of a set, every process makes an order of its own."""
    source = WALK.replace('"Walk."', "f\"{hash('walk')}\"")
    task = build(source, *words, name="Walk")
    with pytest.raises(ConfigError, match="in another process"):
        asyncio.run(self_test(task, task.examples(Split.TRAIN)))


@pytest.fixture
def printed_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "environments.log"
    keep_prints(path)
    yield path
    forget_prints()


def test_what_a_class_prints_is_kept(printed_file: Path, tokenizer: Tokenizer) -> None:
    rollout = attempt(build(WALK, INSIDE, name="Walk"), tokenizer, ["left", "stop"])
    task = build(NASTY, INSIDE, name="Nasty")
    attempt(task, tokenizer, [call("do", what="_exit")])
    lines = printed_file.read_text().splitlines()
    assert f"Walk {rollout.example.example_id} seed" in lines[0]
    assert lines[1].startswith("reset ")
    assert lines[-1] == "about to _exit"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("environment.sandbox=podman",), "have no sandbox"),
        ((INSIDE, "environment.sandbox=remote"), "no sandbox service"),
    ],
)
def test_a_sandbox_that_no_attempt_would_have_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(WALK, *words, name="Walk")


def test_an_environment_of_strops_own_has_no_lane() -> None:
    with pytest.raises(ConfigError, match=r"lane"):
        load_spec(None, ["name=x", "environment.name=guess-number", INSIDE])


def test_a_machine_without_such_sandboxes_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("strop.sandbox.choose._tried", {})
    task: Task = build(WALK, INSIDE, name="Walk")
    failure = attempt(task, tokenizer, ["left"]).outcome.failure
    assert failure is not None
    assert (failure.owner, failure.kind) == (FailureOwner.INFRA, SandboxRefused.__name__)
