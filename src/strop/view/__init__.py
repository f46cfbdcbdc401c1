"""Views of a run: progress on the terminal, the page in a browser, the report, SQL and trackers.

`open_progress` picks the display for a stream, plain lines or the live lines of `strop.view.display`;
`TerminalObserver` shows a run on it. `make_harmless` removes escape codes from text that a model wrote.
Not here: recording (record), judging (evaluate), and any decision about the run.
"""

from strop.view.terminal import (
    PlainProgress,
    TerminalObserver,
    make_harmless,
    open_progress,
)

__all__ = [
    "PlainProgress",
    "TerminalObserver",
    "make_harmless",
    "open_progress",
]
