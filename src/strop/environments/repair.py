"""A repository in a sandbox, an issue, and hidden tests that run in another sandbox.

Its rows have the columns of SWE-bench, SWE-Gym, R2E and similar data sets.

The model's repository has one commit without history: later commits would hold the answer. The diff against
that commit is applied to a fresh copy of the repository and graded there, without files that the hidden tests
replace and those of `_PROTECTED`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import posixpath
import re
import secrets
import shlex
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import override

from strop.environments.workspace import ORDER_LIMIT_S, Workspace, room_limits, submitted
from strop.errors import ConfigError
from strop.rollout import Example, FailureOwner, Outcome, Split, make_example
from strop.sandbox.contract import MIB, ExecKind, SandboxSpec
from strop.sandbox.served import ServedSandbox
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import SOURCE_HELP, EnvironmentSection, TrainingRows
from strop.tasks.failures import AttemptFailed
from strop.tasks.rows.layout import DataSet, Row, bad_row
from strop.tasks.rows.row_task import SplitExamples, read_examples
from strop.tasks.task import TaskLimits

_OWN_FOLDER = "repository"
"""Folder below the private directory, for rows without an image."""
_GIT = "git -c user.name=strop -c user.email=strop@localhost -c core.hooksPath=/dev/null"
_OPENING = (
    "A repository is in the current directory. Solve the issue below by changing its files. Tests that you do"
    " not see decide; changes of tests do not count.{}\n\n{}"
)
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
_DIFF = (
    f'cd "$1" && {_GIT} add -A && {_GIT} diff --cached --binary --no-renames --no-ext-diff --no-color "$2"'
)
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
    def test_{word}_a(self): self.assertEqual({low}, {high})
    def test_{word}_b(self): self.assertTrue({low} > {high})
    def test_{word}_c(self): assert {low} == {high}
    def test_{word}_d(self): self.assertRaises(ValueError, int, "{low}")
    def test_{word}_e(self): self.assertIn({low}, [{high}])


""",
    ".sh": '\n[ {low} = {high} ] && echo "PASSED test_{word}" || echo "FAILED test_{word} - no"\n',
}
"""Tests that must fail, by the suffix of the file that they are put into."""
_PROTECTED = (
    *("*conftest.py", "*sitecustomize.py", "*usercustomize.py", "*.pth"),
    # They can load plugins into the test run.
    *("*pytest.ini", "*pytest.toml", "*tox.ini", "*setup.cfg", "*pyproject.toml"),
    *("*.dist-info/*", "*.egg-info/*"),
    # Python imports them before the real ones.
    *("pytest.py", "pytest/*", "_pytest/*", "unittest.py", "unittest/*"),
)
"""Files whose changes are not graded, beside the test files: they can make every test pass."""
_IN_BASH = 'exec "$(command -v bash || echo /bin/sh)" -c "$0"'
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
        default="/testbed",
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


def _decode(value: Any) -> Any:
    """Read a column that may be JSON; Arrow fills keys of other rows with None."""
    value = json.loads(value) if isinstance(value, str) else value
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_decode)]
_Texts = Annotated[dict[str, Any], BeforeValidator(_decode)]
_FIELDS = ("instance_id", "problem_statement", "image", "repository", "base_commit")
"""The columns that are an example's fields. The others are its answer, which the model does not see."""


def _named(*columns: str) -> Any:
    return Field(default="", validation_alias=AliasChoices(*columns))


class RepairRow(BaseModel):
    """The columns of a row; of an example's answer, those that are hidden from the model."""

    model_config = ConfigDict(populate_by_name=True)

    instance_id: str = ""
    problem_statement: str = ""
    image: str = _named("image", "docker_image", "image_name")
    repository: str = ""
    base_commit: str = _named("base_commit", "commit_hash")
    test_command: str = _named("test_command", "test_cmd")
    """Empty: the run file's command."""
    test_patch: str = ""
    """A diff that adds the tests."""
    hidden_tests: Annotated[dict[str, str], BeforeValidator(_decode)] = {}
    """Test files by path."""
    fail_to_pass: _Names = Field(default=(), alias="FAIL_TO_PASS")
    pass_to_pass: _Names = Field(default=(), alias="PASS_TO_PASS")
    patch: str = ""
    """A correct diff, for the self-test."""
    expected_output_json: _Texts = {}
    install_config: _Texts = {}

    @classmethod
    def of(cls, example: Example) -> RepairRow:
        """Read an example's answer."""
        return cls.model_validate_json(example.answer or "{}")


def _to_example(row: Row) -> Example:
    """Convert a row to an example. Raises: DataError naming the row, if a column is missing or malformed."""
    try:
        read = RepairRow.model_validate({k: v for k, v in row.values.items() if v not in (None, "")})
    except ValidationError as error:
        first = error.errors()[0]
        detail = f"{row.place}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise bad_row(detail, "texts; lists of texts and tables, or these as JSON") from error
    expected = tuple(name for name, status in read.expected_output_json.items() if status == "PASSED")
    read = read.model_copy(
        update={
            "instance_id": read.instance_id or row.place,
            "repository": os.path.expanduser(read.repository),
            "test_command": read.test_command or read.install_config.get("test_cmd") or "",
            "pass_to_pass": read.pass_to_pass or expected,
        }
    )
    if not read.problem_statement.strip():
        raise bad_row(f"{row.place} has no problem_statement", "a text that is not empty")
    if not read.fail_to_pass and not read.pass_to_pass:
        fault = f"{row.place} names no tests, and code under test can end their command with 0"
        raise bad_row(fault, "names in FAIL_TO_PASS, PASS_TO_PASS or expected_output_json")
    answer = read.model_dump(mode="json", exclude={*_FIELDS, "expected_output_json", "install_config"})
    fields = read.model_dump(mode="json", include={*_FIELDS})
    return make_example("repo-repair", fields, json.dumps(answer, sort_keys=True))


_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|SKIPPED|XPASS) +(\S.*)$")
_UNITTEST = re.compile(
    r"^(test\w* \([\w.]+\))(?:\n(.*))? \.\.\. (?:Testing against .*\n)*"
    "(ok|FAIL|ERROR|skipped|expected failure)",
    re.MULTILINE,
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
    for match in _UNITTEST.finditer(log):
        # Django's lists have the docstring in place of the name.
        results += [(name, match[3]) for name in (match[1], match[2]) if name]
    passed: dict[str, bool] = {}
    for name, status in results:
        # A failure's message follows the name.
        whole = name if status in _GOOD else name.partition(" - ")[0]
        within = ".".join(whole.split("::")[1:])
        for alias in {whole, whole.split()[0] if "::" in whole else whole, within or whole}:
            passed[alias] = passed.get(alias, True) and status in _GOOD
    return passed


_ROWS = DataSet(max_reply_tokens=4096)


class RepoRepair(Workspace):
    """Solved if all tests of FAIL_TO_PASS and PASS_TO_PASS pass, and tests that must fail do.

    An attempt without a diff, or with one that does not apply, is not solved. Tests that cannot start, or a
    test patch that does not apply, are a failure of the row, without a score.
    """

    name = "repo-repair"
    version = "repair-3"
    max_turns = 50
    limits = TaskLimits(max_reply_tokens=_ROWS.max_reply_tokens, max_goldless_frac=1.0)
    _base = ""
    _diff = b""

    def __init__(self, spec: RepoRepairSpec) -> None:
        self._spec = spec

    @cached_property
    def _splits(self) -> SplitExamples:
        return read_examples(
            self._spec, _ROWS, _to_example, lambda one: "\n".join(one.fields[key] for key in _FIELDS[:2])
        )

    @property
    def data_digest(self) -> str:
        """Hash over the rows; reads them. Raises: DataError."""
        return self._splits.digest

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the rows of a split. Raises: DataError if they are missing or malformed."""
        return self._splits.of(split)

    @override
    def opening(self, example: Example, seed: int) -> str:
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

    @override
    def sandbox_for(self, example: Example) -> SandboxSpec:
        limits = room_limits(memory_gib=self._spec.memory_gib, disk_gib=self._spec.disk_gib)
        limits = replace(limits, output_head_bytes=8 * MIB, output_tail_bytes=8 * MIB)
        image = self._image_of(example)
        # Root owns the image's files.
        return SandboxSpec(limits=limits, image=image or None, user=0 if image else None)

    @override
    async def prepare(self, example: Example, seed: int) -> None:
        await self._place_repository(self.sandbox)
        sealed = await self._order(self.sandbox, _SEAL, *self._spec.hidden_paths)
        self._base = sealed.stdout.decode().split()[-1]

    @override
    async def grade(self, sandbox: ServedSandbox) -> Outcome:
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
        if _fails(passed, canary) or (passed and not solved):
            return _to_outcome(solved=solved, **fracs)
        # The run ended before the canary, or what fails passes there; or the command misses it, or is none.
        async with self._open_grader() as other:
            passed, canary = await self._run_tests(other, hidden, hidden.patch.encode())
        if isinstance(passed, str) or not _fails(passed, canary):
            detail = "its test command does not run every test of the last test file, or stops before"
            raise AttemptFailed(FailureOwner.TASK, "unwatched_tests", detail)
        return _to_outcome(solved=False, tests_forged=float(solved), **fracs)

    async def _run_tests(
        self, sandbox: ServedSandbox, hidden: RepairRow, diff: bytes
    ) -> tuple[Mapping[str, bool] | str, str]:
        """Return which tests passed, or why there is no result; and the word of the tests that must fail."""
        await self._place_repository(sandbox)
        test_files = tuple(dict.fromkeys([*hidden.hidden_tests, *_PATCHED.findall(hidden.test_patch)]))
        # Before the diff: what is in their way then is the row's fault, and later the model's.
        for path, text in hidden.hidden_tests.items():
            await sandbox.write(self._place_of(path), text.encode())
        if hidden.test_patch and not await self._apply(sandbox, hidden.test_patch.encode()):
            raise AttemptFailed(FailureOwner.TASK, "bad_test_patch", "the row's test patch does not apply")
        command = hidden.test_command or self._spec.test_command or ""
        command = command.replace("{files}", shlex.join(test_files))
        if not command:
            detail = f"{self.example.fields['instance_id']} does not say how its tests are run"
            raise AttemptFailed(FailureOwner.TASK, "no_test_command", detail)
        ungraded = [*_PROTECTED, *(f"{path}{end}" for path in test_files for end in ("", "/*"))]
        if diff and not await self._apply(sandbox, diff, *(f"--exclude={pattern}" for pattern in ungraded)):
            return "patch_failed", ""
        canary = await self._add_canary(sandbox, *test_files, *self._spec.hidden_paths)
        argv = ["/bin/sh", "-c", _IN_BASH, command]
        result = await sandbox.exec(argv, wall_limit_s=self._spec.test_limit_s, cwd=self.folder)
        if result.kind is ExecKind.TIMED_OUT:
            return "tests_timed_out", canary
        return read_passed((result.stdout + b"\n" + result.stderr).decode(errors="replace")), canary

    async def _add_canary(self, sandbox: ServedSandbox, *paths: str) -> str:
        """Put tests that must fail into the last hidden test file; return the word in their names.

        Code under test that ends the run early, or makes every test pass, does not let them fail.
        """
        listed = await self._order(sandbox, _FIND_TESTS, *(paths or ("/dev/null",)))
        found = listed.stdout.decode().strip()
        if not found:
            detail = "it has no hidden test file in Python, and no script of a shell"
            raise AttemptFailed(FailureOwner.TASK, "no_hidden_tests", detail)
        place = self._place_of(found)
        text = (await sandbox.read(place)).decode(errors="surrogateescape")
        word, low = secrets.token_hex(4), secrets.randbelow(1000)
        canary = _CANARIES[posixpath.splitext(found)[1]].format(word=word, low=low, high=low + 7)
        main = _MAIN.search(text)
        at = main.start() if main else len(text)
        await sandbox.write(place, (text[:at] + canary + text[at:]).encode(errors="surrogateescape"))
        return word

    async def _judge_work(self) -> Any:
        argv = ["sh", "-c", _DIFF, "sh", self.folder or ".", self._base]
        result = await self.sandbox.exec(argv, wall_limit_s=ORDER_LIMIT_S)
        # Nothing, if its repository is broken or the diff is too large.
        self._diff = b"" if result.exit_code != 0 or result.stdout_omitted else result.stdout
        return await super()._judge_work() if self._diff.strip() else _to_outcome(solved=False, no_patch=1.0)

    async def _place_repository(self, sandbox: ServedSandbox) -> None:
        """Place the repository at the row's commit, in `folder`."""
        fields, has_image = self.example.fields, bool(self._image_of(self.example))
        self.folder = self._spec.folder if has_image else posixpath.join(sandbox.scratch, _OWN_FOLDER)
        if not has_image:
            archive = await asyncio.to_thread(_pack, fields["repository"])
            # An archive: there may be thousands of files, also links.
            unpack = f"mkdir {_OWN_FOLDER} && tar -xf - -C {_OWN_FOLDER}"
            await self._order(sandbox, unpack, stdin=archive, cwd=sandbox.scratch)
        await self._order(sandbox, _AT_BASE, fields["base_commit"], "1" if has_image else "0")

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

    async def _apply(self, sandbox: ServedSandbox, patch: bytes, *words: str) -> bool:
        argv = ["git", "apply", "--whitespace=nowarn", *words, "-"]
        result = await sandbox.exec(argv, stdin=patch, wall_limit_s=ORDER_LIMIT_S, cwd=self.folder)
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
