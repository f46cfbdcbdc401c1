"""GPUs of an instance as numbers, or as the lists of indices that another launcher of such jobs takes.

A job gets a whole instance, so that all that lists can say is how many GPUs each role has and that no two
roles share one. That is what they become: numbers. The agent on the node hands the GPUs out, training first.
"""

from __future__ import annotations

import re

from strop.errors import ConfigError, explain_refusal
from strop.spec.display import show_value
from strop.spec.job import MAX_SPLIT_GPUS

_LIST = re.compile(r"\d{1,2}(-\d{1,2})?(,\d{1,2}(-\d{1,2})?)*")
_TRAIN, _EVAL = "--train-gpus", "--eval-gpus"


def read_gpu_shares(train: str | None, evaluation: str | None, *, has_split: bool) -> dict[str, int]:
    """Return the settings `gpus` or `train_gpus`, and `eval_gpus`, that two flags ask for.

    A list has a comma or a hyphen; beside a list, a single number is an index too. `has_split`: generation
    has GPUs of its own, so that a list for training is the learner's; else it is the whole training's.
    Raises: ConfigError for what is neither a number nor a list, an index that is named twice, by one role or
        by both, or that no instance has.
    """
    given = {flag: text for flag, text in ((_TRAIN, train), (_EVAL, evaluation)) if text is not None}
    for flag, text in given.items():
        if _LIST.fullmatch(text) is None:
            raise _wrong(f"{flag} {show_value(text)}", "it is neither a number of GPUs nor a list of indices")
    if not any(mark in text for text in given.values() for mark in ",-"):
        numbers = {flag: int(text) for flag, text in given.items()}
        return _name(numbers, "train_gpus")
    lists = {flag: _read_list(flag, text) for flag, text in given.items()}
    shared = sorted(set(lists.get(_TRAIN, ())) & set(lists.get(_EVAL, ())))
    if shared:
        raise _wrong(
            f"{_TRAIN} {train} and {_EVAL} {evaluation}",
            f"both name GPU {', '.join(map(str, shared))}, and two roles cannot share one",
        )
    counts = {flag: len(indices) for flag, indices in lists.items()}
    return _name(counts, "train_gpus" if has_split else "gpus")


def _name(numbers: dict[str, int], train_name: str) -> dict[str, int]:
    names = {_TRAIN: train_name, _EVAL: "eval_gpus"}
    return {names[flag]: number for flag, number in numbers.items()}


def _read_list(flag: str, text: str) -> list[int]:
    indices: list[int] = []
    for part in text.split(","):
        first, hyphen, last = part.partition("-")
        found = range(int(first), int(last if hyphen else first) + 1)
        if not found:
            raise _wrong(f"{flag} {text}", f"{part} runs backwards")
        indices += found
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise _wrong(f"{flag} {text}", f"it names GPU {', '.join(map(str, twice))} twice")
    if max(indices) >= MAX_SPLIT_GPUS:
        raise _wrong(f"{flag} {text}", f"instances have GPUs 0 to {MAX_SPLIT_GPUS - 1}")
    return indices


def _wrong(given: str, why: str) -> ConfigError:
    return ConfigError(
        explain_refusal(
            f"{given}: {why}",
            allowed=f"numbers ({_TRAIN} 4 {_EVAL} 2), or lists without a GPU in common ({_TRAIN} 0-5"
            f" {_EVAL} 6,7)",
            next_step="correct it",
        )
    )
