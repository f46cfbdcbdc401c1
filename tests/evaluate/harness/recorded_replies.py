"""lm-eval with a model that says what is written: `python recorded_replies.py RUNS.json`, in its environment.

RUNS.json is a list of tables: `arguments` of lm-eval's command line, its current folder `cwd`, and
`replies` by example id. A reply ends before the first stop string, as generation would have ended there.
One process for all runs, because lm-eval takes long to import.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model


@register_model("recorded")
class RecordedModel(LM):  # type: ignore[misc]  # lm-eval ships no types
    """Says the reply of each example."""

    def __init__(self, path: str, **_: Any) -> None:
        super().__init__()
        self._replies: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8"))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._reply(request.doc["example_id"], request.args[1]["until"]) for request in requests]

    def _reply(self, example_id: str, stops: list[str]) -> str:
        reply = self._replies[example_id]
        for stop in stops:
            reply = reply.partition(stop)[0]
        return reply

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def main() -> None:
    for run in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        os.chdir(run["cwd"])
        sys.argv = ["lm_eval", *run["arguments"]]
        cli_evaluate()


if __name__ == "__main__":
    main()
