"""lm-eval's own command line, with what it lacks: replies that outlive a kill, and parts that share the work.

It runs in an interpreter that has lm-eval's engine, so it imports nothing of strop. The variable
STROP_LM_EVAL holds its options: `paths`, folders of packages that come last; `shots`, how many examples must
be shown, or null; `replies`, a folder; `part` and `num_parts`. lm-eval's own cache keeps the replies, a piece
at a time. Every part builds all requests and asks its share; part 0 waits for the others, and lets lm-eval
judge all replies.

The answers of a running server are checked: lm-eval would take a missing likelihood for certainty, and a
missing text for an empty one.

Not covered: replies that are drawn (do_sample=true), which lm-eval never keeps: part 0 asks them alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import pickle
import sqlite3
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "STROP_LM_EVAL"
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
PIECE = 512
"""Requests that are asked before their replies are kept for certain."""
_POLL_S = 0.5
_NO_SHOTS = 65
"""Exit code where shown examples are not as asked for."""
_NO_ANSWER = 66
"""Exit code where a server's answer is none."""


class _NoAnswer(BaseException):
    """A server's answer is none: not an `Exception`, so that lm-eval does not ask again."""


def main() -> None:
    """Run lm-eval with this process's arguments."""
    given = json.loads(os.environ[VARIABLE])
    # Behind the engine's own packages, whose versions are those that the engine was made for.
    sys.path += given["paths"]
    engine = sys.argv[sys.argv.index("--model") + 1]
    if engine == "vllm":
        _import_vllm()
    if engine == "local-completions":
        _require_answers()
    # Nothing of its modules is garbage, here and at the end, and walks over them are seconds.
    gc.disable()
    atexit.register(gc.freeze)
    from lm_eval import evaluator
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.task import Task
    from lm_eval.tasks import _index as index

    _keep_tasks(index, Path(index.__file__).parent)
    evaluate = evaluator.evaluate

    def evaluate_kept(lm: Any, task_dict: Any, **options: Any) -> Any:
        # Its engines import most.
        gc.freeze()
        gc.enable()
        _require_shots(task_dict, given["shots"])
        _set_greedy(task_dict)
        if engine == "local-completions":
            _add_bos_token(lm)
        return evaluate(lm=_CachedModel(lm, given), task_dict=task_dict, **options)

    def end(_: Any) -> None:
        # All is asked; part 0 judges.
        sys.exit(0)

    evaluator.evaluate = evaluate_kept
    if given["part"]:
        Task.apply_filters = end
    try:
        cli_evaluate()
    except _NoAnswer as error:
        _say(f"the server's answer is none: {error}")
        # At once: an orderly end would tell of each request that was under way.
        os._exit(_NO_ANSWER)


def _keep_tasks(index: Any, own: Path) -> None:
    """Keep what lm-eval reads of its 14,000 task files: at each start it read them all, in some ten seconds.

    `index` is its module that lists tasks, `own` the folder of its files. They are those of a pinned release:
    making the environment anew removes the kept index. A task that is asked is read from its own file.
    """
    kept_path = own.with_name("strop-tasks.pickle")
    list_files, load_yaml = index.TaskIndex._iter_yaml_files, index.load_yaml
    kept: dict[Path, Any] = {}

    def list_kept(root: Path) -> Any:
        if root != own:
            return list_files(root)
        try:
            kept.update(pickle.loads(kept_path.read_bytes()))
        except (OSError, EOFError, ImportError, AttributeError, ValueError, pickle.UnpicklingError):
            # None yet, cut, or of a Python whose paths have another form.
            for path in list_files(root):
                with contextlib.suppress(Exception):
                    kept[path] = load_yaml(path, resolve_func=False, recursive=True)
            _write(kept_path, pickle.dumps(kept))
        return iter(list(kept))

    def load_kept(path: Path, **options: Any) -> Any:
        return kept[path] if path in kept else load_yaml(path, **options)

    index.TaskIndex._iter_yaml_files, index.load_yaml = staticmethod(list_kept), load_kept


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, where it may be written."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def _import_vllm() -> None:
    """Import lm-eval's engine for vLLM, which asks for the version of a package called vllm.

    On some processors its package has another name. vLLM itself asks too, to find its device, and must not
    be told: it is imported before, and goes on with what it found.
    """
    import vllm
    from vllm.platforms import current_platform

    find, found = metadata.version, f"{vllm.__version__}{'+cpu' if current_platform.is_cpu() else ''}"

    def find_version(distribution_name: str) -> str:
        return found if distribution_name == "vllm" else find(distribution_name)

    metadata.version = find_version
    try:
        from lm_eval.models import vllm_causallms  # noqa: F401
    finally:
        metadata.version = find


def _require_answers() -> None:
    """Have lm-eval end where a server leaves out what it was asked for."""
    from lm_eval.api.model import CacheHook
    from lm_eval.models.openai_completions import LocalCompletionsAPI as Server

    keep = CacheHook.add_partial

    def keep_named(self: Any, attr: str, request: Any, answer: Any) -> None:
        # A window of a longer text has no name, and lm-eval fails on it; the text itself is kept.
        if request is not None:
            keep(self, attr, request, answer)

    CacheHook.add_partial = keep_named

    read_logprobs, read_texts = Server.parse_logprobs, Server.parse_generations

    def require_logprobs(outputs: Any, tokens: Any = None, ctxlens: Any = None, **others: Any) -> Any:
        choices = _list_choices(outputs)
        for choice, asked in zip(choices, tokens, strict=False):
            found = choice.get("logprobs") or {}
            values, tops = found.get("token_logprobs") or [], found.get("top_logprobs") or []
            # Of each token that was sent and the one that was asked for; the first has nothing before it.
            if {len(values), len(tops)} != {len(asked) + 1} or not all(tops[1:]) or None in values[1:]:
                raise _NoAnswer(
                    f"{len(values)} log-probabilities and {len(tops)} lists of likely tokens, to a text of"
                    f" {len(asked)} tokens with echo and logprobs=1. Tasks that choose among answers need one"
                    " of each token: start a server that gives them, or evaluate the model's own files"
                )
        if len(choices) != len(tokens):
            raise _NoAnswer(f"{len(choices)} choices to {len(tokens)} texts")
        return read_logprobs(outputs, tokens=tokens, ctxlens=ctxlens, **others)

    def require_texts(outputs: Any, **others: Any) -> Any:
        if not all(isinstance(choice.get("text"), str) for choice in _list_choices(outputs)):
            raise _NoAnswer("a choice without a text")
        return read_texts(outputs, **others)

    Server.parse_logprobs = staticmethod(require_logprobs)
    Server.parse_generations = staticmethod(require_texts)


def _list_choices(outputs: Any) -> list[dict[str, Any]]:
    answers = outputs if isinstance(outputs, list) else [outputs]
    return [choice for one in answers for choice in sorted(one["choices"], key=lambda each: each["index"])]


def _add_bos_token(lm: Any) -> None:
    """Begin prompts with the token that the tokenizer puts there, as lm-eval's other engines do."""
    lm = getattr(lm, "lm", lm)
    if "add_bos_token" in json.loads(sys.argv[sys.argv.index("--model_args") + 1]):
        return
    tokenizer, text = lm.tokenizer, "1"
    adds_some = tokenizer(text).input_ids != tokenizer(text, add_special_tokens=False).input_ids
    if adds_some and "--apply_chat_template" in sys.argv:
        turns = [{"role": "user", "content": text}]
        written = str(tokenizer.apply_chat_template(turns, tokenize=False))
        adds_some = not written.startswith(tokenizer.bos_token or written)
    lm.add_bos_token = adds_some


def _require_shots(task_dict: Any, wanted: int | None) -> None:
    """End this process if a task would not show as many examples as asked for: lm-eval would go on."""
    tasks = task_dict.get("tasks", {})
    other = {name: task.get_config("num_fewshot") for name, task in tasks.items()}
    if wanted is not None and (wrong := {name: found for name, found in other.items() if found != wanted}):
        shown = ", ".join(f"{name} shows {found}" for name, found in sorted(wrong.items())[:5])
        _say(f"harness.num_few_shot={wanted}, and {shown}: lm-eval's task allows no other")
        sys.exit(_NO_SHOTS)


def _set_greedy(task_dict: Any) -> None:
    """Say that replies are greedy where a task leaves it open: lm-eval's vLLM draws them then."""
    for task in task_dict.get("tasks", {}).values():
        settings = dict(task.get_config("generation_kwargs") or {})
        is_drawn = "do_sample" in settings or float(settings.get("temperature") or 0.0) > 0.0
        if task.get_config("output_type") == "generate_until" and not is_drawn:
            greedy = {"do_sample": False, "temperature": 0.0}
            task.set_config(key="generation_kwargs", value=greedy, update=True)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _CachedModel:
    """A model that caches its replies, and asks only this part's share of the requests."""

    def __init__(self, lm: Any, given: dict[str, Any]) -> None:
        self._lm = lm
        self._folder = Path(given["replies"])
        self._part, self._num_parts = given["part"], given["num_parts"]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lm, name)
        return (lambda requests: self._answer(name, requests)) if name in KINDS else found

    def _answer(self, kind: str, requests: list[Any]) -> list[Any]:
        ask = getattr(self._lm, kind)
        # Of an earlier start, perhaps with another number of parts.
        for path in self._folder.glob("part-*_rank0.db"):
            if path.name != f"part-{self._part}_rank0.db":
                with contextlib.suppress(sqlite3.OperationalError):
                    self._take_over(path)
        # By document: all continuations of a question are scored by one part, which sees its prompt once.
        mine = [one for one in requests if one.doc_id % self._num_parts == self._part]
        mine = [one for one in mine if not (kind == "generate_until" and one.args[1].get("do_sample"))]
        for start in range(0, len(mine), PIECE):
            ask(mine[start : start + PIECE])
            num_kept = min(start + PIECE, len(mine))
            _say(f"{kind}: {num_kept} of {len(mine)} requests of part {self._part} are kept")
        (self._folder / f"{kind}-{self._part}.done").touch()
        if self._part:
            return ["" if kind == "generate_until" else (0.0, False)] * len(requests)
        for other in range(1, self._num_parts):
            while not (self._folder / f"{kind}-{other}.done").exists():
                time.sleep(_POLL_S)
            self._take_over(self._folder / f"part-{other}_rank0.db")
        # All that was kept is read; drawn replies are asked here.
        return list(ask(requests))

    def _take_over(self, path: Path) -> None:
        """Copy what another part keeps into this part's cache: a file that lm-eval makes of `part-N`."""
        cache = self._lm.dbdict
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as other:
            for key, value in other.execute("SELECT key, value FROM unnamed"):
                if key not in cache:
                    cache[key] = cache.decode(value)
        cache.commit()


if __name__ == "__main__":
    main()
