from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.io.leftovers import partial_path_of
from strop.io.redaction import redact
from strop.launch.contract import JobEnvironment
from strop.launch.dotenv import parse_dotenv
from strop.launch.environment import (
    EnvironmentFlags,
    clean_inherited,
    describe_travelling,
    gather_environment,
    read_environment,
    write_environment,
)
from strop.launch.local.options import LocalSite
from strop.launch.options import Site
from strop.launch.secrets import read_secrets, remove_secrets
from strop.launch.slurm.options import SlurmSite

CANARY = "canary-7f3a,'\"$HOME `id`\nsecond line"
# What breaks exports, job scripts and command lines, each for its own reason.
HOSTILE = {
    "COMMA": "a,b",
    "QUOTES": 'it\'s "quoted"',
    "SPACES": "  two words ",
    "NEWLINE": "line 1\nline 2\n",
    "DOLLAR": "$HOME ${PATH} $(id) `id`",
    "BACKSLASH": "a\\nb\\",
    "EMPTY": "",
    "UNICODE": "gr\u00fc\u00df",
    "EQUALS": "a=b=c",
    "HASH": "a # b",
}


def site(**settings: Any) -> Site:
    return Site(name="desk", profile=LocalSite(**settings))


def gather(
    given: Site, project: Path | None = None, *, environ: dict[str, str] | None = None, **rest: Any
) -> tuple[JobEnvironment, tuple[str, ...]]:
    return gather_environment(given, project, environ=environ or {}, **rest)


def with_dotenv(path: Path, text: str) -> Path:
    (path / ".env").write_text(text, encoding="utf-8")
    return path


def test_later_layers_win_and_say_where_a_value_comes_from(tmp_path: Path) -> None:
    project = with_dotenv(tmp_path, "B=dotenv\nC=dotenv\nD=dotenv\nHF_HOME=/dotenv\n")
    extra = tmp_path / "extra.env"
    extra.write_text("D=file\n")
    environment, conflicts = gather(
        site(env={"A": "site", "B": "site", "C": "site", "D": "site"}),
        project,
        names=["C", "D"],
        env_file=extra,
        flags=EnvironmentFlags(hf_cache_dir="/flag", hf_hub_offline=False),
        environ={"C": "mine", "D": "mine", "UNNAMED": "stays here"},
    )
    assert environment.variables == {
        "A": "site",
        "B": "dotenv",
        "C": "mine",
        "D": "file",
        "HF_HOME": "/flag",
        "HF_HUB_OFFLINE": "0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
    }
    assert environment.sources["A"] == "site profile"
    assert environment.sources["B"] == ".env"
    assert environment.sources["C"] == "environment of the submitter"
    assert environment.sources["D"] == environment.sources["HF_HOME"] == "flag"
    assert environment.sources["PYTHONUNBUFFERED"] == "launcher"
    # Overriding is what the upper layers are for; a flag that beats a value elsewhere is said.
    assert conflicts == (
        "conflict: D: using 'file' (--env-file), ignoring 'mine' (your environment)",
        "conflict: HF_HOME: using '/flag' (a flag), ignoring '/dotenv' (.env)",
    )


def test_equal_values_are_no_conflict(tmp_path: Path) -> None:
    project = with_dotenv(tmp_path, "HF_HOME=/cache\n")
    _, conflicts = gather(site(), project, flags=EnvironmentFlags(hf_cache_dir="/cache"))
    assert conflicts == ()


def test_an_owned_variable_is_refused_by_name_and_reported_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env of site 'desk' set MASTER_ADDR, which the launcher sets"):
        gather(site(env={"MASTER_ADDR": "here"}))
    with pytest.raises(ConfigError, match="variables named for the job set CUDA_VISIBLE_DEVICES"):
        gather(site(), names=["CUDA_VISIBLE_DEVICES"], environ={"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(ConfigError, match="secrets of site 'desk' set RANK"):
        gather(site(secrets=("RANK",)), environ={"RANK": "0"})
    project = with_dotenv(tmp_path, "CUDA_VISIBLE_DEVICES=3\nSLURM_JOB_ID=1\n")
    environment, conflicts = gather(site(), project)
    assert not {"CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"} & set(environment.variables)
    assert conflicts == (
        "conflict: CUDA_VISIBLE_DEVICES: the launcher sets it, ignoring the value from .env",
        "conflict: SLURM_JOB_ID: the launcher sets it, ignoring the value from .env",
    )


def test_the_model_cache_is_the_submitters_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    mine = {"HF_HOME": "/mine"}
    assert gather(site(), environ=mine)[0].variables["HF_HOME"] == "/mine"
    assert gather(site(hf_home="/site"), environ=mine)[0].variables["HF_HOME"] == "/site"
    project = with_dotenv(tmp_path, "HF_HOME=/dotenv")
    assert gather(site(), project, environ=mine)[0].variables["HF_HOME"] == "/dotenv"
    assert "HF_HOME" not in gather(site())[0].variables


def test_settings_of_a_profile_become_variables() -> None:
    variables = gather(site(offline=True, store="s3://bucket/root"))[0].variables
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["STROP_STORE_URI"] == "s3://bucket/root"


def test_only_names_that_are_set_can_be_named() -> None:
    with pytest.raises(ConfigError, match="ABSENT is named for the job, and it is not set"):
        gather(site(), names=["ABSENT"])
    with pytest.raises(ConfigError, match="'A' is not the name of a variable") as caught:
        gather(site(), names=["A=hunter2"], environ={"A": "x"})
    assert "hunter2" not in str(caught.value)


def test_hostile_values_arrive_as_they_are(tmp_path: Path) -> None:
    environment, _ = gather(site(), names=list(HOSTILE), environ=HOSTILE)
    write_environment(tmp_path, environment, HOSTILE)
    found = read_environment(tmp_path, "trainer")
    assert {name: found[name] for name in HOSTILE} == HOSTILE
    script = f"import os, json; print(json.dumps({{name: os.environ[name] for name in {list(HOSTILE)!r}}}))"
    shown = subprocess.run(
        ["python3", "-c", script], env={**os.environ, **found}, capture_output=True, check=True
    )
    assert json.loads(shown.stdout) == HOSTILE


def test_a_secret_is_in_its_private_file_alone(tmp_path: Path) -> None:
    environment, conflicts = gather(site(secrets=("JUDGE_KEY",)), environ={"JUDGE_KEY": CANARY})
    assert CANARY not in repr(environment)
    assert not conflicts
    assert environment.secrets == ("JUDGE_KEY",)
    write_environment(tmp_path, environment, {"JUDGE_KEY": CANARY})
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"env.json": 0o600, "secrets.json": 0o600}
    assert json.dumps(CANARY)[1:-1] not in (tmp_path / "env.json").read_text()
    assert read_environment(tmp_path, "trainer")["JUDGE_KEY"] == CANARY
    assert read_secrets(tmp_path) == {"JUDGE_KEY": CANARY}
    remove_secrets(tmp_path)
    remove_secrets(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["env.json"]
    assert read_secrets(tmp_path) == {}


def test_leftovers_of_a_killed_writer_are_removed_with_the_secrets(tmp_path: Path) -> None:
    partial_path_of(tmp_path / "secrets.json").write_text("half")
    remove_secrets(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_role_gets_the_secrets_that_are_meant_for_it(tmp_path: Path) -> None:
    environ = {"JUDGE_KEY": "for the judge", "STORE_TOKEN": "for all"}
    environment, _ = gather(site(secrets=("JUDGE_KEY:trainer, judge", "STORE_TOKEN")), environ=environ)
    write_environment(tmp_path, environment, environ)
    assert read_environment(tmp_path, "judge")["JUDGE_KEY"] == "for the judge"
    engine = read_environment(tmp_path, "engine")
    assert "JUDGE_KEY" not in engine
    assert engine["STORE_TOKEN"] == "for all"


def test_a_role_without_its_secret_is_refused(tmp_path: Path) -> None:
    environment, _ = gather(site(secrets=("JUDGE_KEY:judge",)), environ={"JUDGE_KEY": "x"})
    write_environment(tmp_path, environment, {"JUDGE_KEY": "x"})
    remove_secrets(tmp_path)
    with pytest.raises(CheckRefused, match="role 'judge' lacks JUDGE_KEY"):
        read_environment(tmp_path, "judge")
    assert "JUDGE_KEY" not in read_environment(tmp_path, "engine")


def test_a_secret_without_a_value_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for environ in ({}, {"JUDGE_KEY": ""}):
        with pytest.raises(ConfigError, match="JUDGE_KEY is a secret of the job, and it is not set"):
            gather(site(secrets=("JUDGE_KEY",)), environ=environ)
    environment, _ = gather(site(secrets=("JUDGE_KEY",)), environ={"JUDGE_KEY": "x"})
    with pytest.raises(ConfigError, match=r"JUDGE_KEY is a secret of the job \(from: environment of"):
        write_environment(tmp_path, environment, {})
    assert list(tmp_path.iterdir()) == []


def test_what_looks_like_a_credential_is_a_secret_wherever_it_stands(tmp_path: Path) -> None:
    project = with_dotenv(tmp_path, "WANDB_API_KEY=abc123\nPLAIN=1\nEMPTY_TOKEN=\n")
    extra = tmp_path / "extra.env"
    extra.write_text("FILE_PASSWORD=def456\nODD=hf_abcdefghijklmnopqrst\n")
    environ = {"MY_TOKEN": "ghi789", "WANDB_API_KEY": "not this one: nobody named it"}
    environment, _ = gather(site(), project, names=["MY_TOKEN"], env_file=extra, environ=environ)
    assert environment.secrets == ("FILE_PASSWORD", "MY_TOKEN", "ODD", "WANDB_API_KEY")
    assert environment.variables["PLAIN"] == "1"
    assert environment.variables["EMPTY_TOKEN"] == ""
    job = tmp_path / "job"
    job.mkdir()
    write_environment(job, environment, environ, project_path=project, env_file=extra)
    found = read_environment(job, "trainer")
    assert found["WANDB_API_KEY"] == "abc123"
    assert found["FILE_PASSWORD"] == "def456"
    assert found["MY_TOKEN"] == "ghi789"
    assert found["ODD"] == "hf_abcdefghijklmnopqrst"


def test_a_conflict_of_secrets_shows_no_value(tmp_path: Path) -> None:
    project = with_dotenv(tmp_path, "A_TOKEN=one-value\n")
    extra = tmp_path / "extra.env"
    extra.write_text("A_TOKEN=other-value\n")
    _, conflicts = gather(site(), project, env_file=extra)
    assert conflicts == ("conflict: A_TOKEN: using <redacted> (--env-file), ignoring <redacted> (.env)",)


def test_a_credential_in_a_profile_is_refused_without_showing_it() -> None:
    for name, value in (("WANDB_API_KEY", "abc"), ("ODD", "hf_abcdefghijklmnopqrst")):
        with pytest.raises(
            ConfigError, match=f"{name} in env of site 'desk' looks like a credential"
        ) as caught:
            gather(site(env={name: value}))
        assert value not in str(caught.value)
    with pytest.raises(ConfigError, match="'NO NAME' in env of site 'desk' is not the name of a variable"):
        gather(site(env={"NO NAME": "x"}))
    with pytest.raises(ConfigError, match="'A' in the site's secrets is not the name") as caught:
        gather(site(secrets=("A=hunter2",)))
    assert "hunter2" not in str(caught.value)


def login(home: Path, token: str = "hf_login") -> dict[str, str]:
    (home / ".cache/huggingface").mkdir(parents=True)
    (home / ".cache/huggingface/token").write_text(token + "\n")
    return {"HOME": str(home)}


def test_auto_auth_takes_the_local_login_and_says_so(tmp_path: Path) -> None:
    environ = login(tmp_path)
    environment, _ = gather(site(), flags=EnvironmentFlags(auto_auth=True), environ=environ)
    assert environment.secrets == ("HF_TOKEN",)
    said = describe_travelling(environment)
    assert "HF_TOKEN: taken from the login of the model hub on this machine, for this job only" in said
    job = tmp_path / "job"
    job.mkdir()
    write_environment(job, environment, environ)
    assert read_environment(job, "trainer")["HF_TOKEN"] == "hf_login"


def test_auto_auth_leaves_a_token_that_is_set(tmp_path: Path) -> None:
    environ = {**login(tmp_path), "HF_TOKEN": "my own"}
    environment, _ = gather(site(), flags=EnvironmentFlags(auto_auth=True), environ=environ)
    write_environment(tmp_path, environment, environ)
    assert read_environment(tmp_path, "trainer")["HF_TOKEN"] == "my own"


def test_without_auto_auth_no_login_is_read(tmp_path: Path) -> None:
    environment, _ = gather(site(), environ=login(tmp_path))
    assert environment.secrets == ()
    with pytest.raises(ConfigError, match=r"HF_TOKEN is .* not set.*--auto-auth"):
        gather(site(secrets=("HF_TOKEN",)), environ={"HOME": str(tmp_path)})


def test_auto_auth_without_a_login_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN is a secret of the job, and it is not set"):
        gather(site(), flags=EnvironmentFlags(auto_auth=True), environ={"HOME": str(tmp_path)})


def test_what_another_job_left_in_the_shell_is_not_inherited() -> None:
    inherited = {
        "SLURM_JOB_ID": "1",
        "MASTER_PORT": "2",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "STROP_ATTEMPT": "1-0",
        "PMI_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "MY_KEY": "secret",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "STROP_LEASE": "the-outer-one",
        "STROP_NODE": "1",
        "RANKING": "mine",
        "LC_ALL": "C",
        "HF_TOKEN": "secret",
    }
    assert clean_inherited(inherited, secrets=["MY_KEY"]) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "LC_ALL": "C",
    }


def test_a_directory_that_submit_did_not_fill(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"env\.json is missing"):
        read_environment(tmp_path, "trainer")
    (tmp_path / "env.json").write_text('{"variables": {"A": "hunter2')
    with pytest.raises(StoreError, match=r"env\.json cannot be read") as caught:
        read_environment(tmp_path, "trainer")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreError, match=r"env\.json could not be written .*No such file or directory"):
        write_environment(tmp_path / "absent", JobEnvironment(), {})
    (tmp_path / "secrets.json").mkdir()
    with pytest.raises(StoreError, match=r"secrets\.json cannot be removed"):
        remove_secrets(tmp_path)


def test_the_model_cache_of_this_machine_is_no_business_of_a_cloud() -> None:
    from strop.launch.sagemaker.options import SageMakerSite

    cloud = Site(name="cloud", profile=SageMakerSite())
    assert "HF_HOME" not in gather(cloud, environ={"HF_HOME": "/mine"})[0].variables
    cluster = Site(name="cluster", profile=SlurmSite())
    assert gather(cluster, environ={"HF_HOME": "/mine"})[0].variables["HF_HOME"] == "/mine"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=plain", "plain"),
        ("export A=plain", "plain"),
        ("  A = plain words  # comment", "plain words"),
        ("A=a#b", "a#b"),
        ("A=#only a comment", ""),
        ("A=", ""),
        ("A='it is $HOME \\n # \"x\"' # comment", 'it is $HOME \\n # "x"'),
        ('A="a\\nb\\t\\"\\$x\\`\\\\ \\d # it\'s"', "a\nb\t\"$x`\\ \\d # it's"),
        ("A='line 1\nline 2'\nB=1", "line 1\nline 2"),
        ("A=first\r\nA=last\r\n", "last"),
        ("\ufeffA=1", "1"),
        ("A=costs 5$", "costs 5$"),
        ("A=a,b;c&d|e", "a,b;c&d|e"),
        ("# only\n\n   \nA=x=y", "x=y"),
    ],
)
def test_dotenv_reads(text: str, value: str) -> None:
    assert parse_dotenv(text)["A"] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("B=1\nA=$HOME/x", r"\.env line 2: A has \$, a quote or a backslash"),
        ("A=`id`", r"line 1: A has \$"),
        ("A=$(id)", r"line 1: A has \$"),
        ('A="${HOME}"', r"line 1: A has a variable or a command in double quotes"),
        ('A=x"y"', r"line 1: A has \$, a quote"),
        ("A=C:\\x", r"line 1: A has \$, a quote or a backslash"),
        ("A='x' y", r"line 1: A goes on behind its closing quote"),
        ("A='x", r"line 1: A has a quote that nothing closes"),
        ('A="x', r"line 1: A has a quote that nothing closes"),
        ("A='\0'", r"line 1: A has a NUL character"),
        ("A='a\nb'\nset -a", r"\.env line 3 is no assignment"),
        ("export A", r"\.env line 1 is no assignment"),
        ("1A=x", r"\.env line 1 is no assignment"),
    ],
)
def test_dotenv_refuses_what_has_two_meanings(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_dotenv(text)


def test_dotenv_agrees_with_a_shell_where_it_does_not_refuse(tmp_path: Path) -> None:
    text = "A=a,b\nexport B='x $HOME \"y\"'\nC=\"q \\$x \\` \\\\ \\\" '\" # c\nD=\nE='1\n2'\n"
    path = tmp_path / ".env"
    path.write_text(text)
    shell = subprocess.run(
        ["bash", "-c", 'set -a; . "$0"; exec env -0', str(path)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
        text=True,
    )
    sourced = dict(line.split("=", 1) for line in shell.stdout.split("\0") if line)
    parsed = parse_dotenv(text)
    assert parsed == {name: sourced[name] for name in "ABCDE"}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.env cannot be read: No such file"):
        gather(site(), env_file=tmp_path / "absent.env")
    (tmp_path / "latin.env").write_bytes(b"A=\xe4")
    with pytest.raises(ConfigError, match=r"latin\.env cannot be read: it is not UTF-8"):
        gather(site(), env_file=tmp_path / "latin.env")


def test_redaction_finds_a_value_however_it_is_written() -> None:
    text = f"raw {CANARY} json {json.dumps(CANARY)} repr {CANARY!r} log:\nsecond line\n"
    cleaned = redact(text, [CANARY])
    assert "canary-7f3a" not in cleaned
    assert "second line" not in cleaned
    assert cleaned.startswith("raw <redacted> json ")
    # A longer value goes first, so that the rest of it does not stay.
    assert redact("secret-long secret", ["secret", "secret-long"]) == "<redacted> <redacted>"
    assert redact("a=1", ["1", ""]) == "a=1"
    assert redact("https://x/?k=a%2Fb%20c", ["a/b c"]) == "https://x/?k=<redacted>"
