"""Conformance test of OpenHands' runtime protocol: the numbered cases of its clients, run against any server.

Cases 1 to 18 are run by the real `APIRemoteWorkspace` in a separate environment (`real_client.py`), 19 to 24
with requests of the two other clients (`run.py`).
"""

from strop.runtime.conformance.run import (
    CASES,
    CaseResult,
    ConformanceOptions,
    read_options,
    run_conformance,
)

__all__ = ["CASES", "CaseResult", "ConformanceOptions", "read_options", "run_conformance"]
