"""SageMaker training jobs as a backend.

Covered: plan, check, submit with code and config in S3, status by one listing, logs from CloudWatch, records
from the run's mirror, stop, sweeps as one job per trial, recovery of a killed submission. Tried with
moto 5.2.5 and `FakeSageMaker`, never on live AWS. Not covered: deletion of jobs, training plans.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, ConfigError, RemoteMissing, StoreError, StropError
from strop.hardware.findings import Finding
from strop.launch.contract import JobPlan, JobRef, JobRequest, SchedulerStatus
from strop.launch.environment import ENVIRONMENT_NAME
from strop.launch.job_dir import CANCELLED_NAME, has_plan, has_ref, job_path_of, read_plan, read_ref
from strop.launch.sagemaker.client import AwsClients, JobObjects, SiteObjects, all_pages
from strop.launch.sagemaker.ecr import find_digest, parse_reference
from strop.launch.sagemaker.job_log import JobLog, JobRow, submitted_text
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.places import PLAN_TAG, RUN_TAG, TRIAL_TAG, suffixed_name
from strop.launch.sagemaker.probe import probe_site
from strop.launch.sagemaker.request import complete_plan, renew_plan, step_of_state
from strop.launch.sagemaker.status import CloudWatchLogs, read_answer
from strop.launch.secrets import SECRETS_NAME
from strop.record.files import LogSource, RecordFiles, StoreRecord, find_checkpoints

LOOK_BACK_S = 30 * 86_400.0
"""Age limit of jobs in the search by tags."""
_CLOCK_SKEW_S = 3600.0
_NOT_SENT = frozenset(
    {SECRETS_NAME, ENVIRONMENT_NAME, CANCELLED_NAME, "ref.json", "state.json", "refused.txt"}
)
_LIVING = frozenset({"InProgress", "Stopping"})
_CODE_FILE = "code.tar.zst"
_STEPS = ("local", "build", "push", "image", "image_tag")
_EXCLUSIVE = (
    ("site.local", "--wait"),
    ("site.local", "site.push"),
    ("site.image", "site.image_tag"),
    ("site.image", "site.build"),
)


class SageMakerBackend:
    """Implements `Backend` for one site. Tests and rehearsals pass `clients` and `objects`."""

    name = "sagemaker"

    def __init__(
        self, profile: SageMakerSite, *, clients: AwsClients | None = None, objects: JobObjects | None = None
    ) -> None:
        self._profile = profile
        self._clients = clients or AwsClients(profile=profile)
        self._custom_objects = objects
        self._described: dict[str, tuple[object, SchedulerStatus]] = {}
        """Job to its last change and its status after that."""

    @cached_property
    def _objects(self) -> JobObjects:
        # Created on first use: a plan needs neither boto3 nor credentials.
        return self._custom_objects or SiteObjects(self._profile)

    def prepare(
        self, request: JobRequest, say: Callable[[str], None], *, is_dry_run: bool, is_awaited: bool
    ) -> JobRequest | int:
        """Build and push the job's image, or run the job on this machine, if options request it.

        Raises: as `prepare_image`; ConfigError for options that contradict each other.
        """
        options = request.site.profile
        assert isinstance(options, SageMakerSite)  # The launcher chooses the backend by this very class.
        given = {"--wait": is_awaited, **{f"site.{name}": getattr(options, name) for name in _STEPS}}
        for first, second in _EXCLUSIVE:
            if given[first] and given[second]:
                raise ConfigError(
                    f"{first} together with {second}", allowed="one of them", next_step=f"leave {second} out"
                )
        if options.devices and not options.local:
            raise ConfigError(
                "site.devices without site.local",
                allowed="GPUs of this machine, where the job runs on it",
                next_step="choose an instance type for a job, or add site.local=true",
            )
        if not (options.build or options.push or options.local):
            return request
        from strop.launch.sagemaker.prepare import prepare_image

        return prepare_image(request, options, self, say, is_dry_run=is_dry_run)

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add the requests of all trials. Raises: ConfigError with everything that AWS would refuse."""
        return complete_plan(plan, request)

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Find obstacles to the job by AWS calls that only read."""
        return probe_site(plan, self._profile, self._clients, self._objects)

    def submit(self, plan: JobPlan) -> JobRef:
        """Send code and config, create the jobs of all trials, and write the job log.

        Raises: CheckRefused if AWS refuses a job, after stopping those that it accepted before; StoreError.
        """
        image = plan.details["image"]
        reference = parse_reference(image)
        if reference is not None and reference.registry is not None and reference.digest is None:
            # Use the digest: the tag may have moved by the time that the job starts.
            image = f"{reference.registry}/{reference.name}@{find_digest(self._clients, reference)}"
        accepted: list[dict[str, Any]] = []
        try:
            for job in plan.details["jobs"]:
                self._upload(plan, job)
                accepted.append(self._create(plan, job, image))
        except StropError:
            # Either all trials of a sweep run or none: stop those that were accepted.
            for job in accepted:
                try:
                    self._stop(job["name"])
                except StropError as error:
                    raise CheckRefused(
                        f"a later trial was refused, and {job['name']} could not be stopped ({error})",
                        allowed="all trials of a sweep or none",
                        next_step=f"stop {job['name']} in the console",
                    ) from error
            raise
        ref = self._to_ref(plan, accepted, image)
        # The shared home still has the reference of the job that this one continues.
        earlier = read_ref(job_path_of(plan.home)).job_id if has_ref(Path(plan.home)) else None
        warnings = []
        for job in accepted:
            trial = plan.trials[job["trial"]]
            facts = {key: job[key] for key in ("arn", "run_key", "config_uri", "state_uri", "record_uri")}
            facts |= {"plan_hash": plan.plan_hash, "image": image, "home": plan.home, "trial": job["trial"]}
            row = JobRow(
                job_name=job["name"],
                config=plan.details["config"],
                description=" ".join([plan.details["description"], *trial.overrides]).strip(),
                submitted=submitted_text(plan.submitted_at),
                run=plan.name,
                facts={**facts, "parent": plan.details["parent"] or earlier},
            )
            warnings.append(JobLog(Path(plan.details["job_log"])).append(row))
        return replace(ref, details={**ref.details, "warnings": [text for text in warnings if text]})

    def send_locally(self, plan: JobPlan) -> dict[str, Any]:
        """Send the first trial's files as `submit` does; return the job's request, for local mode."""
        job = plan.details["jobs"][0]
        self._upload(plan, job)
        return {**_name_image(job["request"], plan.details["image"]), "TrainingJobName": job["name"]}

    def renew(self, plan: JobPlan, *, submitted_at: float) -> JobPlan:
        """Give all trials' jobs new names, and move the folders that are named by the job."""
        return renew_plan(plan, submitted_at)

    def find_saved_step(self, ref: JobRef) -> int | None:
        """Return the newest step in S3, from any job of the run or from the run's mirror."""
        root = _job_of(ref, 0)["state_uri"].rstrip("/")
        names = (stored.uri[len(root) + 1 :] for stored in self._objects.list(root))
        steps = [step for name in names if (step := step_of_state(name)) is not None]
        return max([*steps, *find_checkpoints(self.open_record(ref, 0))], default=None)

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Find the jobs of this plan and home by their tags, because their names may have another time."""
        keys = {job["run_key"]: job for job in plan.details["jobs"]}
        accepted: dict[str, dict[str, Any]] = {}
        home = Path(plan.home)
        first_at = read_plan(job_path_of(home)).submitted_at if has_plan(home) else plan.submitted_at
        for summary in self._list_since(first_at):
            tags = self._tags_of(summary["TrainingJobArn"])
            job = keys.get(tags.get(RUN_TAG, ""))
            if job is not None and tags.get(PLAN_TAG) == plan.plan_hash:
                accepted.setdefault(job["run_key"], _accepted(job, summary))
        if len(accepted) < len(keys):
            return None
        return self._to_ref(plan, [accepted[key] for key in keys], plan.details["image"])

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """List once, and describe only jobs that changed since the last query. Raises: StoreError."""
        trials = {job["name"]: (ref, job["trial"]) for ref in refs for job in ref.details["jobs"]}
        if not trials:
            return {}
        answers: dict[tuple[str, int], SchedulerStatus] = {}
        for summary in self._list_since(min(ref.submitted_at for ref in refs), set(trials)):
            name = summary["TrainingJobName"]
            if name not in trials:
                continue
            changed = (summary.get("LastModifiedTime"), summary["TrainingJobStatus"])
            last_change, answer = self._described.get(name, (None, None))
            if answer is None or last_change != changed or changed[0] is None:
                try:
                    described = self._clients.call(
                        "sagemaker", "describe_training_job", resource=name, TrainingJobName=name
                    )
                except RemoteMissing:
                    continue
                answer = read_answer(described)
                if described["TrainingJobStatus"] == summary["TrainingJobStatus"]:
                    # A description that lags behind the listing is read again next time.
                    self._described[name] = (changed, answer)
            ref, trial = trials[name]
            answers[ref.job_id, trial] = answer
        return answers

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the mirror of the trial's run in the store."""
        return StoreRecord(self._objects, _job_of(ref, trial)["record_uri"])

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return the job's log streams."""
        return CloudWatchLogs(self._clients, _job_of(ref, trial)["name"])

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """Stop the jobs. The platform's window of 120 s applies, whatever `grace_s` is."""
        for job in ref.details["jobs"]:
            if trial in {None, job["trial"]}:
                self._stop(job["name"])

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield the live jobs of the last 30 days with strop's tags, each with one trial."""
        for summary in self._list_since(time.time() - LOOK_BACK_S):
            if summary["TrainingJobStatus"] not in _LIVING:
                continue  # The job has ended, and reading its tags would cost a call.
            tags = self._tags_of(summary["TrainingJobArn"])
            if PLAN_TAG not in tags:
                continue
            name = summary["TrainingJobName"]
            job = {"name": name, "arn": summary["TrainingJobArn"], "trial": int(tags.get(TRIAL_TAG, "0"))}
            yield JobRef(
                name=tags.get(RUN_TAG, name),
                site="",
                backend=self.name,
                home="",
                job_id=name,
                plan_hash=tags[PLAN_TAG],
                submitted_at=summary["CreationTime"].timestamp(),
                details={"jobs": [job], "run_key": tags.get(RUN_TAG, "")},
            )

    # Submission.

    def _upload(self, plan: JobPlan, job: Mapping[str, Any]) -> None:
        job_path = job_path_of(plan.home)
        if job["source_uri"]:
            self._send(job_path / _CODE_FILE, f"{job['source_uri']}/{_CODE_FILE}")
        for path in sorted(job_path.iterdir()):
            if path.is_file() and path.name not in _NOT_SENT and not path.name.startswith((".", "code.")):
                self._send(path, f"{job['config_uri']}/{path.name}")
        trial = plan.trials[job["trial"]]
        trial_spec = job_path_of(trial.path) / "spec.toml"
        if trial.overrides and trial_spec.is_file():
            self._send(trial_spec, f"{job['config_uri']}/member-spec.toml")
        original = Path(plan.details["config"] or "/nonexistent")
        if original.is_file():
            # Under its original name, which neither the job's name nor the resolved spec shows.
            self._send(original, f"{job['config_uri']}/original/{original.name}")

    def _send(self, path: Path, uri: str) -> None:
        try:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read ({error.strerror})",
                allowed="the job's home as it was filled",
                next_step="submit again",
            ) from error
        if self._objects.digest(uri) != sha256:
            self._objects.upload(path, uri, sha256)

    def _create(self, plan: JobPlan, job: Mapping[str, Any], image: str) -> dict[str, Any]:
        """Create one job; if another job has its name, try once more with a suffix."""
        request = _name_image(job["request"], image)
        for name in (job["name"], suffixed_name(job["name"], plan.home)):
            request["TrainingJobName"] = name
            try:
                answer = self._clients.call(
                    "sagemaker", "create_training_job", resource=f"training job {name}", **request
                )
            except CheckRefused as error:
                if "ResourceInUse" not in str(error):
                    raise
                # An earlier, killed submission of this plan may have created it.
                described = self._clients.call(
                    "sagemaker", "describe_training_job", resource=name, TrainingJobName=name
                )
                tags = self._tags_of(described["TrainingJobArn"])
                if tags.get(PLAN_TAG) == plan.plan_hash and tags.get(RUN_TAG) == job["run_key"]:
                    return _accepted(job, described)
            else:
                return _accepted(job, {"TrainingJobName": name, "TrainingJobArn": answer["TrainingJobArn"]})
        raise CheckRefused(
            f"the names {job['name']} and {name} are taken in this account and region",
            allowed="a name of its own for each job",
            next_step="submit again in a second, or with another site.name_prefix",
        )

    def _to_ref(self, plan: JobPlan, accepted: list[dict[str, Any]], image: str) -> JobRef:
        return plan.refer_to(
            accepted[0]["name"],
            {
                "jobs": accepted,
                "run_key": plan.details["run_key"],
                "region": self._profile.region,
                "image": image,
                "store": plan.details["store"],
                "job_log": plan.details["job_log"],
            },
        )

    # Queries.

    def _list_since(self, since: float, names: set[str] | None = None) -> Iterator[Mapping[str, Any]]:
        """Yield the account's jobs since a time, newest first; end early once all `names` are found."""
        left = set(names or ())
        query: dict[str, Any] = {
            "CreationTimeAfter": datetime.fromtimestamp(max(0.0, since - _CLOCK_SKEW_S), tz=UTC),
            "SortBy": "CreationTime",
            "SortOrder": "Descending",
            "MaxResults": 100,
        }
        while True:
            page = self._clients.call("sagemaker", "list_training_jobs", **query)
            for summary in page["TrainingJobSummaries"]:
                left.discard(summary["TrainingJobName"])
                yield summary
            # An empty page need not be the last one: only a missing token marks it.
            if not page.get("NextToken") or (names and not left):
                return
            query["NextToken"] = page["NextToken"]

    def _tags_of(self, arn: str) -> dict[str, str]:
        tags = all_pages(self._clients, "sagemaker", "list_tags", "Tags", resource=arn, ResourceArn=arn)
        return {tag["Key"]: tag["Value"] for tag in tags}

    def _stop(self, name: str) -> None:
        try:
            self._clients.call(
                "sagemaker", "stop_training_job", resource=f"training job {name}", TrainingJobName=name
            )
        except CheckRefused as error:
            # The job has ended meanwhile.
            if "in status" not in str(error):
                raise


def _name_image(request: Mapping[str, Any], image: str) -> dict[str, Any]:
    return {
        **request,
        "AlgorithmSpecification": {**request["AlgorithmSpecification"], "TrainingImage": image},
    }


def _accepted(job: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: job[key] for key in ("trial", "run_key", "config_uri", "source_uri", "state_uri")}
    name = summary["TrainingJobName"]
    record_uri = f"{job['record_uri'].rpartition('/')[0]}/{name}"
    return {"name": name, "arn": summary["TrainingJobArn"], **kept, "record_uri": record_uri}


def _job_of(ref: JobRef, trial: int) -> Mapping[str, Any]:
    job: Mapping[str, Any]
    for job in ref.details["jobs"]:
        if job["trial"] == trial:
            return job
    raise StoreError(f"{ref.name} has no trial {trial}")
