"""The learner's ranks as actors.

One rank holds everything; several are FSDP2 ranks of one process group. Each gets its share of a step
pickled.
"""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cluster.ray.roles import RayRole, RoleStart
from strop.hardware.tuning import importing
from strop.io.atomic import explain_write_failure
from strop.rollout import FloatArray
from strop.spec.run import RunSpec
from strop.store import ModelHandle

if TYPE_CHECKING:
    from strop.policy.balancing import PositionCost
    from strop.policy.device_wires import DeviceSender, Wire
    from strop.policy.language_model import ModelShape
    from strop.policy.learner import Learner
    from strop.policy.optimizer import StepPlan, StepReport
    from strop.policy.scoring import FrozenModel

GROUP_LIMIT_S = 600.0
"""Limit of a rank's wait for others in a collective."""
PIECE_BYTES = 64 << 20
"""Bytes of a file in one call: some pieces fit into Ray's smallest object store at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFacts:
    """Facts about a learner that the loop reads without waiting."""

    version: int
    shape: ModelShape
    device: str
    recomputes: bool
    cost: PositionCost
    """For splitting a step's work over the ranks."""


class LearnerRank(RayRole):
    """One rank. Every call is made to all ranks, in the same order."""

    _learner: Learner

    def __init__(self, start: RoleStart) -> None:
        super().__init__(start)
        self._staged_path: Path | None = None
        self._sender: DeviceSender | None = None

    def open_rendezvous(self, host: str, num_ranks: int) -> int:
        """Open the rendezvous of all ranks; return its port. Only called on the first rank."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(
            host,
            0,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=GROUP_LIMIT_S),
        )
        return int(self._store.port)

    def load(
        self, spec: RunSpec, source: ModelHandle, rank: int, num_ranks: int, rendezvous: tuple[str, int]
    ) -> LearnerFacts:
        """Load the model, or this rank's rows of it. `rendezvous`: host and port of the first rank's store.

        Raises: ConfigError if the model cannot be loaded.
        """
        with importing():
            from strop.cluster.local import build_learner, build_rank
            from strop.policy.balancing import PositionCost
            from strop.policy.footprint import read_model_size

        self._num_ranks = num_ranks
        self._frozen: dict[str, FrozenModel] = {}
        if num_ranks == 1:
            self._learner = build_learner(spec, source)
        else:
            import torch
            import torch.distributed as dist
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            limit = timedelta(seconds=GROUP_LIMIT_S)
            store = self._store if rank == 0 else TCPStore(*rendezvous, num_ranks, timeout=limit)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=limit,
            )
            self._learner = build_rank(spec, source, num_ranks=num_ranks)
        model = self._learner.model
        return LearnerFacts(
            version=self._learner.version,
            shape=model.shape,
            device=model.device.type,
            recomputes=model.recomputes,
            cost=PositionCost.of_model(read_model_size(source.path)),
        )

    def step_terms(self, shares: Sequence[bytes], plan: StepPlan | None) -> tuple[StepReport, int]:
        """Take one optimizer step on pickled terms; return the report and the new version."""
        # Trusted: from the run's loop, over a connection that carries the run's token.
        terms = [pickle.loads(share) for share in shares]
        return self._learner.step_terms(terms, plan), self._learner.version

    def score(self, groups: bytes, temperature: float) -> list[FloatArray]:
        """Return the log-probabilities of this rank's share, which is pickled."""
        return self._learner.score(pickle.loads(groups), temperature)

    def digest_tensors(self, role: str | None) -> dict[str, str]:
        """Return the digest of each tensor, on the first rank."""
        return (self._learner if role is None else self._frozen[role]).digest_tensors()

    def add_frozen(self, role: str, source: ModelHandle) -> None:
        """Load a model beside the policy, or this rank's rows of it.

        Raises: ConfigError if it cannot be loaded or has another vocabulary.
        """
        from strop.cluster.local import load_frozen

        here = self.bring_model(source)
        self._frozen[role] = load_frozen(self._learner, role, here, num_ranks=self._num_ranks)

    def score_frozen(self, role: str, groups: bytes, temperature: float) -> list[FloatArray]:
        """Return the scores of a frozen model for this rank's share, which is pickled."""
        return self._frozen[role].score(pickle.loads(groups), temperature)

    def write_weights(self, path: Path) -> str:
        """Write the compute copies; return the digest."""
        return self._learner.write_weights(path)

    def device_digest(self) -> str:
        """Return the `device_digest` of the compute copies."""
        from strop.policy.device_wires import device_digest

        return device_digest(self._learner.compute_copies())

    def open_sender(self, host: str, port: int = 0) -> str:
        """Open the store for receivers, or connect to it at a port, once; return `host:port/`."""
        from strop.policy.device_wires import DeviceSender

        self._sender = self._sender or DeviceSender(host, port)
        return self._sender.address("nccl", "").removeprefix("nccl://")

    def send_weights(self, wire: Wire, name: str, num_receivers: int) -> None:
        """Send the compute copies from device to device."""
        from strop.policy.device_wires import send_copies

        send_copies(self._sender, wire, name, self._learner.compute_copies(), num_receivers)

    def write_adapter(self, target: Path) -> str:
        """Write the adapters; return the digest."""
        return self._learner.write_adapter(target)

    def weights_digest(self) -> str:
        """Return the digest of the compute copies."""
        return self._learner.weights_digest()

    def export(self, target: Path, tokenizer_dir: Path) -> str:
        """Write a Hugging Face model directory; return the digest of its tensors."""
        return self._learner.export(target, tokenizer_dir)

    def save_state(self, target: Path) -> None:
        """Write masters, moments and counters."""
        self._learner.save_state(target)

    def load_state(self, source: Path) -> int:
        """Restore the files of `save_state`; return its version."""
        self._learner.load_state(source)
        return self._learner.version

    # The state of a rank that does not see the run's disk is sent in pieces, through a folder on its machine.

    def stage_state(self) -> dict[str, int]:
        """Write masters, moments and counters into the folder; return the files' sizes in bytes by name."""
        path = self.open_staged()
        self._learner.save_state(path)
        return {file.name: file.stat().st_size for file in sorted(path.iterdir())}

    def open_staged(self) -> Path:
        """Create the folder, empty; return its path. Raises: StoreError."""
        self.clear_staged()
        try:
            # In the attempt's folder, which is removed with its lease.
            self._staged_path = Path(tempfile.mkdtemp(prefix="strop-state-"))
        except OSError as error:
            raise explain_write_failure(error, Path(tempfile.gettempdir())) from error
        return self._staged_path

    def read_staged(self, name: str, offset: int) -> bytes:
        """Return a piece of a file."""
        assert self._staged_path is not None, "open comes first"
        with (self._staged_path / name).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)

    def append_staged(self, name: str, piece: bytes) -> None:
        """Add a piece to the end of a file. Raises: StoreError."""
        assert self._staged_path is not None, "open comes first"
        append_piece(self._staged_path / name, piece)

    def clear_staged(self) -> None:
        """Remove the folder."""
        if self._staged_path is not None:
            shutil.rmtree(self._staged_path, ignore_errors=True)
            self._staged_path = None


def append_piece(path: Path, piece: bytes) -> None:
    """Add a piece to the end of a file. Raises: StoreError."""
    try:
        with path.open("ab") as file:
            file.write(piece)
    except OSError as error:
        raise explain_write_failure(error, path) from error
