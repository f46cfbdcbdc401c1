"""lm-eval with a model that says what is written: `python recorded_replies.py RUNS.json SHOWN.json`.

In lm-eval's environment. RUNS.json is a list of tables: `arguments` of lm-eval's command line and its
current folder `cwd`. A reply ends before the first stop string, as generation would have ended there. The
examples that task files show, and not rows, are written to SHOWN.json by the task's name.

One process for all runs, because lm-eval takes long to import. Left out, because it takes seconds in each
run: the index of lm-eval's own 14,000 task files, which ours name by their paths, and the list of the
installed packages in the results.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import langdetect
from lm_eval import evaluator
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager


@register_model("recorded")
class RecordedModel(LM):  # type: ignore[misc]  # lm-eval ships no types
    """Says the reply of each example; nothing where none is written."""

    def __init__(self, path: str, **_: Any) -> None:
        super().__init__()
        self._replies: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8"))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._reply(request.doc["example_id"], request.args[1]["until"]) for request in requests]

    def _reply(self, example_id: str, stops: list[str]) -> str:
        reply = self._replies.get(example_id, "")
        for stop in stops:
            reply = reply.partition(stop)[0]
        return reply

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def main() -> None:
    runs_path, shown_path = map(Path, sys.argv[1:])
    shown: dict[str, list[dict[str, Any]]] = {}
    load = TaskManager.load

    def load_and_note(manager: Any, names: Any) -> Any:
        loaded = load(manager, names)
        for name, task in loaded["tasks"].items():
            if task.fewshot_cfg.samples is not None:
                shown[name] = list(task.fewshot_docs())
        return loaded

    TaskManager.load = load_and_note
    TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    evaluator.add_env_info = lambda results: None
    # Without a seed its verdict on a short text changes from run to run.
    langdetect.DetectorFactory.seed = 0
    for run in json.loads(runs_path.read_text(encoding="utf-8")):
        os.chdir(run["cwd"])
        sys.argv = ["lm_eval", *run["arguments"]]
        cli_evaluate()
    shown_path.write_text(json.dumps(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
