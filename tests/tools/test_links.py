"""Dead links and paths of a developer's machine are found; others are not reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.links import check_document, main, name_anchors
from tools.paths import find_machine_paths


@pytest.fixture
def root(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "words.md").write_text(
        "# The words we use\n\n## `Task`, and more\n\n## Twice\n\n## Twice\n"
    )
    return tmp_path


def messages(root: Path, text: str) -> list[str]:
    page = root / "page.md"
    page.write_text(text)
    return list(check_document(page, root))


@pytest.mark.parametrize(
    "link",
    [
        "[a](docs/words.md)",
        "[a](docs/words.md#the-words-we-use)",
        "[a](docs/words.md#task-and-more)",
        "[a](docs/words.md#twice-1)",
        "[a](docs/)",
        "[a](https://example.org/nowhere)",
        "[a](mailto:a@example.org)",
        "`[a](nowhere.md)`",
        "```\n[a](nowhere.md)\n```",
        "[a]: docs/words.md",
    ],
)
def test_a_living_link_passes(root: Path, link: str) -> None:
    assert messages(root, link) == []


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[a](nowhere.md)", "page.md:1: nowhere.md does not exist"),
        ("![a](docs/picture.png)", "docs/picture.png does not exist"),
        ("[a](docs/words.md#twice-2)", "names no heading of words.md"),
        ("[a](#nothing)", "#nothing names no heading of page.md"),
        ("[a]: nowhere.md", "nowhere.md does not exist"),
        ("[a](../outside.md)", "leads out of the repository"),
    ],
)
def test_a_dead_link_is_named_with_its_line(root: Path, link: str, message: str) -> None:
    (found,) = messages(root, link)
    assert message in found


def test_tests_that_a_page_names_are_there(root: Path) -> None:
    (root / "tests").mkdir()
    (root / "tests" / "test_it.py").write_text("def test_it_works() -> None: ...\n")
    assert (
        messages(root, "`test_it_works`, `test_it_...`, `tests/test_it.py`, `tests/`, `test`, `test.py`")
        == []
    )
    for name in ("test_it", "test_it_works_...", "test_other", "tests/test_other.py"):
        (found,) = messages(root, f"| `{name}` |")
        assert f"page.md:1: {name} is no test" in found


def test_headings_in_code_are_no_anchors() -> None:
    assert name_anchors("# Real\n```sh\n# not a heading\n```\n") == {"real"}


def test_the_command_reads_only_what_git_would_keep(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".gitignore").write_text("/.venv/\n")
    (root / ".venv").mkdir()
    (root / ".venv" / "theirs.md").write_text("[a](nowhere.md)")
    assert main([str(root)]) == 0
    (root / "ours.md").write_text("[a](nowhere.md)")
    assert main([str(root)]) == 1
    assert "ours.md:1: nowhere.md does not exist" in capsys.readouterr().out


# Put together here, so that this file does not break the check it tests.
HOME = "/" + "home"


@pytest.mark.parametrize(
    "path", [f"{HOME}/kim/strop", "/" + "root/.cache", "/" + "Users/kim/x", "/" + "work/main"]
)
def test_a_home_folder_is_found_with_its_line(path: str) -> None:
    ((line, found),) = find_machine_paths(f"first\ncache = '{path}'\n")
    assert line == 2
    assert path.startswith(found)


@pytest.mark.parametrize(
    "text",
    [
        "src/" + "work/main.py",
        "~/.cache/strop",
        f"{HOME}/ada/m",
        "https://example.org/work/it",
        "/home",
        "a/root/b",
    ],
)
def test_a_path_of_everybody_is_not(text: str) -> None:
    assert list(find_machine_paths(text)) == []
