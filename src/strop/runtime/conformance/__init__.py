"""Does a server speak OpenHands' runtime protocol? The numbered cases of its clients, run against any server.

Cases 1 to 18 are asked by the real `APIRemoteWorkspace` in an environment of its own (`real_client.py`), 19
to 25 by requests that the other two clients send (`run.py`).
"""

from strop.runtime.conformance.run import (
    CASES,
    CaseResult,
    ConformanceOptions,
    read_options,
    run_conformance,
)

__all__ = ["CASES", "CaseResult", "ConformanceOptions", "read_options", "run_conformance"]
