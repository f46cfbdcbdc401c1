"""What a class says of itself; the process that inspects a user's: `python -m strop.environments.looking FD`.

The process answers like `tasks.user.posing`, and adds the class's `facts`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from strop.environments.tools import find_tools
from strop.tasks.user.posing import make_task, pose
from strop.user_code.probe import answer_order


def read_facts(own: Any) -> dict[str, Any]:
    """Return the facts of a class as JSON values: the schemas of its `tools`, `has_step`, `max_turns`.

    Raises: ConfigError like `find_tools`.
    """
    return {
        "tools": {name: tool.schema for name, tool in find_tools(type(own)).items()},
        "has_step": callable(getattr(own, "step", None)),
        "max_turns": getattr(own, "max_turns", None),
    }


def _look(kind: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    return {**pose(kind, order), "facts": read_facts(make_task(kind, order["values"]))}


if __name__ == "__main__":
    answer_order(int(sys.argv[1]), _look)
