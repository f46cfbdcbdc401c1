"""Offline data: demonstrations to imitate (SFT), and pairs of which one reply is better (DPO)."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field

from strop.spec.base import Section, expert


class SftSpec(Section):
    """Supervised fine-tuning: the mean cross-entropy of demonstrated replies."""

    source: str | None = Field(
        default=None,
        min_length=1,
        description="Source of the demonstrations: a file of JSONL (.jsonl, .json), Parquet (.parquet) or CSV"
        " (.csv), a folder written by `save_to_disk` of the datasets library, or the folder of a run, or of"
        " the replies that `strop eval` kept, whose best rollouts are imitated. A relative path is relative"
        " to the file that names it. none = no imitation.",
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Part of a row that the loss covers: 'assistant' every"
        " reply, 'last' the last one, 'all' every token, prompts included.",
        json_schema_extra=expert("chat data differ in which turns are worth imitating"),
    )
    min_reward: float = Field(
        default=1.0,
        description="Lowest reward of a recorded rollout to imitate.",
        json_schema_extra=expert("rejection sampling may imitate partial credit"),
    )
    max_per_example: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Most recorded rollouts to imitate per example, those with the highest reward first; 1 is"
        " best-of-k. none = all.",
        json_schema_extra=expert("easy examples would outweigh hard ones"),
    )
    rows_per_step: int = Field(
        default=16,
        ge=1,
        le=10**6,
        description="Demonstrations in the batch of one optimizer step.",
        json_schema_extra=expert("the batch of a pure SFT run is sized apart from that of rollouts"),
    )
    max_dropped_frac: float = Field(
        default=0.01,
        ge=0.0,
        lt=1.0,
        description="Largest share of demonstrations that may be dropped because they exceed the model's"
        " context or the task's reply limit, or contain one of the task's stop strings. Above it the run is"
        " refused.",
        json_schema_extra=expert("a data set with long rows may lose a known part of them"),
    )
    weight: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="Weight of this term beside the RL term, whose weight is 1. The metrics have the gradient"
        " norm of each; the two may differ a thousandfold.",
        json_schema_extra=expert("the gradients of both terms may differ a thousandfold"),
    )

    @property
    def is_from_file(self) -> bool:
        """Whether the source is a data file, and not the folder of a run."""
        return self.source is not None and is_data_file(self.source)


class DpoSpec(Section):
    """Preference pairs from recorded rollouts, and the loss on them."""

    source: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a run, or of the replies that `strop eval` kept, whose rollouts of one example"
        " are paired by reward. A relative path is relative to the file that names it. none = no pairs.",
    )
    loss: Literal["dpo", "pref_ipo"] = Field(
        default="dpo",
        description="'dpo' is the logistic loss of the margin between the summed log-ratios of two replies,"
        " 'pref_ipo' the squared distance of the margin of their means from 1 / (2 beta).",
        json_schema_extra=expert("published results differ by the loss"),
    )
    beta: float = Field(
        default=0.1,
        gt=0.0,
        le=1e3,
        description="Strength of the pull towards the reference; smaller values let the policy move further.",
        json_schema_extra=expert("it is what papers on preferences vary"),
    )
    pairs_per_step: int = Field(
        default=16,
        ge=1,
        le=10**6,
        description="Pairs in the batch of one optimizer step.",
        json_schema_extra=expert("the batch of a preference run is sized apart from that of rollouts"),
    )


_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
DATA_SUFFIXES = (".parquet", *_TEXTS, *(f"{suffix}.gz" for suffix in _TEXTS))


def is_data_file(text: str) -> bool:
    """Whether a text ends like a data file."""
    return text.lower().endswith(DATA_SUFFIXES)


def is_data_path(text: str, folder: str = "") -> bool:
    """Whether a data set's name is a path: it reads as one, or stands for something in `folder`.

    A hub's id is OWNER/NAME, without a slash at its end.
    """
    if text.startswith(("/", "~", ".")) or "://" in text:
        return "://" not in text
    reads_so = is_data_file(text) or text.endswith("/") or text.count("/") > 1
    return reads_so or (bool(text) and os.path.exists(os.path.join(folder, text)))
