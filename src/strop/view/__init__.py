"""What does it look like: progress on the terminal while a run goes on, a report when it ends.

`open_progress` picks the rich or the plain form of `Progress` for a stream. `make_harmless` takes
the escape codes out of text that a model wrote. The report is `strop.view.report.write_report`,
imported by path because it reads rollouts with pyarrow and evaluations with pydantic.
Not here: recording (record), judging (evaluate), and any decision about the run.
"""

from strop.view.harmless import make_harmless
from strop.view.terminal import PlainProgress, Progress, RichProgress, open_progress

__all__ = ["PlainProgress", "Progress", "RichProgress", "make_harmless", "open_progress"]
