"""Environments of foreign parts: made once, stamped last, refused offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.store.python_environment import STAMP_NAME, PythonEnvironment, ensure_environment, find_interpreter


def test_offline_an_environment_is_used_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STROP_OFFLINE", "1")
    empty = PythonEnvironment(folder="parts", name="empty", pip_steps=())
    with pytest.raises(StoreError, match=r"of empty is not in .*, and offline mode forbids .* Next: start"):
        ensure_environment(empty, say=print)
    assert not empty.path.exists()
    empty.path.mkdir(parents=True)
    (empty.path / STAMP_NAME).write_text(json.dumps({"stamp": empty.stamp}))
    # The Python that it was made with is gone.
    with pytest.raises(StoreError, match="of empty is not in"):
        ensure_environment(empty, say=print)
    empty.python.parent.mkdir()
    empty.python.touch()
    assert ensure_environment(empty, say=print) == empty.python


def test_a_python_that_is_not_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    other = PythonEnvironment(folder="parts", name="other", version=(3, 99), pip_steps=())
    with pytest.raises(StoreError, match=r"no Python 3\.99 was found on PATH or by pyenv"):
        ensure_environment(other, say=print)
    # A name on PATH may lead nowhere, as a shim of pyenv's does.
    shim = tmp_path / "bin" / "python3.99"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent), prepend=":")
    with pytest.raises(StoreError, match=r"no Python 3\.99"):
        find_interpreter((3, 99))
    version = (sys.version_info[0], sys.version_info[1])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    assert find_interpreter(version).endswith(f"python{version[0]}.{version[1]}")


@pytest.mark.slow
def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "a cache"))
    said: list[str] = []
    # Of a module that no step of the installation imports.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = (
        "import sys; sys.path.insert(0, sys.prefix)\nopen(sys.prefix + '/own.py', 'w').close()\nimport own"
    )
    empty = PythonEnvironment(folder="parts", name="empty", pip_steps=(), first_program=program)
    python = ensure_environment(empty, say=said.append)
    assert python.exists()
    assert len(list(empty.path.glob("__pycache__/own.*.pyc"))) == 1
    marker = python.parent / "marker"
    marker.touch()
    assert ensure_environment(empty, say=said.append) == python
    assert (marker.exists(), len(said)) == (True, 1)
    # Other steps are another environment under the same name; these cannot be taken.
    broken = PythonEnvironment(
        folder="parts", name="empty", pip_steps=((str(tmp_path / "no such package"),),)
    )
    with pytest.raises(StoreError, match="empty"):
        ensure_environment(broken, say=said.append)
    assert not marker.exists()
    assert not broken.is_ready()
    hollow = PythonEnvironment(folder="parts", name="empty", pip_steps=(), nltk_data="no_package/data")
    with pytest.raises(StoreError, match="no_package/data"):
        ensure_environment(hollow, say=said.append)
    assert not empty.is_ready()
