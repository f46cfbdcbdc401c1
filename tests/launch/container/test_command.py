from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.backends import open_backend
from strop.launch.build_request import make_plan
from strop.launch.container.command import Mount, fill_argv, parse_memory_bytes
from strop.launch.contract import JobPlan, JobRequest
from tests.fixtures.containers import write_sites
from tests.fixtures.jobs import make_request, project, saver

__all__ = ["project"]


def plan_of(request: JobRequest) -> JobPlan:
    return make_plan(request, open_backend(request.site))


def boxed(project: Path, *overrides: str, lines: tuple[str, ...] = (), **options: object) -> JobRequest:
    write_sites(project, "some/image:1", *lines)
    return make_request(project, [saver(1)], *overrides, site="box", **options)


def option(argv: tuple[str, ...], name: str) -> list[str]:
    return [argv[place + 1] for place, word in enumerate(argv) if word == name]


def test_process_one_is_the_supervisor_itself_and_no_shell(project: Path) -> None:
    plan = plan_of(boxed(project))
    # Rows 3 to 5 of the table of shapes lose signals: a shell, an init in front, a driver without handlers.
    assert option(plan.argv, "--entrypoint") == ["python"]
    place = plan.argv.index("{image}")
    assert plan.argv[place + 1 :] == (
        *("-m", "strop.launch.local.supervisor", "--job", f"{plan.home}/job"),
        *("--job-id", plan.details["container"]),
    )
    assert "--init=false" in plan.argv
    assert not {"bash", "sh", "-c"} & set(plan.argv)
    assert option(plan.argv, "--network") == ["none"]
    assert option(plan.argv, "--pull") == ["never"]


def test_no_value_of_a_variable_is_on_the_command_line(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMED", "named-value")
    monkeypatch.setenv("A_TOKEN", "canary")
    (project / ".env").write_text("FROM_FILE=file-value\n")
    lines = ('secrets = ["A_TOKEN"]', 'env = {FROM_SITE = "site-value"}')
    plan = plan_of(boxed(project, lines=lines, variables=("NAMED",)))
    assert {"NAMED", "FROM_FILE", "FROM_SITE"} < set(plan.environment.variables)
    for value in ("named-value", "file-value", "site-value", "canary", "A_TOKEN"):
        assert not [word for word in plan.argv if value in word]
    assert not {"--env", "-e", "--env-file"} & set(plan.argv)


def test_limits_are_those_that_were_asked_for(project: Path) -> None:
    lines = ("network = true", 'shm = "1G"')
    plan = plan_of(boxed(project, "job.cpus=3", 'job.memory="2G"', "job.grace_s=7.0", lines=lines))
    assert option(plan.argv, "--cpus") == ["3"]
    assert option(plan.argv, "--memory") == ["2147483648"]
    assert option(plan.argv, "--shm-size") == ["1073741824"]
    assert option(plan.argv, "--stop-timeout") == ["7"]
    assert option(plan.argv, "--network") == ["host"]
    assert "{devices}" not in plan.argv
    with_gpus = plan_of(boxed(project, "job.gpus=2", "job.cpus_per_gpu=4"))
    assert option(with_gpus.argv, "--cpus") == ["8"]
    assert "{devices}" in with_gpus.argv


def test_memory_is_read_as_slurm_reads_it() -> None:
    assert parse_memory_bytes("1K") == 1024
    assert parse_memory_bytes("3") == 3 * 1024 * 1024
    assert parse_memory_bytes("2T") == 2 * 1024**4
    for text in ("0", "2P", "", "-1G", "1.5G"):
        with pytest.raises(ConfigError, match="is no amount of memory"):
            parse_memory_bytes(text)


def test_several_nodes_are_no_container(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2 .*which is one machine"):
        plan_of(boxed(project, "job.nodes=2"))
    with pytest.raises(ConfigError, match=r"job\.cpu_nodes=1"):
        plan_of(boxed(project, "job.cpu_nodes=1", "job.cpu_command='sleep 1'"))


def test_folders_are_shown_by_fields_that_no_character_breaks(project: Path) -> None:
    path = '/data/a,b: "c" $HOME'
    name, value = Mount(source=path, target=path, is_read_only=True).to_words()
    assert name == "--mount"
    assert next(csv.reader([value])) == ["type=bind", f"src={path}", f"dst={path}", "readonly"]
    lines = ('mounts = ["/data:/inside:ro", "/scratch:/scratch"]', 'hf_home = "/models"')
    plan = plan_of(boxed(project, lines=lines))
    assert option(plan.argv, "--mount") == [
        f"type=bind,src={plan.home},dst={plan.home}",
        "type=bind,src=/data,dst=/inside,readonly",
        "type=bind,src=/scratch,dst=/scratch",
        "type=bind,src=/models,dst=/models",
    ]
    assert plan.details["mounts"][-1] == ["/models", "/models", False, True]
    for text in ("relative:/x", "/x", "/x:relative", "/x:/y:z"):
        with pytest.raises(ConfigError, match="of the site profile is not understood"):
            plan_of(boxed(project, lines=(f'mounts = ["{text}"]',)))


def test_the_project_is_shown_read_only_where_no_copy_of_it_is_sent(project: Path) -> None:
    plan = plan_of(boxed(project, has_snapshot=False))
    assert [str(project), str(project), True, False] in plan.details["mounts"]
    assert str(project) not in {mount[0] for mount in plan_of(boxed(project)).details["mounts"]}


def test_the_interpreter_is_the_images_own_unless_the_profile_names_one(project: Path) -> None:
    request = boxed(project)
    train = replace(request.roles[0], argv=(request.python, "-m", "strop.cli"))
    plan = plan_of(replace(request, roles=(train, request.roles[0])))
    assert plan.python == "python"
    assert plan.roles[0].argv[0] == "python"
    named = plan_of(boxed(project, lines=('python = "/opt/venv/bin/python"',)))
    assert option(named.argv, "--entrypoint") == ["/opt/venv/bin/python"]
    mounted = plan_of(boxed(project, lines=('environment = "mounted"',)))
    assert option(mounted.argv, "--entrypoint") == [request.python]


def test_what_only_the_host_knows_is_filled_in_and_missing_folders_are_left_out() -> None:
    argv = ["run", "{host}", "--mount", "a", "--mount", "b", "{devices}", "{image}", "x{image}"]
    places = {"{host}": ["--user", "1"], "{devices}": [], "{image}": ["id"]}
    assert fill_argv(argv, places, missing=["a"]) == ["run", "--user", "1", "--mount", "b", "id", "x{image}"]


def test_names_of_containers_are_allowed_ones_and_one_for_each_home(project: Path) -> None:
    names = set()
    for number, stem in enumerate(("a b", "UPPER", "--", "x" * 200, "a b", "\u00e4")):
        request = boxed(project)
        plan = plan_of(replace(request, home=f"/runs/{number}/{stem}"))
        name = str(plan.details["container"])
        assert len(name) <= 63
        assert name.startswith("strop-")
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
        names.add(name)
    assert len(names) == 6


def test_paths_of_the_run_file_that_are_elsewhere_are_kept_for_the_check(project: Path) -> None:
    plan = plan_of(boxed(project, 'model.uri="/models/tiny"', 'task.system_prompt="/no_think"'))
    assert "/models/tiny" in plan.details["paths"]
    # What a model is told may begin like a path.
    assert "/no_think" not in plan.details["paths"]
