"""Level d: the site's tools, as programs that say what they are made to say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.hardware.allocation import Allocation, GpuRequest, allocate_gpus
from strop.hardware.inventory import read_inventory
from strop.hardware.preflight import Level, PreflightRequest, Severity, require_ready, run_preflight
from tests.fixtures.devices import whole
from tests.fixtures.nvidia_smi import install_fake_nvidia_smi

FAILED_DIAG = """
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
|-----  Deployment  --------+------------------------------------------------|
| Denylist                  | Pass                                           |
| Graphics Processes        | Fail                                           |
+---------------------------+------------------------------------------------+
"""
XIDS = """
[   12.3] NVRM: loading NVIDIA UNIX x86_64 Kernel Module
[  812.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=77, GPU has fallen off the bus.
[  813.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=78, GPU has fallen off the bus.
[  900.0] NVRM: Xid (PCI:0000:5e:00): 31, pid=79, Ch 00000010, MMU Fault
"""


class Site:
    """A node whose tools say what they are made to say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_path = folder / "run"
        install_fake_nvidia_smi(folder / "bin", [whole(0, 70), whole(1, 70)], with_memory_errors=["GPU-1"])
        self.put("dcgmi", "exit 0")
        self.put("dmesg", "exit 0")

    def put(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def say(self, name: str, text: str) -> None:
        (self.folder / f"{name}.txt").write_text(text)
        self.put(name, f"cat {self.folder / name}.txt")

    def allocate(self, inherited: str) -> Allocation:
        return allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited=inherited), read_inventory())

    def request(self, inherited: str, *, is_strict: bool = False) -> PreflightRequest:
        return PreflightRequest(
            run_path=self.run_path,
            allocation=self.allocate(inherited),
            node="n7",
            levels=(Level.SITE,),
            is_strict=is_strict,
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return Site(tmp_path)


def test_a_node_without_complaints(site: Site) -> None:
    assert run_preflight(site.request("0")) == []


def test_what_the_tools_complain_of_is_a_warning_or_a_refusal_by_policy(site: Site) -> None:
    site.say("dcgmi", FAILED_DIAG)
    site.say("dmesg", XIDS)
    findings = require_ready(site.request("1"))
    assert [(finding.code, finding.where, finding.severity) for finding in findings] == [
        ("dcgmi", "n7", Severity.WARNING),
        ("ecc", "GPU-1", Severity.WARNING),
        ("xid", "n7", Severity.WARNING),
    ]
    assert findings[0].given == "dcgmi diag -r 1 fails: Graphics Processes | Fail"
    assert findings[1].given == "1 uncorrected memory errors since the driver was loaded"
    # 31 is a fault of a program.
    assert findings[2].given == "the kernel has reported XID 79 of PCI 0000:3b:00 since its start"
    # The errors of another GPU are not this run's business.
    assert [finding.code for finding in run_preflight(site.request("0"))] == ["dcgmi", "xid"]
    with pytest.raises(CheckRefused, match=r"(?s)dcgmi: n7: .*\necc: GPU-1: .*\nxid: n7: ") as caught:
        require_ready(site.request("1", is_strict=True))
    assert caught.value.exit_code == 76


def test_tools_that_are_missing_or_forbidden_say_neither_good_nor_bad(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = site.request("1", is_strict=True)
    site.put("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    site.put("dcgmi", "echo 'Error: unable to connect' >&2; exit 1")
    (site.folder / "bin" / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'Field is not a valid field' >&2\nexit 2\n"
    )
    findings = run_preflight(wanted)
    assert [(finding.code, finding.severity) for finding in findings] == [
        ("dcgmi", Severity.ERROR),
        ("ecc", Severity.UNKNOWN),
        ("xid", Severity.UNKNOWN),
    ]
    assert "Error: unable to connect" in findings[0].given
    assert "Field is not a valid field" in findings[1].given
    assert "Operation not permitted" in findings[2].given
    monkeypatch.setenv("PATH", str(site.folder / "nowhere"))
    findings = require_ready(wanted)
    assert [(finding.code, finding.severity) for finding in findings] == [
        ("dcgmi", Severity.UNKNOWN),
        ("ecc", Severity.UNKNOWN),
        ("xid", Severity.UNKNOWN),
    ]
    assert findings[0].given == "dcgmi diag -r 1 gives no answer: there is no dcgmi here"
