"""A sandbox service on a real cluster: as a job, and on the CPU part of a training job."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.io.endpoints import RUNTIME, Endpoint, read_endpoint
from strop.launch.contract import JobState
from strop.launch.job_dir import job_path_of, read_ref
from strop.record import RunDir
from strop.record.rollouts import read_rollouts
from strop.runtime.agent_server import OPENHANDS
from strop.store.python_environment import KEEP_BYTECODE
from tests.conftest import require_system_part
from tests.fixtures.own_code import ACCEPTED, OWN_TASK, write_own_code
from tests.fixtures.runtime_client import SERVER, RuntimeClient, processes_of, wait_for
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, slurm_log

pytestmark = pytest.mark.slow
SITE = """
[sites.cluster]
backend = "slurm"
python = "{python}"
gpus_per_node = 0
"""


@pytest.fixture
def site(login: LoginNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    monkeypatch.setenv("XDG_STATE_HOME", str(login.root / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(login.root)
    (login.root / "strop-sites.toml").write_text(SITE.format(python=login.python))
    return login


def test_a_service_on_two_nodes_serves_goes_on_without_one_and_leaves_nothing(
    site: LoginNode, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["runtime", "serve", "--on", "cluster", "--backend", "bubblewrap"]
    assert main([*words, "job.nodes=2", "job.cpus=1", "job.time_limit=15m"]) == 0, capsys.readouterr().err
    (home,) = (path for path in (site.root / "runs").iterdir() if path.is_dir())
    ref, folder = read_ref(job_path_of(home)), home / "runtime"
    site.wait_until(lambda: read_endpoint(folder, RUNTIME) or site.status(ref).state in ALL_ENDS)
    endpoint = read_endpoint(folder, RUNTIME)
    assert endpoint is not None, slurm_log(ref)
    with RuntimeClient(endpoint) as client:
        follow_the_page(endpoint, folder)
        use_and_lose_a_node(client)
    assert main(["cancel", str(home)]) == 0
    site.wait_for(ref, JobState.CANCELLED, JobState.SUCCEEDED)
    wait_for(lambda: processes_of(home), lambda found: not found)
    assert read_endpoint(folder, RUNTIME) is None


def follow_the_page(endpoint: Endpoint, folder: Path) -> None:
    """Run the program of docs/runtime.md as it stands there, with OpenHands' own client."""
    require_system_part("OpenHands' client (make openhands-deps)", OPENHANDS.is_ready())
    page = Path(__file__).parents[3] / "docs" / "runtime.md"
    code = page.read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    for word, value in (("http://HOST:PORT", endpoint.url), ("FOLDER", str(folder))):
        assert word in code
        code = code.replace(word, value)
    place = folder.parent / "client"
    place.mkdir()
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "no_proxy": "*", **KEEP_BYTECODE}
    words = [str(OPENHANDS.python), "-c", code]
    done = subprocess.run(words, cwd=place, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit_code=3" in done.stdout
    assert (place / "word").read_text() == "hello\n"


def use_and_lose_a_node(client: RuntimeClient) -> None:
    """Run commands on both nodes, kill one host, and find the others' sandboxes alive."""
    nodes = wait_for(client.nodes, lambda found: len(found) == 2)
    assert all(node["ends_in_s"] is not None and node["ends_in_s"] > 60.0 for node in nodes), nodes
    # A node is filled before the next: how many one holds is the machine's business.
    records: list[dict[str, Any]] = []
    while len({record["node"] for record in records}) < 2:
        name = f"s{len(records)}"
        assert client.start(name)["status"] == "starting"
        records.append(client.wait_ready(name))
        assert client.run(records[-1], "echo here; exit 3") == (3, "here\n")
    assert {record["node"] for record in records} == {node["node_id"] for node in nodes}

    # A node is lost: its sandboxes are, the others live.
    victim = next(node for node in nodes if node["node_id"] == records[0]["node"])
    lost = [record for record in records if record["node"] == victim["node_id"]]
    subprocess.run(["kill", "-9", str(victim["pid"])], check=True)
    for record in lost:
        ended = wait_for(
            partial(client.session, record["session_id"]), lambda found: found["status"] == "error"
        )
        assert (ended["failure_kind"], ended["pod_status"]) == ("infra_lost", "unknown")
    kept = next(record for record in records if record not in lost)
    assert client.run(kept, "true")[0] == 0


REWARD = """
import json
from urllib.request import ProxyHandler, Request, build_opener

from strop.io.endpoints import find_endpoint

_opener = build_opener(ProxyHandler({}))


def ask(url, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request(url, data, {"Content-Type": "application/json", **named})
    with _opener.open(request, timeout=60.0) as answer:
        return json.load(answer)


def score(reply):
    \"\"\"A fifth of the length's remainder, computed in a sandbox of the run's own service.\"\"\"
    endpoint = find_endpoint("runtime")
    key = {"X_API_Key": endpoint.key}
    body = {"image": "host", "command": 'SERVER', "session_id": "reward"}
    found = ask(endpoint.url + "/start", body, **key)
    while found["pod_status"] != "ready":
        assert found["status"] == "starting", found
        found = ask(endpoint.url + "/sessions/reward", **key)
    command = f"echo $(({sum(map(ord, reply))} % 5)) | tee -a /tmp/asked".encode()
    request = Request(found["url"] + "/run", command, {"X-Session-API-Key": found["session_api_key"]})
    with _opener.open(request, timeout=60.0) as answer:
        return int(answer.read()) / 4
""".replace("'SERVER'", repr(SERVER))


def test_a_training_job_brings_its_sandboxes_on_its_cpu_nodes(
    site: LoginNode, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_own_code(site.root, "runtime")
    (site.root / "reward.py").write_text(REWARD)
    (site.root / "run.toml").write_text(f'name = "served"\n{OWN_TASK}')
    words = ["submit", "run.toml", "--on", "cluster", ACCEPTED, f"model.uri={tiny_model_dir}"]
    words += ["runtime.serve=cpu-nodes", "runtime.backend=bubblewrap", "job.cpu_nodes=1", "job.max_requeue=0"]
    words += ["train.steps=1", "train.prompts_per_step=2", "train.group_size=2", "train.checkpoint_every=1"]
    words += ["eval.num_examples=1", "job.time_limit=15m", "--no-snapshot"]
    assert main(words) == 0, capsys.readouterr().err
    (home,) = (path for path in (site.root / "runs").iterdir() if path.is_dir())
    ref = read_ref(job_path_of(home))
    status = site.wait_for(ref, *ALL_ENDS, limit_s=300.0)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    rewards = {rollout.outcome.reward for rollout in read_rollouts(RunDir.open(home).rollouts_path(1))}
    assert rewards
    assert rewards <= {0.0, 0.25, 0.5, 0.75, 1.0}
    wait_for(lambda: processes_of(home), lambda found: not found)
