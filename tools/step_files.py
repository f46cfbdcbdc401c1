"""List the files of `strop` whose code one training step executes, evaluation and checkpoint included.

The run is one step of a run file in this process; what is executed before and after the step does not
count. Values follow the run file, as with `strop train`.

Usage: python -m tools.step_files [RUN_FILE] [SETTING=VALUE ...]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import strop

RUN_FILE = "recipes/arithmetic.toml"
SMALL = ("train.steps=1", "eval.num_examples=4", "eval.num_samples=none")
_ROOT = str(Path(strop.__file__).parent)


def main(arguments: list[str]) -> int:
    """Run the step and print the files."""
    from strop.cli import main as run_command
    from strop.train.loop import TrainLoop

    found: set[str] = set()
    is_in_step = threading.Event()
    step = TrainLoop._step

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and is_in_step.is_set() and code.co_filename.startswith(_ROOT):
            found.add(code.co_filename)

    async def traced(self: TrainLoop) -> None:
        is_in_step.set()
        try:
            await step(self)
        finally:
            is_in_step.clear()

    TrainLoop._step = traced  # type: ignore[method-assign]
    run_file = next((one for one in arguments if "=" not in one), RUN_FILE)
    settings = [one for one in arguments if "=" in one]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["strop", "train", run_file, *SMALL, f"output.dir={folder}/run", *settings]
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            run_command()
        except SystemExit as end:
            if end.code:
                return 1
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    print(*sorted(str(Path(name).relative_to(_ROOT)) for name in found), sep="\n")
    print(f"{len(found)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
