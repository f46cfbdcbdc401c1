"""What an attempt writes of itself, on its way out of the container while it goes on.

To the run's folder in the store, `traces/`; where a job has no network, into the checkpoint directory, which
the platform keeps in step. A store that fails delays this thread and nothing else.
"""

from __future__ import annotations

import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from strop.errors import StoreError
from strop.launch.sagemaker.job_objects import JobObjects
from strop.record.mirror.layout import TRACES

EVERY_S = 10.0
_RUN_FILES = ("run.json", "spec.toml", "metrics.jsonl", "events.jsonl")


class Sink(Protocol):
    """Where files go."""

    def put(self, path: Path, name: str) -> None:
        """Send one file. Raises: StoreError or OSError."""


class StoreSink:
    """The run's folder in a store."""

    def __init__(self, objects: JobObjects, record_uri: str) -> None:
        self._objects, self._root = objects, f"{record_uri}/{TRACES}"

    def put(self, path: Path, name: str) -> None:
        """Send one file whole."""
        self._objects.write(f"{self._root}/{name}", path.read_bytes())


class DirectorySink:
    """A folder that the platform keeps in step with S3."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, path: Path, name: str) -> None:
        """Copy one file, which appears whole."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".partial-{target.name}")
        shutil.copyfile(path, partial)
        partial.rename(target)


class RecordSender:
    """Sends what has changed, now and then, and at the end."""

    def __init__(self, sink: Sink, member_path: Path, attempt: str, *, has_run: bool) -> None:
        self._sink, self._member_path, self._attempt = sink, member_path, attempt
        self._has_run = has_run
        """Whether this host is the one that writes the run's own files."""
        self._sent: dict[str, tuple[int, int]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send_on, name="record-sender", daemon=True)
        self._told = ""

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send the rest and end."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self.send_changed()

    def send_changed(self) -> None:
        """Send every file that is another than the one sent last."""
        for path in self._find():
            name = path.relative_to(self._member_path).as_posix()
            with suppress(FileNotFoundError):
                found = path.stat()
                version = (found.st_mtime_ns, found.st_size)
                if self._sent.get(name) != version and self._try_put(path, name):
                    self._sent[name] = version

    def _find(self) -> list[Path]:
        attempt_path = self._member_path / "attempts" / self._attempt
        found = [path for path in sorted(attempt_path.rglob("*")) if path.is_file() and path.name != "alive"]
        if self._has_run:
            found += [self._member_path / name for name in _RUN_FILES]
        return found

    def _try_put(self, path: Path, name: str) -> bool:
        try:
            self._sink.put(path, name)
        except FileNotFoundError:
            return False
        except (OSError, StoreError) as error:
            if str(error) != self._told:
                self._told = str(error)
                sys.stderr.write(f"record: {name} was not sent: {error}\n")
            return False
        return True

    def _send_on(self) -> None:
        # The first time early: the start record says that the job runs.
        pause_s = 1.0
        while not self._stopped.wait(pause_s):
            self.send_changed()
            pause_s = min(EVERY_S, pause_s * 2)


class LogEcho:
    """Repeats the roles' logs on standard output, `role| line`: all that the platform's log service sees."""

    def __init__(self, folder: Path, *, hide: tuple[str, ...] = ()) -> None:
        self._folder, self._hide = folder, hide
        self._offsets: dict[str, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._echo_on, name="log-echo", daemon=True)

    def start(self) -> None:
        """Begin to repeat."""
        self._thread.start()

    def stop(self) -> None:
        """Repeat the rest and end."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self.echo_new(is_last=True)

    def echo_new(self, *, is_last: bool = False) -> None:
        """Repeat complete lines; at the end the torn one too."""
        from strop.launch.secrets import redact

        for path in sorted(self._folder.glob("*.log")):
            if path.name == "agent.log":
                continue  # On standard error already.
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._offsets.get(path.name, 0))
                data = file.read()
                end = len(data) if is_last else data.rfind(b"\n") + 1
                self._offsets[path.name] = self._offsets.get(path.name, 0) + end
                text = redact(data[:end].decode(errors="backslashreplace"), self._hide)
                for line in text.splitlines():
                    sys.stdout.write(f"{path.stem}| {line}\n")
        with suppress(OSError, ValueError):
            sys.stdout.flush()

    def _echo_on(self) -> None:
        while not self._stopped.wait(0.5):
            self.echo_new()
