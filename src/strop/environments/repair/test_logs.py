"""Which tests passed, as a log says: pytest's with -rA, and unittest's and Django's with -v 2.

A log is written by the code under test, too: of several things that are said of a test the worst counts.
"""

from __future__ import annotations

import re

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|SKIPPED|XPASS) +(\S.*)$")
_UNITTEST = re.compile(
    r"^(test\w* \([\w.]+\))(?:\n.*)? \.\.\. (ok|FAIL|ERROR|skipped|expected failure)", re.MULTILINE
)
_GOOD = frozenset({"PASSED", "XFAIL", "ok", "expected failure"})


def read_passed(log: str) -> dict[str, bool]:
    """Return whether each test passed, under each name that rows of data give it.

    pytest's `a/b.py::C::test_d[x y]` is also known up to its first space, and as `C.test_d[x y]`.
    """
    log = _STYLE.sub("", log)
    said = [(found[2], found[1]) for line in log.splitlines() if (found := _PYTEST.match(line.rstrip()))]
    said += [(found[1], found[2]) for found in _UNITTEST.finditer(log)]
    passed: dict[str, bool] = {}
    for name, status in said:
        # Behind a failure stands its message.
        whole = name if status in _GOOD else name.partition(" - ")[0]
        within = ".".join(whole.split("::")[1:])
        for one in {whole, whole.split()[0] if "::" in whole else whole, within or whole}:
            passed[one] = passed.get(one, True) and status in _GOOD
    return passed
