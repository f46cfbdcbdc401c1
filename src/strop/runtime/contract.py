"""The messages between a client, the controller and the nodes of the sandbox service.

A client speaks OpenHands' protocol to the controller: it sends a `StartRequest` and receives records. The
controller orders sandboxes from a node (`NodeOrder`). A node reports its own state and that of its sandboxes
to the controller every two seconds and after each change (`NodeReport`). All messages are JSON over HTTP; the
classes name their routes. Both sides accept unknown fields.

Source of the client's side: the protocol of openhands-workspace 1.58.0, in `wire.py`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from strop.sandbox.allowlist import parse_network
from strop.sandbox.contract import MIB, IsolationLevel, Limits

NODE_KEY_HEADER = "X-Node-Key"
"""Header of the key between controller and nodes, both ways. Clients have other keys."""
HEARTBEAT_S = 2.0
LOST_AFTER_S = 10.0
"""A node that has been silent for this long is lost, and its sandboxes with it."""
MAX_OUTPUT_BYTES = 64 * MIB
"""Longest head or tail of an output stream that a client may ask to keep: the node holds it in memory."""
MIN_SHARE = 0.001
"""Least amount of a resource that a sandbox may ask for. With 0 it would take no slot."""
INSIDE_PORT = 60000
"""Where a sandbox's own server listens; the clients' commands name it."""

_NO_ID = (1 << 32) - 1


class State(StrEnum):
    """The state of a sandbox. Clients see each as a pair of words (`wire.WORDS`)."""

    QUEUED = "queued"
    """It waits for a slot."""
    IMAGE = "image"
    """Its image is being pulled, built or unpacked."""
    STARTING = "starting"
    """It exists; its server does not answer through its address yet."""
    READY = "ready"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPED = "stopped"
    """Its client stopped it, or a limit of idleness, age or lease."""
    FAILED = "failed"
    """It ended by itself or never began; `FailureKind` says whose fault that was."""


class FailureKind(StrEnum):
    """Why a sandbox failed, for the code that decides about its reward. None of these is a reward of 0."""

    IMAGE_ERROR = "image_error"
    """The image is missing, denied or of another architecture, or nothing in it can be started."""
    TASK_OOM = "task_oom"
    """The sandbox reached its memory limit, by the control group's own count."""
    AGENT_ERROR = "agent_error"
    """Its server ended or stopped answering."""
    INFRA_LOST = "infra_lost"
    """Its node, allocation, disk or network is gone."""
    CAPACITY = "capacity"
    """It can never fit, or no slot was free before its deadline."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Slot(_Message):
    """The resources that a sandbox takes of a node, or that a node has."""

    cpus: float
    memory_bytes: int
    disk_bytes: int
    processes: int

    def times(self, factor: float) -> Slot:
        """Return the slot multiplied, rounded up. Disk stays: the size of images does not change."""
        return Slot(
            cpus=self.cpus * factor,
            memory_bytes=math.ceil(self.memory_bytes * factor),
            disk_bytes=self.disk_bytes,
            processes=math.ceil(self.processes * factor),
        )


class SandboxTerms(_Message):
    """The fields that only strop's own client sends: those of `SandboxSpec` that a node can honour.

    Such a sandbox is served by frames alone (`owner_plane`), and ends with its owner's connection.
    """

    limits: Limits
    user: int | None = None
    network: str = "none"
    has_workspace: bool = False
    min_level: IsolationLevel = IsolationLevel.NAMESPACE

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: Limits) -> Limits:
        for name in Limits.__slots__:
            value = getattr(limits, name)
            most = MAX_OUTPUT_BYTES if name.startswith("output_") else 1 << 53
            least = 0 if name.startswith("output_") else MIN_SHARE
            is_bounded = not (value is None or isinstance(value, bool))
            if is_bounded and not least <= value <= most:
                raise ValueError(f"{name}={value} is not from {least} to {most}")
        return limits

    @field_validator("network")
    @classmethod
    def _check_network(cls, network: str) -> str:
        parse_network(network)
        return network

    def slot(self, default: Slot) -> Slot:
        """Return the slot of the sandbox; `default` has the processors where `limits` names none."""
        limits = self.limits
        return Slot(
            cpus=default.cpus if limits.cpus is None else limits.cpus,
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.scratch_bytes,
            processes=limits.max_processes,
        )


class StartRequest(_Message):
    """`POST /start`, parsed."""

    image: str
    command: tuple[str, ...]
    """Split into words as a shell would. The first replaces the image's entrypoint."""
    working_dir: str = "/"
    environment: dict[str, str] = Field(default_factory=dict)
    session_id: str
    resource_factor: float = 1.0
    """Multiplies memory, processes and processors of a slot."""
    lifetime_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """strop's own field: how long the client means to use the sandbox. A node that ends sooner is chosen only
    if no other fits."""
    run_as_user: int | None = Field(default=None, ge=0, lt=_NO_ID)
    """A hint: the image's user that runs the programs, with the group of the same number, where the node can
    arrange it. `isolation` has their user on the host."""
    run_as_group: int | None = Field(default=None, ge=0, lt=_NO_ID)
    fs_group: int | None = Field(default=None, ge=0, lt=_NO_ID)
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    runtime_class: str | None = None
    """A hint. Nothing is refused because of it."""
    sandbox: SandboxTerms | None = None
    """From strop's own client. `command`, `resource_factor` and the users and groups have no effect then."""


class NodeOrder(_Message):
    """`POST {node}/sandboxes`: make this sandbox. Answered at once with `NodeAnswer`; reports tell the rest.

    Other routes: `DELETE {node}/sandboxes/{runtime_id}?cause=`, `POST .../pause` and `POST .../resume`. They
    are answered with a `SandboxReport` when done; 404 for a sandbox that the node does not have.
    A repeated order for the same runtime id changes nothing and is answered alike. 503 says that the node
    takes no orders now; the order then goes elsewhere.
    """

    runtime_id: str
    session_api_key: str
    slot: Slot
    request: StartRequest


class NodeAnswer(_Message):
    """The address is held from now on, and final."""

    url: str
    """`http://host:port`, without a path."""


class SandboxReport(_Message):
    """The state of one sandbox at its node."""

    runtime_id: str
    state: State
    failure_kind: FailureKind | None = None
    cause: str = ""
    """One sentence for `failed` and `stopped`."""
    refusal: str = ""
    """The kind of the `SandboxRefused` that kept it from being made."""
    exit_code: int | None = None
    log_tail: str = ""
    """The last lines that its server wrote, for `pod_logs`."""
    events: tuple[str, ...] = ()
    """Progress: pull, build, start."""
    isolation: dict[str, Any] = Field(default_factory=dict)
    """The `sandbox.Isolation` that was reached."""
    timeline: dict[str, float] = Field(default_factory=dict)
    """Unix times at which it was queued, had its image, was started, was ready, ran its first command and was
    stopped."""
    last_used_s: float = 0.0
    """Seconds since its address was last used."""
    usage: dict[str, float] = Field(default_factory=dict)
    """cpu_s, memory_bytes, processes, disk_bytes, commands."""
    version: int = 0
    """Grows with each change of its state at this node, so that a controller can drop an outdated report."""
    url: str = ""
    """Its address at the node, if it has one, for a controller that missed the answer to its order."""


class NodeReport(_Message):
    """`POST {controller}/nodes/{node_id}`: at registration, every `HEARTBEAT_S` and after each change.

    A report after a change has only the sandboxes that changed, so its cost does not grow with their number.
    Answered with `NodeReply`.
    """

    node_id: str
    """Unique to one start of one node agent."""
    host: str
    url: str
    """Where the controller reaches the node agent."""
    boot_id: str
    pid: int
    capacity: Slot
    backends: tuple[str, ...]
    is_draining: bool = False
    """It takes no new sandboxes: its allocation ends soon."""
    ends_in_s: float | None = None
    """Seconds until its allocation ends."""
    sandboxes: tuple[SandboxReport, ...]
    """All its sandboxes, and those that ended since the last answered report."""
    has_all: bool = True
    """False: `sandboxes` has only those that changed since the last answered report."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Added to the controller's own, by their names and labels."""


class NodeReply(_Message):
    """The controller's answer to a report."""

    to_stop: tuple[str, ...] = ()
    """Runtime ids that the node should stop: stopped, expired, or placed elsewhere meanwhile."""
    wants_all: bool = False
    """The report was not taken: a node's first report has to have all its sandboxes."""
