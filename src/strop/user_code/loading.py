"""Load user code into this process, and locate the line that failed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.errors import ConfigError, StropError, describe_error, find_place, split_error
from strop.user_code.reference import CodeRef
from strop.user_code.sources import hash_sources, list_sources

_importing: ContextVar[bool] = ContextVar("a file of the user's is being imported", default=False)


class EndOfImport(BaseException):
    """Raised by a file that would begin a training while a run imports it: what stands above is there."""


def is_importing() -> bool:
    """Whether this code runs during the import of a user's file."""
    return _importing.get()


def load_code(ref: CodeRef, digest: str | None = None) -> Any:
    """Import the module of a class or function, once, and return the object.

    `digest`: that of the inspected file; a process that has loaded it keeps it, even if the file changes. The
    file's folder is appended to the path, so modules beside it can be imported but hide no installed ones.

    Raises: ConfigError naming file and line if the module cannot be imported, has no such name, or does not
        match `digest`.
    """
    if ref.is_file and digest is not None and _module_name(ref.path, digest) not in sys.modules:
        with blaming(ref, "be read"):
            current = hash_sources(ref.path)
        if current != digest:
            raise edited([str(ref.path)])
    with blaming(ref, "be imported"):
        module = _import_file(ref, digest) if ref.is_file else importlib.import_module(ref.place)
    try:
        return getattr(module, ref.name)
    except AttributeError:
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise ConfigError(
            f"{ref.path if ref.is_file else ref.place} has no {ref.name}",
            allowed=", ".join(names) or "a class or function of the file",
            next_step="correct the name behind the colon",
        ) from None


def edited(paths: Sequence[str]) -> ConfigError:
    """Make the error for code that was changed since this run or judge began."""
    return ConfigError(
        f"{', '.join(paths)} was edited since it was looked at: replies would be judged in two ways",
        allowed="the code that this began with",
        next_step="restore it, or start again with the edited code",
    )


@contextmanager
def blaming(ref: CodeRef, doing: str) -> Iterator[None]:
    """Turn any exception of user code in the block into one error with file and line.

    Raises: ConfigError: REF cannot DOING.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        given = _blame(error, ref)
        allowed = "code that runs with what is installed here"
        next_step = "mend that line, or install what it needs"
        if isinstance(error, StropError):
            # It says itself what is allowed.
            place = find_place(given)
            given, allowed, next_step = split_error(str(error))
            given = f"{given} ({place})" if place and not find_place(given) else given
        raise ConfigError(f"{ref} cannot {doing}: {given}", allowed=allowed, next_step=next_step) from error


def _blame(error: BaseException, ref: CodeRef) -> str:
    """Format an error as one line with its file and line in the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        # The file has not run, so no frame is in it.
        return f"{type(error).__name__}: {error.msg} ({os.path.basename(error.filename)}:{error.lineno})"
    line = describe_error(error)
    sources = {str(file) for file in list_sources(ref.path)} if ref.is_file else set()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in sources]
    if not frames:
        return line
    # If strop raised the error, the user's line that called strop is the one to mend.
    message = line.removesuffix(f" ({find_place(line)})")
    return f"{message} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"


def _module_name(path: Path, digest: str) -> str:
    # By content, so that a notebook that edits the file gets the new version.
    return f"strop_user_{path.stem}_{digest[:12]}"


def _import_file(ref: CodeRef, digest: str | None) -> ModuleType:
    path = ref.path
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = _module_name(path, digest or hash_sources(path))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, because dataclasses and pickle look their module up.
    sys.modules[name] = module
    is_whole = False
    token = _importing.set(True)
    try:
        with suppress(EndOfImport):
            # Not by the loader: bytecode that it kept counts as new for a second after an edit.
            exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), module.__dict__)
        is_whole = True
    finally:
        _importing.reset(token)
        if not is_whole:
            del sys.modules[name]
    return module
