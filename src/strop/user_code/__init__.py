"""What is in the code that a user names in a run file, and how is it loaded?

`CodeRef` names a class or a function: `my_task.py:Doubling` of a file, or one that an installed package
announces. `inspect_code` looks at it in a process of its own, which is killed at a limit; `load_code` brings
it into this process; `hash_sources` is what versions of tasks cover of it.
Not here: what a task or a reward is (`tasks`), and where they run (`tasks.judging`).
"""

from strop.user_code.inspection import (
    InspectedFunction,
    InspectedTask,
    inspect_function,
    inspect_import,
    inspect_task,
    run_apart,
)
from strop.user_code.loading import blaming, edited, is_importing, load_code
from strop.user_code.reference import (
    MOVED_VARIABLE,
    TASKS_GROUP,
    CodeRef,
    announced,
    find_algorithm,
    find_moved,
    find_task,
    is_code,
)
from strop.user_code.sources import hash_sources, list_sources

__all__ = [
    "MOVED_VARIABLE",
    "TASKS_GROUP",
    "CodeRef",
    "InspectedFunction",
    "InspectedTask",
    "announced",
    "blaming",
    "edited",
    "find_algorithm",
    "find_moved",
    "find_task",
    "hash_sources",
    "inspect_function",
    "inspect_import",
    "inspect_task",
    "is_code",
    "is_importing",
    "list_sources",
    "load_code",
    "run_apart",
]
