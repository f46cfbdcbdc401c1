"""`FakeSageMaker`: training jobs without an AWS account, for tests and local runs.

Methods and answers have the names and shapes of the boto3 client's. Time is virtual: `advance` moves it,
nothing sleeps. A job follows a script of states, or real programs (`Instance`) as far as it trains.

Covered: the limits of the service's model, names unique until deleted, the stop window, wall time and
waiting, spot interruptions, internal errors with and without RetryStrategy, quotas, throttling, an answer of
`describe` that lags behind `list`, unknown states, log streams and outputs in given clients.
Not covered: rights, prices, training plans, warm pools, serverless jobs, anything that AWS does and
its documentation does not say.
"""

from __future__ import annotations

import copy
import io
import tarfile
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from strop.launch.sagemaker.limits import check_request
from strop.launch.sagemaker.places import LOG_GROUP, NUM_FAILURE_CHARACTERS, STOP_WINDOW_S
from strop.store.uris import parse_s3
from strop.testing.sagemaker_job import (
    BILLED,
    TERMINAL,
    TRAINING,
    FakeJob,
    Instance,
    JobScript,
    Stage,
    describe_job,
    output_uri,
    spot_script,
    summarize_job,
)

__all__ = ["FakeSageMaker", "Instance", "JobScript", "Stage", "spot_script", "write_log_lines"]
_CLIENT_CHECKS = frozenset({"type", "unknown"})
_DEFAULT_PAGE = 10
_RETRY_PAUSE_S = 30.0


class FakeSageMaker:
    """A fake SageMaker service, with a clock that the test moves."""

    def __init__(
        self,
        *,
        now: float = 1_700_000_000.0,
        region: str = "us-east-1",
        account: str = "123456789012",
        s3: Any = None,
        logs: Any = None,
        make_instance: Callable[[], Instance] | None = None,
    ) -> None:
        self.now = now
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """Every call, in order: operation and its arguments."""
        self.default_script = JobScript()
        self.next_scripts: list[JobScript] = []
        """Scripts of the jobs that are created next."""
        self.quota: dict[str, int] = {}
        """Instances of a type at once."""
        self.describe_lag_s = 0.0
        self._faults: list[tuple[str, str, str]] = []
        self._jobs: dict[str, FakeJob] = {}
        self._prefix = f"arn:aws:sagemaker:{region}:{account}:training-job"
        self._s3, self._logs, self._make_instance = s3, logs, make_instance

    # For tests.

    def advance(self, duration_s: float) -> None:
        """Let time pass."""
        target = self.now + duration_s
        for job in self._jobs.values():
            self._settle(job, target)
        self.now = target

    def fail_next(self, operation: str, code: str, message: str = "scripted", *, times: int = 1) -> None:
        """Let the next calls of an operation fail with an error of the service."""
        self._faults += [(operation, code, message)] * times

    def sent(self, operation: str) -> list[dict[str, Any]]:
        """Return the arguments of every call of one operation."""
        return [arguments for name, arguments in self.calls if name == operation]

    # The API of the boto3 client.

    def create_training_job(self, **request: Any) -> dict[str, Any]:
        """Accept a job. Raises: ClientError ValidationException, ResourceInUse, ResourceLimitExceeded."""
        self._note("create_training_job", request)
        _refuse_invalid(request)
        name = request["TrainingJobName"]
        if name in self._jobs:
            raise _error("ResourceInUse", "CreateTrainingJob", f"Job name must be unique: {self._arn(name)}")
        self._refuse_beyond_quota(request)
        script = self.next_scripts.pop(0) if self.next_scripts else self.default_script
        job = FakeJob(
            request=copy.deepcopy(request),
            arn=self._arn(name),
            created_at=self.now,
            script=script,
            stage_at=self.now,
            tags=copy.deepcopy(request.get("Tags", [])),
        )
        self._jobs[name] = job
        self._enter(job, 0, self.now)
        return {"TrainingJobArn": job.arn}

    def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:
        """Return a job with everything as it was sent. Raises: ClientError ValidationException."""
        self._note("describe_training_job", {"TrainingJobName": TrainingJobName})
        job = self._find(TrainingJobName, "DescribeTrainingJob")
        return describe_job(job, self.now - self.describe_lag_s)

    def stop_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:
        """Stop a job: SIGTERM now, KILL after 120 s."""
        self._note("stop_training_job", {"TrainingJobName": TrainingJobName})
        job = self._find(TrainingJobName, "StopTrainingJob")
        if job.is_over:
            message = f"The request was rejected because the training job is in status {job.primary}."
            raise _error("ValidationException", "StopTrainingJob", message)
        self._begin_stop(job, self.now, "Stopped")
        return {}

    def delete_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:
        """Forget a finished job; its name is then free."""
        self._note("delete_training_job", {"TrainingJobName": TrainingJobName})
        job = self._find(TrainingJobName, "DeleteTrainingJob")
        if not job.is_over:
            raise _error("ResourceInUse", "DeleteTrainingJob", f"{TrainingJobName} is {job.primary}")
        del self._jobs[TrainingJobName]
        return {}

    def list_training_jobs(self, **query: Any) -> dict[str, Any]:
        """Return a page of summaries; `StatusEquals` filters after the page is cut, as on AWS."""
        self._note("list_training_jobs", query)
        settled = [self._settle_now(job) for job in self._jobs.values()]
        jobs = [job for job in settled if _is_wanted(job, query)]
        by_change = query.get("SortBy") == "LastModifiedTime"
        jobs.sort(
            key=lambda job: job.history[-1][0] if by_change else job.created_at,
            reverse=query.get("SortOrder", "Descending") == "Descending",
        )
        start, size = int(query.get("NextToken", 0)), int(query.get("MaxResults", _DEFAULT_PAGE))
        page = jobs[start : start + size]
        status = query.get("StatusEquals")
        shown = [summarize_job(job) for job in page if status is None or job.primary == status]
        more = {"NextToken": str(start + size)} if start + size < len(jobs) else {}
        return {"TrainingJobSummaries": shown, **more}

    def list_tags(self, *, ResourceArn: str) -> dict[str, Any]:
        """Return a job's tags."""
        self._note("list_tags", {"ResourceArn": ResourceArn})
        return {"Tags": copy.deepcopy(self._find(ResourceArn.rpartition("/")[2], "ListTags").tags)}

    def add_tags(self, *, ResourceArn: str, Tags: list[dict[str, str]]) -> dict[str, Any]:
        """Add tags to a job; an existing key gets the new value."""
        self._note("add_tags", {"ResourceArn": ResourceArn, "Tags": Tags})
        job = self._find(ResourceArn.rpartition("/")[2], "AddTags")
        merged = {tag["Key"]: tag["Value"] for tag in [*job.tags, *Tags]}
        job.tags = [{"Key": key, "Value": value} for key, value in merged.items()]
        return {"Tags": copy.deepcopy(job.tags)}

    # The course of a job.

    def _settle_now(self, job: FakeJob) -> FakeJob:
        self._settle(job, self.now)
        return job

    def _settle(self, job: FakeJob, now: float) -> None:
        """Apply all changes of a job up to an instant."""
        while not job.is_over:
            change = self._next_change(job)
            if change is None or change[0] > now:
                return
            change[1](change[0])

    def _next_change(self, job: FakeJob) -> tuple[float, Callable[[float], None]] | None:
        if job.stop_at is not None:
            ended = job.instance is not None and job.instance.poll() is not None
            at = min(self.now, job.stop_at) if ended else job.stop_at
            return at, lambda at: self._finish_stop(job, at)
        changes = filter(None, [*self._limits(job), self._stage_end(job)])
        return min(changes, key=lambda change: change[0], default=None)

    def _limits(self, job: FakeJob) -> list[tuple[float, Callable[[float], None]]]:
        stopping = job.request["StoppingCondition"]
        limits: list[tuple[float, Callable[[float], None]]] = []
        if job.secondary in BILLED and "MaxRuntimeInSeconds" in stopping:
            before_s = job.billed_s(job.history[-1][0])
            at = job.history[-1][0] + max(0.0, stopping["MaxRuntimeInSeconds"] - before_s)
            limits.append((at, lambda at: self._begin_stop(job, at, "MaxRuntimeExceeded")))
        if "MaxWaitTimeInSeconds" in stopping:
            at = job.created_at + stopping["MaxWaitTimeInSeconds"]
            limits.append((at, lambda at: self._begin_stop(job, at, "MaxWaitTimeExceeded")))
        return limits

    def _stage_end(self, job: FakeJob) -> tuple[float, Callable[[float], None]] | None:
        stage = job.script.stages[job.stage]
        if stage.secondary == TRAINING and job.num_internal_errors < job.script.num_internal_errors:
            return job.stage_at + stage.duration_s / 2, lambda at: self._fail_inside(job, at)
        if stage.secondary == TRAINING and job.instance is not None:
            if job.instance.poll() is None:
                # The program ends the stage, unless the script interrupts it.
                following = job.script.stages[job.stage + 1 : job.stage + 2]
                if not following or following[0].secondary != "Interrupted":
                    return None
            else:
                return max(job.stage_at, self.now), lambda at: self._end_program(job, at)
        return job.stage_at + stage.duration_s, lambda at: self._enter(job, job.stage + 1, at)

    def _enter(self, job: FakeJob, index: int, at: float) -> None:
        if index >= len(job.script.stages):
            self._end(job, at, "Failed" if job.script.failure_reason else "Completed")
            return
        stage = job.script.stages[index]
        job.stage, job.stage_at = index, at
        job.history.append((at, stage.primary, stage.secondary))
        if stage.secondary == "Starting":
            job.num_attempts += 1
        elif stage.secondary == TRAINING:
            if self._logs is not None and job.script.log_lines:
                for host in range(1, job.request["ResourceConfig"].get("InstanceCount", 1) + 1):
                    stream = f"{job.request['TrainingJobName']}/algo-{host}-{int(at)}"
                    write_log_lines(self._logs, stream, job.script.log_lines, at)
            if self._make_instance is not None:
                job.instance = self._make_instance()
                job.instance.start(job.request, max(0, job.num_attempts - 1))
        elif stage.secondary == "Interrupted" and job.instance is not None:
            # AWS does not promise a SIGTERM first, so the fake sends none.
            job.instance.kill()

    def _end_program(self, job: FakeJob, at: float) -> None:
        assert job.instance is not None
        code = job.instance.poll()
        if code:
            job.reason = job.instance.failure() or f"AlgorithmError: exit code {code}"
            self._end(job, at, "Failed")
        else:
            self._enter(job, job.stage + 1, at)

    def _fail_inside(self, job: FakeJob, at: float) -> None:
        job.num_internal_errors += 1
        if job.instance is not None:
            job.instance.kill()
        allowed = job.request.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
        if job.num_internal_errors > allowed:
            job.reason = "InternalServerError: We encountered an internal error. Please try again."
            self._end(job, at, "Failed")
            return
        job.history.append((at, "InProgress", "Restarting"))
        words = [stage.secondary for stage in job.script.stages]
        self._enter(job, words.index("Starting"), at + _RETRY_PAUSE_S)

    def _begin_stop(self, job: FakeJob, at: float, word: str) -> None:
        if job.stop_at is not None:
            return
        has_program = job.secondary == TRAINING
        job.stop_word = word
        job.history.append((at, "Stopping", "Stopping"))
        job.stop_at = at + (STOP_WINDOW_S if has_program else 0.0)
        if job.instance is not None and has_program:
            job.instance.terminate()

    def _finish_stop(self, job: FakeJob, at: float) -> None:
        if job.instance is not None:
            job.instance.kill()
            job.reason = job.instance.failure()
        self._end(job, max(at, job.history[-1][0]), job.stop_word)

    def _end(self, job: FakeJob, at: float, word: str) -> None:
        primary = word if word in TERMINAL else "Stopped"
        job.reason = (job.reason or job.script.failure_reason)[:NUM_FAILURE_CHARACTERS]
        job.history.append((at, primary, word))
        if self._s3 is not None:
            place = parse_s3(output_uri(job))
            for name in ("model.tar.gz", "output.tar.gz"):
                buffer = io.BytesIO()
                with tarfile.open(fileobj=buffer, mode="w:gz"):
                    pass
                self._s3.put_object(Bucket=place.bucket, Key=f"{place.key}/{name}", Body=buffer.getvalue())

    # Helpers.

    def _note(self, operation: str, arguments: dict[str, Any]) -> None:
        self.calls.append((operation, copy.deepcopy(arguments)))
        for index, (name, code, message) in enumerate(self._faults):
            if name == operation:
                del self._faults[index]
                raise _error(code, "".join(word.capitalize() for word in operation.split("_")), message)

    def _find(self, name: str, operation: str) -> FakeJob:
        if name not in self._jobs:
            raise _error("ValidationException", operation, "Requested resource not found.")
        return self._settle_now(self._jobs[name])

    def _arn(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _refuse_beyond_quota(self, request: Mapping[str, Any]) -> None:
        wanted = request["ResourceConfig"]
        kind = wanted.get("InstanceType")
        if kind not in self.quota:
            return
        running = [self._settle_now(job) for job in self._jobs.values()]
        used = sum(
            job.request["ResourceConfig"]["InstanceCount"]
            for job in running
            if not job.is_over and job.request["ResourceConfig"].get("InstanceType") == kind
        )
        if used + wanted["InstanceCount"] > self.quota[kind]:
            raise _error(
                "ResourceLimitExceeded",
                "CreateTrainingJob",
                f"The account-level service limit '{kind} for training job usage' is {self.quota[kind]}"
                f" Instances, with current utilization of {used} Instances and a request delta of"
                f" {wanted['InstanceCount']} Instances.",
            )


def write_log_lines(logs: Any, stream: str, lines: tuple[str, ...], at: float) -> None:
    """Put lines into a stream of the jobs' log group, a millisecond apart; create both if missing."""
    from botocore.exceptions import ClientError

    for create, place in (
        (logs.create_log_group, {"logGroupName": LOG_GROUP}),
        (logs.create_log_stream, {"logGroupName": LOG_GROUP, "logStreamName": stream}),
    ):
        try:
            create(**place)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ResourceAlreadyExistsException":
                raise
    events = [{"timestamp": int(at * 1000) + index, "message": line} for index, line in enumerate(lines)]
    logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)


def _refuse_invalid(request: Mapping[str, Any]) -> None:
    from botocore.exceptions import ParamValidationError

    findings = check_request(request)
    if not findings:
        return
    texts = "; ".join(str(finding) for finding in findings)
    if any(finding.code in _CLIENT_CHECKS for finding in findings):
        raise ParamValidationError(report=texts)
    number = f"{len(findings)} validation error{'s' if len(findings) > 1 else ''} detected: "
    raise _error("ValidationException", "CreateTrainingJob", number + texts)


def _error(code: str, operation: str, message: str) -> Exception:
    from botocore.exceptions import ClientError

    status = 429 if code == "ThrottlingException" else 400
    error: Exception = ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},
        operation,
    )
    return error


def _is_wanted(job: FakeJob, query: Mapping[str, Any]) -> bool:
    name = job.request["TrainingJobName"]
    after, changed_after = query.get("CreationTimeAfter"), query.get("LastModifiedTimeAfter")
    return (
        query.get("NameContains", "").lower() in name.lower()
        and (after is None or job.created_at > _seconds(after))
        and (changed_after is None or job.history[-1][0] > _seconds(changed_after))
    )


def _seconds(value: Any) -> float:
    return value.timestamp() if isinstance(value, datetime) else float(value)
