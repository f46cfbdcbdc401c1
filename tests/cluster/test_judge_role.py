"""A judge that the run starts itself: found by a file, asked over HTTP, named when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from pathlib import Path

import httpx
import pytest

from strop.cluster import servers
from strop.cluster.servers import JudgeRoles, guard
from strop.engine.server import CHAT_PATH
from strop.errors import ConfigError, EngineError
from strop.io.endpoints import ENDPOINTS_VARIABLE, find_endpoint
from strop.rollout import Failure, Split
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tasks.judge_model import JudgeModel, endpoint_name
from strop.tasks.judging import Judge
from strop.tasks.rows.judged_rows import JudgedRows
from tests.fixtures.judged import judge_spec
from tests.fixtures.tiny_run import tiny_spec

DIGEST = "0123456789abcdef"


def run_of(folder: Path, **settings: str) -> RunSpec:
    given = {"judge_model": "org/judge", "judge_revision": DIGEST[:8], **settings}
    return tiny_spec(task=judge_spec(folder, "role", **given).model_dump())


def roles_of(spec: RunSpec, model_dir: Path, work_dir: Path, policy: str = "other") -> JudgeRoles:
    source = ModelHandle(path=model_dir, digest=DIGEST)
    return JudgeRoles(spec, ModelHandle(path=model_dir, digest=policy), {"org/judge": source}, work_dir)


@pytest.mark.slow
async def test_a_judge_of_the_run_answers_and_its_death_ends_the_run(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    spec = run_of(tmp_path)
    judges = roles_of(spec, tiny_model_dir, tmp_path / "judges")
    task = JudgedRows(spec.task)  # type: ignore[arg-type]
    example = task.examples(Split.TRAIN)[0]
    await judges.start()
    (path,) = (tmp_path / "judges").glob("endpoint-*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    endpoint = find_endpoint(endpoint_name("org/judge"))
    assert endpoint is not None
    url, key = endpoint.url, endpoint.key
    assert url.startswith("http://127.0.0.1:")
    assert key not in " ".join(os.environ.values())
    body = {"model": "org/judge", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    address = url.removesuffix("/v1") + CHAT_PATH
    async with httpx.AsyncClient(trust_env=False, timeout=300.0) as client:
        assert (await client.post(address, json=body)).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        answer = (await client.post(address, json=body, headers=headers)).json()
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    # Random weights give no verdict, and that is no score; nor is a prompt that they cannot read.
    for reply in ("word-0", "word " * 500):
        outcome = await Judge(task).judge(example, reply)
        assert outcome.parts == {"judge": None}
    (process,) = judges._started.values()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"org/judge is gone: its process \d+ ended with signal 9"):
        await guard(asyncio.sleep(300), judges.find_failure)
    outcome = await Judge(task).judge(example, "word-7")
    assert outcome.parts == {"judge": None}
    assert isinstance(outcome.failure, Failure)
    assert outcome.failure.kind == "judge_failed"
    await judges.stop()
    await judges.stop()
    assert not path.exists()
    assert ENDPOINTS_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("num_workers", "num_nodes", "is_local"), [(0, 2, True), (2, 1, True), (2, 2, False)]
)
def test_a_judge_listens_where_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, num_nodes: int, is_local: bool
) -> None:
    outside = "strop.cluster.ray.node.find_host_address"
    monkeypatch.setattr(outside, lambda count, interface: "127.0.0.1" if count == 1 else "10.0.0.7")
    run = run_of(tmp_path)
    placement = {"kind": "ray", "rollout_workers": num_workers}
    job = run.job.model_copy(update={"nodes": num_nodes})
    run = run.model_copy(update={"placement": run.placement.model_copy(update=placement), "job": job})
    assert servers._find_host(run) == ("127.0.0.1" if is_local else "10.0.0.7")


def test_a_judge_of_another_revision_and_the_policy_itself_are_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"task.judge_revision=2026-11-01, and org/judge has .* {DIGEST}"):
        roles_of(run_of(tmp_path, judge_revision="2026-11-01"), tiny_model_dir, tmp_path)
    with pytest.raises(ConfigError, match="org/judge has the digest of the policy"):
        roles_of(run_of(tmp_path), tiny_model_dir, tmp_path, policy=DIGEST)


def test_a_role_is_asked_only_where_a_run_has_started_it(tmp_path: Path) -> None:
    judge = JudgeModel(run_of(tmp_path).task)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"task\.judge_url=role.* no server of org/judge"):
        judge.find()
