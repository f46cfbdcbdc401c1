"""Audits that were made, by the version of what they looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.audit.report import SCHEMA, Acceptance, AuditReport, Evidence, ProbeResult, ProbeStatus
from strop.errors import CorruptRecord, explain_refusal
from strop.io import user_cache_dir, write_bytes_atomically


def stored_audit_path(task: str, task_version: str) -> Path:
    """Return where the newest audit of a task is kept for the runs of this user.

    Audits of other probes than those of today are not there: a task is then as good as not audited.
    """
    return user_cache_dir() / "audits" / f"{task}-{task_version}-{SCHEMA}.json"


def write_audit(report: AuditReport, path: Path) -> None:
    """Write a report as JSON, complete or not at all.

    Raises: StoreError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False, sort_keys=True)
    write_bytes_atomically(path, (text + "\n").encode())


def find_audit(task: str, task_version: str) -> AuditReport | None:
    """Return the stored audit of this very version of a task; None if nobody audited it here.

    Raises: CorruptRecord if the file is not what `write_audit` wrote.
    """
    path = stored_audit_path(task, task_version)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return _parse(path, data)


def _parse(path: Path, data: bytes) -> AuditReport:
    try:
        values = json.loads(data)
        report = _to_report(values)
        if report.to_json() != values:
            raise ValueError("its fields do not give its digest")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(
            explain_refusal(
                f"{path} is not a whole audit ({error})",
                allowed="a report as `strop audit` wrote it",
                next_step="run `strop audit` again; it replaces the file",
            )
        ) from error
    return report


def _to_report(values: Mapping[str, Any]) -> AuditReport:
    fields = {name: values[name] for name in AuditReport.__slots__}
    accepted = tuple(Acceptance(**entry) for entry in values["accepted"])
    probes = tuple(_to_probe(probe) for probe in values["probes"])
    return AuditReport(**{**fields, "probes": probes, "accepted": accepted})


def _to_probe(values: Mapping[str, Any]) -> ProbeResult:
    evidence = tuple(Evidence(**entry) for entry in values["evidence"])
    return ProbeResult(**{**values, "status": ProbeStatus(values["status"]), "evidence": evidence})
