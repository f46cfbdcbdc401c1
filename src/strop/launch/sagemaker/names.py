"""Names of training jobs: legal, neutral and unique. They come from a clock, never from a run file.

Who may list an account's jobs reads their names, so a name says nothing about model, data or method. A
name made from a run file would often be illegal too: `qwen3-1.7B` has a dot.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from strop.errors import ConfigError, explain_refusal

# Source: TrainingJobName in the service model. The length is checked apart: the pattern alone accepts
# 'a', a hundred hyphens, 'b'.
NAME_PATTERN = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", re.ASCII)
MAX_NAME_CHARACTERS = 63
SUFFIX_CHARACTERS = 4
MAX_PREFIX_CHARACTERS = 47
"""So that '-YYYYMMDD-HHMMSS', 16 characters, still fits."""
_SHORTEST_TELLING_WORD = 4


def base_name(prefix: str, submitted_at: float) -> str:
    """Return '<prefix>-YYYYMMDD-HHMMSS' in UTC.

    Raises: ConfigError if the prefix cannot begin a name.
    """
    require_name(prefix, what="name_prefix", max_characters=MAX_PREFIX_CHARACTERS)
    stamp = datetime.fromtimestamp(submitted_at, tz=UTC).strftime("%Y%m%d-%H%M%S")
    return f"{prefix}-{stamp}"


def member_name(base: str, index: int, num_members: int) -> str:
    """Return the name of one job of a sweep; a job without a sweep has the base alone."""
    return base if num_members == 1 else _append(base, f"{index:03d}")


def suffixed_name(name: str, home: str) -> str:
    """Return another name for the same job, for when the first one is taken.

    Made from the job's home, which nobody else has, so that the same submission finds its own job again.
    """
    token = hashlib.sha256(f"{name}\n{home}".encode()).hexdigest()[:SUFFIX_CHARACTERS]
    return _append(name, token)


def require_name(name: str, *, what: str = "job name", max_characters: int = MAX_NAME_CHARACTERS) -> None:
    """Refuse what SageMaker would not take as a name, or as the beginning of one.

    Raises: ConfigError.
    """
    if len(name) <= max_characters and NAME_PATTERN.fullmatch(name):
        return
    raise ConfigError(
        explain_refusal(
            f"{what}={name!r} ({len(name)} characters) is no name for a training job",
            allowed=f"1 to {max_characters} letters, digits and hyphens; no dot, underscore or slash,"
            " and no hyphen at either end",
            next_step=f"choose another {what}",
        )
    )


def run_key(name: str, home: str) -> str:
    """Return the neutral name of a run: the same for every job that continues it.

    Its state in S3 is found by this, because a job that is submitted again has a new name.
    """
    folder = home.rstrip("/").rpartition("/")[2]
    return "r" + hashlib.sha256(f"{name}\n{folder}".encode()).hexdigest()[:12]


def find_telling(texts: dict[str, str], words: Iterable[str]) -> list[str]:
    """Say which public texts (what to text) contain a word of the run, for a notice."""
    telling = {word for word in words if len(word) >= _SHORTEST_TELLING_WORD}
    return [
        f"{what}={text!r} contains {word!r}: everybody who may list jobs reads it"
        for what, text in texts.items()
        for word in sorted(telling)
        if word.lower() in text.lower()
    ]


def _append(name: str, tail: str) -> str:
    room = MAX_NAME_CHARACTERS - len(tail) - 1
    if len(name) > room:
        # Cut in the prefix: the stamp and what follows it tell jobs apart.
        stamp = name[-15:]
        name = f"{name[: room - len(stamp) - 1].rstrip('-')}-{stamp}"
    return f"{name}-{tail}"
