"""Inspection and loading of the code that a run file names.

`CodeRef` names a class or a function: `my_task.py:Doubling` in a file, or an entry point of an installed
package. `inspect_function` and `inspect_task` inspect it in a separate process with a time limit; `load_code`
imports it into this process; `hash_sources` is its part of a task's version.
Not here: the contracts of tasks and rewards (`tasks`), and the processes that run them (`tasks.judging`).
"""

from strop.user_code.inspection import (
    InspectedFunction,
    InspectedTask,
    inspect_function,
    inspect_import,
    inspect_task,
)
from strop.user_code.loading import EndOfImport, blaming, edited, is_importing, load_code
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
    "EndOfImport",
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
]
