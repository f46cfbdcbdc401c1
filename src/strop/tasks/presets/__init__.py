"""Published data sets, each described by a TOML file here (a `DataSet`), and the task of most of them."""

from __future__ import annotations

from typing import Literal

from strop.tasks.rows.judged_rows import JudgedRows, RewardSection
from strop.tasks.rows.row_task import PublishedRows, read_preset


class PresetSpec(PublishedRows, RewardSection):
    """Word problems of gsm8k, competition problems, or multiple-choice questions of MMLU."""

    name: Literal["gsm8k", "math", "math500", "deepscaler", "aime", "mmlu"]


class PresetTask(JudgedRows):
    """A published data set; right is a reply with the right answer, or what the run's rewards say."""

    def __init__(self, spec: PresetSpec) -> None:
        super().__init__(spec, read_preset(spec.name), spec.source)
