"""lm-eval's command line with two models that write down how each reply ended; its own do not say.

It runs in lm-eval's interpreter and imports nothing of strop: `lm_eval_models.py run --model strop-hf`, or
`strop-server`. The file that STROP_HARNESS_ENDS names gets lm-eval's key of each request and 1 if the budget
cut the reply, else 0; nothing where a server gives no reason. lm-eval's cache has the reply after that.
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


class Noted(CacheHook):  # type: ignore[misc]  # lm-eval ships no types
    """Writes down how a reply ended, then hands it to lm-eval's cache."""

    def __init__(self, hook: Any, is_cut: Callable[[Any], bool | None]) -> None:
        super().__init__(None)
        self.dbdict, self._is_cut = hook.dbdict, is_cut

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Take a reply to a request of the kind `attr`."""
        if attr == "generate_until" and (is_cut := self._is_cut(req[1])) is not None:
            with open(os.environ["STROP_HARNESS_ENDS"], "a", encoding="ascii") as ends:
                ends.write(f"\n{hash_args(attr, req)} {int(is_cut)}\n")
        # A window of a longer text has no request, and lm-eval's own hook fails on it.
        if req is not None:
            super().add_partial(attr, req, res)


def register_hf() -> None:
    """Register `strop-hf`: a reply was cut if it has neither a terminator nor a stop string."""
    from lm_eval.models.huggingface import HFLM

    @register_model("strop-hf")
    class Transformers(HFLM):  # type: ignore[misc]
        def set_cache_hook(self, cache_hook: Any) -> None:
            super().set_cache_hook(Noted(cache_hook, self._is_cut))

        def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
            self._last_ids = tokens
            return super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

        def _is_cut(self, settings: Any) -> bool:
            named = self.model.generation_config.eos_token_id
            if {self.eot_token_id, *(named if isinstance(named, list) else [named])} & set(self._last_ids):
                return False
            text = self.tokenizer.decode(self._last_ids)
            if isinstance(self.think_end_token, str):
                text = text.rpartition(self.think_end_token)[2]
            stops = settings.get("until") or []
            return not any(stop and stop in text for stop in ([stops] if isinstance(stops, str) else stops))


def register_server() -> None:
    """Register `strop-server`, which reads finish reasons."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    @register_model("strop-server")
    class Server(LocalCompletionsAPI):  # type: ignore[misc]
        def set_cache_hook(self, cache_hook: Any) -> None:
            super().set_cache_hook(Noted(cache_hook, lambda settings: self._ends.pop(0)))

        def parse_generations(self, outputs: Any, **others: Any) -> list[str]:
            answers = outputs if isinstance(outputs, list) else [outputs]
            choices = [
                one for answer in answers for one in sorted(answer["choices"], key=itemgetter("index"))
            ]
            if not all(isinstance(one.get("text"), str) for one in choices):
                # lm-eval would judge a placeholder.
                raise ValueError("the server gave a choice without a text")
            reasons = [one.get("finish_reason") for one in choices]
            self._ends = [reason == "length" if reason else None for reason in reasons]
            return [one["text"] for one in choices]


if __name__ == "__main__":
    (register_hf if "strop-hf" in sys.argv else register_server)()
    cli_evaluate()
