"""Who serves sandboxes to a run: what fits together, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.spec import load_spec, spec_digest

RUN = 'name = "run"\n[task]\nname = "arithmetic"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["runtime.url=http://h:1"], "an address and the file of its key belong together"),
        (["runtime.key_file=k"], "an address and the file of its key belong together"),
        (["runtime.url=http://h:1", "runtime.key_file=k", "runtime.serve=here"], "two services are named"),
        (["runtime.url=http://h:1/path", "runtime.key_file=k"], "runtime.url='http://h:1/path'"),
        (["runtime.backend=podman"], "no service comes with the run"),
        (["runtime.serve=cpu-nodes"], "nodes and what runs on them belong together"),
        (["runtime.serve=everywhere"], "'none', 'here', 'cpu-nodes'"),
    ],
)
def test_what_cannot_be_is_refused(run_file: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(run_file, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "task",
    [
        'name = "mbpp"\nsandbox = "ray"',
        'name = "mixture"\n[task.parts.code]\nname = "mbpp"\nsandbox = "ray"',
    ],
)
def test_sandboxes_on_any_node_need_ray(task: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "run"\n[task]\n{task}\n')
    layout = load_spec(path).spec.layout
    assert (layout.kind, len(layout.nodes)) == ("ray", 1)
    with pytest.raises(ConfigError) as caught:
        load_spec(path, ["placement.kind=inline"])
    assert "task.sandbox='ray'" in str(caught.value)
    # Nodes without GPUs join its Ray, and have no role of the run.
    layout = load_spec(path, ["job.cpu_nodes=2"]).spec.layout
    assert [node.is_cpu for node in layout.nodes] == [False, True, True]
    assert {slot.node for slot in layout.slots} == {0}
    assert len(load_spec(path, ["job.cpu_nodes=2", "job.cpu_command=serve"]).spec.layout.nodes) == 1


def test_where_sandboxes_come_from_does_not_make_another_run(run_file: Path) -> None:
    plain = load_spec(run_file).spec
    served = load_spec(run_file, ["runtime.serve=here", "runtime.backend=bubblewrap"]).spec
    assert spec_digest(plain) == spec_digest(served)
