"""The process that calls a user's function: `python -m strop.agents.calling`, with the problem as input.

Standard output has the answer only: the function's own output goes to standard error.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from typing import Any

from strop.tasks.user.rewards import call_foreign
from strop.user_code import CodeRef, load_code


def main() -> None:
    """Call the function with the parameters that it names, and write its answer."""
    order = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    function = load_code(CodeRef(place=order["place"], name=order["name"]))
    available: dict[str, Any] = {
        **order["fields"],
        "prompt": order["prompt"],
        "messages": order["messages"],
        "folder": os.environ["TMPDIR"],
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "model": os.environ["OPENAI_MODEL"],
    }
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in available.items() if takes_all or name in parameters}
    answer = asyncio.run(call_foreign(function, **arguments))
    print("" if answer is None else answer, end="", file=answers, flush=True)


if __name__ == "__main__":
    main()
