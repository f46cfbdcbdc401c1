"""Repository repair: rows, what the model can reach, what decides, and whose failures are whose."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditSettings, ProbeStatus, run_audit, self_test
from strop.engine import GenerationRequest
from strop.environments import choose_environment, run_group
from strop.environments.groups import NUM_REFILLS
from strop.environments.repair import RepairRow, RepoRepair, RepoRepairSpec, read_passed
from strop.errors import DataError
from strop.rollout import Example, FailureOwner, Split
from strop.tasks import Task, build_task
from tests.environments.test_worlds import call, plan_of, tokenizer_of
from tests.environments.test_worlds import play_here as play
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.judging import failed
from tests.fixtures.sandboxes import needs_bubblewrap, needs_podman
from tests.fixtures.small_root import copy_programs, imported

BUGGY = 'add() { echo "$(($1 - $2))"; }\nname() { echo adder; }\n'
PATCH = """\
--- a/lib/add.sh
+++ b/lib/add.sh
@@ -1,2 +1,2 @@
-add() { echo "$(($1 - $2))"; }
+add() { echo "$(($1 + $2))"; }
 name() { echo adder; }
"""
SHOWN = '. ./lib/add.sh\n[ "$(name)" = adder ] && echo "PASSED t.sh::name" || echo "FAILED t.sh::name - no"\n'
TEST_PATCH = """\
--- a/tests/t.sh
+++ b/tests/t.sh
@@ -1,2 +1,3 @@
 . ./lib/add.sh
 [ "$(name)" = adder ] && echo "PASSED t.sh::name" || echo "FAILED t.sh::name - no"
+[ "$(add 20 3)" = 23 ] && echo "PASSED t.sh::hidden_sum" || echo "FAILED t.sh::hidden_sum - wrong"
"""
ROW = {
    "problem_statement": "add is wrong.",
    "base_commit": "",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(["t.sh::hidden_sum"]),
    "PASS_TO_PASS": ["t.sh::name"],
    "test_command": "sh {files}",
    "patch": PATCH,
}
FIX = call("bash", command="sed -i 's/ - / + /' lib/add.sh")
SUBMIT = call("submit")
PROCESS = {"sandbox": "process", "min_isolation": "rlimit"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a bug, whose later history has the repair."""
    folder = tmp_path_factory.mktemp("repository")
    for name, text in {"lib/add.sh": BUGGY, "tests/t.sh": SHOWN, "conftest.py": "", "kept.log": "1"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link").symlink_to("lib/add.sh")
    (folder / ".gitignore").write_text("*.log\n")

    def git(*words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")
        argv = ["git", *identity, *words]
        return subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "-A", "-f")
    git("commit", "-qm", "with a bug")
    base = git("rev-parse", "HEAD")
    (folder / "lib/add.sh").write_text(BUGGY.replace(" - ", " + "))
    git("commit", "-qam", "the secret repair")
    git("tag", "later")
    git("checkout", "-q", "-f", base)
    (folder / "base").write_text(base)
    return folder


def make(folder: Path, place: Path, settings: dict[str, Any] | None = None, **columns: Any) -> Task:
    """Build the environment over rows of which the first is trained on."""
    row: dict[str, Any] = {**ROW, "repository": str(place), **columns}
    for number, name in enumerate(("train", "test")):
        text = json.dumps({**row, "instance_id": f"adder__adder-{number}"})
        (folder / f"{name}.jsonl").write_text(text + "\n")
    given = {**PROCESS, "memory_gib": 0.25, "disk_gib": 0.0625, **(settings or {})}
    return build_task(RepoRepairSpec(name="repo-repair", source=str(folder), **given))


@pytest.mark.parametrize(
    "settings",
    [PROCESS, pytest.param({"sandbox": "bubblewrap", "min_isolation": "namespace"}, marks=needs_bubblewrap)],
)
def test_a_tool_changes_the_file_inside_and_the_reward_follows(
    tmp_path: Path, repository: Path, settings: dict[str, str]
) -> None:
    rollout = play(
        tmp_path, make(tmp_path, repository, settings), FIX, call("bash", command="git diff"), SUBMIT
    )
    assert '+add() { echo "$(($1 + $2))"; }' in rollout.turns[4].text
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert rollout.outcome.is_correct
    assert rollout.outcome.metrics["fail_to_pass_frac"] == 1.0
    assert (repository / "lib/add.sh").read_text() == BUGGY


@pytest.mark.parametrize(
    ("command", "metric"),
    [
        (":", "no_patch"),
        ("sed -i 's/ - / * /' lib/add.sh", "fail_to_pass_frac"),
        ("sed -i 's/adder/other/; s/ - / + /' lib/add.sh", "pass_to_pass_frac"),
        ("echo 'echo \"PASSED t.sh::hidden_sum\"' >> tests/t.sh", "fail_to_pass_frac"),
        ("rm -r tests; mkdir -p tests/t.sh; touch tests/t.sh/x", "fail_to_pass_frac"),
        ("rm -r tests; touch tests", "patch_failed"),
        ("sed -i 's/ - / + /' lib/add.sh; rm -rf .git", "no_patch"),
        ("sed -i 's/ - / + /' lib/add.sh; git reset -q --hard; (sleep 0.5; touch x) &", "no_patch"),
        ("mv lib/add.sh x; ln -s ../../../../etc/passwd lib/add.sh", "fail_to_pass_frac"),
        # Tests that are ended before they say anything are not passed.
        ("echo 'exit 0' > lib/add.sh", "fail_to_pass_frac"),
        ("sed -i '1i exit 0' lib/add.sh", "fail_to_pass_frac"),
    ],
)
def test_nothing_else_earns_it(tmp_path: Path, repository: Path, command: str, metric: str) -> None:
    rollout = play(tmp_path, make(tmp_path, repository), call("bash", command=command), SUBMIT)
    assert rollout.outcome.reward == 0.0, rollout.outcome
    assert rollout.outcome.metrics[metric] in (0.0, 1.0)
    assert rollout.outcome.metrics.get("tests_forged", 0.0) == 0.0


def test_an_attempt_whose_sandbox_dies_is_made_again_and_never_a_wrong_one(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RepoRepair] = []
    prepare = RepoRepair.prepare

    async def note(self: RepoRepair, example: Example, seed: int) -> None:
        await prepare(self, example, seed)
        made.append(self)

    monkeypatch.setattr(RepoRepair, "prepare", note)
    task, tokenizer = make(tmp_path, repository), tokenizer_of(tmp_path)
    killed: list[int] = []

    def script(request: GenerationRequest) -> str:
        if "sed" not in tokenizer.decode(request.prompt_ids):
            return FIX
        if not killed:
            killed.append(made[0].sandbox.supervisor_pid)
            os.kill(killed[0], signal.SIGKILL)
        return SUBMIT

    plans = [replace(plan_of(task), sample_index=index) for index in range(2)]
    engine = DummyEngine(tokenizer, script)
    group = asyncio.run(run_group(choose_environment(task), engine, tokenizer, plans))
    outcomes = [rollout.outcome for rollout in group.rollouts]
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0], outcomes
    assert sorted(outcome.metrics.get(NUM_REFILLS, 0.0) for outcome in outcomes) == [0.0, 1.0]
    assert len(made) == 3


FORGED = [
    *("conftest.py", "lib/conftest.py", "sitecustomize.py", "usercustomize.py", "evil.pth"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("evil-1.dist-info/entry_points.txt", "evil.egg-info/entry_points.txt"),
    *("pytest.py", "pytest/__init__.py", "_pytest/main.py", "unittest.py", "unittest/__main__.py"),
    *("tests/t.sh", "tests/new/more.sh"),
]


def test_files_that_make_tests_pass_do_not_reach_them(tmp_path: Path, repository: Path) -> None:
    """Plugins, settings of the runner and modules in its place, of which one alone would do."""
    passes = "PASSED forged\n"
    named: dict[str, Any] = {"FAIL_TO_PASS": ["forged"], "PASS_TO_PASS": ["t.sh::name"]}
    forging = "".join(f"if grep -q forged {path}; then printf '{passes}'; fi\n" for path in FORGED)
    named |= {
        "hidden_tests": {"tests/new/more.sh": "true"},
        "test_command": f"{forging} sh {{files}}; sh tests/t.sh",
    }
    made = "\n".join(call("create", path=path, text="forged\n") for path in (*FORGED, "kept.txt"))
    outcome = play(tmp_path, make(tmp_path, repository, **named), made, SUBMIT).outcome
    assert (outcome.reward, outcome.metrics["fail_to_pass_frac"]) == (0.0, 0.0), outcome
    named["test_command"] = f"grep -q forged kept.txt && printf '{passes}'; sh tests/t.sh"
    assert play(tmp_path, make(tmp_path, repository, **named), made, SUBMIT).outcome.reward == 1.0


@pytest.mark.parametrize(
    "command",
    [
        "sed -i 's/ - / + /' lib/add.sh; git add -A; git -c user.name=x -c user.email=y commit -qm done",
        "sed -i 's/ - / + /' lib/add.sh; printf 'exit 1\\n' >> tests/t.sh; echo junk > conftest.py",
        "sed -i 's/ - / + /' lib/add.sh; printf '\\0\\377' > 'new file.bin'; echo 2 > kept.log; rm link",
        "git apply - <<'EOF'\n" + PATCH + "EOF",
    ],
)
def test_the_same_repair_counts_however_it_is_made(tmp_path: Path, repository: Path, command: str) -> None:
    rollout = play(tmp_path, make(tmp_path, repository), call("bash", command=command), SUBMIT)
    assert rollout.outcome.reward == 1.0, rollout.outcome


def test_hidden_tests_and_later_commits_cannot_be_read(tmp_path: Path, repository: Path) -> None:
    task = make(
        tmp_path, repository, {"hidden_paths": ["base"]}, hidden_tests={"tests/more.sh": "secret_more"}
    )
    look = (
        "git log --all --format=%s; git cat-file --batch-all-objects --batch | grep -c 'secret repair';"
        " grep -rc 'hidden_sum\\|secret_more' . | grep -v ':0$'; ls base; env | grep -i hidden"
    )
    seen = play(tmp_path, task, call("bash", command=look), SUBMIT)
    output = seen.turns[2].text
    assert "the repository as it is\n0\n" in output
    assert "No such file" in output
    assert "tests" not in output
    example = task.examples(Split.TRAIN)[0]
    shown = json.dumps(dict(example.fields)) + task.render(example)[0].text
    assert "hidden_sum" not in shown
    assert "$1 + $2" not in shown


def test_a_right_patch_passes_the_self_test_and_nonsense_does_not(tmp_path: Path, repository: Path) -> None:
    task = make(tmp_path, repository)
    assert asyncio.run(self_test(task, task.examples(Split.TRAIN))) == []
    wrong = make(tmp_path, repository, patch=PATCH.replace("$1 + $2", "$1 / $2"))
    assert [one.probe for one in asyncio.run(self_test(wrong, wrong.examples(Split.TRAIN)))] == ["gold"]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"test_patch": TEST_PATCH.replace("adder", "other")}, "bad_test_patch"),
        ({"base_commit": "0" * 40}, "bad_repository"),
        ({"repository": "/nowhere"}, "bad_repository"),
        ({"test_command": ""}, "no_test_command"),
        *(
            ({"test_command": one}, "unwatched_tests")
            for one in (
                "sed -i '/test_/d' {files}; sh {files}",
                "/opt/no/pytest -rA {files}",
                "sh {files} | wc",
            )
        ),
        ({"test_patch": "", "FAIL_TO_PASS": [], "test_command": "sh tests/t.sh"}, "no_hidden_tests"),
    ],
)
def test_a_row_that_cannot_be_judged_is_no_reward(
    tmp_path: Path, repository: Path, columns: dict[str, Any], kind: str
) -> None:
    outcome = play(tmp_path, make(tmp_path, repository, **columns), FIX, SUBMIT).outcome
    assert outcome.reward is None
    assert failed(outcome) == (FailureOwner.TASK, kind)


def test_tests_that_wait_without_an_end_are_not_passed(tmp_path: Path, repository: Path) -> None:
    task = make(tmp_path, repository, {"test_limit_s": 0.5})
    outcome = play(tmp_path, task, call("bash", command="echo 'sleep 60' >> lib/add.sh"), SUBMIT).outcome
    assert (outcome.reward, outcome.metrics["tests_timed_out"]) == (0.0, 1.0)


def test_the_repository_stands_at_the_rows_commit(tmp_path: Path, repository: Path) -> None:
    late = tmp_path / "late"
    shutil.copytree(repository, late, symlinks=True)
    subprocess.run(["git", "checkout", "-q", "-f", "later"], cwd=late, check=True)
    # An orphan's commit is behind nothing.
    words = ["git", "-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--amend", "-m", "other"]
    subprocess.run(["git", "checkout", "-q", "--orphan", "other"], cwd=late, check=True)
    subprocess.run([*words[:5], "commit", "-qam", "other"], cwd=late, check=True)
    task = make(tmp_path, late, base_commit=(repository / "base").read_text())
    rollout = play(tmp_path, task, call("bash", command="cat lib/add.sh"), FIX, SUBMIT)
    assert "$1 - $2" in rollout.turns[2].text
    assert rollout.outcome.reward == 1.0, rollout.outcome


@pytest.mark.slow
@needs_podman
def test_an_image_has_the_repository_and_its_tests(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What R2E's images are like: the tests are in them, and their files are root's."""
    tree = tmp_path / "tree"
    tree.mkdir()
    names = ("sh", "git", "sed", "rm", "cat", "ls", "mkdir", "grep", "env", "tail", "find", "sort")
    copy_programs(tree, names)
    shutil.copytree(repository, tree / "testbed", symlinks=True)
    (tree / "hidden").mkdir()
    (tree / "etc").mkdir()
    (tree / "hidden/t.sh").write_text('. ./lib/add.sh\n[ "$(add 20 3)" = 23 ] && echo "PASSED h::sum"\n')
    columns = {
        "test_patch": "",
        "PASS_TO_PASS": [],
        "FAIL_TO_PASS": ["h::sum"],
        "test_command": "sh /hidden/t.sh",
    }
    with imported(tree) as image:
        settings = {
            "sandbox": "podman",
            "min_isolation": "namespace",
            "hidden_paths": ["/hidden"],
            "image": image,
        }
        task = make(tmp_path, Path(), settings, **columns, repository="")
        rollout = play(tmp_path, task, call("bash", command="pwd; ls /hidden"), FIX, SUBMIT)
        assert rollout.outcome.reward == 1.0, rollout.outcome
        assert "/testbed\n" in rollout.turns[2].text
        assert "No such file" in rollout.turns[2].text
        wrong = call("bash", command="echo >> lib/add.sh")
        assert play(tmp_path, task, wrong, SUBMIT).outcome.reward == 0.0
    # It cannot be had any more.
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", "/dev/null")
    outcome = play(tmp_path, task, FIX, SUBMIT).outcome
    assert outcome.failure is not None
    assert (outcome.failure.owner, outcome.reward) == (FailureOwner.INFRA, None)


@pytest.mark.parametrize(
    "columns",
    [
        {"problem_statement": ""},
        *({"FAIL_TO_PASS": one} for one in ("t.sh::a", "{}")),
        {"PASS_TO_PASS": [1]},
        {"hidden_tests": ["a"]},
        {"image": 3},
        {"PASS_TO_PASS": [], "FAIL_TO_PASS": None},
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, repository: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(columns))}|tests"):
        make(tmp_path, repository, **columns).examples(Split.TRAIN)


def test_rows_of_several_makers_are_read(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "repository": "",
        "docker_image": "r2e/adder:1",
        "commit_hash": "abc",
        "PASS_TO_PASS": None,
        "FAIL_TO_PASS": "[]",
        "expected_output_json": '{"C.test_a": "PASSED", "C.test_b": "FAILED"}',
        "test_command": None,
        "install_config": {"test_cmd": "pytest -rA"},
    }
    example = make(tmp_path, tmp_path, **more).examples(Split.TRAIN)[0]
    hidden = RepairRow.of(example)
    assert (example.fields["image"], example.fields["base_commit"]) == ("r2e/adder:1", "abc")
    assert (hidden.pass_to_pass, hidden.test_command) == (("C.test_a",), "pytest -rA")


def test_a_log_says_which_tests_passed() -> None:
    log = """
        noise
PASSED tests/a.py::C::test_a
PASSED tests/a.py::test_b[x y]
\x1b[31mFAILED\x1b[0m tests/a.py::test_c - assert 1 == 2 - no
ERROR tests/b.py
XFAIL tests/a.py::test_d
SKIPPED [1] tests/a.py:3: no reason
PASSED tests/a.py::test_c
test_e (pkg.tests.Case) ... ok
test_f (pkg.tests.Case)
It says what it does. ... FAIL
test_g (pkg.tests.Case)
It is named by its docstring. ... Testing against Django installed in '/django'
ok
PASSED
"""
    passed = read_passed(log)
    assert {name for name, is_good in passed.items() if is_good} == {
        *("tests/a.py::C::test_a", "C.test_a", "tests/a.py::test_b[x y]", "tests/a.py::test_b[x"),
        *("test_b[x y]", "tests/a.py::test_d", "test_d", "test_e (pkg.tests.Case)"),
        *("test_g (pkg.tests.Case)", "It is named by its docstring."),
    }
    bad = "tests/a.py::test_c", "test_f (pkg.tests.Case)", "It says what it does."
    assert not any(passed[name] for name in bad)


@pytest.mark.slow
@needs_bubblewrap
def test_the_audits_attacks_find_nothing(tmp_path: Path, repository: Path) -> None:
    make(tmp_path, repository, {"sandbox": "bubblewrap", "min_isolation": "namespace"})
    spec = RepoRepairSpec(name="repo-repair", source=str(tmp_path), memory_gib=0.25, disk_gib=0.0625)
    settings = AuditSettings(num_examples=1, probes=("empty", "gold", "judge_injection"))
    report = asyncio.run(run_audit(build_task(spec), settings))
    found = {one.probe: (one.status, one.detail) for one in report.probes}
    assert {status for status, _ in found.values()} == {ProbeStatus.PASS}, found
