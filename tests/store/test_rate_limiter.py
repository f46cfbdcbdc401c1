"""Sending no faster than allowed."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

from strop.store.s3_client import RateLimiter
from strop.store.s3_objects import S3Objects
from tests.fixtures.object_store import SETTINGS


def test_each_transfer_waits_for_the_time_of_those_before_it() -> None:
    now, waits = 100.0, []

    def sleep(duration_s: float) -> None:
        waits.append(duration_s)

    limiter = RateLimiter(1000.0, clock=lambda: now, sleep=sleep)
    # 500 bytes take half a second: the first goes at once, the others 0.5 s and 1.0 s later.
    for _ in range(3):
        limiter.wait_for(500)
    assert waits == [0.5, 1.0]
    now += 10.0
    limiter.wait_for(500)
    assert waits == [0.5, 1.0]


def test_without_a_limit_nothing_waits() -> None:
    def fail(duration_s: float) -> None:
        raise AssertionError

    RateLimiter(None, sleep=fail).wait_for(10**15)


def test_an_upload_in_parts_keeps_to_the_limit(s3_root: str, tmp_path: Path) -> None:
    data = bytes(12 << 20)  # Parts of 5, 5 and 2 MiB: the last one may go when 10 MiB had their time.
    (tmp_path / "f").write_bytes(data)
    objects = S3Objects(replace(SETTINGS, max_bytes_per_s=10 * 2**20 / 0.8))
    began_at = time.monotonic()
    objects.upload(tmp_path / "f", f"{s3_root}/f", hashlib.sha256(data).hexdigest())
    assert time.monotonic() - began_at >= 0.8
