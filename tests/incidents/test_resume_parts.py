"""Incidents of the checkpoint group: what a run was made of changed between two attempts at it.

The same command after a death must be the same run: each changed part is refused by its name, with both
digests, and a checkpoint that cannot be used is refused with a remedy that works.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from strop.errors import CheckRefused, CorruptRecord, Interrupted, split_error
from strop.record import RunDir, list_runs
from strop.run.training import train_here
from strop.spec import load_spec
from tests.fixtures.tiny_run import Composition, Notes, StopAfterOne, new_run, read_curve, take_up, tiny_spec

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


def test_ckp_4_checkpoints_that_are_gone_altogether_are_missed_too(trained: Composition) -> None:
    kept, expected = trained.run_dir.path.parent / "kept", read_curve(trained.run_dir.path)
    shutil.move(trained.run_dir.checkpoints_path, kept)
    trained.run_dir.checkpoints_path.mkdir()
    with pytest.raises(CheckRefused, match=r"none of its checkpoints \(step-000002, step-000004\)"):
        take_up(trained).run()
    # The way out that was named: one of them from a copy.
    shutil.copytree(kept / "step-000002", trained.run_dir.checkpoint_path(2))
    again = take_up(trained)
    again.run()
    (resumed,) = [event for event in again.notes.events if event.kind.value == "resume"]
    assert resumed.detail == (
        "training goes on from step-000002; step-000004, written later, is not complete any more"
    )
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
