"""Train from Python: write the run file, and run `strop train` on it in a separate process.

So it also works under a running event loop, as in a notebook; the run's memory is free when it ends; and the
same file can be submitted to a cluster.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
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
from strop.record import RunDir
from strop.run.code_by_value import place_of, write_by_content, write_bytes
from strop.spec import load_spec
from strop.spec.display import NULL_WORD, format_value
from strop.spec.sources import absolute_path
from strop.user_code import EndOfImport, is_importing

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

    `task`: the name of a task, your task class, or the table of a task; without a name it is that of `rows`.
    Its `source` may be a `Dataset`, a data frame or a list of rows, or a table of them with the keys `train`
    and `test`; its `reward` one function or several, also of a script or a notebook. `model`: a hub id, a
    folder, or a package. Relative paths start in the current folder. `sections`: further tables of a run
    file: `train={"steps": 40}, optimizer={"lr": 1e-5}, seed=1`. The same call again continues an unfinished
    run; `is_new` starts a new one.

    Raises: ConfigError, CheckRefused or Interrupted like the command; StropError for every other failure.
    """
    if is_importing():
        # A process of the run imports the script for what stands above this call.
        raise EndOfImport
    folder = Path(root).absolute()
    table = _make_table(task, folder)
    tree = {"name": name, "model": {"uri": model}, "task": table, "output": {"root": str(folder)}}
    for section, value in sections.items():
        earlier = tree.get(section)
        tree[section] = {**earlier, **value} if isinstance(earlier, dict) else value
    text = "\n".join(_to_toml(_make_absolute(tree, ()))).encode() + b"\n"
    # By its content: calls at the same time have a file each.
    run_file = write_by_content(folder, name, ".toml", text)
    # Wrong settings are refused here, before a process is started.
    load_spec(run_file)
    descriptor, log_path = tempfile.mkstemp(dir=folder, prefix=f"{run_file.stem}-", suffix=".log")
    os.close(descriptor)
    return _run_to_end(run_file, Path(log_path), is_new=is_new)


def _make_absolute(value: Any, at: tuple[str, ...]) -> Any:
    """Return settings with paths made absolute against the current folder, as overrides of a command are."""
    if isinstance(value, Mapping):
        return {key: _make_absolute(item, (*at, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_absolute(item, at) for item in value]
    if isinstance(value, os.PathLike):
        return os.path.abspath(value)
    if not isinstance(value, str) or value == NULL_WORD:
        return value
    return absolute_path(at, value, os.getcwd(), "strop.train")


def _make_table(task: TaskWish, folder: Path) -> dict[str, Any]:
    """Return the table of a task for a run file: rows are written to a file, code becomes FILE.py:NAME."""
    if isinstance(task, str):
        return {"name": task}
    if not isinstance(task, Mapping):
        return {"name": place_of(task, folder)}
    table = {"name": "rows", **task}
    if table["name"] == "rows":
        table.setdefault("prompt", "prompt")
    source, reward = table.get("source"), table.get("reward")
    if callable(table["name"]):
        table["name"] = place_of(table["name"], folder)
    if isinstance(source, Mapping):
        texts = {split: _to_lines(rows) for split, rows in source.items()}
        digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
        for split, text in texts.items():
            write_bytes(folder / "rows" / digest / f"{split}.jsonl", text)
        table["source"] = str(folder / "rows" / digest)
    elif source is not None and not isinstance(source, str | os.PathLike):
        table["source"] = str(write_by_content(folder / "rows", "rows", ".jsonl", _to_lines(source)))
    if reward is not None and not isinstance(reward, str):
        rewards = reward if isinstance(reward, Sequence) else [reward]
        table["reward"] = [item if isinstance(item, str) else place_of(item, folder) for item in rewards]
    return table


def _to_lines(source: Any) -> bytes:
    """Return rows as JSONL: those of a `datasets.Dataset`, a pandas data frame, or any iterable of tables.

    Raises: ConfigError if a row is no table, or holds what JSON cannot.
    """
    if hasattr(source, "notna"):
        source = source.astype(object).where(source.notna(), None).to_dict("records")
    try:
        rows = [dict(row) for row in source]
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task.source has a row that is not JSON ({error})",
            allowed="tables of texts, numbers, lists and tables",
            next_step="convert the value",
        ) from error
    return "".join(lines).encode()


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
    path = Path(next(line.removeprefix(_RUN_WORD) for line in lines if line.startswith(_RUN_WORD)))
    if not RunDir.open(path).is_finished:
        raise StropError(f"strop train ended with exit code 0, and {path} has no end; {log_path} says more")
    log_path.unlink()
    return Run(path=path)


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
