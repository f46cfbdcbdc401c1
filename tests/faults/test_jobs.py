"""Jobs of a cluster whose scheduler is a pair of shell scripts: submissions, listings and forgotten jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.fixtures.commands import Run

RUN = """\
name = "tiny"
[model]
uri = "example/model"
[task]
name = "arithmetic"
[train]
steps = 2
"""
# Where two submissions are to meet, each waits in its check for the other one, but not for ever.
SBATCH = """\
#!/bin/sh
for word; do [ "$word" != --test-only ] || is_check=yes; done
[ "${is_check:-}" ] || { echo 17; exit; }
cat >/dev/null
[ "${MEET:-}" ] || exit 0
touch "$MEET.$$"
for _ in $(seq 50); do [ "$(ls "$MEET".* | wc -l)" -lt 2 ] || exit 0; sleep 0.1; done
"""
SQUEUE = """\
#!/bin/sh
echo '{"jobs": [], "errors": []}'
"""
SITE = """\
[sites.cluster]
backend = "slurm"
run_root = "ROOT"
time_limit = "15m"
secrets = ["MYTOKEN"]
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's folder for runs, from a folder with a run file; its scheduler knows no job."""
    bin_path = tmp_path / "bin"
    bin_path.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", "#!/bin/sh\n")):
        (bin_path / name).write_text(text)
        (bin_path / name).chmod(0o755)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "strop-sites.toml").write_text(SITE.replace("ROOT", str(tmp_path / "runs of the site")))
    monkeypatch.setenv("PATH", f"{bin_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MYTOKEN", "t0ken-of-mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs of the site"


def submit(run: Run, *words: str) -> None:
    ended = run("submit", "run.toml", *words, "--on", "cluster", "--no-snapshot")
    assert ended.code == 0, ended.err


def test_jobs_in_the_run_root_of_a_site_are_listed(
    runs: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`strop ls` said "runs is no folder" while the site's own folder held jobs."""
    submit(run)
    # Also without the list of this user's jobs, which is a machine's own.
    monkeypatch.setenv("XDG_STATE_HOME", str(runs / "another"))
    ended = run("ls", "--json")
    assert ended.code == 0, ended.err
    (listed,) = json.loads(ended.out)
    assert Path(listed["home"]).parent == runs
    assert run("ls", "absent").code == 1


def test_a_forgotten_job_can_be_closed_and_leaves_no_secrets(runs: Path, run: Run) -> None:
    """A job that its scheduler had forgotten stayed unknown, with its secrets, and `cancel` failed."""
    submit(run)
    (home,) = (path.parents[1] for path in runs.glob("*/job/ref.json"))
    assert json.loads(run("status", home, "--json").out)[0]["state"] == "unknown"
    assert list(home.glob("job/secrets*"))
    assert run("cancel", home).code == 0
    (status,) = json.loads(run("status", home, "--json").out)
    assert (status["state"], list(home.glob("job/secrets*"))) == ("cancelled", [])
    # It can go on all the same.
    submit(run, "--resume", str(home))
    assert json.loads(run("status", home, "--json").out)[0]["state"] == "unknown"


@pytest.mark.slow
def test_two_submissions_at_once_share_no_directory(runs: Path, tmp_path: Path) -> None:
    """Of two submissions at once into one folder, under two names, both went, with the settings of one."""
    words = [sys.executable, "-m", "strop.cli", "submit", "run.toml", "--on", "cluster", "--no-snapshot"]
    words += ["--output-dir", str(tmp_path / "one")]
    both = [
        subprocess.Popen(
            [*words, f"name={name}", f"train.steps={steps}"],
            env={**os.environ, "MEET": str(tmp_path / "meet")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, steps in (("first", 3), ("second", 5))
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 76], said
    accepted = [process.returncode for process in both].index(0)
    spec = tomllib.loads((tmp_path / "one/job/spec.toml").read_text())
    assert (spec["name"], spec["train"]["steps"]) == (("first", 3), ("second", 5))[accepted]
