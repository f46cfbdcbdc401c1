"""A repository in a sandbox, an issue, and hidden tests that run in another sandbox.

The model's repository has one commit without history: later commits would hold the answer. The diff against
that commit is applied to a fresh copy of the repository and graded there, without files that the hidden tests
replace and those in `protected`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import posixpath
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from strop.environments.workspace import Workspace, room_limits, submitted
from strop.errors import ConfigError, SandboxError
from strop.rollout import Example, FailureOwner, Outcome, Split, make_example
from strop.sandbox.contract import MIB, ExecKind, ExecResult, SandboxSpec
from strop.sandbox.served import ServedSandbox
from strop.spec.base import expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import SOURCE_HELP, EnvironmentSection, TrainingRows
from strop.tasks.contract import TaskLimits
from strop.tasks.failures import AttemptFailed
from strop.tasks.registry import built_in
from strop.tasks.rows.layout import DataLayout, Row, bad_row
from strop.tasks.rows.row_task import (
    RowReading,
    SplitExamples,
    optional_text,
    read_examples,
    require_texts,
    wrong_type,
)

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
[ -d .git ] && [ -n "$1" ] || exit 0
git merge-base --is-ancestor "$1" HEAD 2>/dev/null || git checkout -q -f "$1"
"""
"""Checks out the row's commit, unless the image has it or a later commit."""
IMAGE_COLUMNS = ("image", "docker_image", "image_name")
_COMMAND_COLUMNS = ("test_command", "test_cmd")


class RepoRepairSpec(RoomSettings, EnvironmentSection, TrainingRows):
    """Issues of repositories, in the columns of SWE-bench, SWE-Gym or R2E."""

    name: Literal["repo-repair"]
    source: str = Field(min_length=1, description=SOURCE_HELP.format("SWE-Gym/SWE-Gym"))
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


@built_in(
    "repo-repair",
    RepoRepairSpec,
    "Issues of repositories, solved with a shell and an editor; hidden tests decide in a fresh sandbox.",
    rank=145,
)
class RepoRepair(Workspace):
    """Solved if all tests of FAIL_TO_PASS and PASS_TO_PASS pass; without names, if the command exits with 0.

    An attempt without a diff, or with one that does not apply, is not solved. Tests that cannot start, or a
    test patch that does not apply, are a failure of the row, without a score.
    """

    name = "repo-repair"
    version = "repair-1"
    max_turns = 50
    limits = TaskLimits(max_reply_tokens=4096, max_goldless_frac=1.0)
    _base = ""
    _diff = b""

    def __init__(self, spec: RepoRepairSpec) -> None:
        self._spec = spec

    @cached_property
    def _splits(self) -> SplitExamples:
        spec = self._spec
        return read_examples(_READING, spec.source, num_train=spec.num_train, num_held_out=spec.num_held_out)

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
        patch = Hidden.of(example).patch
        if patch:
            word = f"END_{hashlib.sha256(patch.encode()).hexdigest()[:12]}"
            command = f"git apply - <<'{word}'\n{patch.rstrip()}\n{word}"
            yield submitted(command)

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return a sandbox of the row's image."""
        limits = replace(room_limits(self._spec), output_head_bytes=8 * MIB, output_tail_bytes=8 * MIB)
        image = self._image_of(example)
        # Root owns the image's files.
        return SandboxSpec(limits=limits, image=image or None, user=0 if image else None)

    async def prepare(self, example: Example, seed: int) -> None:
        """Place the repository without history and hidden paths."""
        self.folder = await self._place_repository(self.sandbox)
        hidden = (*Hidden.of(example).hidden_paths, *self._spec.hidden_paths)
        self._base = (await self._order(self.sandbox, _SEAL, *hidden)).stdout.decode().split()[-1]

    async def grade(self, sandbox: ServedSandbox) -> Outcome:
        """Apply the diff and the hidden tests, run them, and read their log."""
        hidden = Hidden.of(self.example)
        folder = self.folder = await self._place_repository(sandbox)
        test_files = tuple(dict.fromkeys([*hidden.hidden_tests, *_PATCHED.findall(hidden.test_patch)]))
        ungraded = [*self._spec.protected, *(f"{path}{end}" for path in test_files for end in ("", "/*"))]
        if not await self._apply(sandbox, self._diff, *(f"--exclude={pattern}" for pattern in ungraded)):
            return _to_outcome(solved=False, patch_failed=1.0)
        for path, text in hidden.hidden_tests.items():
            await sandbox.write(posixpath.join(folder, path), text.encode())
        if hidden.test_patch and not await self._apply(sandbox, hidden.test_patch.encode()):
            raise AttemptFailed(FailureOwner.TASK, "bad_test_patch", "the row's test patch does not apply")
        command = hidden.test_command or self._spec.test_command or ""
        command = command.replace("{files}", shlex.join(test_files))
        if not command:
            detail = f"{self.example.fields['instance_id']} does not say how its tests are run"
            raise AttemptFailed(FailureOwner.TASK, "no_test_command", detail)
        limit_s = self._spec.test_limit_s
        for shell in ("/bin/bash", "/bin/sh"):
            result = await sandbox.exec([shell, "-c", command], wall_limit_s=limit_s, cwd=folder)
            if result.kind is not ExecKind.NOT_STARTED:
                return _read_result(hidden, result)
        raise AttemptFailed(FailureOwner.TASK, "no_shell", "the image has no shell that could run the tests")

    async def _judge_work(self) -> Any:
        self._diff = await self._take_diff()
        return await super()._judge_work() if self._diff.strip() else _to_outcome(solved=False, no_patch=1.0)

    async def _take_diff(self) -> bytes:
        """Return the model's changes; nothing if its repository is broken or the diff is too large."""
        script = (
            f'cd "$1" && {_GIT} add -A && {_GIT} diff --cached --binary --no-ext-diff --no-color "$2" > "$3"'
        )
        path = posixpath.join(
            self.sandbox.scratch, f".{hashlib.sha256(self._base.encode()).hexdigest()}.diff"
        )
        argv = ["sh", "-c", f'rm -rf "$3"; {script}', "sh", self.folder or ".", self._base, path]
        result = await self.sandbox.exec(argv, wall_limit_s=_ORDER_LIMIT_S)
        if result.exit_code:
            return b""
        try:
            return await self.sandbox.read(path, max_bytes=_PATCH_BYTES)
        except SandboxError as error:
            if error.kind != "too_large":
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
        await self._order(sandbox, _AT_BASE, fields["base_commit"])
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


def _read_result(hidden: Hidden, result: ExecResult) -> Outcome:
    if result.kind is ExecKind.TIMED_OUT:
        return _to_outcome(solved=False, tests_timed_out=1.0)
    if not hidden.fail_to_pass and not hidden.pass_to_pass:
        return _to_outcome(solved=result.exit_code == 0)
    passed = read_passed(b"\n".join([result.stdout, result.stderr]).decode(errors="replace"))
    parts = {"fail_to_pass_frac": hidden.fail_to_pass, "pass_to_pass_frac": hidden.pass_to_pass}
    fracs = {
        name: sum(passed.get(test, False) for test in tests) / len(tests)
        for name, tests in parts.items()
        if tests
    }
    return _to_outcome(solved=all(frac == 1.0 for frac in fracs.values()), **fracs)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """The grading data of a row, hidden from the model: part of an example's answer, not of its fields."""

    test_command: str
    """Empty: the run file's command."""
    test_patch: str
    """A diff that adds the tests; maybe empty."""
    hidden_tests: dict[str, str]
    """Test files by path."""
    hidden_paths: tuple[str, ...]
    """Paths of the repository or the image that only the grader has."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    """Without names in either, the exit code of the command decides."""
    patch: str
    """A correct diff, for the self-test; maybe empty."""

    @classmethod
    def of(cls, example: Example) -> Hidden:
        """Read an example's answer."""
        values = json.loads(example.answer or "{}")
        lists = ("hidden_paths", "fail_to_pass", "pass_to_pass")
        return cls(**{**values, **{name: tuple(values[name]) for name in lists}})


def to_example(row: Row) -> Example:
    """Convert a row to an example. Raises: DataError naming the row, if a column is missing or malformed."""
    (problem,) = require_texts(row, "problem_statement")
    image = _first_text(row, IMAGE_COLUMNS)
    expected = _table(row, "expected_output_json")
    hidden = Hidden(
        test_command=_first_text(row, _COMMAND_COLUMNS)
        or _table(row, "install_config").get("test_cmd")
        or "",
        test_patch=optional_text(row, "test_patch"),
        hidden_tests={name: str(text) for name, text in _table(row, "hidden_tests").items()},
        hidden_paths=_names(row, "hidden_paths"),
        fail_to_pass=_names(row, "FAIL_TO_PASS"),
        pass_to_pass=_names(row, "PASS_TO_PASS") or tuple(n for n, s in expected.items() if s == "PASSED"),
        patch=optional_text(row, "patch"),
    )
    fields = {
        "instance_id": _first_text(row, ("instance_id",)) or row.place,
        "problem_statement": problem,
        "image": image,
        "repository": os.path.expanduser(optional_text(row, "repository")),
        "folder": optional_text(row, "folder"),
        "base_commit": _first_text(row, ("base_commit", "commit_hash")),
    }
    return make_example("repo-repair", fields, json.dumps(asdict(hidden), sort_keys=True))


def _first_text(row: Row, columns: tuple[str, ...]) -> str:
    return next((text for column in columns if (text := optional_text(row, column))), "")


def _table(row: Row, column: str) -> Mapping[str, Any]:
    allowed = "a table, or one as JSON"
    table = _read_json(row, column, allowed)
    if table is not None and not isinstance(table, dict):
        raise wrong_type(row, column, allowed)
    # Arrow fills keys of other rows with None.
    return {name: value for name, value in (table or {}).items() if value is not None}


def _names(row: Row, column: str) -> tuple[str, ...]:
    allowed = "a list of texts, or one as JSON"
    names = _read_json(row, column, allowed)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise wrong_type(row, column, allowed)
    return tuple(names or ())


def _read_json(row: Row, column: str, allowed: str) -> Any:
    value = row.values.get(column)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise bad_row(f"{row.place} has a {column} that is no JSON ({error})", allowed) from error


_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|SKIPPED|XPASS) +(\S.*)$")
_UNITTEST = re.compile(
    r"^(test\w* \([\w.]+\))(?:\n.*)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure)", re.MULTILINE
)
_GOOD = frozenset({"PASSED", "XFAIL", "ok", "expected failure"})


def read_passed(log: str) -> dict[str, bool]:
    """Return from a log whether each test passed, under each name that data sets use for it.

    Reads logs of pytest with -rA, and of unittest and Django with -v 2. pytest's `a/b.py::C::test_d[x y]`
    also counts under its part before the first space, and as `C.test_d[x y]`. The code under test can write
    to the log, too: of several results of a test the worst counts.
    """
    log = _STYLE.sub("", log)
    results = [(match[2], match[1]) for line in log.splitlines() if (match := _PYTEST.match(line.rstrip()))]
    results += [(match[1], match[2]) for match in _UNITTEST.finditer(log)]
    passed: dict[str, bool] = {}
    for name, status in results:
        # A failure's message follows the name.
        whole = name if status in _GOOD else name.partition(" - ")[0]
        within = ".".join(whole.split("::")[1:])
        for alias in {whole, whole.split()[0] if "::" in whole else whole, within or whole}:
            passed[alias] = passed.get(alias, True) and status in _GOOD
    return passed


_READING = RowReading(
    layout=DataLayout(train=("train.jsonl",), held_out=("test.jsonl",), is_unknown=True),
    to_example=to_example,
    question=lambda example: f"{example.fields['instance_id']}\n{example.fields['problem_statement']}",
)
