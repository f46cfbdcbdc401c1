"""The first process of a training container: `python -m strop.launch.sagemaker.node`.

The kernel gives a first process no default handlers: it would ignore a SIGTERM, and the run would go on to
its end. So the handler is installed before anything else, even before the slow imports.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


class StopFlag:
    """Remembers a SIGTERM that arrives before the agent can handle it."""

    def __init__(self) -> None:
        self.is_asked = False

    def install(self) -> None:
        """Handle SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._ask)

    @property
    def is_installed(self) -> bool:
        """Whether this handler is still installed."""
        return signal.getsignal(signal.SIGTERM) == self._ask

    def _ask(self, number: int, frame: object) -> None:
        self.is_asked = True


def main(arguments: list[str] | None = None) -> int:
    """Run as the container's first process; return its exit code."""
    stop = StopFlag()
    stop.install()
    from strop.launch.sagemaker.entry import EntrySettings, run_entry

    defaults = EntrySettings()
    parser = argparse.ArgumentParser(prog="strop.launch.sagemaker.node", description=__doc__)
    parser.add_argument(
        "word", nargs="?", help="'train', as the platform starts images without an entrypoint"
    )
    parser.add_argument("--root", type=Path, default=defaults.root, help="instead of /opt/ml")
    parser.add_argument("--scratch", type=Path, default=defaults.scratch, help="where the run is written")
    parser.add_argument("--ray-port", type=int, default=defaults.ray_port, help="of the first host's Ray")
    parser.add_argument(
        "--stop-window", type=float, default=defaults.stop_window_s, help="seconds, TERM to KILL"
    )
    args = parser.parse_args(arguments)
    settings = EntrySettings(
        root=args.root,
        scratch=args.scratch,
        ray_port=args.ray_port,
        stop_window_s=args.stop_window,
    )
    return run_entry(settings, stop)


if __name__ == "__main__":
    sys.exit(main())
