"""The suite of attacks: what it says is what was seen."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.io.endpoints import Endpoint
from strop.runtime.serve import served_beside
from strop.sandbox import daemon_handle
from strop.sandbox.attack import ATTACKS, attack_sandboxes
from strop.sandbox.attack.contract import Code, confirmed_level
from strop.sandbox.contract import IsolationLevel
from strop.sandbox.doctor import read_confirmed, read_facts
from tests.fixtures.commands import Run, run
from tests.fixtures.sandboxes import IS_ROOT, needs_bubblewrap, needs_podman, where_users_differ
from tools.attack_table import BACKENDS, MARK, main, render

__all__ = ["run"]


def test_one_attack_on_one_backend(run: Run) -> None:
    ended = run("sandbox", "attack", "process", "sparse-file", "--json")
    assert ended.code == 0
    (result,) = json.loads(ended.out)
    (verdict,) = result["verdicts"]
    assert result["name"] == "process"
    assert (verdict["attack"], verdict["row"], verdict["code"], verdict["expected"]) == (
        "sparse-file",
        5,
        "B",
        "B",
    )
    # One attack says nothing of a level.
    assert result["confirmed"] is None


def test_unknown_names_are_refused(run: Run) -> None:
    for words, said in (
        (("charm",), "fork-bomb"),
        (("service-odd-ids", "process"), "fork-bomb"),
        (("vm",), "bubblewrap, podman, docker, process"),
    ):
        ended = run("sandbox", "attack", *words)
        assert ended.code != 0
        assert words[0] in ended.err
        assert said in ended.err


def test_a_level_is_confirmed_by_the_codes_of_its_rows() -> None:
    codes = dict.fromkeys(range(1, 25), Code.BLOCKED)

    def confirm(reached: IsolationLevel, **changed: Code) -> IsolationLevel:
        rows = codes | {int(row[1:]): code for row, code in changed.items()}
        return confirmed_level(reached, rows.items())

    assert confirm(IsolationLevel.CONTAINER) is IsolationLevel.CONTAINER
    # No more than what the record says.
    assert confirm(IsolationLevel.NAMESPACE) is IsolationLevel.NAMESPACE
    # A namespace may only detect what takes processor time; a container contains it.
    assert confirm(IsolationLevel.CONTAINER, r10=Code.DETECTED) is IsolationLevel.NAMESPACE
    assert confirm(IsolationLevel.CONTAINER, r13=Code.DETECTED) is IsolationLevel.CONTAINER
    assert confirm(IsolationLevel.NAMESPACE, r16=Code.EXPOSED) is IsolationLevel.RLIMIT
    assert confirm(IsolationLevel.RLIMIT, r6=Code.DETECTED) is IsolationLevel.NONE
    # The worst of several variants counts, and a row without any is not kept.
    assert confirmed_level(IsolationLevel.RLIMIT, [*codes.items(), (7, Code.EXPOSED)]) is IsolationLevel.NONE
    assert confirmed_level(IsolationLevel.RLIMIT, [(6, Code.BLOCKED)]) is IsolationLevel.NONE


WEAK = """
import strop.sandbox.program as program
program.forbid_privileges = program.filter_calls = lambda *_: None
"""


@where_users_differ
def test_an_attack_sees_what_is_open(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes without their last two defences; what remains of them is not relied upon here."""
    code = daemon_handle._DAEMON_CODE.replace("main(", WEAK + "main(", 1)
    monkeypatch.setattr(daemon_handle, "_DAEMON_CODE", code)
    names = ["kernel-calls", "keyrings"]
    if backend == "process" and IS_ROOT:
        names += ["set-uid-program", "capable-program"]
    (result,) = asyncio.run(attack_sandboxes([backend], names))
    assert {verdict.attack: verdict.code for verdict in result.verdicts} == dict.fromkeys(names, Code.EXPOSED)


OPEN = """
import strop.sandbox.allowlist as allowlist
allowlist.AllowList.has = allowlist.AllowList.may_connect = lambda *_: True
"""


@needs_bubblewrap
def test_an_attack_sees_a_list_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    code = daemon_handle._DAEMON_CODE.replace("main(", OPEN + "main(", 1)
    monkeypatch.setattr(daemon_handle, "_DAEMON_CODE", code)
    names = ["list-other-port", "list-rebound-name"]
    (result,) = asyncio.run(attack_sandboxes(["bubblewrap"], names))
    assert {verdict.attack: verdict.code for verdict in result.verdicts} == dict.fromkeys(names, Code.EXPOSED)


def test_only_a_service_of_the_suites_own_is_attacked() -> None:
    with pytest.raises(ConfigError, match="'remote'"):
        asyncio.run(attack_sandboxes(["remote"]))


@pytest.mark.slow
def test_an_attack_sees_what_is_open_at_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.sandbox.attack.run._SERVED_BY", "process")
    worst = {
        "reach-loopback": Code.EXPOSED,
        "read-public-files": Code.EXPOSED,
        "service-without-key": Code.BLOCKED,
    }

    def serve(*words: str) -> AbstractAsyncContextManager[Endpoint]:
        return served_beside(*words, "--disable-auth")

    (result,) = asyncio.run(attack_sandboxes(["remote"], list(worst), serve=serve))
    assert result.isolation is not None, result.refusal
    codes = {verdict.attack: (verdict.code, verdict.expected) for verdict in result.verdicts}
    assert codes == {name: (Code.EXPOSED, expected) for name, expected in worst.items()}


OVER_A_SERVICE = (
    *("outlive-setsid", "output-flood", "forged-results", "steal-orders", "kill-parent", "reach-loopback"),
    *("open-list", "list-other-port", "download-links", "see-other"),
    *(attack.name for attack in ATTACKS if attack.is_on_service),
)
"""What goes another way, or is seen another way, where a node makes the sandbox."""


def with_rest_of_page(result: dict[str, Any], written: str) -> dict[str, Any]:
    """Return what was found of the last backend, with the page's codes of attacks that were not made."""
    made = {verdict["attack"] for verdict in result["verdicts"]}
    rows = [line.split(" | ") for line in written.splitlines() if " | `" in line]
    rest = [
        {"attack": row[1].strip("`"), "code": row[-1].rstrip(" |"), "why": ""}
        for row in rows
        if len(row) == 4 + len(BACKENDS) and row[1].strip("`") not in made
    ]
    return {**result, "verdicts": [*result["verdicts"], *rest]}


@pytest.mark.slow
@needs_bubblewrap
@needs_podman
@pytest.mark.usefixtures("own_cache")
@pytest.mark.docker
def test_the_page_says_what_attacks_do_here(run: Run) -> None:
    page = Path(__file__).parents[2] / "docs" / "sandbox-attacks.md"
    *local, remote = BACKENDS
    ended = run("sandbox", "attack", "--json", *local)
    assert ended.code == 0, ended.err
    results = json.loads(ended.out)
    ended = run("sandbox", "attack", "--json", remote, *OVER_A_SERVICE)
    assert ended.code == 0, ended.err
    (served,) = json.loads(ended.out)
    assert {one["attack"] for one in served["verdicts"]} == set(OVER_A_SERVICE)
    written = page.read_text("utf-8").partition(MARK)[2].strip().partition("\n\n")[2]
    assert render([*results, with_rest_of_page(served, written)]).strip() == written
    levels = {one["name"]: IsolationLevel(one["confirmed"]).word for one in results}
    reached = {"podman": "container", "docker": "container", "bubblewrap": "namespace", "process": "rlimit"}
    assert levels == reached
    assert {name: level.word for name, level in read_confirmed(read_facts()).items()} == levels
    by_name = {one["name"]: one["verdicts"] for one in results}
    for name in ("bubblewrap", "podman", "docker"):
        assert [one["attack"] for one in by_name[name] if one["code"] > Code.CONTAINED] == []
    assert {one["row"] for one in by_name["podman"]} == set(range(1, 25)) - {22}


def test_tables_of_a_part_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("", "[]", '[{"name": "process", "verdicts": []}]', "3"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main([]) == 2
        assert "strop sandbox attack --json" in capsys.readouterr().err
