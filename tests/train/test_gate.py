"""The gate: every fault is refused by its name before anything is trained; a healthy run passes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cluster import Roles
from strop.cluster.local import InlinePlacement
from strop.engine import Completion, GenerationRequest
from strop.engine.native import NativeEngine
from strop.errors import CheckRefused
from strop.policy.footprint import checkpoint_bytes, read_model_size
from strop.policy.language_model import LanguageModel
from strop.rollout import Example, Outcome, Split
from strop.store import ModelHandle, follow_store
from strop.tokenizer import Tokenizer
from strop.train import gate_checks
from strop.train.gate import pass_gate
from strop.train.gate_checks import GateCheck, GateInput, check_room
from strop.train.watch.process import LOW_DISK_FACTOR
from tests.fixtures.places import line_of
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import GATE_CHECKS, Composition, new_run, tiny_spec
from tests.incidents.faulty_engines import build_gate


def refuse(
    root: Path, model_dir: Path, *, change: Callable[[Roles], Roles] | None = None, **parts: Any
) -> CheckRefused:
    """Run a faulty composition up to the gate; return its refusal once nothing else was done."""
    spec = parts.pop("spec", None) or tiny_spec()
    made = Composition(spec, model_dir, new_run(root), **parts)
    with pytest.raises(CheckRefused) as caught:
        made.run(change)
    assert caught.value.exit_code == 76
    assert "nothing was trained" in str(caught.value)
    # No step, no checkpoint, no evaluation, and nothing beside the run directory.
    path = made.run_dir.path
    assert made.notes.starts == []
    assert [entry.name for entry in root.iterdir()] == [path.name]
    found = {entry.name for entry in path.iterdir()}
    # What made rollouts or judgements fail is told at once, and nothing else.
    assert ("events.jsonl" in found) == bool(made.notes.causes("rollout_lost"))
    assert found - {"events.jsonl"} == {
        "attempts",
        "audit.json",
        "checkpoints",
        "env.txt",
        "eval",
        "lock",
        "rollouts",
        "run.json",
        "spec.toml",
    }
    assert not [entry for name in ("checkpoints", "eval", "rollouts") for entry in (path / name).iterdir()]
    return caught.value


@dataclass
class ChangedEngine:
    """An engine whose completions are changed on their way."""

    engine: Any
    change: Callable[[GenerationRequest, Completion], Completion]

    async def generate(self, request: GenerationRequest) -> Completion:
        return self.change(request, await self.engine.generate(request))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_a_healthy_run_passes_every_check(tmp_path: Path, tiny_model_dir: Path) -> None:
    async def look() -> list[GateCheck]:
        spec = tiny_spec()
        placement = InlinePlacement(spec, ModelHandle(path=tiny_model_dir, digest="unused"))
        roles = await placement.start()
        try:
            gate = GateInput(
                spec=spec, task=SpellTask(), roles=roles, model_dir=tiny_model_dir, run_path=tmp_path
            )
            return await pass_gate(gate)
        finally:
            await placement.stop()

    checks = asyncio.run(look())
    assert [check.name for check in checks] == GATE_CHECKS
    # A random model and one answer for all are what is wrong here, both accepted with a reason.
    assert [check.name for check in checks if not check.is_passed] == ["weights", "audit"]
    # The prompt as the model gets it, byte for byte, and all that ends a reply.
    assert (
        r"prompt '<|start|>user\n#0<|end|>\n<|start|>assistant\n', stops ['<|end|>', 'a'," in checks[0].detail
    )
    assert [path.name for path in tmp_path.iterdir()] == ["audit.json"]


def test_random_weights_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    error = refuse(tmp_path, tiny_model_dir, spec=tiny_spec(train={"accept": None}))
    # Two layers of 36,864 parameters: 1.5 (8.8e13 / 73,728)^0.076 nats per token of 4.19 bytes.
    assert_matches(r"refused to train: weights: loss of the policy \d\.\d\d nats per token", error)
    assert "per byte, bound 1.75; the weights look random" in str(error)


def test_accepting_one_check_accepts_no_other(tmp_path: Path, tiny_model_dir: Path) -> None:
    task = Overlapping()
    error = refuse(tmp_path, tiny_model_dir, task=task)
    assert "weights:" not in str(error)
    assert_matches(
        r"overlap: 12 of 12 held-out examples are learned from: 12 as they are; the first is \w{16}, '#0',"
        r" there '#0'; remove them",
        error,
    )


class Overlapping(SpellTask):
    def examples(self, split: Split) -> Sequence[Example]:
        return super().examples(Split.TRAIN)


class RaisesTypeError(SpellTask):
    def verify(self, example: Example, text: str) -> Outcome:
        raise TypeError("unsupported operand")


def assert_matches(cause: str, error: Exception) -> None:
    assert re.search(cause, str(error), re.DOTALL), str(error)


@pytest.mark.parametrize("kl_beta", [None, 0.05])
def test_an_engine_without_replies_is_refused(
    tmp_path: Path, tiny_model_dir: Path, kl_beta: float | None
) -> None:
    """Incident: with a reference, the gate died of an empty array before it said what had failed."""

    def silence(roles: Roles) -> Roles:
        def fail(request: GenerationRequest, completion: Completion) -> Completion:
            raise ConnectionError("gone")

        return replace(roles, engine=ChangedEngine(roles.engine, fail))

    spec = tiny_spec() if kl_beta is None else tiny_spec(reference={"kl_beta": kl_beta})
    error = refuse(tmp_path, tiny_model_dir, spec=spec, change=silence)
    place = f"test_gate.py:{line_of(test_an_engine_without_replies_is_refused, 'raise')}"
    cause = f"engine, ConnectionError: gone ({place})"
    assert f"refused to train: parity: all 64 probes failed: {cause}; the engine gave no reply" in str(error)


@pytest.mark.parametrize(
    ("memory_bytes", "disk_bytes"), [(10**6, 10**12), (10**12, 10**5)], ids=["memory", "disk"]
)
def test_too_little_memory_or_disk_is_refused(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int, disk_bytes: int
) -> None:
    # This process's own memory counts as free, so it is set as well.
    monkeypatch.setattr(gate_checks, "rss_bytes", lambda: 0)
    monkeypatch.setattr(gate_checks, "free_memory_bytes", lambda: memory_bytes)
    monkeypatch.setattr(gate_checks, "free_disk_bytes", lambda path: disk_bytes)
    error = refuse(tmp_path, tiny_model_dir)
    assert_matches(r"room: memory about \d+\.\d GiB of .* GiB free, checkpoints \d\.\d of .* GiB free", error)


def test_room_is_for_all_checkpoints_that_there_will_be_at_a_time(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are kept, the one being written and one that is being sent; what is there counts as free."""
    one_bytes = checkpoint_bytes(read_model_size(tiny_model_dir), "float32")
    engine = NativeEngine(
        LanguageModel.load(tiny_model_dir, dtype=torch.float32), Tokenizer.load(tiny_model_dir)
    )

    def has_room(free_bytes: float, **settings: Any) -> bool:
        monkeypatch.setattr(gate_checks, "free_memory_bytes", lambda: None)
        monkeypatch.setattr(gate_checks, "free_disk_bytes", lambda path: int(free_bytes))
        gate = build_gate(tiny_model_dir, engine, train={"keep_checkpoints": 2}, **settings)
        with follow_store(gate.spec.store):
            return check_room(replace(gate, run_path=tmp_path)).is_passed

    wanted = (2 + LOW_DISK_FACTOR) * one_bytes
    assert (has_room(wanted), has_room(0.99 * wanted)) == (True, False)
    mirrored = {"uri": str(tmp_path / "store"), "mirror": True}
    assert not has_room(wanted, store=mirrored)
    assert has_room(wanted + one_bytes, store=mirrored)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "written").write_bytes(bytes(one_bytes))
    assert has_room(wanted - one_bytes)


@pytest.mark.parametrize("wanted", [None, False, True])
def test_activations_are_counted_as_the_learner_holds_them(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    """Memory decided when the learner was loaded, and it keeps them here where nobody says otherwise."""
    monkeypatch.setattr(
        gate_checks, "activation_bytes", lambda *_, is_recomputed: 0 if is_recomputed else 10**15
    )
    spec = tiny_spec(train={"steps": 1, "checkpoint_every": 1, "activation_checkpointing": wanted})
    if wanted:
        Composition(spec, tiny_model_dir, new_run(tmp_path)).run()
    else:
        assert_matches(r"room: memory about 9\d{5}\.\d GiB", refuse(tmp_path, tiny_model_dir, spec=spec))


def test_every_cause_is_shown_at_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    class Broken(Overlapping, RaisesTypeError):
        pass

    error = refuse(tmp_path, tiny_model_dir, task=Broken(), spec=tiny_spec(train={"accept": None}))
    causes = [name for name in GATE_CHECKS if f"{name}: " in str(error)]
    assert causes == ["weights", "verifier", "audit", "overlap"]


class HalfWithoutGold(SpellTask):
    """Knows no right reply to half of its examples."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return () if example.fields["n"] % 2 else super().gold_replies(example)


def test_examples_without_gold_are_refused_where_the_task_promises_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    refused = str(refuse(tmp_path, tiny_model_dir, task=HalfWithoutGold()))
    # 12 examples, of which the odd ones have none.
    assert "verifier: 6 findings: probe gold on example" in refused
    assert "the task knows no right reply" in refused


def test_examples_without_gold_are_accepted_within_the_share_that_a_task_declares(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    task = HalfWithoutGold()
    task.limits = replace(task.limits, max_goldless_frac=0.5)
    spec = tiny_spec(train={"steps": 1, "checkpoint_every": 1})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    (shown,) = (event.detail for event in made.notes.events if event.cause == "verifier")
    assert shown == "gold earns full marks, nonsense does not"
