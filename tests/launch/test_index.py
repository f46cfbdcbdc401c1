"""Finding jobs again: by folder, id, name or a prefix, from anywhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import ConfigError, StoreError
from strop.launch.contract import JobRef
from strop.launch.index import find_job_dir, index_path, list_job_dirs, note_job
from strop.launch.job_dir import job_path_of, write_ref
from tests.fixtures.scripted_jobs import World


@pytest.fixture
def three(world: World) -> list[JobRef]:
    """Three jobs, oldest first: two of one name, and one of another."""
    refs = [
        world.launcher.submit(world.request(now=1_790_000_000.0 + second), is_new=True).ref
        for second in (0, 60)
    ]
    refs.append(world.launcher.submit(world.request("name=other")).ref)
    for age, ref in enumerate(reversed(refs)):
        at = 1_800_000_000 - age
        os.utime(job_path_of(ref.home) / "plan.json", (at, at))
    return refs


def found(world: World, reference: str, *roots: Path) -> str:
    return str(find_job_dir(reference, list(roots), world.environ))


def test_a_job_is_found_by_whatever_names_it(world: World, three: list[JobRef]) -> None:
    first, second, other = three
    assert found(world, first.home) == first.home
    assert found(world, first.job_id) == first.home
    assert found(world, Path(first.home).name) == first.home
    # A name is the newest job of that name; a beginning has to be of one job alone.
    assert found(world, "run") == second.home
    assert found(world, "oth") == other.home
    # In a folder that is named, there alone, and without the list.
    index_path(world.environ).unlink()
    assert found(world, f"{world.runs}/oth") == other.home
    with pytest.raises(ConfigError, match="/absent/oth' names no job"):
        found(world, f"{world.runs}/absent/oth")


def test_a_job_is_found_by_the_names_of_its_trials_and_by_those_it_had(world: World) -> None:
    old = world.submit()
    trials = [{"name": "job-20261121-120000-000"}, {"name": "job-20261121-120000-001"}]
    new = replace(old, job_id="job-20261121-120000-000", details={"jobs": trials})
    write_ref(new)
    note_job(new, world.environ)
    for reference in (old.job_id, "job-20261121-120000-001", "job-20261121", "fake"):
        assert found(world, reference) == old.home
    # A number is one job's, and no beginning: another job may have been cancelled by it.
    note_job(replace(new, job_id="1234", details={}), world.environ)
    assert found(world, "1234") == old.home
    with pytest.raises(ConfigError, match="'12' names no job"):
        found(world, "12")


def test_jobs_are_found_from_any_folder_and_without_the_list(
    world: World, three: list[JobRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert [str(path) for path in list_job_dirs([], world.environ)] == [ref.home for ref in reversed(three)]
    index_path(world.environ).unlink()
    assert list_job_dirs([], world.environ) == []
    assert len(list_job_dirs([world.runs], world.environ)) == 3


@pytest.mark.parametrize(
    ("reference", "words"), [("ru", "'ru' names 2 jobs"), ("nope", "no job"), ("", "no job")]
)
def test_what_names_none_or_several_is_refused_with_what_there_is(
    world: World, three: list[JobRef], reference: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        found(world, reference)
    assert words in str(caught.value)
    assert Path(three[1].home).name in str(caught.value)
    assert "`strop ls`" in str(caught.value)


def test_without_any_job_that_is_said(world: World) -> None:
    with pytest.raises(ConfigError) as caught:
        found(world, "run")
    assert "there is none yet" in str(caught.value)


def test_a_directory_that_has_gone_and_a_cut_line_are_passed_over(world: World, three: list[JobRef]) -> None:
    job_path = job_path_of(three[2].home)
    job_path.rename(job_path.with_name("moved"))
    with index_path(world.environ).open("ab") as file:
        file.write(b'{"name": "cut\n[1]\n\xff\xfe\n7\n{"home": 3}\n')
    assert {str(path) for path in list_job_dirs([], world.environ)} == {three[0].home, three[1].home}


@pytest.mark.parametrize("name", ["plan.json", "ref.json"])
def test_a_damaged_directory_hides_no_other_one(world: World, three: list[JobRef], name: str) -> None:
    (job_path_of(three[0].home) / name).write_text("{")
    assert found(world, three[1].job_id) == three[1].home
    # By its folder's name it is still found, and then says what is damaged.
    assert found(world, Path(three[0].home).name) == three[0].home


def test_a_list_that_cannot_be_read_or_written_is_said(world: World) -> None:
    path = index_path(world.environ)
    path.mkdir(parents=True)
    with pytest.raises(StoreError) as caught:
        list_job_dirs([], world.environ)
    assert "the list of your jobs, cannot be read" in str(caught.value)
    ref = JobRef(name="a", site="s", backend="b", home="/h", job_id="1", plan_hash="p", submitted_at=0.0)
    with pytest.raises(StoreError) as caught:
        note_job(ref, world.environ)
    assert "could not be written" in str(caught.value)


def test_the_list_is_below_the_users_state(tmp_path: Path) -> None:
    assert index_path({"HOME": "/h"}) == Path("/h/.local/state/strop/jobs.jsonl")
    assert index_path({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/strop/jobs.jsonl")


def test_a_folder_that_cannot_be_listed_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StoreError) as caught:
        list_job_dirs([world.runs], world.environ)
    assert f"{world.runs} cannot be listed (Permission denied)" in str(caught.value)
