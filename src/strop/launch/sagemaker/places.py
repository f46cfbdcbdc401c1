"""Where things are: the keys of a job in S3, and the paths that the platform promises in the container.

    <root>/source/<job>/code.tar.zst     <root>/config/<job>/...         <root>/output/<job>/...
    <root>/state/<run key>/<host>/step-N/...                             <store>/checkpoints/<job>/...

State is kept by run, because a job that is submitted again has a new name.
"""

from __future__ import annotations

from pathlib import PurePosixPath

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
LINK_KEY = "hosts.key"
"""In the channel `config` of a job of several hosts: what they know each other by."""
CODE_CHANNEL = "code"
ASSET_CHANNEL = "asset-{index}"
RUN_PARAMETER = "strop_run"
PLAN_PARAMETER = "strop_plan"
RUN_TAG = "strop-run"
PLAN_TAG = "strop-plan"
MEMBER_TAG = "strop-member"
USER_TAG = "strop-user"
SCRATCH = "/tmp/strop"
"""Where runs are written in the container: outside everything that the platform packs or copies."""
ASSET_STORE = f"{SCRATCH}/store"
"""Root of the store in a job without network: links to its channels."""
ENTRY_MODULE = "strop.launch.sagemaker.node"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
STOP_WINDOW_S = 120.0
"""Between SIGTERM and KILL. Source: the API's text on StopTrainingJob."""
NUM_FAILURE_CHARACTERS = 1024
"""Of the failure file that the platform shows."""


def source_uri(root: str, job: str) -> str:
    """Return the folder of a job's code."""
    return f"{root}/source/{job}"


def config_uri(root: str, job: str) -> str:
    """Return the folder of a job's plan, spec and original run file."""
    return f"{root}/config/{job}"


def state_uri(root: str, run_key: str) -> str:
    """Return the folder that the platform keeps in step with the checkpoint directory."""
    return f"{root}/state/{run_key}"


def record_uri(store: str, job: str) -> str:
    """Return the folder that a run is mirrored to."""
    return f"{store}/checkpoints/{job}"
