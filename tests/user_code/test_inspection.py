"""User code is looked at in a process of its own: what it holds, and why it may be unusable."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.user_code import (
    CodeRef,
    hash_sources,
    inspect_function,
    inspect_task,
    inspection,
    is_code,
    list_sources,
    load_code,
)
from strop.user_code.reference import MOVED_VARIABLE


def write(path: Path, text: str) -> CodeRef:
    path.write_text(text)
    return CodeRef(place=str(path), name="score")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("reward.py:score", True),
        ("/a/b/reward.py:score", True),
        ("reward.py", False),
        ("reward:score", False),
        ("reward.py:", False),
        ("reward.py:a-b", False),
        (".py:score", False),
        ("s3://bucket/questions.jsonl", False),
    ],
)
def test_code_is_a_file_and_a_name(text: str, expected: bool) -> None:
    assert is_code(text) is expected
    if not expected:
        with pytest.raises(ConfigError, match=r"FILE\.py:NAME"):
            CodeRef.parse(text)


def test_a_signature_is_read(tmp_path: Path) -> None:
    ref = write(tmp_path / "r.py", "import os\n\ndef score(reply, answer, *, hint=1, **others): ...\n")
    function = inspect_function(ref)
    assert function.parameters == ("reply", "answer", "hint")
    assert (sorted(function.required), function.takes_others, function.line) == (["answer", "reply"], True, 3)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, ["r.py"]),
        ("", ["r.py", "score"]),
        ("def other(): ...", ["r.py", "other"]),
        ("score = 3", ["int"]),
        ("class score: ...", ["class"]),
        ("def score(reply, /): ...", ["reply"]),
        ("import nothing_of_this_name", ["ModuleNotFoundError", "nothing_of_this_name", "(r.py:1)"]),
        ("x = 1\ndef score(:\n", ["SyntaxError", "(r.py:2)"]),
        ("x = 1\ny = x / 0\n", ["ZeroDivisionError", "(r.py:2)"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit: 3 (r.py:2)"]),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", ["signal 11"]),
    ],
)
def test_what_cannot_be_used_is_refused_by_file_and_line(
    tmp_path: Path, code: str | None, words: list[str]
) -> None:
    path = tmp_path / "r.py"
    ref = CodeRef(place=str(path), name="score") if code is None else write(path, code)
    with pytest.raises(ConfigError) as refusal:
        inspect_function(ref)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_an_endless_import_is_ended_with_all_that_it_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "IMPORT_LIMIT_S", 4.0)
    note = tmp_path / "pid"
    code = f"import os, time\nif os.fork() == 0:\n    open({str(note)!r}, 'w').write(str(os.getpid()))\n"
    with pytest.raises(ConfigError, match=r"r\.py:score was not imported after 4 s"):
        inspect_function(write(tmp_path / "r.py", code + "while True:\n    time.sleep(1)\n"))
    pid = int(note.read_text())
    # The orphan is reaped by whoever has adopted it, which may take a moment.
    ends_at = time.monotonic() + 300
    while _is_running(pid) and time.monotonic() < ends_at:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_it_prints_goes_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os\nos.write(1, b'x' * 1000000)\nos.write(2, b'x' * 1000000)\ndef score(reply): ...\n"
    assert inspect_function(write(tmp_path / "r.py", code)).parameters == ("reply",)
    assert capfd.readouterr() == ("", "")


def test_an_edited_file_is_looked_at_again(tmp_path: Path) -> None:
    assert inspect_function(write(tmp_path / "r.py", "def score(reply): ...")).parameters == ("reply",)
    ref = write(tmp_path / "r.py", "def score(answer): ...")
    assert inspect_function(ref).parameters == ("answer",)
    assert load_code(ref)(answer=1) is None


def test_a_tasks_settings_are_completed_or_refused(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        '''
from dataclasses import dataclass

@dataclass
class Settings:
    low: int = 3
    names: tuple[str, ...] = ("a",)

class Doubling:
    """Doubles numbers."""
    def __init__(self, settings: Settings): ...
    def examples(self, split): ...
    def render(self, example): ...
    def verify(self, example, text): ...

class Half:
    def examples(self, split): ...
'''
    )
    ref = CodeRef(place=str(tmp_path / "t.py"), name="Doubling")
    task = inspect_task(ref, {"low": 5})
    assert (task.meaning, task.values, task.mistakes) == (
        "Doubles numbers.",
        {"low": 5, "names": ["a"]},
        (),
    )
    assert task.schema["properties"]["low"]["type"] == "integer"
    assert inspect_task(ref, {"low": "5"}).mistakes == (("low", "Input should be a valid integer"),)
    assert inspect_task(ref, {"lo": 5}).mistakes == (("lo", ""),)
    with pytest.raises(ConfigError, match=r"Half has no render and no verify \(line 16\)"):
        inspect_task(CodeRef(place=ref.place, name="Half"), {})


def test_sources_are_found_wherever_they_are_imported(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    files = {
        "__init__.py": "",
        "reward.py": "import json\nfrom . import near\ndef score(reply):\n    from pkg.late import x\n",
        "near.py": "from pkg import reward\n",
        "late.py": "import numpy\nx = 1\n",
        "other.py": "y = 1\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    path = package / "reward.py"
    assert [file.name for file in list_sources(path)] == ["__init__.py", "late.py", "near.py", "reward.py"]
    before = hash_sources(path)
    (package / "other.py").write_text("y = 2\n")
    assert hash_sources(path) == before
    (package / "late.py").write_text("x = 2\n")
    assert hash_sources(path) != before


def test_the_hash_is_that_of_the_content_alone(tmp_path: Path) -> None:
    hashes = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "near.py").write_text("x = 1\n")
        hashes.add(hash_sources(Path(write(folder / "r.py", "import near\n").place)))
    assert len(hashes) == 1


def test_what_stands_beside_a_file_can_be_imported_and_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "near_the_reward.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('hidden')\n")
    code = "import json\nimport near_the_reward\ndef score(reply):\n    return near_the_reward.VALUE\n"
    assert load_code(write(tmp_path / "r.py", code))("x") == 7


def test_in_a_job_the_submitted_copy_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, value in (("mine", 1), ("snapshot", 2)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "r.py", f"def score(reply):\n    return {value}\n")
    ref = CodeRef(place=str(tmp_path / "mine" / "r.py"), name="score")
    assert load_code(ref)("") == 1
    monkeypatch.setenv(MOVED_VARIABLE, f"{tmp_path / 'mine'}:{tmp_path / 'snapshot'}")
    assert load_code(ref)("") == 2
