"""Making a plan has no effects, needs no time and no luck, and reads nothing any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.jobs.home import plan_to_json
from strop.launch.jobs.planning import make_plan, tag_of
from tests.fixtures.scripted_jobs import World

# The request is read; from then on every touch of the world is refused: disk, network, clock, luck.
SEALED = """
import os, random, sys, time
from pathlib import Path
from strop.launch.jobs.fake import FakeBackend
from strop.launch.jobs.home import plan_to_json
from strop.launch.jobs.planning import make_plan
from strop.launch.local.backend import LocalBackend
from tests.fixtures.scripted_jobs import World

folder = Path(sys.argv[1])
world = World(folder=folder, backend=FakeBackend(folder / "scheduler"), environ={"HOME": "/"})
requests = [world.request(), world.request(sweep=("train.steps=2,3",))]
backends = [world.backend, LocalBackend()]
# Imports are no effects: the first plan brings what is imported late.
before = [plan_to_json(make_plan(one, backend)) for one in requests for backend in backends]

FORBIDDEN = ("open", "os.", "socket.", "subprocess.", "shutil.", "import")
def refuse(event, args):
    if event.startswith(FORBIDDEN):
        raise OSError(30, f"a plan does this: {event} {args}")
def no_luck(*args, **kwargs):
    raise OSError(30, "a plan asks the clock or for luck")
time.time = time.monotonic = time.perf_counter = random.random = os.urandom = os.getpid = no_luck
sys.addaudithook(refuse)
after = [plan_to_json(make_plan(one, backend)) for one in requests for backend in backends]
sys.stdout.write("equal" if before == after else "different")
"""


def test_a_plan_touches_nothing_and_is_the_same_every_time(world: World) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEALED, str(world.folder)],
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
