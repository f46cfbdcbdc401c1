"""The process in which a user's function acts: `python -m strop.agents.calling`, with its problem as input.

Standard output is the answer alone: what the function prints goes to standard error.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

from strop.tasks.user.rewards import await_if_needed
from strop.user_code import CodeRef, load_code


def main() -> None:
    """Call the function with what it names, and write what it returns."""
    order = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    function = load_code(CodeRef(place=order["place"], name=order["name"]))
    given: dict[str, Any] = {
        **order["fields"],
        "prompt": order["prompt"],
        "messages": order["messages"],
        "folder": os.environ["TMPDIR"],
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "model": os.environ["OPENAI_MODEL"],
    }
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    taken = {name: value for name, value in given.items() if takes_all or name in parameters}
    answer = await_if_needed(function(**taken))
    answers.write("" if answer is None else str(answer))
    answers.close()


if __name__ == "__main__":
    main()
