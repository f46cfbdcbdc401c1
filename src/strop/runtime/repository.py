"""What a git repository in a sandbox has changed, by the sandbox's own git.

A change is one against the commit at which the current branch left the remote's default branch; without a
remote against the last commit, and without any commit against nothing, so that all is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from strop.runtime.http_server import HttpError
from strop.sandbox.contract import MIB, ExecKind, ExecResult, Sandbox

_LIMIT_S = 120.0
_MAX_DIFF_BYTES = MIB
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
_WORDS = {"M": "UPDATED", "A": "ADDED", "D": "DELETED", "U": "UPDATED", "T": "UPDATED"}
_DEFAULT_EXCLUDES = ("node_modules/", ".venv/", "venv/", "__pycache__/", "*.pyc", ".cache/", ".git/")
# Prints the commit to compare with.
_FIND_BASE = """
git rev-parse --git-dir >/dev/null 2>&1 || exit 3
git rev-parse --verify -q HEAD >/dev/null || { echo EMPTY; exit 0; }
head=$(git rev-parse HEAD)
for name in origin/HEAD origin/main origin/master; do
  base=$(git merge-base HEAD "$name" 2>/dev/null) && [ "$base" != "$head" ] && { echo "$base"; exit 0; }
done
echo "$head"
"""


class Repository:
    """Asks git in one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def list_changes(self, path: str, ref: str = "") -> list[dict[str, str]]:
        """Return what differs below a directory, by paths relative to it; nothing without a repository.

        Raises: HttpError 400 for a reference that there is not.
        """
        base = await self._find_base(path, ref)
        if base is None:
            return []
        told = await self._git(path, "diff", "--name-status", "--no-renames", "--relative", "-z", base)
        words = told.stdout.decode(errors="surrogateescape").split("\0")[:-1]
        changes = [
            {"status": _WORDS.get(status[:1], "UPDATED"), "path": name}
            for status, name in zip(words[::2], words[1::2], strict=False)
        ]
        new = await self._git(path, "ls-files", "--others", "--exclude-standard", "-z")
        names = new.stdout.decode(errors="surrogateescape").split("\0")[:-1]
        changes += [{"status": "ADDED", "path": name} for name in names]
        return sorted(changes, key=lambda one: one["path"])

    async def diff(self, path: str, ref: str = "", commit: str = "") -> dict[str, str | None]:
        """Return a file before and after, whole. Raises: HttpError 400 if it is too large or in neither."""
        folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
        base = await self._find_base(folder, f"{commit}^" if commit else ref)
        if base is None:
            return {"modified": None, "original": None}
        original = await self._show(folder, f"{base}:./{name}")
        if commit:
            modified = await self._show(folder, f"{commit}:./{name}")
        else:
            told = await self._sandbox.exec(["cat", "--", path], wall_limit_s=_LIMIT_S)
            modified = None if told.exit_code else _text_of(told)
        if original is None and modified is None:
            raise HttpError(400, f"File does not exist: {path}")
        return {"modified": modified or "", "original": original or ""}

    async def archive(
        self, path: str, *, is_delta: bool, base_ref: str, excludes: Sequence[str], use_default_excludes: bool
    ) -> tuple[bytes, dict[str, str]]:
        """Return a directory as a patch or a gzip tar, and the headers that describe it.

        Raises: HttpError 400 without a repository or with an unknown base; 413 if it is too large.
        """
        left_out = (*(_DEFAULT_EXCLUDES if use_default_excludes else ()), *excludes)
        base = await self._find_base(path, base_ref) if is_delta or base_ref else None
        if is_delta and base is None:
            raise HttpError(400, f"{path} is in no git repository")
        facts = {}
        for header, words in (
            ("X-Archive-Head-Commit", ("rev-parse", "--verify", "-q", "HEAD")),
            ("X-Archive-Branch", ("rev-parse", "--abbrev-ref", "HEAD")),
            ("X-Archive-Repo-Root", ("rev-parse", "--show-toplevel")),
        ):
            told = await self._run(["git", "-C", path, *words])
            if told.exit_code == 0:
                facts[header] = told.stdout.decode(errors="replace").strip()
        if not is_delta:
            flags = [f"--exclude={one.rstrip('/')}" for one in left_out]
            made = await self._run(["tar", "-C", path, "-czf", "-", *flags, "."])
        else:
            assert base is not None
            facts["X-Archive-Base-Ref"] = base_ref or "auto"
            if base != _EMPTY_TREE:
                facts["X-Archive-Base-Commit"] = base
            pathspecs = [f":(exclude,glob)**/{one.rstrip('/')}" for one in left_out if not one.endswith("/")]
            pathspecs += [f":(exclude,glob)**/{one}**" for one in left_out if one.endswith("/")]
            script = (
                "export GIT_INDEX_FILE=$(mktemp); trap 'rm -f \"$GIT_INDEX_FILE\"' EXIT; base=$1; shift;"
                ' git read-tree "$base" && git add -A -- . "$@" >&2'
                ' && git diff --binary --cached "$base" -- . "$@"'
            )
            made = await self._run(["/bin/sh", "-c", script, "sh", base, *pathspecs], cwd=path)
        _require(made)
        if made.truncated:
            raise HttpError(413, f"an archive of {made.stdout_total} bytes is more than one answer holds")
        return made.stdout, facts

    async def _find_base(self, folder: str, ref: str) -> str | None:
        if ref:
            told = await self._run(["git", "-C", folder, "rev-parse", "--git-dir"])
            if told.exit_code:
                return None
            told = await self._run(["git", "-C", folder, "rev-parse", "--verify", "-q", f"{ref}^{{commit}}"])
            if told.exit_code and (ref == "HEAD" or ref.endswith("^")):
                return _EMPTY_TREE
            if told.exit_code:
                raise HttpError(400, f"{ref!r} is no commit of this repository")
            return told.stdout.decode().strip()
        told = await self._run(["/bin/sh", "-c", _FIND_BASE], cwd=folder)
        if told.kind is not ExecKind.EXITED or told.exit_code:
            return None
        word = told.stdout.decode().strip()
        return _EMPTY_TREE if word == "EMPTY" else word

    async def _show(self, folder: str, name: str) -> str | None:
        told = await self._run(["git", "-C", folder, "show", name])
        return None if told.exit_code else _text_of(told)

    async def _git(self, folder: str, *words: str) -> ExecResult:
        return _require(await self._run(["git", "-C", folder, "--no-pager", *words]))

    async def _run(self, argv: Sequence[str], cwd: str | None = None) -> ExecResult:
        # A directory that another user made is as good as one's own: there is one user here.
        env = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
        return await self._sandbox.exec(argv, wall_limit_s=_LIMIT_S, env=env, cwd=cwd)


def _require(told: ExecResult) -> ExecResult:
    if told.kind is not ExecKind.EXITED or told.exit_code:
        raise HttpError(400, told.stderr.decode(errors="replace").strip() or f"git ended as {told.kind}")
    return told


def _text_of(told: ExecResult) -> str:
    if told.stdout_total > _MAX_DIFF_BYTES:
        raise HttpError(400, f"File too large for git diff: more than {_MAX_DIFF_BYTES} bytes")
    return "\n".join(told.stdout.decode(errors="replace").splitlines())
