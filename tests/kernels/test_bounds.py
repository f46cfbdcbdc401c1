"""No kernel reads or writes beyond its tensors: the same tests, under the address sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.kernels import needs_kernels

REPOSITORY = Path(__file__).parents[2]


def find_library(name: str) -> str:
    """Return the path of a library of the compiler's, or the name alone if it has none of that name."""
    asked = ["cc", f"-print-file-name={name}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@needs_kernels
@pytest.mark.slow
def test_the_kernels_stay_inside_their_tensors(tmp_path: Path) -> None:
    sanitizer = find_library("libasan.so")
    if not Path(sanitizer).exists() and "STROP_CI" not in os.environ:
        pytest.skip("the C compiler has no address sanitizer")
    environment = os.environ | {
        "CC": "cc -fsanitize=address",
        # The C++ library too, or the sanitizer dies at PyTorch's first exception.
        "LD_PRELOAD": f"{sanitizer} {find_library('libstdc++.so.6')}",
        "ASAN_OPTIONS": f"detect_leaks=0:verify_asan_link_order=0:log_path={tmp_path / 'report'}",
        "STROP_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "2",  # Shares of several threads, too.
        "STROP_CI": "1",  # Without kernels, the tests below would be skipped and prove nothing.
    }
    files = [
        "tests/kernels/test_calls.py",
        "tests/policy/test_kv_cache.py",
        "tests/policy/test_fused_trunk.py",
    ]
    # What is computed without kernels proves nothing here.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not False", *files]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    reports = "".join(path.read_text() for path in tmp_path.glob("report*"))
    assert done.returncode == 0, reports or done.stdout[-3000:]
    assert list((tmp_path / "cache" / "kernels").glob("*.so")), "the sanitized library was the one used"
