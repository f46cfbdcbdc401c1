"""What a training is made of, as digests: models, task, examples, and what else it learns from.

Recorded in run.json and compared whenever a run goes on; see `strop.record.parts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from strop.io import user_cache_dir
from strop.rollout import Split
from strop.spec import RunSpec
from strop.spec.task import judge_sections
from strop.store import ModelHandle
from strop.store.data_files import locate_named
from strop.store.model_files import digest_parts
from strop.tasks import Task
from strop.user_code import CodeRef, hash_sources, is_code


def list_parts(
    spec: RunSpec, task: Task, models: Mapping[str, ModelHandle], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the digest of every part by a name that a person understands.

    `models` are those that take part, by their role; `given` the digests of other data that is learned from.

    Raises: DataError, StoreError or CorruptRecord if a part cannot be read.
    """
    found = {"version of its task": task.version, "set of examples": _digest_examples(spec, task), **given}
    for role, model in models.items():
        parts = digest_parts(model.path, user_cache_dir() / "digests")
        found |= {f"{role} ({part})": digest for part, digest in parts.items()}
    if is_code(spec.algorithm.name):
        found["algorithm"] = hash_sources(CodeRef.parse(spec.algorithm.name).path)
    return found | dict(_calibrations(spec))


def _digest_examples(spec: RunSpec, task: Task) -> str:
    """Hash the ids of all examples, which are hashes of what is asked and answered, in their order."""
    digest = hashlib.sha256()
    for split in [Split.TRAIN, Split.HELD_OUT] if spec.train.has_rl else [Split.HELD_OUT]:
        digest.update("\n".join([split, *(one.example_id for one in task.examples(split))]).encode())
    return digest.hexdigest()


def _calibrations(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for section in judge_sections(spec.task):
        path = None if section.calibration is None else locate_named(section.calibration)
        # One that is missing is refused where it is read.
        if path is not None and path.is_file():
            yield f"calibration of {section.judge_model}", hashlib.sha256(path.read_bytes()).hexdigest()
