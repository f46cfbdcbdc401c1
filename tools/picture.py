"""Make the picture of the page that README.md shows, from a run's directory, in the system's Chromium.

The page is opened as a reader opens it, its charts are waited for, and what a screen of 1,280 x 1,120 shows
of it is kept.

Usage: python -m tools.picture RUN [PICTURE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fixtures.browser import find_chromium, open_browser, open_page
from tests.view.served import served

PICTURE = Path("docs/page.png")
MAX_BYTES = 150_000
WIDTH, HEIGHT = 1280, 1120


def take_picture(run: Path, program: str) -> bytes:
    """Return the page of a run as a PNG. Raises: StoreError if it is no run."""
    place = f"/run/{run.resolve().name}"
    with (
        served(run) as address,
        open_browser(program) as browser,
        open_page(browser, width=WIDTH, height=HEIGHT) as page,
    ):
        page.goto(f"{address}/#{place}")
        page.locator(f'#main[data-view="#{place}"]').wait_for()
        # Those that are on the screen: the others are drawn when they come into sight.
        page.locator("figure .read").filter(has_text="step").first.wait_for()
        page.locator("#pulse.live").wait_for()
        return page.screenshot()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture; return 1 if it is too large, 2 without a run or a browser."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    program = find_chromium()
    if not 1 <= len(given) <= 2 or program is None:
        print(
            (__doc__ or "") if program else "chromium is not installed. Next: run make system-deps as root."
        )
        return 2
    target = Path(given[1]) if given[1:] else PICTURE
    picture = take_picture(Path(given[0]), program)
    if len(picture) > MAX_BYTES:
        print(f"the picture has {len(picture):,} bytes. Allowed: {MAX_BYTES:,}. Next: take another run.")
        return 1
    target.write_bytes(picture)
    print(f"{target}: {len(picture):,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
