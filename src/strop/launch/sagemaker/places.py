"""Names of jobs, their keys in S3, and the platform's paths in the container.

    <root>/source/<job>/code.tar.zst     <root>/config/<job>/...         <root>/output/<job>/...
    <root>/state/<run key>/<host>/step-N/...                             <store>/checkpoints/<job>/...

State is kept by run, because a resubmitted job has a new name. Everyone who may list an account's jobs can
read their names, so a name comes from the clock and reveals nothing about model, data or method. A name from
a run file would often be invalid too: `qwen3-1.7B` has a dot.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import PurePosixPath

from strop.errors import ConfigError

# Source: the developer guide of SageMaker on training containers.
OPT_ML = PurePosixPath("/opt/ml")
HYPERPARAMETERS = "input/config/hyperparameters.json"
RESOURCES = "input/config/resourceconfig.json"
CHANNELS = "input/config/inputdataconfig.json"
CHECKPOINTS = "input/config/checkpointconfig.json"
DATA = "input/data"
FAILURE = "output/failure"
CHECKPOINT_PATH = "/opt/ml/checkpoints"
CONFIG_CHANNEL = "config"
CODE_CHANNEL = "code"
RUN_PARAMETER = "strop_run"
PLAN_PARAMETER = "strop_plan"
RUN_TAG = "strop-run"
PLAN_TAG = "strop-plan"
TRIAL_TAG = "strop-member"
USER_TAG = "strop-user"
SCRATCH = "/tmp/strop"
"""The folder for runs in the container, which the platform neither packs nor copies."""
ENTRY_MODULE = "strop.launch.sagemaker.node"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
STOP_WINDOW_S = 120.0
"""Seconds between SIGTERM and KILL. Source: the API's text on StopTrainingJob."""
NUM_FAILURE_CHARACTERS = 1024
"""Characters of the failure file that the platform shows."""
# Source: TrainingJobName in the service model. The length is checked separately: the pattern accepts 'a', a
# hundred hyphens, 'b'.
NAME_PATTERN = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", re.ASCII)
MAX_NAME_CHARACTERS = 63
SUFFIX_CHARACTERS = 4
MAX_PREFIX_CHARACTERS = 47
"""Leaves room for '-YYYYMMDD-HHMMSS', 16 characters."""
_MIN_REVEALING_CHARACTERS = 4


def base_name(prefix: str, submitted_at: float) -> str:
    """Return '<prefix>-YYYYMMDD-HHMMSS' in UTC.

    Raises: ConfigError if the prefix cannot begin a name.
    """
    require_name(prefix, what="name_prefix", max_characters=MAX_PREFIX_CHARACTERS)
    stamp = datetime.fromtimestamp(submitted_at, tz=UTC).strftime("%Y%m%d-%H%M%S")
    return f"{prefix}-{stamp}"


def trial_name(base: str, index: int, num_trials: int) -> str:
    """Return the name of a job of a sweep; a single job has the base name."""
    return base if num_trials == 1 else _append(base, f"{index:03d}")


def suffixed_name(name: str, home: str) -> str:
    """Return another name for a job whose first name is in use.

    It depends on the job's home, so that a repeated submission finds its job.
    """
    token = hashlib.sha256(f"{name}\n{home}".encode()).hexdigest()[:SUFFIX_CHARACTERS]
    return _append(name, token)


def require_name(name: str, *, what: str = "job name", max_characters: int = MAX_NAME_CHARACTERS) -> None:
    """Refuse an invalid name of a training job, or prefix of one.

    Raises: ConfigError.
    """
    if len(name) <= max_characters and NAME_PATTERN.fullmatch(name):
        return
    raise ConfigError(
        f"{what}={name!r} ({len(name)} characters) is no name for a training job",
        allowed=f"1 to {max_characters} letters, digits and hyphens; no dot, underscore or slash,"
        " and no hyphen at either end",
        next_step=f"choose another {what}",
    )


def run_key(name: str, home: str) -> str:
    """Return the neutral name of a run, which is the same for every job that continues it.

    It locates the state in S3, because a resubmitted job has a new name.
    """
    folder = home.rstrip("/").rpartition("/")[2]
    return "r" + hashlib.sha256(f"{name}\n{folder}".encode()).hexdigest()[:12]


def find_revealing(texts: dict[str, str], words: Iterable[str]) -> list[str]:
    """Return a notice for each public text that contains a word of the run. `texts`: setting to text."""
    revealing = {word for word in words if len(word) >= _MIN_REVEALING_CHARACTERS}
    return [
        f"{what}={text!r} contains {word!r}: everybody who may list jobs reads it"
        for what, text in texts.items()
        for word in sorted(revealing)
        if word.lower() in text.lower()
    ]


def _append(name: str, tail: str) -> str:
    room = MAX_NAME_CHARACTERS - len(tail) - 1
    if len(name) > room:
        # Shorten the prefix, because the stamp and the tail distinguish jobs.
        stamp = name[-15:]
        name = f"{name[: room - len(stamp) - 1].rstrip('-')}-{stamp}"
    return f"{name}-{tail}"


def source_uri(root: str, job: str) -> str:
    """Return the folder of a job's code."""
    return f"{root}/source/{job}"


def config_uri(root: str, job: str) -> str:
    """Return the folder of a job's plan, spec and original run file."""
    return f"{root}/config/{job}"


def state_uri(root: str, run_key: str) -> str:
    """Return the folder that mirrors the checkpoint directory."""
    return f"{root}/state/{run_key}"


def record_uri(store: str, job: str) -> str:
    """Return the folder that a run is mirrored to."""
    return f"{store}/checkpoints/{job}"
