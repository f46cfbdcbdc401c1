"""lm-eval's command line, extended by replies that survive a kill, and by parts that share the work.

It runs in an interpreter that has lm-eval's engine, so it imports nothing of strop. The variable
STROP_LM_EVAL holds its options: `paths`, folders of packages that come last; `shots`, the required number of
few-shot examples, or null; `replies`, a folder; `part` and `num_parts`. lm-eval's own cache stores the
replies, a piece at a time. Every part builds all requests and sends its share; part 0 waits for the others,
and lets lm-eval judge all replies.

The answers of a running server are checked: lm-eval would treat a missing likelihood as certainty, and a
missing text as an empty one.

Not covered: sampled replies (do_sample=true), which lm-eval never caches: part 0 generates all of them.
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
"""Requests per piece; after each piece its replies are on the disk."""
_POLL_S = 0.5
_NO_SHOTS = 65
"""Exit code if a task would show another number of few-shot examples."""
_NO_ANSWER = 66
"""Exit code if a server's answer is incomplete."""


class _NoAnswer(BaseException):
    """A server's answer is incomplete. Not an `Exception`, so that lm-eval does not retry."""


def main() -> None:
    """Run lm-eval with this process's arguments."""
    options = json.loads(os.environ[VARIABLE])
    # Behind the engine's own packages, which keep the versions that the engine needs.
    sys.path += options["paths"]
    engine = sys.argv[sys.argv.index("--model") + 1]
    if engine == "vllm":
        _import_vllm()
    if engine == "local-completions":
        _require_answers()
    # Its modules hold no garbage, now and at exit, and collections over them take seconds.
    gc.disable()
    atexit.register(gc.freeze)
    from lm_eval import evaluator
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.task import Task
    from lm_eval.tasks import _index as index

    _keep_tasks(index, Path(index.__file__).parent)
    evaluate = evaluator.evaluate

    def evaluate_cached(lm: Any, task_dict: Any, **others: Any) -> Any:
        # Most imports, those of the engine, are done.
        gc.freeze()
        gc.enable()
        _require_shots(task_dict, options["shots"])
        _set_greedy(task_dict)
        if engine == "local-completions":
            _add_bos_token(lm)
        return evaluate(lm=_CachedModel(lm, options), task_dict=task_dict, **others)

    def end(_: Any) -> None:
        # This part's replies are complete; part 0 judges.
        sys.exit(0)

    evaluator.evaluate = evaluate_cached
    if options["part"]:
        Task.apply_filters = end
    try:
        cli_evaluate()
    except _NoAnswer as error:
        _say(f"the server's answer is none: {error}")
        # At once: an orderly exit would log every pending request.
        os._exit(_NO_ANSWER)


def _keep_tasks(index: Any, own: Path) -> None:
    """Cache the index of lm-eval's 14,000 task files, which it would read at each start in some ten seconds.

    `index` is its module that lists tasks, `own` the folder of its files, which are of a pinned release: a
    fresh environment has no cached index. The evaluated tasks are read from their own files.
    """
    cache_path = own.with_name("strop-tasks.pickle")
    list_files, load_yaml = index.TaskIndex._iter_yaml_files, index.load_yaml
    cached: dict[Path, Any] = {}

    def list_cached(root: Path) -> Any:
        if root != own:
            return list_files(root)
        try:
            cached.update(pickle.loads(cache_path.read_bytes()))
        except (OSError, EOFError, ImportError, AttributeError, ValueError, pickle.UnpicklingError):
            # Missing, truncated, or of a Python whose paths have another pickled form.
            for path in list_files(root):
                with contextlib.suppress(Exception):
                    cached[path] = load_yaml(path, resolve_func=False, recursive=True)
            _write(cache_path, pickle.dumps(cached))
        return iter(list(cached))

    def load_cached(path: Path, **options: Any) -> Any:
        return cached[path] if path in cached else load_yaml(path, **options)

    index.TaskIndex._iter_yaml_files, index.load_yaml = staticmethod(list_cached), load_cached


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, if its folder is writable."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)


def _import_vllm() -> None:
    """Import lm-eval's engine for vLLM, which looks up the version of a package named vllm.

    On some processors the package has another name. vLLM also looks it up, to detect its device, and must see
    the real answer: it is imported before the patch.
    """
    import vllm
    from vllm.platforms import current_platform

    real_version = metadata.version
    vllm_version = f"{vllm.__version__}{'+cpu' if current_platform.is_cpu() else ''}"

    def find_version(distribution_name: str) -> str:
        return vllm_version if distribution_name == "vllm" else real_version(distribution_name)

    metadata.version = find_version
    try:
        from lm_eval.models import vllm_causallms  # noqa: F401
    finally:
        metadata.version = real_version


def _require_answers() -> None:
    """Patch lm-eval so that it ends if a server's answer is incomplete."""
    from lm_eval.api.model import CacheHook
    from lm_eval.models.openai_completions import LocalCompletionsAPI as Server

    add_partial = CacheHook.add_partial

    def add_named(self: Any, attr: str, request: Any, answer: Any) -> None:
        # A window of a longer text has no request, and lm-eval fails on it; the whole text is cached.
        if request is not None:
            add_partial(self, attr, request, answer)

    CacheHook.add_partial = add_named

    read_logprobs, read_texts = Server.parse_logprobs, Server.parse_generations

    def require_logprobs(outputs: Any, tokens: Any = None, ctxlens: Any = None, **others: Any) -> Any:
        choices = _list_choices(outputs)
        for choice, prompt in zip(choices, tokens, strict=False):
            logprobs = choice.get("logprobs") or {}
            values, tops = logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or []
            # One for each token of the prompt and the generated one; the first has no context, so no value.
            if {len(values), len(tops)} != {len(prompt) + 1} or not all(tops[1:]) or None in values[1:]:
                raise _NoAnswer(
                    f"{len(values)} log-probabilities and {len(tops)} lists of likely tokens, to a text of"
                    f" {len(prompt)} tokens with echo and logprobs=1. Tasks that choose among answers need"
                    " one of each token: start a server that gives them, or evaluate the model's own files"
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
    return [choice for answer in answers for choice in sorted(answer["choices"], key=lambda c: c["index"])]


def _add_bos_token(lm: Any) -> None:
    """Begin prompts with the tokenizer's BOS token, as lm-eval's other engines do."""
    lm = getattr(lm, "lm", lm)
    if "add_bos_token" in json.loads(sys.argv[sys.argv.index("--model_args") + 1]):
        return
    tokenizer, text = lm.tokenizer, "1"
    adds_bos = tokenizer(text).input_ids != tokenizer(text, add_special_tokens=False).input_ids
    if adds_bos and "--apply_chat_template" in sys.argv:
        turns = [{"role": "user", "content": text}]
        prompt = str(tokenizer.apply_chat_template(turns, tokenize=False))
        adds_bos = not prompt.startswith(tokenizer.bos_token or prompt)
    lm.add_bos_token = adds_bos


def _require_shots(task_dict: Any, num_shots: int | None) -> None:
    """End this process if a task would show another number of examples: lm-eval would go on."""
    if num_shots is None:
        return
    numbers = {name: task.get_config("num_fewshot") for name, task in task_dict.get("tasks", {}).items()}
    if wrong := {name: number for name, number in numbers.items() if number != num_shots}:
        shown = ", ".join(f"{name} shows {number}" for name, number in sorted(wrong.items())[:5])
        _say(f"harness.num_few_shot={num_shots}, and {shown}: lm-eval's task allows no other")
        sys.exit(_NO_SHOTS)


def _set_greedy(task_dict: Any) -> None:
    """Make replies greedy unless a task says otherwise: lm-eval's vLLM samples by default."""
    for task in task_dict.get("tasks", {}).values():
        settings = dict(task.get_config("generation_kwargs") or {})
        is_sampled = "do_sample" in settings or float(settings.get("temperature") or 0.0) > 0.0
        if task.get_config("output_type") == "generate_until" and not is_sampled:
            greedy = {"do_sample": False, "temperature": 0.0}
            task.set_config(key="generation_kwargs", value=greedy, update=True)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class _CachedModel:
    """A model that caches its replies, and sends only this part's share of the requests."""

    def __init__(self, lm: Any, options: dict[str, Any]) -> None:
        self._lm = lm
        self._folder = Path(options["replies"])
        self._part, self._num_parts = options["part"], options["num_parts"]

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._lm, name)
        return (lambda requests: self._answer(name, requests)) if name in KINDS else attribute

    def _answer(self, kind: str, requests: list[Any]) -> list[Any]:
        ask = getattr(self._lm, kind)
        # From an earlier start, perhaps with another number of parts.
        for path in self._folder.glob("part-*_rank0.db"):
            if path.name != f"part-{self._part}_rank0.db":
                with contextlib.suppress(sqlite3.OperationalError):
                    self._take_over(path)
        # By document: one part scores all continuations of a question, and computes its prompt once.
        mine = [request for request in requests if request.doc_id % self._num_parts == self._part]
        mine = [r for r in mine if not (kind == "generate_until" and r.args[1].get("do_sample"))]
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
        # Reads all cached replies, and generates the sampled ones.
        return list(ask(requests))

    def _take_over(self, path: Path) -> None:
        """Copy another part's cache, a file that lm-eval names after `part-N`, into this part's."""
        cache = self._lm.dbdict
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as other:
            for key, value in other.execute("SELECT key, value FROM unnamed"):
                if key not in cache:
                    cache[key] = cache.decode(value)
        cache.commit()


if __name__ == "__main__":
    main()
