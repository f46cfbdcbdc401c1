"""lm-eval's command line with two models that write down how each reply ended.

It runs in lm-eval's interpreter, so it imports nothing of strop: `python models.py run --model strop-hf ...`.
`strop-hf` is lm-eval's `hf`, `strop-server` its `local-completions`. The variable STROP_HARNESS_ENDS names a
file that gets a line for each reply, lm-eval's own key of the request and 1 if the budget cut the reply, else
0; none where a server does not say. The line is written before lm-eval's cache has the reply.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import CacheHook, hash_args
from lm_eval.api.registry import register_model

ENDS_VARIABLE = "STROP_HARNESS_ENDS"
GENERATION = "generate_until"


class Noted(CacheHook):  # type: ignore[misc]  # lm-eval ships no types
    """Writes down how a reply ended, then hands it to lm-eval's cache."""

    def __init__(self, hook: Any, find_end: Callable[[Any], bool | None]) -> None:
        super().__init__(None)
        self.dbdict = hook.dbdict
        self._find_end = find_end
        self._ends = open(os.environ[ENDS_VARIABLE], "a", buffering=1, encoding="ascii")  # noqa: SIM115
        # After a line that a kill left unfinished.
        self._ends.write("\n")

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Take a reply to a request of the kind `attr`."""
        if attr == GENERATION and (is_cut := self._find_end(req[1])) is not None:
            self._ends.write(f"{hash_args(attr, req)} {int(is_cut)}\n")
        # A window of a longer text has no request, and lm-eval's own hook fails on it.
        if req is not None:
            super().add_partial(attr, req, res)


def register_hf() -> None:
    """Register `strop-hf`."""
    from lm_eval.models.huggingface import HFLM

    @register_model("strop-hf")
    class Transformers(HFLM):  # type: ignore[misc]
        """A reply was cut if it holds neither a terminator nor a stop string."""

        def set_cache_hook(self, cache_hook: Any) -> None:
            super().set_cache_hook(Noted(cache_hook, self._is_cut))

        def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
            self._last_ids = tokens
            return super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

        def _is_cut(self, settings: Any) -> bool:
            named = self.model.generation_config.eos_token_id
            terminators = {self.eot_token_id, *(named if isinstance(named, list) else [named])}
            if terminators & set(self._last_ids):
                return False
            text = self.tokenizer.decode(self._last_ids)
            if isinstance(self.think_end_token, str):
                text = text.rpartition(self.think_end_token)[2]
            stops = settings.get("until") or []
            return not any(stop and stop in text for stop in ([stops] if isinstance(stops, str) else stops))


def register_server() -> None:
    """Register `strop-server`."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    @register_model("strop-server")
    class Server(LocalCompletionsAPI):  # type: ignore[misc]
        """Reads finish reasons, refuses incomplete answers, and begins prompts as lm-eval's `hf` does."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._ends: list[bool | None] = []
            first = self.tokenizer.bos_token_id
            is_added = first is not None and self.tokenizer("1").input_ids[:1] == [first]
            self._begins = is_added and "add_bos_token" not in options

        def set_cache_hook(self, cache_hook: Any) -> None:
            super().set_cache_hook(Noted(cache_hook, lambda settings: self._ends.pop(0)))

        def tok_encode(self, string: Any, *rest: Any, add_special_tokens: bool = False, **others: Any) -> Any:
            text = string if isinstance(string, str) else next(iter(string), "")
            # A chat template may have begun it.
            begins = self._begins and not text.startswith(self.tokenizer.bos_token)
            return super().tok_encode(
                string, *rest, add_special_tokens=add_special_tokens or begins, **others
            )

        def parse_generations(self, outputs: Any, **others: Any) -> list[str]:
            choices = _list_choices(outputs)
            if not all(isinstance(choice.get("text"), str) for choice in choices):
                # lm-eval would judge a placeholder.
                raise ValueError("the server gave a choice without a text")
            reasons = [choice.get("finish_reason") for choice in choices]
            self._ends = [reason == "length" if reason else None for reason in reasons]
            return [choice["text"] for choice in choices]

        def parse_logprobs(self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **others: Any) -> Any:
            for choice, prompt in zip(_list_choices(outputs), tokens, strict=True):
                logprobs = choice.get("logprobs") or {}
                values, tops = logprobs.get("token_logprobs") or [], logprobs.get("top_logprobs") or []
                # Of each token of the prompt and the generated one; the first has no context, so no value.
                # lm-eval would take missing ones for certainty.
                if {len(values), len(tops)} != {len(prompt) + 1} or not all(tops[1:]) or None in values[1:]:
                    raise ValueError(
                        f"the server gave {len(values)} log-probabilities and {len(tops)} likely tokens to a"
                        f" text of {len(prompt)} tokens, with echo and logprobs=1: choices need one of each"
                    )
            return super().parse_logprobs(outputs, tokens=tokens, ctxlens=ctxlens, **others)


def _list_choices(outputs: Any) -> list[Any]:
    answers = outputs if isinstance(outputs, list) else [outputs]
    return [choice for answer in answers for choice in sorted(answer["choices"], key=itemgetter("index"))]


if __name__ == "__main__":
    {"strop-hf": register_hf, "strop-server": register_server}[sys.argv[sys.argv.index("--model") + 1]]()
    cli_evaluate()
