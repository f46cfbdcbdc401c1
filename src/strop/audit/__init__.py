"""Attacks on a task before it may train a model, to find rewards that need no work.

A red report lets no model train unless the run file accepts the probe by name and reason.
"""

from strop.audit.report import (
    AuditReport,
    ProbeResult,
    ProbeStatus,
    Verdict,
    accept_probes,
    describe_acceptance,
    find_audit,
    stored_audit_path,
    write_audit,
)
from strop.audit.run import (
    PROBE_IDS,
    AuditSettings,
    examples_to_attack,
    run_audit,
    self_test,
)

__all__ = [
    "PROBE_IDS",
    "AuditReport",
    "AuditSettings",
    "ProbeResult",
    "ProbeStatus",
    "Verdict",
    "accept_probes",
    "describe_acceptance",
    "examples_to_attack",
    "find_audit",
    "run_audit",
    "self_test",
    "stored_audit_path",
    "write_audit",
]
