"""Attacks on a task before it may train a model, to find rewards that need no work.

`run_audit` judges replies that deserve nothing (empty, garbage, echoes, constants, near misses) and correct
replies, and compares their rewards with the task's declarations. The report is green, amber or red; a red
task trains no model unless the run file accepts the probe by name and reason.
Not here: whether one verifier is right on one example (`tasks.selftest`, part of every run's gate).
"""

from strop.audit.report import (
    Acceptance,
    AuditReport,
    Evidence,
    ProbeResult,
    ProbeStatus,
    Verdict,
    accept_probes,
    describe_acceptance,
    find_audit,
    stored_audit_path,
    write_audit,
)
from strop.audit.run import PROBE_IDS, QUICK_PROBES, AuditSettings, examples_to_attack, run_audit

__all__ = [
    "PROBE_IDS",
    "QUICK_PROBES",
    "Acceptance",
    "AuditReport",
    "AuditSettings",
    "Evidence",
    "ProbeResult",
    "ProbeStatus",
    "Verdict",
    "accept_probes",
    "describe_acceptance",
    "examples_to_attack",
    "find_audit",
    "run_audit",
    "stored_audit_path",
    "write_audit",
]
