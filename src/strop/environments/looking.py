"""The process that inspects a user's environment: `python -m strop.environments.looking FD`.

It answers like `tasks.user.posing`, and adds the class's `facts` (`read_facts`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from strop.environments.objects import read_facts
from strop.tasks.user.posing import make_task, pose
from strop.user_code.probe import answer_order


def main(descriptor: int) -> None:
    """Answer one order: the settings, as the class completed them."""

    def look(kind: Any, order: Mapping[str, Any]) -> dict[str, Any]:
        return {**pose(kind, order), "facts": read_facts(make_task(kind, order["values"]))}

    answer_order(descriptor, look)


if __name__ == "__main__":
    main(int(sys.argv[1]))
