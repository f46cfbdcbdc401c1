"""The table of submitted jobs for people, and its twin for programs.

A job's name is neutral, so each job that AWS has accepted gets a row in a Markdown table. Its twin (`.jsonl`)
has more details, with one line per job or change of state, and the table is rendered from it each time. Both
are written under a lock; the table is replaced atomically.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strop.errors import StoreError
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.io.lock import FileLock

COLUMNS = ("Job Name", "Config", "Description", "Submitted", "State")
TITLE = "# Jobs\n\nWritten by strop when a job is submitted; do not edit.\n"
LOCK_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRow:
    """One submitted job."""

    job_name: str
    config: str
    """The run file's name."""
    description: str
    submitted: str
    """'YYYY-MM-DD HH:MM', UTC."""
    state: str = ""
    run: str = ""
    """The run's name in the run file."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """ARN, plan hash, image, prefixes, run key, home: JSON values, only in the twin."""

    def to_markdown(self) -> str:
        """Return the row of the table."""
        cells = (self.job_name, self.config, self.description, self.submitted, self.state)
        return f"| {' | '.join(_escape(cell) for cell in cells)} |"


def submitted_text(submitted_at: float) -> str:
    """Format a time for the table."""
    return datetime.fromtimestamp(submitted_at, tz=UTC).strftime("%Y-%m-%d %H:%M")


class JobLog:
    """A table of jobs and its twin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.twin_path = path.with_suffix(".jsonl")

    def append(self, row: JobRow) -> str | None:
        """Add an accepted job; return a warning if that fails, which does not affect the job."""
        try:
            self._write([asdict(row)])
        except StoreError as error:
            return (
                f"the job {row.job_name} was accepted, and its row could not be written ({error})."
                f" Add it to {self.path} by hand: {row.to_markdown()}"
            )
        return None

    def note_states(self, states: Mapping[str, str]) -> None:
        """Record the states of jobs that have changed.

        Raises: StoreError if it cannot be written.
        """
        recorded = {row.job_name: row.state for row in self.read()}
        changed = {name: state for name, state in states.items() if recorded.get(name, state) != state}
        if changed:
            self._write([{"job_name": name, "state": state} for name, state in changed.items()])

    def read(self) -> list[JobRow]:
        """Return all jobs, oldest first. A torn line, which is no JSON, is skipped."""
        try:
            lines = self.twin_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(
                f"{self.twin_path} cannot be read ({error.strerror})",
                allowed="the twin of the job log",
                next_step="mend the permissions, or name the job itself",
            ) from error
        rows: dict[str, dict[str, Any]] = {}
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("job_name"), str):
                rows.setdefault(record["job_name"], {}).update(record)
        return [
            JobRow(
                job_name=name,
                submitted=str(record["submitted"]),
                facts=record["facts"] if isinstance(record.get("facts"), dict) else {},
                **{key: str(record.get(key, "")) for key in ("config", "description", "state", "run")},
            )
            for name, record in rows.items()
            # A record without it is a change of state of a job that is not in this log.
            if "submitted" in record
        ]

    def _write(self, records: list[dict[str, Any]]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, self.path) from error
        with FileLock(self.path.with_suffix(".lock"), wait_limit_s=LOCK_WAIT_S):
            _append_lines(self.twin_path, records)
            lines = [TITLE, f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
            lines += [row.to_markdown() for row in self.read()]
            write_bytes_atomically(self.path, ("\n".join(lines) + "\n").encode())


def _append_lines(path: Path, records: list[dict[str, Any]]) -> None:
    data = "".join(json.dumps(record, sort_keys=True) + "\n" for record in records).encode()
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    # A kill tore the last line; the next one must begin on a new line.
                    data = b"\n" + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise explain_write_failure(error, path) from error


def _escape(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\\", "\\\\").replace("|", "\\|")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "<br>")
    return "".join(letter if letter.isprintable() else " " for letter in text)
