from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.launch.container.engine import Engine
from strop.launch.container.image import (
    BuiltImage,
    Variant,
    build_image,
    environment_mounts,
    find_image,
    image_python,
    list_images,
    plan_image,
    render_containerfile,
)
from strop.launch.container.layers import (
    Layer,
    make_base,
    packages_layer,
    read_suite,
    required_packages,
    strop_layer,
    write_layer,
)
from tests.launch.conftest import PACKAGES, build, with_packages


def test_the_small_image_has_what_an_agent_needs_and_no_torch() -> None:
    plan = plan_image(Variant.AGENT)
    targets = [target for layer in plan.layers for _, target in layer.files]
    assert any(target.endswith("/pydantic/__init__.py") for target in targets)
    assert any(target.endswith("/strop/launch/node/agent.py") for target in targets)
    assert any(target.endswith("/Containerfile.j2") for target in targets)
    assert not [target for target in targets if "/torch/" in target]
    full = {entry.metadata["Name"] for entry in required_packages()}
    assert {"torch", "transformers"} <= full
    assert not {"pytest", "mypy", "strop"} & full


def test_the_tag_is_the_content(tmp_path: Path) -> None:
    assert plan_image(Variant.AGENT).tag == plan_image(Variant.AGENT).tag
    tags = {plan_image(variant).tag for variant in Variant}
    tags |= {plan_image(Variant.AGENT, base_image="python:3.11-slim").tag}
    (tmp_path / "strop-0.1.0-py3-none-any.whl").write_bytes(b"one")
    tags |= {plan_image(wheels=tmp_path).tag}
    (tmp_path / "strop-0.1.0-py3-none-any.whl").write_bytes(b"two")
    tags |= {plan_image(wheels=tmp_path).tag}
    assert len(tags) == 6
    assert all(len(tag) == 16 for tag in tags)


def test_a_base_made_here_needs_no_network_and_no_command() -> None:
    text = render_containerfile(plan_image(Variant.AGENT))
    lines = text.splitlines()
    assert lines[0] == "FROM scratch"
    assert next(line for line in lines if line.startswith("ADD")) == "ADD base.tar /"
    assert "RUN" not in text
    assert "ARG" not in text
    assert lines[-1] == 'ENTRYPOINT ["python", "-m", "strop.launch.node"]'
    assert f'ENV PATH="{Path(sys.prefix) / "bin"}:' in text


def test_a_public_base_gets_the_same_versions_of_packages() -> None:
    plan = plan_image(base_image="python:3.11-slim")
    text = render_containerfile(plan)
    assert text.startswith("FROM python:3.11-slim\n")
    assert "ADD" not in text
    pinned = {word.partition("==")[0]: word.partition("==")[2] for word in plan.requirements}
    assert pinned["torch"] == "2.13.0"
    assert not [version for version in pinned.values() if "+" in version]
    assert 'ENV PYTHONPATH="/opt/strop/src"' in text
    assert image_python(plan) == "python"


def test_wheels_are_installed_from_their_folder_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 0 wheels and none of strop"):
        plan_image(wheels=tmp_path)
    (tmp_path / "strop-0.1.0-py3-none-any.whl").write_bytes(b"x")
    plan = plan_image(wheels=tmp_path)
    assert {"python3", "python3-venv"} < set(plan.packages)
    assert '"--no-index", "--find-links", "/opt/strop/wheels", "strop"' in render_containerfile(plan)
    assert image_python(plan) == "/opt/strop/venv/bin/python"


def test_sec_5_values_of_a_containerfile_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", '/odd "$HOME\\')
    assert 'ENV PATH="/odd \\"\\$HOME\\\\/bin:' in render_containerfile(plan_image(Variant.BASE))


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(CheckRefused, match="package 'no-such-package' is not installed"):
        packages_layer(["no-such-package"])


def test_layers_are_readable_for_all_and_owned_by_nobody_in_particular(tmp_path: Path) -> None:
    (tmp_path / "secretive").write_text("x")
    (tmp_path / "secretive").chmod(0o600)
    (tmp_path / "program").write_text("x")
    (tmp_path / "program").chmod(0o700)
    files = (
        (tmp_path / "secretive", str(Path("/root", "a", "file"))),
        (tmp_path / "program", "/opt/b/program"),
    )
    write_layer(Layer(name="x", files=files, key=""), tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as archive:
        found = {entry.name: (oct(entry.mode), entry.uid) for entry in archive}
    # Of the system's own folders (/opt) no rights are changed; root's home can be passed, not read.
    assert found == {
        "root": ("0o711", 0),
        "root/a": ("0o755", 0),
        "root/a/file": ("0o644", 0),
        "opt/b": ("0o755", 0),
        "opt/b/program": ("0o755", 0),
    }


def test_strop_goes_where_an_installed_one_would_be() -> None:
    layer = strop_layer()
    assert all("/site-packages/strop/" in target for _, target in layer.files)
    assert not [source for source, _ in layer.files if source.suffix == ".pyc"]
    assert layer.key == strop_layer().key


def test_the_environment_of_this_machine_is_shown_by_its_own_paths() -> None:
    shown = environment_mounts()
    assert any(Path(sys.executable).is_relative_to(folder) for folder in shown)
    import strop

    assert any(Path(strop.__file__).is_relative_to(folder) for folder in shown)
    assert "/" not in shown


def test_the_release_of_debian_is_this_machines(tmp_path: Path) -> None:
    release = tmp_path / "os-release"
    assert read_suite(release) == "bookworm"
    release.write_text('ID=debian\nVERSION_CODENAME="trixie"\n')
    assert read_suite(release) == "trixie"
    release.write_text("ID=other\nVERSION_CODENAME=noble\n")
    assert read_suite(release) == "bookworm"


def test_without_mmdebstrap_or_a_mirror_no_base_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(CheckRefused, match="mmdebstrap is not installed"):
        make_base(tmp_path / "images", "bookworm", ["python3"])
    (programs / "mmdebstrap").write_text('#!/bin/sh\necho "E: cannot resolve the mirror" >&2\nexit 1\n')
    (programs / "mmdebstrap").chmod(0o755)
    with pytest.raises(CheckRefused, match=r"mmdebstrap made no bookworm \(E: cannot resolve the mirror\)"):
        make_base(tmp_path / "images", "bookworm", ["python3"])
    assert [path.name for path in (tmp_path / "images").iterdir()] == [".lock"]


@pytest.mark.slow
def test_the_small_image_builds_offline_in_a_minute_and_is_built_once(
    engine: Engine, agent_image: BuiltImage, tmp_path: Path
) -> None:
    plan = plan_image(Variant.AGENT)
    assert agent_image.name == plan.name
    assert agent_image.name in list_images(engine)
    again = build_image(engine, plan, cache_dir=tmp_path)
    assert again.wall_s == 0.0
    assert list(tmp_path.iterdir()) == []
    assert find_image(engine, "localhost/absent:1") is None
    program = (
        "import strop.launch.local.supervisor, strop.launch.node.agent, ssl, sqlite3, pyarrow; print('ok')"
    )
    done = engine.ask(
        *("run", "--rm", "--network", "none", "--entrypoint", "python", agent_image.name, "-c", program),
        limit_s=180.0,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    # The agent is the entry, in exec form: its own words, without a shell.
    helped = engine.ask("run", "--rm", "--network", "none", agent_image.name, "--help", limit_s=180.0)
    assert "usage: strop.launch.node" in helped.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("STROP_CI") != "1", reason="makes an environment; in CI only")
def test_an_environment_is_installed_from_wheels_alone(engine: Engine, tmp_path: Path, debian: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels / "strop-0.1.0-py3-none-any.whl")
    plan = plan_image(Variant.AGENT, wheels=wheels)
    assert set(plan.packages) < set(PACKAGES)
    built = build(engine, with_packages(plan), debian)
    program = "import sys, strop; print(sys.prefix, strop.WORD)"
    words = ("run", "--rm", "--network", "none", "--entrypoint", "python", built.name, "-c", program)
    assert engine.ask(*words, limit_s=180.0).stdout == "/opt/strop/venv from a wheel\n"


def write_wheel(path: Path) -> None:
    """Write the smallest package of this name that pip installs."""
    name = "strop-0.1.0.dist-info"
    files = {
        "strop/__init__.py": "WORD = 'from a wheel'\n",
        f"{name}/METADATA": "Metadata-Version: 2.1\nName: strop\nVersion: 0.1.0\n",
        f"{name}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{name}/RECORD"] = "".join(f"{entry},,\n" for entry in [*files, f"{name}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for entry, text in files.items():
            archive.writestr(entry, text)


@pytest.mark.slow
def test_a_build_that_fails_says_why(engine: Engine, tmp_path: Path) -> None:
    plan = plan_image(Variant.AGENT, base_image="localhost/absent:1")
    with pytest.raises(CheckRefused, match=r"podman did not build localhost/strop:.*localhost/absent"):
        build_image(engine, plan, cache_dir=tmp_path)
    assert not list((tmp_path / "images").iterdir())
