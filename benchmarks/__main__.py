"""Run the benchmarks: `python -m benchmarks --help`."""

import signal
import sys

from benchmarks.run import main

if __name__ == "__main__":
    # As an exception, so that what was started is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    raise SystemExit(main())
