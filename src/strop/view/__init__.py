"""What does it look like: progress on the terminal while a run goes on, a report when it ends.

`open_progress` picks the form of `Progress` for a stream, plain lines or those of `strop.view.display`;
`TerminalObserver` puts a run into it. `make_harmless` takes the escape codes out of text that a model wrote.
The report is `strop.view.report.write_report`, imported by path because it needs Jinja2.
Not here: recording (record), judging (evaluate), and any decision about the run.
"""

from strop.view.terminal import (
    PlainProgress,
    Progress,
    TerminalObserver,
    make_harmless,
    open_progress,
)

__all__ = [
    "PlainProgress",
    "Progress",
    "TerminalObserver",
    "make_harmless",
    "open_progress",
]
