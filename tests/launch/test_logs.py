"""The lines of a job's nodes and roles, while they are written and long after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.launch.logs import FileLogs, LogFilter, follow, require_logs
from strop.record.files import DirectoryRecord, LogLine


def log(run: Path, attempt: str, node: int, role: str, data: str | bytes, *, mode: str = "ab") -> None:
    path = run / "attempts" / attempt / str(node) / f"{role}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def read(run: Path, **wanted: object) -> list[LogLine]:
    return FileLogs(DirectoryRecord(run), LogFilter(**wanted)).read_rest()  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two attempts; the first on two nodes with two roles each."""
    for node in (0, 1):
        for role in ("agent", "train"):
            log(tmp_path, "17-0", node, role, f"0 {node} {role}\n")
    log(tmp_path, "17-1", 0, "train", "1 0 train\n")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        ({}, ["0 0 agent", "0 0 train", "0 1 agent", "0 1 train", "1 0 train"]),
        ({"attempt": "0"}, ["0 0 agent", "0 0 train", "0 1 agent", "0 1 train"]),
        ({"attempt": "17-1"}, ["1 0 train"]),
        ({"attempt": "latest"}, ["1 0 train"]),
        ({"node": 1}, ["0 1 agent", "0 1 train"]),
        ({"role": "train"}, ["0 0 train", "0 1 train", "1 0 train"]),
        ({"attempt": "0", "node": 1, "role": "agent"}, ["0 1 agent"]),
        ({"attempt": "7"}, []),
        ({"node": 5}, []),
    ],
)
def test_a_filter_chooses_by_attempt_node_and_role(
    run: Path, wanted: dict[str, object], texts: list[str]
) -> None:
    assert [line.text for line in read(run, **wanted)] == texts


def test_the_tenth_attempt_is_the_latest_and_comes_last(tmp_path: Path) -> None:
    for number in (9, 10, 2):
        log(tmp_path, f"17-{number}", 0, "train", f"{number}\n")
    assert [line.text for line in read(tmp_path)] == ["2", "9", "10"]
    assert [line.text for line in read(tmp_path, attempt="latest")] == ["10"]


def test_a_line_is_shown_once_it_is_complete(tmp_path: Path) -> None:
    log(tmp_path, "17-0", 0, "train", "one\ntw")
    files = FileLogs(DirectoryRecord(tmp_path), LogFilter())
    assert [line.text for line in files.read_new()] == ["one"]
    assert files.read_new() == []
    log(tmp_path, "17-0", 0, "train", "o\nthree")
    assert [line.text for line in files.read_new()] == ["two"]
    # At the end a last line without its end is shown too.
    assert [line.text for line in files.read_rest()] == ["three"]
    assert files.read_rest() == []


def test_bytes_that_are_no_text_stay_one_line_each(tmp_path: Path) -> None:
    log(tmp_path, "17-0", 0, "train", b"\xff\xfe\x00garbage\n\x80\n" + "ü\n".encode()[:1])
    files = FileLogs(DirectoryRecord(tmp_path), LogFilter())
    assert [line.text for line in files.read_new()] == ["��\x00garbage", "�"]
    # A character that was cut by a buffer's end is whole again.
    log(tmp_path, "17-0", 0, "train", "ü\n".encode()[1:])
    assert [line.text for line in files.read_new()] == ["ü"]
    # A progress bar is one line, and Windows' ends are cut.
    log(tmp_path, "17-0", 0, "train", b"10%\r50%\r100%\ndone\r\n")
    assert [line.text for line in files.read_new()] == ["10%\r50%\r100%", "done"]


def test_no_log_names_the_place_that_was_looked_at(tmp_path: Path) -> None:
    record = DirectoryRecord(tmp_path)
    files = FileLogs(record, LogFilter(role="trian"))
    assert files.read_rest() == []
    with pytest.raises(StoreError, match=f"{tmp_path / 'attempts'}"):
        require_logs(files, record)


class PlayedTime:
    """Time that passes only while somebody sleeps, and in which a test has things happen."""

    def __init__(self, *happenings: tuple[float, Callable[[], None]]) -> None:
        self.now = 0.0
        self._happenings = list(happenings)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        end = self.now + duration_s
        while self._happenings and self._happenings[0][0] <= end:
            _, happen = self._happenings.pop(0)
            happen()
        self.now = end


def test_a_followed_line_is_seen_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str, attempt: str = "17-0", role: str = "train") -> Callable[[], None]:
        return lambda: log(tmp_path, attempt, 0, role, text)

    written_at = {f"line {number}": 0.37 * (number + 1) for number in range(9)}
    happenings = [(at, write(f"{text}\n")) for text, at in written_at.items()]
    # Of a role that begins only now, and of the next attempt.
    happenings += [(4.03, write("new role\n", role="sidecar")), (5.11, write("new attempt\n", "17-1"))]
    happenings.append((7.0, write("last words", "17-1")))
    clock = PlayedTime(*happenings)
    monkeypatch.setattr("strop.launch.logs.time", clock)
    log(tmp_path, "17-0", 0, "train", "first\n")
    files = FileLogs(DirectoryRecord(tmp_path), LogFilter())
    seen_at = {line.text: clock.now for line in follow(files, is_over=lambda: clock.now > 7.0)}
    assert list(seen_at) == ["first", *written_at, "new role", "new attempt", "last words"]
    for text, at in (written_at | {"first": 0.0, "new role": 4.03, "new attempt": 5.11}).items():
        assert 0.0 <= seen_at[text] - at < 1.0, text


def test_what_is_written_until_the_end_is_still_shown(tmp_path: Path) -> None:
    def is_over() -> bool:
        log(tmp_path, "17-0", 0, "train", "written while the end was asked for\n")
        return True

    files = FileLogs(DirectoryRecord(tmp_path), LogFilter())
    assert [line.text for line in follow(files, is_over=is_over)] == ["written while the end was asked for"]


def test_a_slow_scheduler_is_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PlayedTime()
    monkeypatch.setattr("strop.launch.logs.time", clock)
    monkeypatch.setattr("strop.launch.logs._POLL_S", 0.02)
    asked: list[float] = []

    def is_over() -> bool:
        asked.append(clock.now)
        clock.sleep(0.15)
        return len(asked) == 2

    files = FileLogs(DirectoryRecord(tmp_path), LogFilter())
    list(follow(files, is_over=is_over))
    # Ten times the 0.15 s that an answer takes, instead of every second.
    assert 1.6 <= asked[1] - asked[0] < 1.7


def test_where_no_agent_began_the_schedulers_own_words_are_shown(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "slurm-17.out").write_text("bash: no-such-python: command not found\n")
    (tmp_path / "job" / "plan.json").write_text("{}\n")
    wanted = LogLine(
        text="bash: no-such-python: command not found", attempt="slurm-17.out", node="-", role="scheduler"
    )
    assert read(tmp_path) == [wanted]
    log(tmp_path, "17-0", 0, "agent", "began\n")
    # Once somebody speaks for the node, they are asked for by name: most of them are the agent's words again.
    assert [line.role for line in read(tmp_path)] == ["agent"]
    assert read(tmp_path, role="scheduler") == [wanted]
