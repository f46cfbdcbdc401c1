"""Train from Python: write the run file, and run `strop train` on it in a separate process.

So it also works under a running event loop, as in a notebook; the run's memory is free when it ends; and the
same file can be submitted to a cluster.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from strop.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_USAGE,
    CheckRefused,
    ConfigError,
    Interrupted,
    StropError,
)
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.io.atomic import write_bytes_atomically
from strop.record import RunDir
from strop.spec import load_spec
from strop.spec.display import format_value
from strop.user_code import is_importing

if TYPE_CHECKING:
    from strop.evaluate import EvalResult

_LOOK_EVERY_S = 0.2
_SAVE_LIMIT_S = 600.0
"""Time for an interrupted run to write its checkpoint."""
_ERRORS: Mapping[int, type[StropError]] = {
    EXIT_USAGE: ConfigError,
    EXIT_REFUSED: CheckRefused,
    EXIT_INTERRUPTED: Interrupted,
}
_RUN_WORD, _REFUSAL_WORD = "run ", "strop: "
TaskWish: TypeAlias = str | Callable[..., Any] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A finished run."""

    path: Path
    """Its directory, with checkpoints, rollouts, results, report.html."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, by name."""
        return [dict(line) for line in RunDir.open(self.path).metrics.read()]

    @property
    def results(self) -> list[EvalResult]:
        """Its evaluations by step; the first is of the model before training."""
        from strop.run.runs import read_results

        return read_results(self.path)


def train(
    task: TaskWish,
    model: str,
    *,
    name: str = "from-python",
    root: str | Path = "runs",
    is_new: bool = False,
    **sections: Any,
) -> Run:
    """Train a model on a task, as `strop train` does, and show its progress.

    `task`: the name of a task, your task class, or the table of a task, in which `source` may be a list of
    rows and `reward` one function or several. `model`: a hub id, a folder, or a package. `sections`: further
    tables of a run file: `train={"steps": 40}, optimizer={"lr": 1e-5}, seed=1`. The same call again continues
    an unfinished run; `is_new` starts a new one.

    Raises: ConfigError, CheckRefused or Interrupted like the command; StropError for every other failure.
    """
    if is_importing():
        raise ConfigError(
            "strop.train is called by a file whose class or function a run uses, while it is imported",
            allowed='the call below `if __name__ == "__main__":`',
            next_step="move the call there",
        )
    folder = Path(root).absolute()
    table = _make_table(task, folder)
    tree = {"name": name, "model": {"uri": model}, "task": table, "output": {"root": str(folder)}}
    for section, value in sections.items():
        earlier = tree.get(section)
        tree[section] = {**earlier, **value} if isinstance(earlier, dict) else value
    run_file = folder / f"{name}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(run_file, "\n".join(_to_toml(tree)).encode() + b"\n")
    # Wrong settings are refused here, before a process is started.
    load_spec(run_file)
    return _run_to_end(run_file, folder / f"{name}.log", is_new=is_new)


def _make_table(task: TaskWish, folder: Path) -> dict[str, Any]:
    """Return the table of a task for a run file: rows are written to a file, code becomes FILE.py:NAME."""
    if isinstance(task, str):
        return {"name": task}
    if not isinstance(task, Mapping):
        return {"name": _place_of(task)}
    table = dict(task)
    if callable(table.get("name")):
        table["name"] = _place_of(table["name"])
    source, reward = table.get("source"), table.get("reward")
    if isinstance(source, Sequence) and not isinstance(source, str):
        try:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in source).encode()
        except TypeError as error:
            raise ConfigError(
                f"task.source has a row that is not JSON ({error})",
                allowed="tables of texts, numbers, lists and tables",
                next_step="convert the value",
            ) from error
        path = folder / "rows" / f"{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, text)
        table["source"] = str(path)
    if reward is not None and not isinstance(reward, str):
        rewards = reward if isinstance(reward, Sequence) else [reward]
        table["reward"] = [item if isinstance(item, str) else _place_of(item) for item in rewards]
    return table


def _place_of(code: Callable[..., Any]) -> str:
    """Return FILE.py:NAME of a class or a function. Raises: ConfigError if it is in no file."""
    name = getattr(code, "__qualname__", type(code).__name__)
    try:
        file = Path(inspect.getsourcefile(code) or "")
    except TypeError:
        file = Path()
    if file.suffix != ".py" or not file.is_file() or not name.isidentifier():
        raise ConfigError(
            f"{name} is in no file, so that no other process can import it",
            allowed="classes and functions at the top of a file",
            next_step="begin a notebook's cell with `%%writefile reward.py`, and import it from there",
        )
    return f"{file.absolute()}:{name}"


def _to_toml(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a run file: first the values, then a table per section."""
    yield "# Written by strop.train; `strop train` runs it as well."
    tables = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    for key, value in tree.items():
        if key not in tables:
            yield f"{key} = {format_value(value)}"
    for section, table in tables.items():
        yield f"\n[{section}]"
        for key, value in table.items():
            plain = dict(value) if isinstance(value, Mapping) else value
            yield f"{key} = {format_value(plain)}"


def _run_to_end(run_file: Path, log_path: Path, *, is_new: bool) -> Run:
    """Run the file in a separate process, and print its output."""
    log_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "strop.cli", "train", str(run_file), *(["--new"] if is_new else [])]
    child = spawn(command, log_path)
    lines: list[str] = []
    try:
        for line in _follow(child, log_path):
            lines.append(line)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    finally:
        if child.poll() is None:
            # With time to save: an interrupted run writes a checkpoint.
            terminate(child, _SAVE_LIMIT_S)
    refusals = [line.removeprefix(_REFUSAL_WORD) for line in lines if line.startswith(_REFUSAL_WORD)]
    code = child.poll()
    if code != EXIT_DONE:
        why = refusals[-1] if refusals else f"strop train ended with exit code {code}; {log_path} says more"
        raise _ERRORS.get(code or 0, StropError)(why)
    path = next(line.removeprefix(_RUN_WORD) for line in lines if line.startswith(_RUN_WORD))
    return Run(path=Path(path))


def _follow(child: ChildProcess, log_path: Path) -> Iterator[str]:
    """Yield the complete lines of a log until its process has ended."""
    with log_path.open(encoding="utf-8", errors="replace") as log:
        rest = ""
        while True:
            has_ended = child.poll() is not None
            *lines, rest = (rest + log.read()).split("\n")
            yield from lines
            if has_ended:
                if rest:
                    yield rest
                return
            time.sleep(_LOOK_EVERY_S)
