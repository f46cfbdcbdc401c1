"""The commands, one short file per topic, which call the rooms below.

`main` is the program. Results go to standard output, everything else to standard error; exit codes
are 0 done, 1 failed, 2 bad usage or malformed input, 75 interrupted and resumable, 76 refused by a check.
Commands import what they need when they run, so that `strop --help` loads nothing heavy.
They make no decision about a run.
"""

from strop.cli.program import main

__all__ = ["main"]
