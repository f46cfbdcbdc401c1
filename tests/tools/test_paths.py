"""A path of somebody's own machine is found; paths that mean something elsewhere are not."""

from __future__ import annotations

import pytest

from tools.paths import find_machine_paths

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
