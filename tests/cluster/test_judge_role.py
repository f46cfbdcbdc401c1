"""A judge that the run starts itself: found by a file, asked over HTTP, named when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from pathlib import Path

import httpx
import pytest

from strop.cluster.ray.placement import RayPlacement
from strop.cluster.servers import check_judges
from strop.engine.chat import CHAT_PATH
from strop.errors import ConfigError, EngineLost
from strop.io.endpoints import ENDPOINTS_VARIABLE, find_endpoint
from strop.rollout import Failure, Split
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tasks.judge_model import JudgeModel, endpoint_name
from strop.tasks.judging import Judge
from strop.tasks.rows.judged_rows import JudgedRows
from tests.fixtures.judged import judge_spec
from tests.fixtures.ray_traces import needs_ray
from tests.fixtures.tiny_run import tiny_spec

DIGEST = "0123456789abcdef"


def run_of(folder: Path, **settings: str) -> RunSpec:
    given = {"judge_model": "org/judge", "judge_revision": DIGEST[:8], **settings}
    return tiny_spec(task=judge_spec(folder, "role", **given).model_dump())


@pytest.mark.slow
@needs_ray
async def test_a_judge_of_the_run_answers_and_its_death_ends_the_run(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    spec = run_of(tmp_path)
    model = ModelHandle(path=tiny_model_dir, digest=DIGEST)
    placement = RayPlacement(spec, model, tmp_path / "roles", judges={"org/judge": model})
    task = JudgedRows(spec.task)  # type: ignore[arg-type]
    example = task.examples(Split.TRAIN)[0]
    try:
        await placement.start()
        (path,) = (tmp_path / "roles" / "servers").glob("endpoint-*.json")
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
        os.kill(placement.role_pids["judge-0"], signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"role judge-0 on node 0 .* ended"):
            await placement._watch.guard(asyncio.sleep(300))
        outcome = await Judge(task).judge(example, "word-7")
        assert outcome.parts == {"judge": None}
        assert isinstance(outcome.failure, Failure)
        assert outcome.failure.kind == "judge_failed"
    finally:
        await placement.stop()
    assert not path.exists()
    assert ENDPOINTS_VARIABLE not in os.environ


def test_a_judge_of_another_revision_and_the_policy_itself_are_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    judge = ModelHandle(path=tiny_model_dir, digest=DIGEST)

    def check(policy: str, **settings: str) -> None:
        run = run_of(tmp_path, **settings)
        check_judges(run, ModelHandle(path=tiny_model_dir, digest=policy), {"org/judge": judge})

    check("other")
    with pytest.raises(ConfigError, match=f"task.judge_revision=2026-11-01, and org/judge has .* {DIGEST}"):
        check("other", judge_revision="2026-11-01")
    with pytest.raises(ConfigError, match="org/judge has the digest of the policy"):
        check(DIGEST)


def test_a_role_is_asked_only_where_a_run_has_started_it(tmp_path: Path) -> None:
    judge = JudgeModel(run_of(tmp_path).task)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"task\.judge_url=role.* no server of org/judge"):
        judge.find()
