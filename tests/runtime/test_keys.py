from __future__ import annotations

import stat
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.runtime.keys import KeyRing, open_keys, read_keys, require_keys_or_loopback

KEYS = [f"{letter * 20}" for letter in "abcd"]


def write_keys(path: Path, *lines: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def test_a_missing_file_is_made_for_its_owner_alone_and_read_again_as_it_is(tmp_path: Path) -> None:
    ring = open_keys(tmp_path / "keys", "ada")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert ring.owner_of(ring.newest) == "ada"
    assert open_keys(tmp_path / "keys", "bob").owner_of(ring.newest) == "ada"


def test_several_owners_and_two_keys_of_one_while_it_changes(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "# two", f"ada {KEYS[0]}", f"ada {KEYS[1]}", f"bob {KEYS[2]}")
    ring = KeyRing(path)
    assert [ring.owner_of(key) for key in (*KEYS, "", "a", "\u00e9")] == [
        *("ada", "ada", "bob"),
        *(None, None, None, None),
    ]


def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_old_keys(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", f"ada {KEYS[0]}")
    ring = KeyRing(path)
    assert ring.refresh() == ""
    path.unlink()
    assert "cannot be read" in ring.refresh()
    assert ring.owner_of(KEYS[0]) == "ada"
    write_keys(path, f"ada {KEYS[1]}")
    assert ring.refresh() == ""
    assert [ring.owner_of(KEYS[0]), ring.owner_of(KEYS[1])] == [None, "ada"]


@pytest.mark.parametrize(
    ("lines", "mode", "what"),
    [
        ([f"ada {KEYS[0]}"], 0o640, "mode 0640"),
        (["ada short"], 0o600, "line 1"),
        ([KEYS[0]], 0o600, "line 1"),
        ([f"ada {KEYS[0]} more"], 0o600, "line 1"),
        (["# nothing"], 0o600, "has no key"),
        ([f"ada {KEYS[0]}", f"bob {KEYS[0]}"], 0o600, "one key twice"),
        ([f"ada {key}" for key in KEYS[:3]], 0o600, "3 keys of ada"),
    ],
)
def test_a_file_that_cannot_be_is_refused_without_showing_a_key(
    tmp_path: Path, lines: list[str], mode: int, what: str
) -> None:
    path = write_keys(tmp_path / "keys", *lines, mode=mode)
    with pytest.raises(ConfigError, match=what) as caught:
        read_keys(path)
    assert not any(key in str(caught.value) for key in KEYS)


def test_a_file_in_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be"):
        open_keys(tmp_path / "file" / "keys", "ada")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "head.cluster"])
def test_no_keys_on_an_address_that_others_reach_only_by_force(host: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        require_keys_or_loopback(host, is_forced=False)
    require_keys_or_loopback(host, is_forced=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_no_keys_on_loopback_are_allowed(host: str) -> None:
    require_keys_or_loopback(host, is_forced=False)
