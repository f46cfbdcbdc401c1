"""Incidents of the checkpoint group that files can cause, and parts that changed between two attempts."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.errors import CheckRefused, ConfigError, CorruptRecord, Interrupted, StoreError, split_error
from strop.io import AtomicDirectory, verify_directory
from strop.policy.learner import Learner
from strop.policy.lora import merge_adapters
from strop.policy.weights import export_tensors, own_tensors
from strop.record import RunDir, list_runs
from strop.run.training import train_here
from strop.spec import load_spec
from strop.spec.model import LoraSpec
from strop.spec.train import OptimizerSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.attempts import fork, wait_for_end
from tests.fixtures.tiny_run import Composition, Notes, StopAfterOne, new_run, read_curve, take_up, tiny_spec
from tests.fixtures.write_points import write_and_die, write_checkpoint
from tests.policy.worlds import World, load_model, make_model, reinforce

NORM = "model.norm.weight"
MAX_WRITE_POINTS = 200


def save(run: RunDir, step: int) -> Path:
    return write_checkpoint(run.checkpoint_path(step), str(step))


def reaches_its_end(target: Path, countdown: int, *, replace: bool) -> bool:
    """Return whether a writer that dies at a touch of the file system had no such touch to make."""
    code = wait_for_end(fork(write_and_die, target, countdown, replace))
    assert code in {0, -signal.SIGKILL}
    return code == 0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", "", "d1", {})


def test_ckp_4_a_kill_at_any_write_point_leaves_the_previous_checkpoint(run: RunDir) -> None:
    """Incident: the newest directory was chosen without a completeness marker; a torn save looked whole."""
    save(run, 10)
    target = run.checkpoint_path(20)
    num_died = num_published = 0
    for countdown in range(MAX_WRITE_POINTS):
        if reaches_its_end(target, countdown, replace=False):
            break
        num_died += 1
        latest = run.latest_checkpoint()
        assert latest is not None
        step, path = latest
        verify_directory(path)
        # Once the name is there, the rest is tidying: the new checkpoint counts, whole.
        assert step == (20 if target.exists() else 10)
        num_published += step == 20
        run.release()
        run.acquire()
        assert {entry.name for entry in run.checkpoints_path.iterdir()} == {
            f"step-{known:06d}" for known in run.checkpoint_steps()
        }
        shutil.rmtree(target, ignore_errors=True)
    # Two directories and two files made, four files read back or sealed, a manifest and two renames.
    assert num_died >= 10
    assert num_died < MAX_WRITE_POINTS
    assert num_published <= 2
    run.release()


def test_ckp_4_a_kill_while_replacing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "model"
    for countdown in range(MAX_WRITE_POINTS):
        with AtomicDirectory(target, replace=True) as partial:
            (partial / "old.bin").write_bytes(b"old")
        if reaches_its_end(target, countdown, replace=True):
            break
        # At no point is there nothing, or a mixture.
        names = set(verify_directory(target).files)
        assert names in ({"old.bin"}, {"model/part.bin", "state/part.bin"})
    assert set(verify_directory(target).files) == {"model/part.bin", "state/part.bin"}
    assert countdown >= 10


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # A parameter under another name is missing, and what is left over has no place.
        (lambda t: t.__setitem__("norm.scale", t.pop(NORM)), rf"missing_keys.*{NORM}.*norm\.scale"),
        (lambda t: t.__delitem__(NORM), rf"missing_keys.*{NORM}"),
        (lambda t: t.__setitem__("extra.bias", t[NORM].clone()), r"unexpected_keys.*extra\.bias"),
        (shorten, rf"mismatched_keys.*{NORM}.*31.*32"),
    ],
    ids=["renamed", "dropped", "left over", "mis-shaped"],
)
def test_ckp_1_weights_that_do_not_fill_the_model_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    """Incident: parameters that were not loaded kept their random values, with a KL of about 15."""
    path = make_model(tmp_path)
    edit_weights(path / "model.safetensors", change)
    with pytest.raises(ConfigError, match=named):
        load_model(path)


def test_ckp_1_a_shard_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    module.save_pretrained(path, max_shard_size="20KB")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    load_model(path)
    shards[1].unlink()
    with pytest.raises(ConfigError, match=re.escape(shards[1].name)):
        load_model(path)


class FaultyExport:
    """Damages what transformers has just written, as a full or failing disk would."""

    def __init__(self, module: Any, damage: Callable[[Path], None]) -> None:
        self.save = module.save_pretrained
        self.damage = damage

    def __call__(self, target: Path, **options: Any) -> None:
        self.save(target, max_shard_size="20KB", **options)
        self.damage(target)


def flip_value(target: Path) -> None:
    path = next(shard for shard in sorted(target.glob("*.safetensors")) if NORM in load_file(shard))
    edit_weights(path, lambda tensors: tensors.__setitem__(NORM, tensors[NORM] + 1e-3))


def drop_tensor(target: Path) -> None:
    path = next(shard for shard in sorted(target.glob("*.safetensors")) if NORM in load_file(shard))
    edit_weights(path, lambda tensors: tensors.__delitem__(NORM))


def cut_shard(target: Path) -> None:
    path = sorted(target.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-4])


def name_other_shards(target: Path) -> None:
    index = target / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "model-00001-out-of"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_value, f"{NORM} has other values"),
        (drop_tensor, f"it cannot be read back .*{NORM}"),
        (cut_shard, "it cannot be read back"),
        (name_other_shards, "it cannot be read back .*model-00001-out-of"),
    ],
)
def test_ckp_2_an_export_that_is_not_the_live_policy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], named: str
) -> None:
    """Incident: an index named other shards than were written, and merges silently did nothing."""
    path = make_model(tmp_path / "source")
    model = load_model(path)
    monkeypatch.setattr(model.module, "save_pretrained", FaultyExport(model.module, damage))
    with pytest.raises(
        StoreError, match=f"is not the live policy: {named}.*the previous checkpoint is intact"
    ):
        export_tensors(model.module, own_tensors(model), path, tmp_path / "target")


def adapted_learner(path: Path, dtype: str) -> Learner:
    """Return a learner whose adapters have learned something that its number format can hold."""
    spec = LoraSpec(rank=2)
    model = load_model(path, dtype)
    model.adapt(spec, seed=1)
    learner = Learner(model, OptimizerSpec(lr=0.05))
    for seed in range(2):
        learner.step([World(seed).packed(3, [4, 2])], temperature=1.0, token_terms=reinforce)
    return learner


def merge_with_scale_0(tensors: Mapping[str, torch.Tensor], spec: LoraSpec) -> dict[str, torch.Tensor]:
    return merge_adapters(tensors, spec.model_copy(update={"alpha": 0.0}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ckp_2_a_merge_that_does_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Incident: a LoRA merge silently did nothing, and the base model was shipped as the trained one."""
    path = make_model(tmp_path / "source")
    learner = adapted_learner(path, dtype)
    for name in ("sound", "broken"):
        (tmp_path / name).mkdir()
    learner.export(tmp_path / "sound", path)
    monkeypatch.setattr("strop.policy.weights.merge_adapters", merge_with_scale_0)
    refused = r"the merged weights are not the live policy: model\.layers\.0\..*_proj adds"
    with pytest.raises(StoreError, match=refused):
        learner.export(tmp_path / "broken", path)
    assert list((tmp_path / "broken").iterdir()) == []
    # Engines get merged weights as well.
    with pytest.raises(StoreError, match=refused):
        learner.write_weights(tmp_path / "weights.safetensors")


def test_ckp_2_stop_settings_are_exported(tmp_path: Path) -> None:
    """Incident: stop settings were not exported, and the served model never ended."""
    path = make_model(tmp_path / "source")
    settings = {"eos_token_id": [260, 261], "temperature": 0.6, "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(settings))
    policy = load_model(path)
    export_tensors(policy.module, own_tensors(policy), path, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "generation_config.json").read_text()) == settings
    assert Tokenizer.load(tmp_path / "target").stop_token_ids == {260, 261}


def test_ckp_2_an_export_that_stops_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(tmp_path / "source")
    model = load_model(path)
    (path / "generation_config.json").unlink()

    def name_another_end(target: Path) -> None:
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))

    monkeypatch.setattr(model.module, "save_pretrained", FaultyExport(model.module, name_another_end))
    with pytest.raises(StoreError, match=r"it stops at \[7, 260\], not at \[260\]"):
        export_tensors(model.module, own_tensors(model), path, tmp_path / "target")


RUN_FILE = """
name = "same"
[model]
uri = "model"
dtype = "float32"
[task]
name = "rows"
source = "rows.jsonl"
prompt = "question"
answer = "answer"
reward = "reward.py:score"
max_reply_tokens = 4
num_held_out = 2
[reference]
model = "reference"
kl_beta = 0.01
[teacher]
source = "model"
model = "teacher"
form = "sampled"
[train]
steps = 3
prompts_per_step = 2
group_size = 2
checkpoint_every = 1
accept = "weights: a random model for a test"
[eval]
num_examples = 2
num_samples = 1
[placement]
threads = 1
"""
NUM_ROWS = 9


def write_rows(path: Path, answers: Callable[[int], str], num_rows: int = NUM_ROWS) -> None:
    rows = [{"question": f"{number}?", "answer": answers(number)} for number in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, notes: Notes, *, is_new: bool = False) -> Path:
    resolved = load_spec(folder / "run.toml", [f"output.root={folder / 'runs'}"])
    return train_here(resolved, notes, is_new=is_new, on_run=lambda run_dir: None).run_path


@pytest.fixture
def begun(tmp_path: Path, own_cache: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a step, in a folder of its own with everything that it is made of."""
    folder = tmp_path / "here"
    for name in ("model", "reference", "teacher"):
        shutil.copytree(tiny_model_dir, folder / name)
    (folder / "run.toml").write_text(RUN_FILE)
    (folder / "reward.py").write_text("def score(reply, answer):\n    return reply.strip() == answer\n")
    write_rows(folder / "rows.jsonl", str)
    monkeypatch.chdir(folder)
    with pytest.raises(Interrupted):
        train(folder, StopAfterOne())
    return folder


def move_weights(folder: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / folder / "model.safetensors"
        tensors = load_file(path)
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name] + 1e-3}, path, metadata={"format": "pt"})

    return change


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return change


def reverse_rows(root: Path) -> None:
    path = root / "rows.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "every gold answer": (
        lambda root: write_rows(root / "rows.jsonl", lambda number: str(number + 1)),
        "set of examples",
    ),
    "the order of the rows": (reverse_rows, "set of examples"),
    "a row more": (lambda root: write_rows(root / "rows.jsonl", str, NUM_ROWS + 1), "version of its task"),
    "a comment of the reward": (edit("reward.py", "answer\n", "answer  # Or not.\n"), "version of its task"),
    "the reward": (edit("reward.py", "strip", "rstrip"), "version of its task"),
    "the base model": (move_weights("model"), "model (weights)"),
    "the chat template": (edit("model/chat_template.jinja", "<|start|>", "<|end|>"), "model (chat template)"),
    "the tokenizer": (edit("model/tokenizer.json", "{", "{ "), "model (tokenizer)"),
    "where a reply ends": (edit("model/generation_config.json", "260", "261"), "model (configuration)"),
    "the reference": (move_weights("reference"), "reference (weights)"),
    "the teacher": (move_weights("teacher"), "teacher (weights)"),
}


def test_ckp_3_a_run_does_not_go_on_with_another_part(begun: Path) -> None:
    """Incident: after kill -9 and the same command, each of these trained on without a word."""
    kept = begun.parent / "kept"
    shutil.copytree(begun, kept, ignore=shutil.ignore_patterns("runs"))
    (run,) = list_runs(begun / "runs")
    expected = read_curve(run.path)
    for what, (change, named) in CHANGES.items():
        change(begun)
        with pytest.raises(CheckRefused) as caught:
            train(begun, Notes())
        given, _, next_step = split_error(str(caught.value))
        assert given.startswith(f"{run.path} began with another "), what
        digests = re.search(rf"{re.escape(named)} \((\w{{12}}) then, (\w{{12}}) now\)", given)
        assert digests is not None, (what, given)
        assert digests[1] != digests[2]
        assert "start a new run with --new" in next_step
        # What another part says of itself is not said of this one.
        assert ("teacher" in given) == ("teacher" in named)
        assert read_curve(run.path) == expected, what
        shutil.copytree(kept, begun, dirs_exist_ok=True)
    assert train(begun, Notes()) == run.path
    assert RunDir.open(run.path).is_finished
    # A run that has trained nothing yet is no reason to refuse anything.
    reverse_rows(begun)
    assert train(begun, Notes(), is_new=True) != run.path


def test_ckp_3_a_checkpoint_of_other_parts_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A checkpoint that was put into the directory of another run."""
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path / "one"))
    set_parts(made.run_dir, {"model (weights)": "a" * 64})
    made.run()
    set_parts(made.run_dir, {"model (weights)": "b" * 64})
    with pytest.raises(
        CheckRefused, match=r"step-000003 began with another model \(weights\) \(a{12} then, b"
    ):
        take_up(made).run()


def set_parts(run_dir: RunDir, parts: dict[str, str]) -> None:
    path = run_dir.path / "run.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"facts": {"made_of": parts}, "finished_at": None}))
    if run_dir.is_locked_here:
        run_dir.acquire()


LONG = {"steps": 4, "checkpoint_every": 2}


@pytest.fixture
def trained(tmp_path: Path, tiny_model_dir: Path) -> Composition:
    """A run with checkpoints of its steps 2 and 4."""
    made = Composition(tiny_spec(train=LONG), tiny_model_dir, new_run(tmp_path))
    made.run()
    assert made.run_dir.checkpoint_steps() == [2, 4]
    return made


def test_ckp_4_a_run_that_lost_every_checkpoint_is_not_begun_anew_in_silence(trained: Composition) -> None:
    """Incident: it restarted at step 0 and cut off what was recorded, without an event."""
    expected, kept = read_curve(trained.run_dir.path), trained.run_dir.path.parent / "kept"
    shutil.copytree(trained.run_dir.checkpoints_path, kept)
    for step in (2, 4):
        (trained.run_dir.checkpoint_path(step) / "COMPLETE").unlink()
    before = {path: path.read_bytes() for path in trained.run_dir.path.glob("*.jsonl")}
    with pytest.raises(CheckRefused) as caught:
        take_up(trained).run()
    given, _, next_step = split_error(str(caught.value))
    assert "has trained 4 steps" in given
    assert "(step-000002, step-000004) is complete any more" in given
    assert next_step.startswith("restore one from a copy, or begin anew: with --new")
    assert {path: path.read_bytes() for path in trained.run_dir.path.glob("*.jsonl")} == before
    # Gone altogether, they are missed too.
    torn = trained.run_dir.checkpoint_path(4).rename(kept / "torn")
    shutil.rmtree(trained.run_dir.checkpoint_path(2))
    with pytest.raises(CheckRefused, match=r"none of its checkpoints \(step-000002, step-000004\)"):
        take_up(trained).run()
    # The way out that was named: one of them from a copy. What is torn behind it is written again.
    shutil.copytree(kept / "step-000002", trained.run_dir.checkpoint_path(2))
    torn.rename(trained.run_dir.checkpoint_path(4))
    again = take_up(trained)
    again.run()
    (resumed,) = [event for event in again.notes.events if event.kind.value == "resume"]
    assert resumed.detail == (
        "training goes on from step-000002; step-000004, written later, is not complete any more"
    )
    assert again.notes.starts == [(str(trained.run_dir.path), 2, 4)]
    verify_directory(trained.run_dir.checkpoint_path(4))
    assert read_curve(trained.run_dir.path) == expected


def test_ckp_4_a_run_that_died_before_its_first_checkpoint_says_that_it_begins_again(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    made = Composition(tiny_spec(train=LONG), tiny_model_dir, new_run(tmp_path))
    made.run_dir.metrics.append(1, {"loss": 0.0})
    made.run()
    (resumed,) = [event for event in made.notes.events if event.kind.value == "resume"]
    assert (resumed.cause, resumed.detail) == (
        "start",
        "no checkpoint was written yet: 1 steps are trained again",
    )


@pytest.mark.parametrize(
    "place", ["model/model.safetensors", "state/optimizer.safetensors", "state/trainer.json", "COMPLETE"]
)
def test_ckp_4_the_remedy_for_a_damaged_checkpoint_works(trained: Composition, place: str) -> None:
    """Incident: the message had the folder inside the checkpoint removed, and the same refusal followed."""
    expected = read_curve(trained.run_dir.path)
    damaged = trained.run_dir.checkpoint_path(4) / place
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CorruptRecord) as caught:
        take_up(trained).run()
    assert place in str(caught.value)
    next_step = split_error(str(caught.value))[2]
    advice = re.fullmatch(
        r"restore it from a copy, or remove (\S+): the same command then goes on from step-000002\.",
        next_step,
    )
    assert advice is not None, next_step
    shutil.rmtree(advice[1])
    take_up(trained).run()
    assert read_curve(trained.run_dir.path) == expected


def test_ckp_4_a_damaged_checkpoint_without_one_before_it_is_not_to_be_removed(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    spec = tiny_spec(train=LONG | {"keep_checkpoints": 1})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path))
    made.run()
    assert made.run_dir.checkpoint_steps() == [4]
    damaged = made.run_dir.checkpoint_path(4) / "state" / "learner.json"
    damaged.write_text("")
    with pytest.raises(CorruptRecord, match=r"there is none before it; or begin anew with --new"):
        take_up(made).run()
