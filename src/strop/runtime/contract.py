"""What flows between a client, the controller and the nodes of the sandbox service.

A client speaks OpenHands' protocol to the controller: `StartRequest` comes in, records go out. The controller
tells a node what to make (`NodeOrder`), and a node tells the controller, every two seconds and after each
change, what it is and how its sandboxes are (`NodeReport`). All of it is JSON over HTTP; the routes stand
with the classes. Both sides accept fields that they do not know.

Source of the client's side: the protocol of openhands-workspace 1.58.0 and openhands-ai 1.11.0, in `wire.py`.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from strop.sandbox.allowlist import parse_network
from strop.sandbox.contract import MIB, IsolationLevel, Limits

NODE_KEY_HEADER = "X-Node-Key"
"""Between controller and nodes, both ways. Not a client's key."""
HEARTBEAT_S = 2.0
LOST_AFTER_S = 10.0
"""A node that was silent for this long is lost, and its sandboxes with it."""
MAX_OUTPUT_BYTES = 64 * MIB
"""Most that a client may have kept of one end of an output stream: the node holds it in memory."""
MIN_SHARE = 0.001
"""Least of each thing that a sandbox may ask for: none would take no slot."""
INSIDE_PORT = 60000
"""Where a sandbox's own server listens; every client's command says it."""

_NO_ID = (1 << 32) - 1


class State(StrEnum):
    """Where a sandbox is in its life. What clients are told of each is one pair of words (`wire.WORDS`)."""

    QUEUED = "queued"
    """Waits for a slot."""
    IMAGE = "image"
    """Its image is pulled, built or unpacked."""
    STARTING = "starting"
    """It exists; its server does not answer yet through its address."""
    READY = "ready"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPED = "stopped"
    """Asked for, or by a limit of idleness, age or lease."""
    FAILED = "failed"
    """Ended by itself or never began; `FailureKind` says whose fault it was."""


class FailureKind(StrEnum):
    """Why a sandbox failed, for the code that decides about its reward. None of these is a reward of 0."""

    IMAGE_ERROR = "image_error"
    """Missing, denied, of another architecture, or nothing in it can be started."""
    TASK_OOM = "task_oom"
    """Its memory limit, by the control group's own count."""
    AGENT_ERROR = "agent_error"
    """Its server ended or stopped answering."""
    INFRA_LOST = "infra_lost"
    """Its node, allocation, disk or network is gone."""
    CAPACITY = "capacity"
    """It can never fit, or no slot came before its deadline."""


class _Flow(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Slot(_Flow):
    """What one sandbox takes of a node, or what a node has."""

    cpus: float
    memory_bytes: int
    disk_bytes: int
    processes: int

    def times(self, factor: float) -> Slot:
        """Return as many times as much, rounded up. A disk holds images, which no factor makes larger."""
        return Slot(
            cpus=self.cpus * factor,
            memory_bytes=math.ceil(self.memory_bytes * factor),
            disk_bytes=self.disk_bytes,
            processes=math.ceil(self.processes * factor),
        )


class SnapshotTerms(_Flow):
    """The snapshot that a sandbox begins with."""

    node_id: str
    """Where it is: the only node that can make the sandbox."""
    key: str = Field(repr=False)
    """Whoever has it may use the snapshot."""


class SandboxTerms(_Flow):
    """What strop's own client says of a sandbox beside its image: as `SandboxSpec`, where that fits a node.

    Such a sandbox is served by frames alone (`owner_plane`), and ends with its owner's connection.
    """

    limits: Limits
    user: int | None = None
    network: str = "none"
    has_workspace: bool = False
    min_level: IsolationLevel = IsolationLevel.NAMESPACE
    snapshot: SnapshotTerms | None = None
    module: Literal["strop.environments.inside"] | None = None
    """Whose `main` it is made for. Such a sandbox shows the packages of the node agent's Python."""

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: Limits) -> Limits:
        for name in Limits.__slots__:
            value = getattr(limits, name)
            most = MAX_OUTPUT_BYTES if name.startswith("output_") else 1 << 53
            least = 0 if name.startswith("output_") else MIN_SHARE
            is_open = value is None or isinstance(value, bool)
            if not is_open and not least <= value <= most:
                raise ValueError(f"{name}={value} is not from {least} to {most}")
        return limits

    @field_validator("network")
    @classmethod
    def _check_network(cls, network: str) -> str:
        parse_network(network)
        return network

    def slot(self, plain: Slot) -> Slot:
        """Return what it takes of a node; where `limits` leaves processors open, those of a plain one."""
        limits = self.limits
        return Slot(
            cpus=plain.cpus if limits.cpus is None else limits.cpus,
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.scratch_bytes,
            processes=limits.max_processes,
        )


class StartRequest(_Flow):
    """`POST /start` of all dialects, understood."""

    image: str
    command: tuple[str, ...]
    """Split where a client sent one string. The first word replaces the image's entrypoint."""
    working_dir: str = "/"
    environment: dict[str, str] = Field(default_factory=dict)
    session_id: str
    resource_factor: float = 1.0
    """Multiplies memory, processes and processors of a slot."""
    lifetime_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """strop's own: how long its client means to use it. A node that ends before is taken if no other fits."""
    run_as_user: int | None = Field(default=None, ge=0, lt=_NO_ID)
    """A hint. Where the node can give programs this user of the image, it does, with the group of the same
    number; `isolation` says who they are on the host."""
    run_as_group: int | None = Field(default=None, ge=0, lt=_NO_ID)
    fs_group: int | None = Field(default=None, ge=0, lt=_NO_ID)
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    runtime_class: str | None = None
    """A hint. Nothing is refused because of it."""
    sandbox: SandboxTerms | None = None
    """Of strop's own client. `command`, `resource_factor` and what is run as whom mean nothing then."""


class NodeOrder(_Flow):
    """`POST {node}/sandboxes`: make this. Answered at once with `NodeAnswer`; the rest is reported.

    Also there: `DELETE {node}/sandboxes/{runtime_id}?cause=`, and `POST .../pause` and `.../resume` below it,
    answered with a `SandboxReport` when it is done; 404 for a sandbox that the node does not have.
    Given again for the same runtime id it changes nothing and is answered alike. 503 says that the node
    takes nothing now; the order then goes elsewhere.

    Images, for clients that build: `POST {node}/builds?image=TARGET&tag=T&tag=T` with a gzip tar as its body
    is answered `{"build_id"}`, `GET {node}/builds/{build_id}` with `BuildStatus`, `GET {node}/images?image=`
    with `{"exists": false}`, or with `{"exists": true, "image": {"upload_time", "image_size_bytes"}}`.
    """

    runtime_id: str
    session_api_key: str
    slot: Slot
    request: StartRequest


class NodeAnswer(_Flow):
    """The address is held from now on, and final."""

    url: str
    """`http://host:port`, without a path."""


class SandboxReport(_Flow):
    """What a node knows of one of its sandboxes."""

    runtime_id: str
    state: State
    failure_kind: FailureKind | None = None
    cause: str = ""
    """One sentence for `failed` and `stopped`."""
    refusal: str = ""
    """The kind of `SandboxRefused`, where it was not made because of one."""
    exit_code: int | None = None
    log_tail: str = ""
    """The last lines that its server wrote, for `pod_logs`."""
    events: tuple[str, ...] = ()
    """What it waits for and has done: pull, build, start."""
    isolation: dict[str, Any] = Field(default_factory=dict)
    """`sandbox.Isolation` as it was reached."""
    timeline: dict[str, float] = Field(default_factory=dict)
    """Seconds since the epoch at which it was queued, had its image, was started, was ready, ran its first
    command and was stopped."""
    last_used_s: float = 0.0
    """Seconds since its address was last used."""
    usage: dict[str, float] = Field(default_factory=dict)
    """cpu_s, memory_bytes, processes, disk_bytes, commands."""
    version: int = 0
    """Grows with each change of its state at this node: by it, a report that was overtaken is known."""
    url: str = ""
    """Its address at the node, where it has one: new to a controller that got no answer to its order."""


class NodeReport(_Flow):
    """`POST {controller}/nodes/{node_id}`: at registration, every `HEARTBEAT_S` and after each change.

    One that is only sent for a change tells of what changed, and is cheap however many live. Answered with
    `NodeReply`.
    """

    node_id: str
    """Unique to one start of one node agent."""
    host: str
    url: str
    """Where the controller reaches the node agent."""
    boot_id: str
    pid: int
    job_id: str = ""
    """The scheduler's, where the node agent runs in a job."""
    capacity: Slot
    snapshot_bytes: int = 0
    """What snapshots take of its disk beside its sandboxes."""
    backends: tuple[str, ...]
    is_draining: bool = False
    """Takes nothing new: its allocation ends soon, or it was told to."""
    ends_in_s: float | None = None
    """Until its allocation ends."""
    sandboxes: tuple[SandboxReport, ...]
    """All that it has, and those that ended since the last report that was answered."""
    has_all: bool = True
    """False: of all that, only what changed since the last report that was answered."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Added to the controller's own, by their names and labels."""


class BuildStatus(_Flow):
    """How a build is."""

    status: Literal[
        "QUEUED", "WORKING", "SUCCESS", "FAILURE", "INTERNAL_ERROR", "TIMEOUT", "CANCELLED", "EXPIRED"
    ]
    image: str = ""
    """What can be started, once it succeeded."""
    error: str = ""


class NodeReply(_Flow):
    """What the controller wants of a node, beside orders."""

    to_stop: tuple[str, ...] = ()
    """Runtime ids that it has and should not have: stopped, expired, or placed elsewhere meanwhile."""
    wants_all: bool = False
    """The report was not taken: the first of a node has all its sandboxes."""
    should_drain: bool = False
