"""A document's commands are run, compared and never silently left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.readme_commands import find_test_command, main, matches_shown, read_blocks


def document(tmp_path: Path, marker: str, block: str) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"Text.\n\n{marker}\n```console\n{block}\n```\n")
    return path


def test_output_as_shown_passes_and_other_output_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = document(tmp_path, "<!-- check: run -->", "$ echo one; echo two\none\ntwo\n$ true")
    assert main([str(good)]) == 0
    bad = document(tmp_path, "<!-- check: run -->", "$ echo one\ntwo")
    assert main([str(bad)]) == 1
    assert "line 5: echo one: the document shows other output; it printed:\none" in capsys.readouterr().out


def test_a_failing_command_is_reported_with_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = document(tmp_path, "<!-- check: run -->", "$ echo why; exit 3")
    assert main([str(bad)]) == 1
    assert "exit status 3; it printed:\nwhy" in capsys.readouterr().out


def test_a_block_without_a_comment_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(document(tmp_path, "More text.", "$ true"))]) == 1
    assert "a code block marked ''" in capsys.readouterr().out


def test_a_comment_belongs_to_the_next_block_only(tmp_path: Path) -> None:
    text = "<!-- check: run -->\n```console\n$ true\n```\n\n```console\n$ true\n```\n"
    assert [block.marker for block in read_blocks(text)] == ["run", ""]


def test_a_long_command_must_stand_in_the_file_that_runs_it(tmp_path: Path) -> None:
    marker = "<!-- check: run by tests/test_demo.py -->"
    path = document(tmp_path, marker, "$ make demo")
    assert main([str(path)]) == 1
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_demo.py").write_text('run(["make", "demo"])')
    assert main([str(path)]) == 0


def test_dots_stand_for_any_lines_and_numbers_may_vary() -> None:
    assert matches_shown("a\nb\nc\n", ["a", "...", "c"], numbers_vary=False)
    assert not matches_shown("a\nb\n", ["a", "...", "c"], numbers_vary=False)
    assert matches_shown("took 12.5 s\n", ["took 3 s"], numbers_vary=True)
    assert not matches_shown("took 12.5 s\n", ["took 3 s"], numbers_vary=False)


def test_a_backslash_continues_a_command() -> None:
    (block,) = read_blocks("```console\n$ echo a \\\n>   b\na b\n```\n")
    (command,) = block.commands
    assert command.text == "echo a b"
    assert command.shown == ("a b",)


def test_there_is_exactly_one_test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = document(tmp_path, "<!-- check: test command -->", "$ make test")
    assert main(["--test-command", str(path)]) == 0
    assert capsys.readouterr().out == "make test\n"
    with pytest.raises(ValueError, match="marks 0 test commands"):
        find_test_command([])


def test_a_python_block_is_run_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- check: run -->\n```python\nword = 'a b'\nassert word == \"a c\"\n```\n")
    assert main([str(path)]) == 1
    assert "AssertionError" in capsys.readouterr().out
    path.write_text(path.read_text().replace("a c", "a b"))
    assert main([str(path)]) == 0
