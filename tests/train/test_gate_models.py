"""The gate's checks of the models: tokenizer, tensors, language, and that engine and trainer agree."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.cluster import Roles
from strop.cluster.contract import with_frozen
from strop.errors import CheckRefused
from strop.policy.language_model import LanguageModel
from strop.record import RunDir
from strop.store import ModelHandle
from strop.tokenizer import Tokenizer
from strop.train.gate_checks import GateCheck, GateInput
from strop.train.gate_models import (
    bound_nats_per_byte,
    check_tensors,
    check_tokenizer,
    check_weights,
)
from tests.fixtures.apart import ApartPlacement
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Composition, learner_of, new_run, tiny_spec
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.incidents.faulty_engines import build_gate
from tests.policy.worlds import make_model

LAYER = "model.layers.1.mlp.down_proj.weight"


def gate_of(model_dir: Path, **settings: Any) -> GateInput:
    return build_gate(model_dir, DummyEngine(Tokenizer.load(model_dir), []), **settings)


def make_anew(model: LanguageModel, name: str) -> None:
    """Give a tensor other random values of the same size."""
    with torch.no_grad():
        torch.nn.init.normal_(dict(model.named_parameters())[name], std=0.1)


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_models_own_tokenizer_passes(tiny_model_dir: Path) -> None:
    check = check_tokenizer(gate_of(tiny_model_dir))
    assert (check.is_passed, check.detail) == (True, "262 ids of a model with 262")


def test_rows_that_only_make_a_size_round_are_no_fault(tmp_path: Path) -> None:
    assert check_tokenizer(gate_of(make_model(tmp_path, vocab_size=288))).is_passed


@pytest.mark.parametrize(
    ("vocab_size", "cause"),
    [
        (2048, "it knows 12.8% of the model's ids, and at least 90% are allowed"),
        (261, "its ids go up to 261 and the model's to 260"),
    ],
    ids=["foreign", "extended without the model"],
)
def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path, vocab_size: int, cause: str) -> None:
    check = check_tokenizer(gate_of(make_model(tmp_path, vocab_size=vocab_size)))
    assert not check.is_passed
    assert cause in check.detail
    assert check.detail.endswith("is it the tokenizer that the model was trained with?")


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
    with pytest.raises(
        CheckRefused, match=r"refused to train: tokenizer: 262 ids of a model with 1024; it knows"
    ):
        made.run()


def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused_wherever_the_engine_is(tmp_path: Path) -> None:
    """Before the gate, engines of other processes are asked about a fixed text."""
    model_dir = make_model(tmp_path / "model", vocab_size=30, pad_token_id=None, eos_token_id=7)
    spec = tiny_spec(placement={"kind": "process"})
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
    with pytest.raises(
        CheckRefused, match=rf"refused to train: tensors: 1 of 20 .*: {LAYER}; they were made"
    ):
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
    learner: Any = gate.roles.learner
    make_anew(learner._frozen[role].model, LAYER)
    check = tensors_of(gate)
    assert not check.is_passed
    assert f"1 of 20 tensors of the {role} are not those of {other}: {LAYER}" in check.detail
    # And it is asked for its English like the policy.
    told = asyncio.run(check_weights(gate))
    assert not told.is_passed
    assert f"loss of the {role} " in told.detail


def test_files_that_are_gone_say_nothing_of_the_tensors(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    gate = gate_of(path)
    (path / "model.safetensors").unlink()
    check = tensors_of(gate)
    assert not check.is_passed
    assert "No such file" in check.detail


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
        run_dir = RunDir.open(made.run_dir.path)
        run_dir.acquire()
        again = Composition(spec, tiny_model_dir, run_dir)
        if is_tampered:
            shutil.rmtree(made.run_dir.checkpoint_path(3))
            damage = damage_after_loading(run_dir)
            with pytest.raises(CheckRefused, match=rf"tensors: 1 of 20 .*: {LAYER}"):
                again.run(damage)
        else:
            again.run()
            details = [event.detail for event in again.notes.events if event.cause == "tensors"]
    place = tiny_model_dir if lora else made.run_dir.checkpoint_path(2) / "model"
    assert details == [f"20 tensors of the policy are those of {place}"]


def damage_after_loading(run_dir: RunDir) -> Callable[[Roles], Roles]:
    """Have the learner lose a layer when it has been restored."""

    def change(roles: Roles) -> Roles:
        learner = learner_of(roles)
        restore = learner.load_state

        def load_state(source: Path) -> None:
            restore(source)
            make_anew(learner.model, LAYER)

        learner.load_state = load_state  # type: ignore[method-assign]
        return roles

    return change


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
    score = gate.roles.learner.score

    async def note(groups: Any, temperature: float) -> Any:
        asked.extend(group.prompt_ids.tolist() for group in groups)
        return await score(groups, temperature)

    gate.roles.learner.score = note  # type: ignore[method-assign]
    asyncio.run(check_weights(gate))
    assert asked == [[261]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_passes_and_its_damaged_copies_do_not(
    tmp_path: Path, smollm2_dir: Path, dtype: str
) -> None:
    """Incidents: it trained with 5 of 30 layers made anew, and with a foreign tokenizer."""
    gate = gate_of(smollm2_dir, dtype=dtype)
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
