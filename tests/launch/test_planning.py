"""Making a plan has no effects, needs no time and no luck, and reads nothing any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.home import plan_to_json
from strop.launch.planning import make_plan, tag_of
from tests.fixtures.scripted_jobs import World

SITES = """
[sites.lab]
backend = "slurm"
partition = "gpu's $HOME"
[sites.box]
backend = "container"
image = "registry.example/strop:1"
[sites.cloud]
backend = "sagemaker"
region = "eu-central-1"
role = "arn:aws:iam::111122223333:role/training"
bucket = "strop-test"
image = "registry.example/strop:1"
[sites.desk]
backend = "local"
"""

# The request is read; from then on every touch of the world is refused: disk, network, clock, luck.
SEALED = """
import os, random, sys, time
from pathlib import Path
from strop.launch.backends import open_backend
from strop.testing.scripted_backend import FakeBackend
from strop.launch.home import plan_to_json
from strop.launch.planning import make_plan
from tests.fixtures.scripted_jobs import World

folder, site = Path(sys.argv[1]), sys.argv[2]
world = World(folder=folder, backend=FakeBackend(folder / "scheduler"), environ={"HOME": "/"})
known = site if site != "fake" else "desk"
MODEL = "model.uri=hf://org/model"
requests = [world.request(MODEL, site=known), world.request(MODEL, site=known, sweep=("train.steps=2,3",))]
backend = world.backend if site == "fake" else open_backend(requests[0].site)
# Imports are no effects: the first plan brings what is imported late.
before = [plan_to_json(make_plan(one, backend)) for one in requests]

FORBIDDEN = ("open", "os.", "socket.", "subprocess.", "shutil.", "import")
def refuse(event, args):
    if event.startswith(FORBIDDEN):
        raise OSError(30, f"a plan does this: {event} {args}")
def no_luck(*args, **kwargs):
    raise OSError(30, "a plan asks the clock or for luck")
time.time = time.monotonic = time.perf_counter = random.random = os.urandom = os.getpid = no_luck
sys.addaudithook(refuse)
after = [plan_to_json(make_plan(one, backend)) for one in requests]
sys.stdout.write("equal" if before == after else "different")
"""


@pytest.mark.parametrize("site", ["fake", "desk", "lab", "box", "cloud"])
def test_a_plan_touches_nothing_and_is_the_same_every_time(world: World, site: str) -> None:
    world.sites(SITES)
    done = subprocess.run(
        [sys.executable, "-c", SEALED, str(world.folder), site],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert (done.stdout, done.returncode) == ("equal", 0), done.stderr[-2000:]


def test_a_plan_makes_no_folder(world: World) -> None:
    before = sorted(world.folder.rglob("*"))
    plan = make_plan(world.request(), world.backend)
    assert sorted(world.folder.rglob("*")) == before
    assert tag_of(plan.plan_hash) == f"strop:{plan.plan_hash}"


def test_what_a_backend_cannot_do_is_refused_while_planning(world: World) -> None:
    world.sites("[sites.local]\ngpus_per_node = 2\n")
    with pytest.raises(ConfigError) as caught:
        make_plan(world.request("job.gpus=4"), world.backend)
    assert "nodes of local have 2" in str(caught.value)
    assert make_plan(world.request("job.gpus=2"), world.backend).resources.is_whole_node


def test_a_plan_holds_names_of_secrets_and_no_value(world: World) -> None:
    (world.project / ".env").write_text("MY_TOKEN=canary-value-1\nPLAIN=private-2\n")
    text = plan_to_json(make_plan(world.request(), world.backend))
    assert "MY_TOKEN" in text
    assert "canary-value-1" not in text
    assert "private-2" not in text


@pytest.mark.parametrize("escape", ["\\n", "\\t", "\\u001b", "\\u007f"])
def test_a_directory_with_a_control_character_is_refused(world: World, escape: str) -> None:
    world.sites(f'[sites.local]\nrun_root = "{world.runs}{escape}x"\n')
    with pytest.raises(ConfigError) as caught:
        make_plan(world.request(has_snapshot=False), world.backend)
    assert "holds a control character" in str(caught.value)
    assert str(caught.value).isprintable()


def test_odd_but_printable_directories_are_planned(world: World) -> None:
    odd = world.folder / 'it\'s $HOME "quoted" `x`; rm'
    plan = make_plan(world.request(f"output.root={odd}"), world.backend)
    assert plan.home == f"{odd}/run-20260921-141320"
