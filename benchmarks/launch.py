"""What a person waits for when sending a run to a cluster, on a real Slurm of this machine.

`strop plan --on slurm` of the demo's run file; `strop submit --on slurm` of a project of 500 files, from the
command to its end, when the job is accepted; and the age of a log line when `strop logs -f` prints it, for a
role that writes the time a few times a second. Goals: 1 s, 3 s, 1 s.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Figure, Measured
from benchmarks.startup import person_environment
from strop.launch.backends import open_backend
from strop.launch.build_request import SubmitOptions, read_request
from strop.launch.contract import RolePlan
from strop.launch.launcher import Launcher
from tools.slurm_cluster import slurm_cluster

RECIPE = Path(__file__).parents[1] / "recipes" / "arithmetic.toml"
STROP = (sys.executable, "-m", "strop.cli")
NUM_FILES = 500
FILE_BYTES = 4096
_RUN = """name = "{name}"
[model]
uri = "some/model"
[task]
name = "arithmetic"
"""
_SPEAKER = (
    "import sys, time\n"
    "for _ in range({count}):\n"
    "    print(repr(time.time()), flush=True)\n"
    "    time.sleep(0.173)\n"
)


@contextmanager
def _desk() -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a project of 500 files and the variables of a user of a running cluster."""
    with tempfile.TemporaryDirectory() as name, slurm_cluster(Path(name) / "slurm") as cluster:
        folder = Path(name)
        project = folder / "project"
        for index in range(NUM_FILES - 1):
            path = project / f"package{index % 20}" / f"module{index}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(FILE_BYTES // 2).hex().encode())
        for words in (
            ("init", "-q"),
            ("add", "-A"),
            ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"),
        ):
            subprocess.run(["git", *words], cwd=project, check=True)
        variables = {
            **person_environment(),
            **cluster.environment,
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "STROP_RUNTIME_DIR": str(folder / "runtime"),
        }
        yield project, variables


def _time(command: Sequence[str], project: Path, variables: dict[str, str]) -> float:
    begun_at = time.perf_counter()
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - begun_at


def measure_launch(*, is_quick: bool) -> Measured:
    """Measure all three, the commands several times."""
    num_repeats = 1 if is_quick else 7
    with _desk() as (project, variables):
        plan = [*STROP, "plan", str(RECIPE), "--on", "slurm"]
        _time(plan, project, variables)
        plans = [_time(plan, project, variables) for _ in range(num_repeats)]
        submissions = []
        for index in range(num_repeats):
            (project / "run.toml").write_text(_RUN.format(name=f"tree{index}"))
            submit = [*STROP, "submit", "run.toml", "--on", "slurm", "--time", "5m"]
            submissions.append(_time(submit, project, variables))
        ages = _measure_log_ages(project, variables, num_lines=20 if is_quick else 100)
    return Measured(
        figures=[
            Figure(
                name="strop plan --on slurm",
                unit="s, median",
                value=statistics.median(plans),
                measured=tuple(plans),
                at_most=1.0,
            ),
            Figure(
                name=f"strop submit of {NUM_FILES} files to Slurm",
                unit="s, median",
                value=statistics.median(submissions),
                measured=tuple(submissions),
                at_most=3.0,
            ),
            Figure(
                name="log line to `strop logs -f`",
                unit="s, 99th percentile",
                value=sorted(ages)[int(0.99 * (len(ages) - 1))],
                measured=tuple(ages),
                at_most=1.0,
            ),
        ]
    )


def _measure_log_ages(project: Path, variables: dict[str, str], *, num_lines: int) -> list[float]:
    """Return how old each line of a running job is when `strop logs -f` prints it."""
    (project / "run.toml").write_text(_RUN.format(name="speaker"))
    # In this process, since no command submits a role of one's own.
    os.environ.update(variables)
    options = SubmitOptions(
        site="slurm",
        overrides=("job.time_limit=5m", f"output.root={project / 'runs'}"),
        project_path=project,
        has_snapshot=False,
    )
    request = read_request(str(project / "run.toml"), options, environ=os.environ, now=time.time())
    role = RolePlan(name="train", argv=(sys.executable, "-c", _SPEAKER.format(count=num_lines)))
    launcher = Launcher(open_backend(request.site))
    ref = launcher.submit(replace(request, roles=(role,))).ref
    ages = []
    command = [*STROP, "logs", "-f", ref.job_id, "--role", "train"]
    with subprocess.Popen(command, cwd=project, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.time()
            ages.append(now - float(line.rpartition(" ")[2]))
    # Those before the command had started are older than the command makes them.
    return ages[-num_lines // 2 :]
