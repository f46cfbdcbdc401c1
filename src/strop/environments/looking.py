"""The process in which an environment of the user's is looked at: `python -m strop.environments.looking FD`.

It answers as `tasks.user.posing` does, and says what the class shows of itself.
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

    def look(found: Any, order: Mapping[str, Any]) -> dict[str, Any]:
        return {**pose(found, order), "facts": read_facts(make_task(found, order["values"]))}

    answer_order(descriptor, look)


if __name__ == "__main__":
    main(int(sys.argv[1]))
