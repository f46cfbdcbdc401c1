"""The judges of a run besides its roles, and the wait for work that the death of a server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from strop.errors import ConfigError
from strop.spec.judge import role_judges
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tokenizer import Tokenizer

T = TypeVar("T")
_LOOK_EVERY_S = 1.0
_MIN_REVISION_CHARS = 8


def check_judges(spec: RunSpec, policy: ModelHandle, models: Mapping[str, ModelHandle]) -> None:
    """Refuse a judge that the run would start and that cannot judge it. `models` are by name.

    Raises: ConfigError if a judge has another revision than in the run file, has no chat template, or is the
        policy.
    """
    for section in role_judges(spec.task):
        judge = models[section.judge_model]
        revision = section.judge_revision
        if len(revision) < _MIN_REVISION_CHARS or not judge.digest.startswith(revision):
            raise ConfigError(
                f"task.judge_revision={revision}, and {section.judge_model} has the digest {judge.digest}",
                allowed=f"at least {_MIN_REVISION_CHARS} characters of the digest, from its first:"
                " judgements are kept under it",
                next_step=f'set task.judge_revision = "{judge.digest[:16]}"',
            )
        if judge.digest == policy.digest and not section.can_judge_itself:
            raise ConfigError(
                f"task.judge_model={section.judge_model} has the digest of the policy, {policy.digest[:16]}",
                allowed="a judge that is another model, or task.can_judge_itself = true",
                next_step="name another judge",
            )
        Tokenizer.load(judge.path).require_chat_template()


async def guard(work: Coroutine[Any, Any, T], find_failure: Callable[[], Exception | None]) -> T:
    """Await `work`; once `find_failure` returns an error, cancel it and raise the error."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_LOOK_EVERY_S))[0]:
            if (failure := find_failure()) is not None:
                raise failure
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
