"""Which settings hold paths, and how a relative one becomes absolute when a run file is read.

Workers start in other folders, so no relative path leaves the reader. Whether a path exists is
not asked here: a run file is valid on a machine that does not have its data yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from strop.errors import ConfigError, explain_refusal
from strop.spec.display import KeyPath, dotted, show_text
from strop.user_code import is_code

_DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def _is_marked_path(text: str) -> bool:
    return text.startswith(("/", "~", "."))


def is_data_file(text: str) -> bool:
    """Whether a text ends as data files do."""
    return text.lower().endswith(_DATA_SUFFIXES)


def _is_data_path(text: str) -> bool:
    # s3://bucket/train.jsonl is no path.
    return _is_marked_path(text) or (is_data_file(text) and "://" not in text)


def _is_rubric_path(text: str) -> bool:
    return _is_marked_path(text) or (text.lower().endswith((".txt", ".md")) and "://" not in text)


def _is_any_text(text: str) -> bool:
    return True


def _is_no_address(text: str) -> bool:
    return "://" not in text


_PART_DEPTH = 4
"""Keys down to a setting of a mixture's part: task.parts.LABEL.source."""
PATH_SETTINGS: Mapping[KeyPath, Callable[[str], bool]] = {
    ("model", "uri"): _is_marked_path,
    ("reference", "model"): _is_marked_path,
    ("teacher", "model"): _is_marked_path,
    ("algorithm", "name"): is_code,
    ("task", "name"): is_code,
    ("task", "source"): _is_data_path,
    ("task", "reward"): is_code,
    ("task", "judge_model"): _is_marked_path,
    ("task", "order_file"): _is_no_address,
    ("task", "rubric"): _is_rubric_path,
    ("task", "calibration"): _is_data_path,
    ("sft", "source"): _is_no_address,
    ("dpo", "source"): _is_no_address,
    ("output", "root"): _is_any_text,
    ("output", "dir"): _is_any_text,
    ("store", "uri"): _is_marked_path,
    ("job", "eval_config"): _is_any_text,
}
"""Setting, and whether a text of it is a path (or else the id of something remote)."""


def absolute_path(path: KeyPath, text: str, folder: str, origin: str) -> str:
    """Return the text of a setting, made absolute against `folder` where it is a path.

    An empty text is left to the model's own check.
    Raises: ConfigError if a path holds control characters.
    """
    path = ("task", path[-1]) if path[:2] == ("task", "parts") and len(path) == _PART_DEPTH else path
    if not text or path not in PATH_SETTINGS or not PATH_SETTINGS[path](text):
        return text
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ConfigError(
            explain_refusal(
                f"{dotted(path)}={show_text(text)} ({origin}) holds a control character",
                allowed="a path of printable characters",
                next_step="correct the path",
            )
        )
    return os.path.abspath(os.path.join(folder, os.path.expanduser(text)))
