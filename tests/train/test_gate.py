"""The gate: every fault is refused by its name before anything is trained; a healthy run passes."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cluster import Roles
from strop.cluster.contract import with_frozen
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
from strop.train.gate_models import bound_nats_per_byte, check_tensors, check_tokenizer, check_weights
from strop.train.watch.process import LOW_DISK_FACTOR
from tests.fixtures.apart import ApartPlacement
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.places import line_of
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import GATE_CHECKS, Composition, learner_of, new_run, take_up, tiny_spec
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.incidents.faulty_engines import TamperedEngine, build_gate
from tests.policy.worlds import make_model


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


def test_ckp_1_random_weights_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    error = refuse(tmp_path, tiny_model_dir, spec=tiny_spec(train={"accept": None}))
    # Two layers of 36,864 parameters: 1.5 (8.8e13 / 73,728)^0.076 nats per token of 4.19 bytes.
    assert_matches(r"refused to train: weights: loss of the policy \d\.\d\d nats per token", error)
    assert "per byte, bound 1.75; the weights look random" in str(error)


class Overlapping(SpellTask):
    def examples(self, split: Split) -> Sequence[Example]:
        return super().examples(Split.TRAIN)


class RaisesTypeError(SpellTask):
    async def verify(self, example: Example, text: str) -> Outcome:
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

        return replace(roles, engine=TamperedEngine(roles.engine, tamper=fail))

    spec = tiny_spec() if kl_beta is None else tiny_spec(reference={"kl_beta": kl_beta})
    error = refuse(tmp_path, tiny_model_dir, spec=spec, change=silence)
    place = f"test_gate.py:{line_of(test_an_engine_without_replies_is_refused, 'raise')}"
    cause = f"engine, ConnectionError: gone ({place})"
    assert f"refused to train: parity: all 64 probes failed: {cause}; the engine gave no reply" in str(error)


@pytest.mark.parametrize(
    ("memory_bytes", "disk_bytes"), [(10**6, 10**12), (10**12, 10**5)], ids=["memory", "disk"]
)
def test_prc_8_too_little_memory_or_disk_is_refused(
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
    assert causes == ["weights", "audit", "overlap"]


class HalfWithoutGold(SpellTask):
    """Knows no right reply to half of its examples."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return () if example.fields["n"] % 2 else super().gold_replies(example)


def test_examples_without_gold_are_accepted_within_the_share_that_a_task_declares(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    task = HalfWithoutGold()
    # 12 examples, of which the odd ones have none.
    accept = tiny_spec(train={"accept": "weights: random"})
    assert "6 examples without any right reply" in str(
        refuse(tmp_path / "refused", tiny_model_dir, task=task, spec=accept)
    )
    task.limits = replace(task.limits, max_goldless_frac=0.5)
    spec = tiny_spec(train={"steps": 1, "checkpoint_every": 1})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()


# The gate's checks of the models: tokenizer, tensors, language, and that engine and trainer agree.

LAYER = "model.layers.1.mlp.down_proj.weight"


def gate_of(model_dir: Path, **settings: Any) -> GateInput:
    return build_gate(model_dir, DummyEngine(Tokenizer.load(model_dir), []), **settings)


def make_anew(model: LanguageModel, name: str) -> None:
    """Give a tensor other random values of the same size."""
    with torch.no_grad():
        torch.nn.init.normal_(dict(model.named_parameters())[name], std=0.1)


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("vocab_size", "cause"),
    [
        (262, None),
        # Rows that only make a size round.
        (288, None),
        (2048, "it knows 12.8% of the model's ids"),
        (261, "its ids go up to 261 and the model's to 260"),
    ],
    ids=["own", "round", "foreign", "extended without the model"],
)
def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path, vocab_size: int, cause: str | None) -> None:
    check = check_tokenizer(gate_of(make_model(tmp_path, vocab_size=vocab_size)))
    assert check.is_passed is (cause is None)
    assert (cause or f"262 ids of a model with {vocab_size}") in check.detail


@pytest.mark.parametrize(
    ("name", "values", "cause"),
    [
        (
            "config.json",
            {"eos_token_id": 2},
            "eos_token_id=2 of config.json is '#' in the tokenizer, no special",
        ),
        ("config.json", {"bos_token_id": 65}, "bos_token_id=65 of config.json is "),
        ("config.json", {"pad_token_id": 4000}, "pad_token_id=4000 of config.json is no id of the model"),
        (
            "generation_config.json",
            {"eos_token_id": [260, 7]},
            "eos_token_id=7 of generation_config.json is ",
        ),
    ],
)
def test_special_tokens_that_the_tokenizer_reads_as_text_are_refused(
    tmp_path: Path, name: str, values: dict[str, Any], cause: str
) -> None:
    path = make_model(tmp_path)
    gate = gate_of(path)
    edit_json(path / name, **values)
    check = check_tokenizer(gate)
    assert not check.is_passed
    assert cause in check.detail


def test_several_terminators_and_a_pad_that_is_none_are_no_fault(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    edit_json(path / "config.json", eos_token_id=[260, 261], pad_token_id=-1, bos_token_id=None)
    assert check_tokenizer(gate_of(path)).is_passed


def test_a_run_with_a_foreign_tokenizer_is_refused_although_its_weights_are_accepted(tmp_path: Path) -> None:
    """Incident: SmolLM2 with a tokenizer of 262 words trained."""
    model_dir = make_model(tmp_path / "model", vocab_size=1024)
    tiny_tokenizer(model_dir)
    made = Composition(tiny_spec(), model_dir, new_run(tmp_path / "runs"))
    with pytest.raises(CheckRefused, match=r"tokenizer: 262 ids of a model with 1024"):
        made.run()


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused_wherever_the_engine_is(tmp_path: Path) -> None:
    """Before the gate, engines of other processes are asked about a fixed text."""
    model_dir = make_model(tmp_path / "model", vocab_size=30, pad_token_id=None, eos_token_id=7)
    spec = tiny_spec(placement={"kind": "ray"})
    placement = ApartPlacement(spec, model_dir, tmp_path / "weights")
    made = Composition(spec, model_dir, new_run(tmp_path / "runs"), placement=placement)
    with pytest.raises(CheckRefused, match=r"tokenizer: 262 ids of a model with 30; its ids go up to 261"):
        made.run()


def tensors_of(gate: GateInput) -> GateCheck:
    return asyncio.run(check_tensors(gate))


def test_accepting_random_weights_accepts_no_tensor_of_unknown_origin(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    def tamper(roles: Roles) -> Roles:
        make_anew(learner_of(roles).model, LAYER)
        return roles

    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path))
    with pytest.raises(CheckRefused, match=rf"tensors: 1 of 20 .*: {LAYER}"):
        made.run(tamper)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_frozen_model_is_that_of_its_files_too(tmp_path: Path, tiny_model_dir: Path, role: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    settings: dict[str, dict[str, Any]] = {
        "reference": {"reference": {"kl_beta": 0.1, "model": str(other)}},
        "teacher": {"train": {"terms": "distill"}, "teacher": {"source": "model", "model": str(other)}},
    }
    gate = gate_of(tiny_model_dir, **settings[role])
    fetch: Callable[[str], ModelHandle] = lambda uri: ModelHandle(path=Path(uri), digest="")  # noqa: E731
    source = ModelHandle(path=tiny_model_dir, digest="")
    gate = replace(gate, roles=asyncio.run(with_frozen(gate.roles, gate.spec, source, fetch)))
    check = tensors_of(gate)
    assert check.is_passed
    assert check.detail.endswith(f"20 tensors of the {role} are those of {other}")
    make_anew(learner_of(gate.roles).frozen[role].model, LAYER)
    check = tensors_of(gate)
    assert not check.is_passed
    assert f"1 of 20 tensors of the {role} are not those of {other}: {LAYER}" in check.detail
    # And it is asked for its English like the policy.
    told = asyncio.run(check_weights(gate))
    assert not told.is_passed
    assert f"loss of the {role} " in told.detail


@pytest.mark.parametrize("lora", [{}, {"rank": 2}], ids=["whole", "adapters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_goes_on_has_the_tensors_of_its_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, dtype: str, lora: dict[str, Any]
) -> None:
    spec = tiny_spec(train={"steps": 3, "checkpoint_every": 2}, lora=lora, model={"dtype": dtype})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    made.run()
    shutil.rmtree(made.run_dir.checkpoint_path(3))
    details = []
    for is_tampered in (False, True):
        again = take_up(made)
        if is_tampered:
            shutil.rmtree(made.run_dir.checkpoint_path(3))
            with pytest.raises(CheckRefused, match=rf"tensors: 1 of 20 .*: {LAYER}"):
                again.run(damage_after_loading)
        else:
            again.run()
            details = [event.detail for event in again.notes.events if event.cause == "tensors"]
    place = tiny_model_dir if lora else made.run_dir.checkpoint_path(2) / "model"
    assert details == [f"20 tensors of the policy are those of {place}"]


def damage_after_loading(roles: Roles) -> Roles:
    """Have the learner lose a layer when it has been restored."""
    learner = learner_of(roles)
    restore = learner.load_state

    def load_state(source: Path) -> None:
        restore(source)
        make_anew(learner.model, LAYER)

    learner.load_state = load_state  # type: ignore[method-assign]
    return roles


def test_the_bound_falls_with_size_as_the_law_says() -> None:
    # (8.8e13 / 1e6)^0.076 = 4.013 nats per token of 4.192 bytes, and half as much again.
    assert bound_nats_per_byte(10**6) == pytest.approx(1.436, abs=1e-3)
    assert bound_nats_per_byte(106_000_000) == pytest.approx(1.008, abs=1e-3)
    # Beyond what was measured nothing is said.
    assert bound_nats_per_byte(10**12) == bound_nats_per_byte(1_500_000_000) == pytest.approx(0.824, abs=1e-3)
    assert bound_nats_per_byte(1) == bound_nats_per_byte(768) < math.log(256)


def test_what_a_run_made_of_its_policy_is_reported_and_not_judged(tiny_model_dir: Path) -> None:
    gate = gate_of(tiny_model_dir)
    assert not asyncio.run(check_weights(gate)).is_passed
    learner_of(gate.roles).version = 3
    check = asyncio.run(check_weights(gate))
    assert check.is_passed
    assert "bound" not in check.detail


def test_text_begins_as_the_models_tokenizer_begins_it(tmp_path: Path) -> None:
    """Some models know nothing without the token that all of their texts began with."""
    path = tiny_model(tmp_path)
    assert Tokenizer.load(path).start_ids.tolist() == []
    content = json.loads((path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [261], "tokens": ["<|start|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(path).start_ids.tolist() == [261]
    asked: list[list[int]] = []
    gate = gate_of(path)
    learner = learner_of(gate.roles)
    score = learner.score

    def note(groups: Any, temperature: float, role: str | None = None) -> Any:
        asked.extend(group.prompt_ids.tolist() for group in groups)
        return score(groups, temperature, role)

    learner.score = note  # type: ignore[method-assign]
    asyncio.run(check_weights(gate))
    assert asked == [[261]]


@pytest.mark.slow
def test_the_real_model_passes_and_its_damaged_copies_do_not(tmp_path: Path, smollm2_dir: Path) -> None:
    """Incidents: it trained with 5 of 30 layers made anew, and with a foreign tokenizer."""
    gate = gate_of(smollm2_dir, dtype="bfloat16")
    model, learner = learner_of(gate.roles).model, learner_of(gate.roles)
    assert check_tokenizer(gate).is_passed
    assert tensors_of(gate).is_passed
    sound = asyncio.run(check_weights(gate))
    assert sound.is_passed, sound.detail
    foreign = tiny_tokenizer(tmp_path / "foreign")
    with_foreign = replace(gate, roles=replace(gate.roles, tokenizer=Tokenizer.load(foreign)))
    assert not check_tokenizer(with_foreign).is_passed
    assert not asyncio.run(check_weights(with_foreign)).is_passed
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in range(10, 15):
            for parameter in model.module.model.layers[layer].parameters():
                parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    assert learner.version == 0
    broken = asyncio.run(check_weights(gate))
    assert not broken.is_passed, broken.detail
    named = tensors_of(gate)
    assert not named.is_passed
    assert "45 of 272 tensors of the policy are not those of" in named.detail
    assert "model.layers.10.input_layernorm.weight" in named.detail
