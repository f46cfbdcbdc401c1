"""Submitting: once for each plan, again by hand after an end, and the next job of a run by itself.

Whatever ends a submission, the same call again finds what it left: the home that it filled, or the job that
the scheduler had accepted before anybody could note it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import CheckRefused, ConfigError, StoreError, explain_refusal
from strop.hardware.findings import require_none
from strop.io import FileLock
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.launch.attempts import read_attempts
from strop.launch.checking import check_plan
from strop.launch.contract import Backend, JobPlan, JobRef, JobRequest, JobState, Renewable
from strop.launch.filling import fill_home, find_homes_of, name_home, refill_home, refuse_foreign_home
from strop.launch.home import has_plan, has_ref, job_path_of, read_plan, read_ref, write_ref
from strop.launch.index import note_job
from strop.launch.next_job import make_next_plan, refuse_next, refuse_other_run
from strop.launch.planning import make_plan, move_plan
from strop.launch.secrets import remove_secrets
from strop.launch.standing import find_statuses

REFUSED_NAME = "refused.txt"
"""The scheduler's own words, where it refused the job."""
SETTLE_LIMIT_S = 10.0
"""How long a scheduler may take to see the end of a job whose record says that it has ended."""
_ASK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """What became of a submission."""

    ref: JobRef
    plan: JobPlan
    is_new: bool
    """False: the very same job was submitted before, and this is its reference."""
    notice: str = ""
    """Why the job is not in the list of jobs."""
    warnings: tuple[str, ...] = ()
    """What else a person must do, because it did not work beside the submission itself."""


class Submitter:
    """Submits to one backend."""

    def __init__(self, backend: Backend, environ: Mapping[str, str]) -> None:
        self._backend = backend
        self._environ = environ

    def submit(self, request: JobRequest, *, is_new: bool = False) -> Submitted:
        """Submit once: the same plan again is the job that it made the first time.

        `is_new`: another job, even of the same plan or name.
        Raises: CheckRefused if `check` finds an error, another plan has the name, or the scheduler refuses;
            StoreError if the home cannot be filled.
        """
        plan, root = make_plan(request, self._backend), Path(request.home).parent
        if not root.is_dir():
            # There cannot be an earlier one. What is refused leaves no folder behind.
            require_none(check_plan(self._backend, plan))
        with lock_name(root, plan.name):
            earlier = None if is_new else self._find_earlier(plan, root)
            if earlier is None:
                request = _move_to_free_home(request)
            elif has_ref(earlier):
                return Submitted(ref=read_ref(job_path_of(earlier)), plan=plan, is_new=False)
            else:
                request = move_plan(request, str(earlier))
            plan = make_plan(request, self._backend)
            accepted = None if earlier is None else self._backend.find_accepted(plan)
            if accepted is not None:
                return self._keep(accepted, plan, is_new=False)
            require_none(check_plan(self._backend, plan))
            return self._fill_and_hand_over(plan, request)

    def resume(self, home: Path, request: JobRequest) -> Submitted:
        """Submit a job again that has ended without success, in its own home, from its last checkpoint.

        Raises: CheckRefused if it may still live, has succeeded, or is another run.
        """
        with lock_name(home.parent, read_plan(job_path_of(home)).name):
            old = read_plan(job_path_of(home))
            noted = read_ref(job_path_of(home)) if has_ref(home) else None
            num_past = 0 if noted is None else self._count_lives(noted, old)
            request = replace(move_plan(request, str(home)), num_past=num_past)
            plan = make_plan(request, self._backend)
            refuse_other_run(plan, old)
            accepted = self._backend.find_accepted(old)
            if accepted is not None and (noted is None or accepted.job_id != noted.job_id):
                # A resume that was killed before it could note what it had submitted.
                return self._keep(accepted, old, is_new=False)
            if noted is not None:
                self._refuse_living(noted)
                if isinstance(self._backend, Renewable):
                    start_step = self._backend.find_saved_step(noted, 0)
                    plan = replace(plan, follows=noted.job_id, start_step=start_step)
            require_none(check_plan(self._backend, plan))
            return self._fill_and_hand_over(plan, request, is_resumed=True)

    def resubmit(self, ref: JobRef, *, submitted_at: float) -> Submitted:
        """Submit the next job of a run from what its home holds: the same code, spec and resources.

        Twice, by two at once, or once more after a kill at any place, it is one job.
        Raises: CheckRefused if there may be no next one, `check` finds an error or the scheduler refuses;
            StoreError where something does not answer.
        """
        home = Path(ref.home)
        with lock_name(home.parent, read_plan(job_path_of(home)).name):
            old, noted = read_plan(job_path_of(home)), read_ref(job_path_of(home))
            if noted.job_id != ref.job_id:
                return Submitted(ref=noted, plan=old, is_new=False)
            is_begun = old.follows == noted.job_id
            if is_begun:
                # Killed after the next job's plan was written: whether it was submitted, that does not say.
                accepted = self._backend.find_accepted(old)
                if accepted is not None and accepted.job_id != noted.job_id:
                    return self._keep(accepted, old, is_new=False)
            refuse_next(self._backend, old, find_statuses(self._backend, [noted]), is_begun=is_begun)
            self._refuse_living(noted)
            plan = old if is_begun else self._make_next(old, noted, submitted_at)
            require_none(check_plan(self._backend, plan))
            refill_home(plan)
            return self._keep(self._backend.hand_over(plan), plan, is_new=True)

    def _make_next(self, old: JobPlan, noted: JobRef, submitted_at: float) -> JobPlan:
        return make_next_plan(
            self._backend, old, noted, num_past=self._count_lives(noted, old), submitted_at=submitted_at
        )

    def _find_earlier(self, plan: JobPlan, root: Path) -> Path | None:
        """Return the home of the same plan, if there is one.

        Raises: CheckRefused if the name belongs to another plan's job.
        """
        found = find_homes_of(root, plan.name)
        named = Path(plan.home)
        if has_plan(named) and named not in [home for home, _ in found]:
            # output.dir may give a home any name.
            found.insert(0, (named, read_plan(job_path_of(named))))
        same = [home for home, other in found if other.plan_hash == plan.plan_hash]
        if same:
            return same[0]
        if found:
            home, other = found[0]
            raise CheckRefused(
                explain_refusal(
                    f"the name {plan.name} belongs to {home.name}, whose plan is another"
                    f" ({other.plan_hash} there, {plan.plan_hash} here)",
                    allowed="one plan for a name, so that nothing is submitted twice by mistake",
                    next_step="change `name` in the run file, or submit with --new",
                )
            )
        return None

    def _refuse_living(self, ref: JobRef) -> None:
        """Refuse to let a job live again whose first life may go on.

        Its record says earlier that it has ended than its scheduler does, so that is asked too.
        """
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while True:
            standing = [
                one.state for one in find_statuses(self._backend, [ref]) if not _may_live_again(one.state)
            ]
            answers = self._backend.ask([ref])
            living = [answer.state for answer in answers.values() if not answer.state.is_terminal]
            # Only an end that is recorded and not settled yet is worth waiting for.
            if standing or not living or time.monotonic() > deadline:
                break
            time.sleep(_ASK_EVERY_S)
        standing += living
        if standing:
            raise CheckRefused(
                explain_refusal(
                    f"job {ref.job_id} of {ref.home} is {standing[0].value}",
                    allowed="a job that has ended without success: two lives would write into one run",
                    next_step="wait for its end, or `strop cancel` it",
                )
            )

    def _count_lives(self, ref: JobRef, plan: JobPlan) -> int:
        """Return the first number that no attempt of a job has yet."""
        found = [
            one
            for member in plan.members
            for one in read_attempts(self._backend.open_record(ref, member.index))
        ]
        return max([one.number + 1 for one in found], default=plan.num_past)

    def _fill_and_hand_over(
        self, plan: JobPlan, request: JobRequest, *, is_resumed: bool = False
    ) -> Submitted:
        job_path = job_path_of(plan.home)
        if not is_resumed:
            refuse_foreign_home(plan)
        with ExitStack() as undo:
            # Whatever ends it, an interrupt from the keyboard too.
            undo.callback(remove_secrets, job_path)
            fill_home(plan, request, self._environ)
            undo.pop_all()
        try:
            ref = self._backend.hand_over(plan)
        except (CheckRefused, ConfigError) as error:
            remove_secrets(job_path)
            write_bytes_atomically(job_path / REFUSED_NAME, str(error).encode())
            raise
        return self._keep(ref, plan, is_new=True)

    def _keep(self, ref: JobRef, plan: JobPlan, *, is_new: bool) -> Submitted:
        """Note an accepted job."""
        write_ref(ref)
        (job_path_of(plan.home) / REFUSED_NAME).unlink(missing_ok=True)
        notice, warnings = "", tuple(ref.details.get("warnings", ()))
        try:
            note_job(ref, self._environ)
        except StoreError as error:
            # It is submitted. The list only helps to find it from other folders.
            notice = str(error)
        return Submitted(ref=ref, plan=plan, is_new=is_new, notice=notice, warnings=warnings)


def _may_live_again(state: JobState) -> bool:
    """Whether a state is no success, and none of a job that its scheduler still knows."""
    return state is JobState.UNKNOWN or (state.is_terminal and state is not JobState.SUCCEEDED)


def lock_name(root: Path, name: str) -> FileLock:
    """Return the lock of a name: two submissions of it in one second would be two jobs."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, root) from error
    return FileLock(root / f".{name}.submit.lock")


def _move_to_free_home(request: JobRequest) -> JobRequest:
    """Return the request for a home that no job has: another one may have been filled since it was named.

    Raises: CheckRefused if the run file or a flag names a home that is taken.
    """
    home, spec = Path(request.home), request.resolved.spec
    if not has_plan(home):
        return request
    if spec.output.dir is not None:
        raise CheckRefused(
            explain_refusal(
                f"{home} is the home of another job",
                allowed="a directory of its own for every job",
                next_step="name another output.dir, or go on in it with --resume",
            )
        )
    return move_plan(request, str(name_home(home.parent, spec.name, request.submitted_at)))
