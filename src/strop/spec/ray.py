"""How Ray is started, where the roles live on it."""

from __future__ import annotations

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict

MAX_PORT = 65_535


class RaySpec(Section):
    """Settings of Ray's own processes; read only with placement.kind = "ray"."""

    temp_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of each node for Ray's sockets and logs, 30 bytes long at most; what is made"
        " there goes with the run. none = the user's own folder below /tmp.",
    )
    object_store_bytes: int | None = Field(
        default=None,
        ge=75 << 20,
        description="Shared memory of each node for what passes through Ray. Steps and rollouts do,"
        " weights do not. none = 256 MiB.",
    )
    port: int | None = Field(
        default=None,
        ge=1024,
        le=MAX_PORT,
        description="Port of the first node that the others join. none = any that is free.",
    )
    ports: str | None = Field(
        default=None,
        pattern=r"^\d{4,5}-\d{4,5}$",
        description="Range for all other ports of Ray on each node, '20000-20099', where a firewall asks for"
        " one. none = any that are free.",
    )
    join_limit_s: float = Field(
        default=300.0, gt=0.0, description="Seconds within which all nodes of a job must have joined."
    )

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last port; zeros for any."""
        if self.ports is None:
            return 0, 0
        first, _, last = self.ports.partition("-")
        return int(first), int(last)

    @model_validator(mode="after")
    def _check_ports(self) -> RaySpec:
        first, last = self.port_range
        if self.ports is not None and not (1024 <= first < last <= MAX_PORT):
            raise SpecConflict(
                {"ray.ports": self.ports},
                "it is no range of ports that a user may open",
                allowed=f"first and last, 1024 to {MAX_PORT}, the smaller first",
                next_step="correct it, or leave it out",
            )
        return self
