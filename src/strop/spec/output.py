"""Where a run is written."""

from __future__ import annotations

from pydantic import Field

from strop.spec.base import Section


class OutputSpec(Section):
    """Folders of the run. Not part of what was asked: they do not enter the spec's digest."""

    root: str = Field(
        default="runs",
        min_length=1,
        description="Folder that new run folders are made in. Relative to the file that names it; the"
        " default and an override are relative to the current folder.",
    )
    dir: str | None = Field(
        default=None,
        min_length=1,
        description="The run's own folder. Relative as for output.root; a folder called none is written"
        " './none'. none = a new folder under output.root, named after the run and the time.",
    )
