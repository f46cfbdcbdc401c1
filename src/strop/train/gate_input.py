"""What the gate looks at, and what each of its checks says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.cluster import Roles
from strop.rollout import Example, Split
from strop.spec.run import RunSpec
from strop.tasks import Task
from strop.tasks.failures import FailureCause
from strop.tasks.judging import Judge
from strop.train.demonstrations import Demonstrations
from strop.train.preferences import Preferences


@dataclass(frozen=True, kw_only=True, slots=True)
class GateInput:
    """What the gate looks at."""

    spec: RunSpec
    task: Task
    roles: Roles
    model_dir: Path
    run_path: Path
    weights_dir: Path | None = None
    """Where the policy's weights were loaded from; None: from `model_dir`."""
    judge: Judge | None = None
    """None: replies are judged in this process."""
    demonstrations: Demonstrations | None = None
    """None: nothing is imitated."""
    preferences: Preferences | None = None
    """None: nothing is preferred."""
    dtype_reason: str | None = None
    """Why the run computes in its number format; None: nobody said."""
    on_causes: Callable[[Sequence[FailureCause]], None] = lambda causes: None
    """Told what made a verifier or a probe fail."""

    @property
    def asked(self) -> Sequence[Example]:
        """The examples that the model answers: those trained on, or those evaluated on if none are."""
        return self.task.examples(Split.TRAIN if self.spec.train.has_rl else Split.HELD_OUT)

    @property
    def max_positions(self) -> int:
        """Tokens that the model can look at, prompt and reply together."""
        return self.roles.learner.shape.max_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCheck:
    """The verdict of one check."""

    name: str
    is_passed: bool
    detail: str
    """What was seen; for a failure also the cause and what to do."""
    notice: str | None = None
    """What whoever reads the run's results must know; it is said when the run begins and when it ends."""
