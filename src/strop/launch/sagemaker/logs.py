"""The logs of a training job, from CloudWatch: one stream per host and start, merged by time."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from strop.errors import RemoteMissing
from strop.launch.sagemaker.client import AwsClients, all_pages
from strop.launch.sagemaker.places import LOG_GROUP
from strop.record.files import LogLine

OVERLAP_MS = 60_000
"""Lines arrive out of order: what is up to a minute older than the newest line is asked for again."""
_STREAM = re.compile(r"(?P<job>[^/]+)/(?P<host>.+?)(?:-(?P<start>\d+))?$")
_ROLE = re.compile(r"(?P<role>[a-z][a-z0-9_-]*)\| (?P<text>.*)", re.DOTALL)


class CloudWatchLogs:
    """`LogSource` of one training job."""

    def __init__(self, clients: AwsClients, job: str) -> None:
        self._clients, self._job = clients, job
        self._newest_ms = 0
        self._seen: dict[str, int] = {}
        """Ids of the lines that may come once more, with their times."""
        self._starts: dict[str, list[str]] = defaultdict(list)

    def read_new(self) -> list[LogLine]:
        """Return the lines since the last call, oldest first. Before the first one there is no group.

        Raises: StoreError if the service does not answer.
        """
        try:
            events = all_pages(
                self._clients,
                "logs",
                "filter_log_events",
                "events",
                resource=f"{LOG_GROUP}/{self._job}",
                logGroupName=LOG_GROUP,
                logStreamNamePrefix=f"{self._job}/",
                startTime=max(0, self._newest_ms - OVERLAP_MS),
            )
        except RemoteMissing:
            return []
        fresh = [
            event
            for event in events
            # Again: moto 5.2.5 does not look at the prefix.
            if event["logStreamName"].startswith(f"{self._job}/") and event["eventId"] not in self._seen
        ]
        fresh.sort(key=lambda event: event["timestamp"])
        for event in fresh:
            self._seen[event["eventId"]] = event["timestamp"]
            self._newest_ms = max(self._newest_ms, event["timestamp"])
        horizon = self._newest_ms - OVERLAP_MS
        self._seen = {name: at for name, at in self._seen.items() if at >= horizon}
        return [self._to_line(event) for event in fresh]

    def _to_line(self, event: dict[str, Any]) -> LogLine:
        match = _STREAM.fullmatch(event["logStreamName"])
        host, start = (match["host"], match["start"] or "") if match else (event["logStreamName"], "")
        starts = self._starts[host]
        if start not in starts:
            starts.append(start)
        said = _ROLE.fullmatch(event["message"].rstrip("\n"))
        return LogLine(
            text=said["text"] if said else event["message"].rstrip("\n"),
            attempt=f"{self._job}-{starts.index(start)}",
            node=host,
            role=said["role"] if said else "",
        )
