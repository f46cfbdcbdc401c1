"""The page over a folder of runs, served in a thread of the tests' process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from strop.record.files import RecordFiles
from strop.view.places import find_runs
from strop.view.server import LOOPBACK, Address, build_app


@contextmanager
def served(root: Path, *, token: str | None = None, writes_notes: bool = False) -> Iterator[str]:
    """Serve the page until the end; yield its address, without a slash at the end."""
    app = build_app(find_runs(str(root), _no_job), token=token, writes_notes=writes_notes)
    # What a browser still listens to is cut off.
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    listener = Address(port=0).listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page")
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _no_job(name: str) -> tuple[str, RecordFiles]:
    raise AssertionError(f"{name} is no job")
