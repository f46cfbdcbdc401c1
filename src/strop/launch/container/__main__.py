"""Build the project's own image: `python -m strop.launch.container [--variant full|agent|base] ...`.

The image's name goes to standard output, everything for a person to standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from strop.errors import StropError
from strop.launch.container.engine import locate_engine
from strop.launch.container.image import Variant, build_image, plan_image


def main(arguments: list[str] | None = None) -> int:
    """Build an image unless the engine has it; return the exit code."""
    parser = argparse.ArgumentParser(prog="strop.launch.container", description=__doc__)
    parser.add_argument("--variant", type=Variant, choices=list(Variant), default=Variant.FULL)
    parser.add_argument("--base-image", help="from a registry; none: a Debian base made on the spot")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of strop and of all that it needs")
    parser.add_argument("--engine", choices=("auto", "podman", "docker"), default="auto")
    parser.add_argument("--no-cache", action="store_true", help="everything again, the base included")
    args = parser.parse_args(arguments)
    try:
        plan = plan_image(args.variant, base_image=args.base_image, wheels=args.wheels)
        engine = locate_engine(args.engine)
        built = build_image(engine, plan, no_cache=args.no_cache, say=_say)
    except StropError as error:
        _say(str(error))
        return error.exit_code
    _say(f"{built.size_bytes / 1e6:.0f} MB, {built.wall_s:.0f} s")
    sys.stdout.write(built.name + "\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
