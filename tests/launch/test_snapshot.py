"""The part of a working tree that is sent with a job, and how the job verifies it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.launch.contract import CodeSnapshot
from strop.launch.snapshot import pack_code, read_diff, take_snapshot, unpack_code


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    words = ("git", *identity, *words)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


def fill(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit: a.py, pkg/b.py and a .gitignore of data/."""
    folder = tmp_path / "my tree"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    fill(folder, a_py="a = 1\n", pkg__b_py="b = 1\n")
    (folder / ".gitignore").write_text("data/\n*.ckpt\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    return folder


def travel(snapshot: CodeSnapshot, folder: Path, *, name: str = "code") -> Path:
    """Pack and unpack; return where the code is then."""
    archive = folder / f"{name}.tar.zst"
    pack_code(snapshot, archive)
    unpack_code(archive, folder / name, snapshot.sha256)
    return folder / name


def test_lau_5_the_tree_on_the_disk_travels_and_not_the_commit(tree: Path, tmp_path: Path) -> None:
    (tree / "a.py").write_text("a = 2\n")
    fill(tree, new_py="n = 1\n", data__big_py="d = 1\n", pkg__weights="w")
    (tree / "model.ckpt").write_text("x")
    git(tree, "rm", "-q", "--cached", "pkg/b.py")
    (tree / "pkg" / "b.py").unlink()
    found = take_snapshot(tree)
    code = travel(found, tmp_path)
    assert found.files == (".gitignore", "a.py", "new.py", "pkg/weights")
    assert found.commit == git(tree, "rev-parse", "HEAD").strip()
    # 13 bytes of .gitignore, 6, 6 and 1.
    assert found.size_bytes == 13 + 6 + 6 + 1
    assert (code / "a.py").read_text() == "a = 2\n"
    assert (code / "new.py").read_text() == "n = 1\n"
    assert "a.py" in found.diffstat
    assert "untracked: new.py, pkg/weights" in found.diffstat
    assert "+a = 2" in read_diff(found)


NAMES = ["2 words.py", "line\nbreak.py", 'it\'s "quoted".py', "ümläut 名.py", "$(id).py", "-rf", "tab\t"]


def test_odd_names_travel_unchanged(tree: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (tree / name).write_text(name)
    raw = os.fsencode(tree) + b"/not-utf8-\xff.py"
    with open(raw, "wb") as file:
        file.write(b"raw")
    code = travel(take_snapshot(tree), tmp_path)
    assert {name: (code / name).read_text() for name in NAMES} == {name: name for name in NAMES}
    with open(os.fsencode(code) + b"/not-utf8-\xff.py", "rb") as file:
        assert file.read() == b"raw"


def test_the_bit_of_programs_travels(tree: Path, tmp_path: Path) -> None:
    (tree / "run.sh").write_text("#!/bin/sh\n")
    before = take_snapshot(tree).sha256
    (tree / "run.sh").chmod(0o755)
    found = take_snapshot(tree)
    assert found.sha256 != before
    code = travel(found, tmp_path)
    assert os.access(code / "run.sh", os.X_OK)
    assert not os.access(code / "a.py", os.X_OK)


def test_links_inside_travel_as_links(tree: Path, tmp_path: Path) -> None:
    (tree / "link.py").symlink_to("pkg/b.py")
    (tree / "folder").symlink_to("pkg")
    (tree / "nowhere").symlink_to("absent.py")
    code = travel(take_snapshot(tree), tmp_path)
    targets = [os.readlink(code / name) for name in ("link.py", "folder", "nowhere")]
    assert targets == ["pkg/b.py", "pkg", "absent.py"]
    assert (code / "folder" / "b.py").read_text() == "b = 1\n"


@pytest.mark.parametrize("target", ["../outside.py", "/etc/hostname", "pkg/../../outside.py"])
def test_a_link_that_leads_out_is_refused(tree: Path, target: str) -> None:
    (tree / "link.py").symlink_to(target)
    with pytest.raises(ConfigError, match=f"is a link to {target}"):
        take_snapshot(tree)


def test_a_subdirectory_is_a_project_of_its_own(tree: Path, tmp_path: Path) -> None:
    (tree / "pkg" / "b.py").write_text("b = 2\n")
    (tree / "a.py").write_text("a = 2\n")
    found = take_snapshot(tree / "pkg")
    assert found.files == ("b.py",)
    assert "a.py" not in read_diff(found)
    assert (travel(found, tmp_path) / "b.py").read_text() == "b = 2\n"


def test_without_git_all_but_hidden_files_and_caches_travel(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    fill(folder, a_py="1", pkg__b_py="2")
    fill(folder / "pkg" / "__pycache__", x="1")
    fill(folder / "node_modules", x="1")
    fill(folder / ".hidden", x="1")
    (folder / ".secret").write_text("1")
    found = take_snapshot(folder)
    assert found.files == ("a.py", "pkg/b.py")
    assert (found.commit, read_diff(found)) == (None, "")
    # So it is below a folder that the repository around it ignores.
    fill(tree, data__mine__run_py="1")
    assert take_snapshot(tree / "data" / "mine").files == ("run.py",)
    # And a repository without a commit travels.
    git(folder, "init", "-q")
    found = take_snapshot(folder)
    assert {"a.py", "pkg/b.py"} < set(found.files)
    assert found.commit is None


def test_a_repository_that_git_refuses_is_no_plain_folder(tree: Path) -> None:
    # Otherwise everything that git ignores would travel too.
    (tree / ".git" / "HEAD").write_text("damaged")
    with pytest.raises(StoreError, match="git status"):
        take_snapshot(tree)


def test_a_clone_inside_of_the_tree_travels(tree: Path, tmp_path: Path) -> None:
    inner = tree / "vendor" / "lib"
    inner.mkdir(parents=True)
    git(inner, "init", "-q")
    fill(inner, lib_py="1", data__x_py="1")
    (inner / ".gitignore").write_text("data/\n")
    assert take_snapshot(tree).files[3:] == ("vendor/lib/.gitignore", "vendor/lib/lib.py")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    # As a submodule: git lists the folder, and none of its files.
    git(tree, "add", "vendor/lib")
    (inner / "lib.py").write_text("edited")
    code = travel(take_snapshot(tree), tmp_path)
    assert (code / "vendor" / "lib" / "lib.py").read_text() == "edited"


def test_an_unfinished_merge_is_refused(tree: Path) -> None:
    git(tree, "checkout", "-qb", "other")
    (tree / "a.py").write_text("a = 3\n")
    git(tree, "commit", "-qam", "two")
    git(tree, "checkout", "-q", "main")
    (tree / "a.py").write_text("a = 4\n")
    git(tree, "commit", "-qam", "three")
    with pytest.raises(subprocess.CalledProcessError):
        git(tree, "merge", "other")
    with pytest.raises(ConfigError, match="MERGE_HEAD"):
        take_snapshot(tree)
    git(tree, "merge", "--abort")
    assert take_snapshot(tree).diffstat == "as committed"


def test_lau_5_too_much_code_is_refused_with_the_five_largest(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.launch.snapshot.MAX_CODE_BYTES", 1_000_000)
    for number in range(1, 8):
        (tree / f"big{number}.bin").write_bytes(b"x" * number * 100_000)
    # 100 to 700 kB are 2.8 MB.
    with pytest.raises(ConfigError, match=r"2\.8 MB; .* big7\.bin \(0\.7 MB\), big6.* big3\.bin") as caught:
        take_snapshot(tree)
    assert "big2.bin" not in str(caught.value)


def test_runs_in_the_project_and_files_of_variables_are_no_code(tree: Path) -> None:
    fill(tree, runs__one__job__secrets="s", more__x_py="1")
    (tree / ".env").write_text("A=old\n")
    git(tree, "add", "-f", ".env")
    git(tree, "commit", "-qm", "two")
    for name in (".env", "pkg/.env", "my.env"):
        (tree / name).write_text("HF_TOKEN=canary")
    found = take_snapshot(tree, excluded=[tree / "runs", tree / "my.env", tree / "absent"])
    assert found.files == (".gitignore", "a.py", "more/x.py", "pkg/b.py")
    assert "runs" not in found.diffstat
    assert "canary" not in read_diff(found)


def test_equal_trees_give_equal_bytes(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    subprocess.run(["cp", "-r", str(tree), str(other)], check=True)
    os.utime(other / "a.py", (1, 1))
    (other / "a.py").chmod(0o600)
    # One file under two names there, two files here.
    (tree / "same.py").write_text("s")
    (tree / "twin.py").write_text("s")
    (other / "same.py").write_text("s")
    os.link(other / "same.py", other / "twin.py")
    packed = []
    for folder, name in ((tree, "one"), (other, "two")):
        pack_code(take_snapshot(folder), tmp_path / name)
        packed.append((tmp_path / name).read_bytes())
    assert packed[0] == packed[1]


@pytest.mark.parametrize("change", ["edit", "delete", "mode"])
def test_a_tree_that_changes_while_it_is_packed_is_refused(tree: Path, tmp_path: Path, change: str) -> None:
    found = take_snapshot(tree)
    path = tree / "a.py"
    if change == "edit":
        path.write_text("a = 9\n")
    elif change == "delete":
        path.unlink()
    else:
        path.chmod(0o755)
    with pytest.raises(StoreError, match="could not be written"):
        pack_code(found, tmp_path / "absent" / "code.tar.zst")
    with pytest.raises(CheckRefused, match="changed while it was packed"):
        pack_code(found, tmp_path / "code.tar.zst")
    assert not (tmp_path / "code.tar.zst").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage", "absent", "another"])
def test_lau_5_a_damaged_or_altered_archive_is_refused(tree: Path, tmp_path: Path, damage: str) -> None:
    found = take_snapshot(tree)
    archive = tmp_path / "code.tar.zst"
    pack_code(found, archive)
    data = archive.read_bytes()
    middle = len(data) // 2
    if damage == "another":
        (tree / "a.py").write_text("a = 'evil'\n")
        pack_code(take_snapshot(tree), archive)
    elif damage == "absent":
        archive.unlink()
    else:
        flipped = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        archive.write_bytes(
            {"cut": data[:middle], "flip": flipped, "empty": b"", "garbage": b"no zstd"}[damage]
        )
    with pytest.raises(CheckRefused, match=str(archive)):
        unpack_code(archive, tmp_path / "code", found.sha256)
