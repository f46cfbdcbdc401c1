"""Level d: what the site's own tools and the driver's counters say.

Most machines lack these tools, and most users may not read the kernel's messages: then the answer is unknown,
which is neither good nor bad. What they find is a warning, or an error where the site's policy says so.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace

from strop.hardware.findings import Finding, Severity
from strop.hardware.gpus import Probe, ask_nvidia_smi
from strop.hardware.preflight.request import PreflightRequest

DIAG_LIMIT_S = 180.0
_DMESG_LIMIT_S = 10.0
_ECC_FIELD = "ecc.errors.uncorrected.volatile.total"
HARDWARE_XIDS = frozenset({48, 64, 74, 79, 92, 95, 119, 120, 140})
"""Errors of the GPU, its memory or its links. Others are mostly of programs.

Source: NVIDIA, 'XID Errors', table of XID events: uncorrected memory errors (48, 64, 92, 95, 140), NVLink
(74), fallen off the bus (79), time-outs of its system processor (119, 120).
"""
_XID_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<address>[^)]+)\): (?P<number>\d+)")
_NEXT_STEP = "exclude this node and tell its administrators"


def check_site_tools(request: PreflightRequest) -> list[Finding]:
    """Ask dcgmi, the memory-error counters and the kernel's messages."""
    if not request.num_gpus:
        return []
    severity = Severity.ERROR if request.is_strict else Severity.WARNING
    uuids = () if request.allocation is None else request.allocation.uuids
    found = [*_ask_dcgmi(request.node), *_count_memory_errors(uuids), *_read_xids(request.node)]
    return [one if one.severity is Severity.UNKNOWN else replace(one, severity=severity) for one in found]


def _ask_dcgmi(node: str) -> Iterator[Finding]:
    words = ["dcgmi", "diag", "-r", "1"]
    done = _run(words, DIAG_LIMIT_S)
    if isinstance(done, str):
        yield _unknown("dcgmi", f"dcgmi diag -r 1 gives no answer: {done}", node)
        return
    failed = [" ".join(line.strip(" |").split()) for line in done.stdout.splitlines() if "Fail" in line]
    if done.returncode != 0 or failed:
        said = "; ".join(failed) or " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        yield Finding(
            code="dcgmi",
            given=f"dcgmi diag -r 1 fails: {said}",
            allowed="a node that passes its diagnosis",
            next_step=_NEXT_STEP,
            where=node,
        )


def _count_memory_errors(uuids: tuple[str, ...]) -> Iterator[Finding]:
    answer = ask_nvidia_smi(f"--query-gpu=uuid,{_ECC_FIELD}", "--format=csv,noheader,nounits")
    if answer.probe is not Probe.ANSWERED:
        why = answer.complaint or "there is no nvidia-smi"
        yield _unknown("ecc", f"uncorrected memory errors cannot be counted: {why}", "")
        return
    for line in answer.lines:
        uuid, _, count = (part.strip() for part in line.partition(","))
        # GPUs without such memory say '[N/A]'.
        if uuid in uuids and count.isdigit() and int(count) > 0:
            yield Finding(
                code="ecc",
                given=f"{count} uncorrected memory errors since the driver was loaded",
                allowed="none",
                next_step=_NEXT_STEP,
                where=uuid,
            )


def _read_xids(node: str) -> Iterator[Finding]:
    done = _run(["dmesg"], _DMESG_LIMIT_S)
    if isinstance(done, str) or done.returncode != 0:
        why = done if isinstance(done, str) else " ".join(done.stderr.split())
        yield _unknown("xid", f"the kernel's messages cannot be read: {why}", node)
        return
    events = [(match["address"], int(match["number"])) for match in _XID_LINE.finditer(done.stdout)]
    seen = sorted({event for event in events if event[1] in HARDWARE_XIDS})
    if seen:
        named = ", ".join(f"XID {number} of PCI {address}" for address, number in seen)
        yield Finding(
            code="xid",
            given=f"the kernel has reported {named} since its start",
            allowed="no errors of the hardware",
            next_step=_NEXT_STEP,
            where=node,
        )


def _run(words: list[str], limit_s: float) -> subprocess.CompletedProcess[str] | str:
    """Run a program of the site; return what it said, or why it said nothing."""
    if shutil.which(words[0]) is None:
        return f"there is no {words[0]} here"
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def _unknown(code: str, given: str, where: str) -> Finding:
    return Finding(
        code=code,
        given=given,
        allowed="a site whose users may ask",
        next_step="nothing; it is not known whether anything is wrong",
        where=where,
        severity=Severity.UNKNOWN,
    )
