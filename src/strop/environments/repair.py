"""A repository in a sandbox, an issue, and hidden tests that run in another sandbox.

The model's repository has one commit without history: later commits would hold the answer. The diff against
that commit is applied to a fresh copy of the repository and graded there, without files that the hidden tests
replace and those in `protected`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import posixpath
import re
import secrets
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from strop.environments.repair_rows import READING, RepairRow, read_passed
from strop.environments.workspace import FILE_ERRORS, Workspace, room_limits, submitted
from strop.errors import ConfigError, SandboxError
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.sandbox.contract import MIB, ExecKind, ExecResult, SandboxSpec
from strop.sandbox.served import ServedSandbox
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import SOURCE_HELP, EnvironmentSection, TrainingRows
from strop.tasks.failures import AttemptFailed
from strop.tasks.rows.row_task import SplitExamples, read_examples
from strop.tasks.task import TaskLimits

_FOLDER = "/testbed"
_OWN_FOLDER = "repository"
"""Folder below the private directory, for rows without an image."""
_GIT = "git -c user.name=strop -c user.email=strop@localhost -c core.hooksPath=/dev/null"
_OPENING = (
    "A repository is in the current directory. Solve the issue below by changing its files. Tests that you do"
    " not see decide; changes of tests do not count.{}\n\n{}"
)
_PATCH_BYTES = 16 * MIB
_ORDER_LIMIT_S = 600.0
"""Limit of one set-up step in a sandbox, on a large repository."""
_PATCHED = re.compile(r"^(?:\+\+\+ b/|--- a/)(.+?)\t?$", re.MULTILINE)
_SEAL = f"""
rm -rf -- "$@"
if [ -d .git ]; then git ls-files -z > "$HOME/.tracked"; rm -rf .git; fi
git init -q . && git add -A
[ ! -s "$HOME/.tracked" ] ||
    git add -f --ignore-errors --pathspec-file-nul --pathspec-from-file="$HOME/.tracked" 2>/dev/null || true
rm -f "$HOME/.tracked"
{_GIT} commit -q --no-verify --allow-empty -m "the repository as it is" && git rev-parse HEAD
"""
"""Removes the arguments, reduces the repository to one commit, and prints that commit."""
_AT_BASE = """
[ -n "$1" ] || exit 0
[ -d .git ] || { [ "$2" = 1 ] && exit 0; echo "no git repository, and the row names a commit" >&2; exit 1; }
git merge-base --is-ancestor "$1" HEAD 2>/dev/null && [ "$(git rev-list --count "$1..HEAD")" -le "$2" ] ||
    git checkout -q -f "$1"
"""
"""Checks out the row's commit, unless at most $2 commits follow it: images may add their set-up as one."""
_FIND_TESTS = r"""
find "$@" -type f \( -name 'test*.py' -o -name '*_test.py' -o -name '*.sh' \) 2>/dev/null | sort | tail -n 1
"""
_CANARIES = {
    ".py": """

class Test{word}(__import__("unittest").TestCase):
    def test_{word}_a(self):
        self.assertEqual({low}, {high})

    def test_{word}_b(self):
        self.assertTrue({low} > {high})

    def test_{word}_c(self):
        assert {low} == {high}

    def test_{word}_d(self):
        with self.assertRaises(ValueError):
            int("{low}")

    def test_{word}_e(self):
        self.assertIn({low}, [{high}])


""",
    ".sh": '\n[ {low} = {high} ] && echo "PASSED test_{word}" || echo "FAILED test_{word} - no"\n',
}
"""Tests that must fail, by the suffix of the file that they are put into."""
_MAIN = re.compile(r"^if __name__\b", re.MULTILINE)


class RepoRepairSpec(RoomSettings, EnvironmentSection, TrainingRows):
    """Issues of repositories, in the columns of SWE-bench, SWE-Gym or R2E."""

    name: Literal["repo-repair"]
    source: Unhashed[str] = Field(min_length=1, description=SOURCE_HELP.format("SWE-Gym/SWE-Gym"))
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image of rows without one, such as 'swebench/sweb.eval.x86_64.{instance}:latest', with"
        " {instance_id} or {instance}, its form in names of images. none = each row names an image or a"
        " repository, which is a directory of this machine.",
        json_schema_extra=expert("SWE-bench's rows do not name their images"),
    )
    folder: str = Field(
        default=_FOLDER,
        pattern="^/",
        description="Folder of the repository in images, for rows without one.",
        json_schema_extra=expert("images are built in several ways"),
    )
    test_command: str | None = Field(
        default=None,
        min_length=1,
        description="Command that runs the hidden tests, for rows without one, in bash if the image has it;"
        " {files} are the test files. none = each row has one.",
        json_schema_extra=expert("SWE-bench's rows have none"),
    )
    test_limit_s: float = Field(
        default=1800.0,
        gt=0.0,
        le=86_400.0,
        description="Limit of the hidden tests in seconds. Beyond it, the issue is not solved.",
        json_schema_extra=expert("a change may make tests hang"),
    )
    hidden_paths: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Paths in the image that only the grader has, such as R2E's ['/r2e_tests'].",
        json_schema_extra=expert("some images hold the hidden tests"),
    )
    protected: tuple[str, ...] = Field(
        default=(
            *("*conftest.py", "*sitecustomize.py", "*usercustomize.py", "*.pth"),
            # They can load plugins into the test run.
            *("*pytest.ini", "*pytest.toml", "*tox.ini", "*setup.cfg", "*pyproject.toml"),
            *("*.dist-info/*", "*.egg-info/*"),
            # Python imports them before the real ones.
            *("pytest.py", "pytest/*", "_pytest/*", "unittest.py", "unittest/*"),
        ),
        strict=False,
        description="Files whose changes are not graded, beside the test files: patterns of paths in the"
        " repository.",
        json_schema_extra=expert("some files can make every test pass"),
    )


class RepoRepair(Workspace):
    """Solved if all tests of FAIL_TO_PASS and PASS_TO_PASS pass, and tests that must fail do.

    An attempt without a diff, or with one that does not apply, is not solved. Tests that cannot start, or a
    test patch that does not apply, are a failure of the row, without a score.
    """

    name = "repo-repair"
    version = "repair-2"
    max_turns = 50
    limits = TaskLimits(max_reply_tokens=4096, max_goldless_frac=1.0)
    _base = ""
    _diff = b""

    def __init__(self, spec: RepoRepairSpec) -> None:
        self._spec = spec

    @cached_property
    def _splits(self) -> SplitExamples:
        spec = self._spec
        return read_examples(READING, spec.source, num_train=spec.num_train, num_held_out=spec.num_held_out)

    @property
    def data_digest(self) -> str:
        """Hash over the rows; reads them. Raises: DataError."""
        return self._splits.digest

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the rows of a split. Raises: DataError if they are missing or malformed."""
        return self._splits.of(split)

    def opening(self, example: Example, seed: int) -> str:
        """Return the issue with its instructions."""
        # A program that works in place of the tools has no submit.
        ending = " Call submit when you are done." if self._spec.agent is None else ""
        return _OPENING.format(ending, example.fields["problem_statement"])

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield the row's own patch, applied and submitted, if it has one."""
        patch = RepairRow.of(example).patch
        if patch:
            word = f"END_{hashlib.sha256(patch.encode()).hexdigest()[:12]}"
            command = f"git apply - <<'{word}'\n{patch.rstrip()}\n{word}"
            yield submitted(command)

    def forgeries(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield attempts whose code reports that all tests passed, and ends them; none without a patch."""
        hidden = RepairRow.of(example)
        names = (*hidden.fail_to_pass, *hidden.pass_to_pass)
        log = "\n" + "".join(f"PASSED {name}\n{name} ... ok\n" for name in names)
        forged = {
            ".py": f"import os\nos.write(1, {log!r}.encode())\nos.write(2, {log!r}.encode())\nos._exit(0)",
            ".sh": f"printf %s {shlex.quote(log)}\nexit 0",
        }
        for path in dict.fromkeys(_PATCHED.findall(hidden.patch)):
            if code := forged.get(posixpath.splitext(path)[1]):
                yield submitted(f"printf %s {shlex.quote(code)} > {shlex.quote(path)}")

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return a sandbox of the row's image."""
        limits = replace(room_limits(self._spec), output_head_bytes=8 * MIB, output_tail_bytes=8 * MIB)
        image = self._image_of(example)
        # Root owns the image's files.
        return SandboxSpec(limits=limits, image=image or None, user=0 if image else None)

    async def prepare(self, example: Example, seed: int) -> None:
        """Place the repository without history and hidden paths."""
        self.folder = await self._place_repository(self.sandbox)
        hidden = (*RepairRow.of(example).hidden_paths, *self._spec.hidden_paths)
        self._base = (await self._order(self.sandbox, _SEAL, *hidden)).stdout.decode().split()[-1]

    async def grade(self, sandbox: ServedSandbox) -> Outcome:
        """Apply the hidden tests and the diff, run the tests, and read their log."""
        hidden = RepairRow.of(self.example)
        passed, canary = await self._run_tests(sandbox, hidden, self._diff)
        if isinstance(passed, str):
            return _to_outcome(solved=False, **{passed: 1.0})
        parts = {"fail_to_pass_frac": hidden.fail_to_pass, "pass_to_pass_frac": hidden.pass_to_pass}
        fracs = {
            name: sum(passed.get(test, False) for test in tests) / len(tests)
            for name, tests in parts.items()
            if tests
        }
        solved = all(frac == 1.0 for frac in fracs.values())
        if not solved or _fails(passed, canary):
            return _to_outcome(solved=solved, **fracs)
        # The run ended before the canary, or what fails passes there; or the command leaves canaries out.
        async with self._open_grader() as other:
            passed, canary = await self._run_tests(other, hidden, hidden.patch.encode())
        if isinstance(passed, str) or not _fails(passed, canary):
            detail = "its test command does not run every test of the last test file, or stops before"
            raise AttemptFailed(FailureOwner.TASK, "unwatched_tests", detail)
        return _to_outcome(solved=False, tests_forged=1.0, **fracs)

    async def _run_tests(
        self, sandbox: ServedSandbox, hidden: RepairRow, diff: bytes
    ) -> tuple[Mapping[str, bool] | str, str]:
        """Return which tests passed, or why there is no result; and the word of the tests that must fail."""
        self.folder = await self._place_repository(sandbox)
        test_files = tuple(dict.fromkeys([*hidden.hidden_tests, *_PATCHED.findall(hidden.test_patch)]))
        # Before the diff: what is in their way then is the row's fault, and later the model's.
        for path, text in hidden.hidden_tests.items():
            await sandbox.write(posixpath.join(self.folder, path), text.encode())
        if hidden.test_patch and not await self._apply(sandbox, hidden.test_patch.encode()):
            raise AttemptFailed(FailureOwner.TASK, "bad_test_patch", "the row's test patch does not apply")
        command = hidden.test_command or self._spec.test_command or ""
        command = command.replace("{files}", shlex.join(test_files))
        if not command:
            detail = f"{self.example.fields['instance_id']} does not say how its tests are run"
            raise AttemptFailed(FailureOwner.TASK, "no_test_command", detail)
        ungraded = [*self._spec.protected, *(f"{path}{end}" for path in test_files for end in ("", "/*"))]
        if diff and not await self._apply(sandbox, diff, *(f"--exclude={pattern}" for pattern in ungraded)):
            return "patch_failed", ""
        canary = await self._add_canary(sandbox, *test_files, *hidden.hidden_paths, *self._spec.hidden_paths)
        limit_s = self._spec.test_limit_s
        for shell in ("/bin/bash", "/bin/sh"):
            result = await sandbox.exec([shell, "-c", command], wall_limit_s=limit_s, cwd=self.folder)
            if result.kind is ExecKind.TIMED_OUT:
                return "tests_timed_out", canary
            if result.kind is not ExecKind.NOT_STARTED:
                log = b"\n".join([result.stdout, result.stderr]).decode(errors="replace")
                return read_passed(log), canary
        raise AttemptFailed(FailureOwner.TASK, "no_shell", "the image has no shell that could run the tests")

    async def _add_canary(self, sandbox: ServedSandbox, *paths: str) -> str:
        """Put tests that must fail into the last hidden test file; return the word in their names.

        Code under test that ends the run early, or makes every test pass, does not let them fail.
        """
        listed = await self._order(sandbox, _FIND_TESTS, *(paths or ("/dev/null",)))
        found = listed.stdout.decode().strip()
        if not found:
            detail = "it has no hidden test file in Python, and no script of a shell"
            raise AttemptFailed(FailureOwner.TASK, "no_hidden_tests", detail)
        place = posixpath.join(self.folder or "", found)
        text = (await sandbox.read(place)).decode(errors="surrogateescape")
        word, low = secrets.token_hex(4), secrets.randbelow(1000)
        canary = _CANARIES[posixpath.splitext(found)[1]].format(word=word, low=low, high=low + 7)
        main = _MAIN.search(text)
        at = main.start() if main else len(text)
        await sandbox.write(place, (text[:at] + canary + text[at:]).encode(errors="surrogateescape"))
        return word

    async def _judge_work(self) -> Any:
        self._diff = await self._take_diff()
        return await super()._judge_work() if self._diff.strip() else _to_outcome(solved=False, no_patch=1.0)

    async def _take_diff(self) -> bytes:
        """Return the model's changes; nothing if its repository is broken or the diff is too large."""
        script = (
            f'cd "$1" && {_GIT} add -A && {_GIT} diff --cached'
            ' --binary --no-renames --no-ext-diff --no-color "$2" > "$3"'
        )
        path = posixpath.join(self.sandbox.scratch, ".strop-diff")
        argv = ["sh", "-c", f'rm -rf "$3"; {script}', "sh", self.folder or ".", self._base, path]
        result = await self.sandbox.exec(argv, wall_limit_s=_ORDER_LIMIT_S)
        if result.exit_code != 0:
            return b""
        try:
            return await self.sandbox.read(path, max_bytes=_PATCH_BYTES)
        except SandboxError as error:
            if error.kind not in FILE_ERRORS:
                raise
            return b""

    async def _place_repository(self, sandbox: ServedSandbox) -> str:
        """Place the repository at the row's commit; return its folder."""
        fields = self.example.fields
        if self._image_of(self.example):
            folder = fields["folder"] or self._spec.folder
        else:
            folder = posixpath.join(sandbox.scratch, _OWN_FOLDER)
            self.folder = None
            archive = await asyncio.to_thread(_pack, fields["repository"])
            # An archive: there may be thousands of files, also links.
            await self._order(sandbox, f"mkdir {_OWN_FOLDER} && tar -xf - -C {_OWN_FOLDER}", stdin=archive)
        self.folder = folder
        await self._order(
            sandbox, _AT_BASE, fields["base_commit"], "1" if self._image_of(self.example) else "0"
        )
        return folder

    def _image_of(self, example: Example) -> str:
        """Return a row's image; empty if it has a repository. Raises: ConfigError if it has neither."""
        fields = example.fields
        if fields["image"] or fields["repository"]:
            image: str = fields["image"]
            return image
        if self._spec.image is None:
            raise ConfigError(
                f"{fields['instance_id']} names neither an image nor a repository",
                allowed="a column image, docker_image, image_name or repository, or task.image",
                next_step="set task.image",
            )
        instance = fields["instance_id"]
        named = self._spec.image.replace("{instance_id}", instance)
        return named.replace("{instance}", instance.replace("__", "_1776_").lower())

    async def _order(
        self, sandbox: ServedSandbox, script: str, *words: str, stdin: bytes = b""
    ) -> ExecResult:
        """Run a set-up script in the repository. Raises: AttemptFailed (of the task) if it fails."""
        argv = ["sh", "-c", script, "sh", *words]
        result = await sandbox.exec(argv, stdin=stdin, wall_limit_s=_ORDER_LIMIT_S, cwd=self.folder)
        if result.exit_code or result.kind is not ExecKind.EXITED:
            output = (result.stderr or result.stdout).decode(errors="replace").strip()[-400:]
            detail = f"the repository of {self.example.fields['instance_id']}: {result.kind}: {output}"
            raise AttemptFailed(FailureOwner.TASK, "bad_repository", detail)
        return result

    async def _apply(self, sandbox: ServedSandbox, patch: bytes, *words: str) -> bool:
        argv = ["git", "apply", "--whitespace=nowarn", *words, "-"]
        result = await sandbox.exec(argv, stdin=patch, wall_limit_s=_ORDER_LIMIT_S, cwd=self.folder)
        return result.exit_code == 0


def _fails(passed: Mapping[str, bool], canary: str) -> bool:
    """Whether the canary was reported, and never as passed."""
    seen = [is_good for name, is_good in passed.items() if canary in name]
    return bool(seen) and not any(seen)


def _pack(folder: str) -> bytes:
    """Return a directory as an archive. Raises: AttemptFailed if it cannot be read."""
    packed = io.BytesIO()
    try:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, arcname=".")
    except OSError as error:
        detail = f"the repository {folder} cannot be read: {error.strerror}"
        raise AttemptFailed(FailureOwner.TASK, "bad_repository", detail) from error
    return packed.getvalue()


def _to_outcome(*, solved: bool, **metrics: float) -> Outcome:
    return Outcome(parts={"solved": float(solved)}, is_correct=solved, metrics=metrics)
