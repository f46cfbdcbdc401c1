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
from strop.launch.backends import BACKENDS
from strop.launch.contract import JobEnvironment
from strop.launch.dotenv import parse_dotenv
from strop.launch.environment import (
    clean_inherited,
    describe_travelling,
    gather_environment,
    read_environment,
    write_environment,
)
from strop.launch.local.options import LocalSite
from strop.launch.options import Site
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.secrets import read_secrets, remove_secrets
from strop.launch.sites import explain_site, find_site, list_site_names, site_files
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
        environ={"C": "mine", "D": "mine", "UNNAMED": "stays here"},
    )
    assert environment.variables == {
        "A": "site",
        "B": "dotenv",
        "C": "mine",
        "D": "file",
        "HF_HOME": "/dotenv",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
    }
    assert [environment.sources[name] for name in ("A", "B", "C", "D", "PYTHONUNBUFFERED")] == [
        *("site profile", ".env", "environment of the submitter", "flag", "launcher")
    ]
    # Overriding is what the upper layers are for; a file of one job that beats a value elsewhere is said.
    assert conflicts == ("conflict: D: using 'file' (--env-file), ignoring 'mine' (your environment)",)


@pytest.mark.parametrize(
    ("settings", "rest", "words"),
    [
        ({"env": {"MASTER_ADDR": "here"}}, {}, "env of site 'desk' set MASTER_ADDR"),
        ({}, {"names": ["RANK"], "environ": {"RANK": "0"}}, "named for the job set RANK"),
        ({"secrets": ("RANK",)}, {"environ": {"RANK": "0"}}, "secrets of site 'desk' set RANK"),
        ({}, {"names": ["ABSENT"]}, "ABSENT is named for the job"),
        ({}, {"names": ["A=hunter2"], "environ": {"A": "x"}}, "'A' is not the name of a variable"),
        ({"env": {"WANDB_API_KEY": "hunter2"}}, {}, "WANDB_API_KEY in env of site 'desk' looks like a cred"),
        ({"env": {"ODD": "hf_hunter2hunter2hunter2"}}, {}, "ODD in env of site 'desk' looks like"),
        ({"env": {"NO NAME": "x"}}, {}, "'NO NAME' in env of site 'desk' is not the name of a variable"),
        ({"secrets": ("A=hunter2",)}, {}, "'A' in the site's secrets is not the name"),
        ({"secrets": ("JUDGE_KEY",)}, {}, "JUDGE_KEY is a secret"),
        ({"secrets": ("JUDGE_KEY",)}, {"environ": {"JUDGE_KEY": ""}}, "JUDGE_KEY is a secret"),
        ({"secrets": ("HF_TOKEN",)}, {}, "HF_TOKEN is .*--auto-auth"),
        ({}, {"auto_auth": True, "environ": {"HOME": "/no"}}, "HF_TOKEN is a secret"),
        ({}, {"env_file": Path("/nowhere/absent.env")}, r"absent\.env cannot be read"),
    ],
)
def test_what_no_job_can_be_given_is_refused_without_its_value(
    settings: dict[str, Any], rest: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        gather(site(**settings), **rest)
    assert "hunter2" not in str(caught.value)


def test_an_owned_variable_from_a_file_is_left_out_and_reported(tmp_path: Path) -> None:
    project = with_dotenv(tmp_path, "CUDA_VISIBLE_DEVICES=3\nSLURM_JOB_ID=1\n")
    environment, conflicts = gather(site(), project)
    assert not {"CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"} & set(environment.variables)
    assert [one.split(": ")[1] for one in conflicts] == ["CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"]


def test_the_model_cache_is_the_submitters_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    mine = {"HF_HOME": "/mine"}
    assert gather(site(), environ=mine)[0].variables["HF_HOME"] == "/mine"
    assert gather(site(hf_home="/site"), environ=mine)[0].variables["HF_HOME"] == "/site"
    project = with_dotenv(tmp_path, "HF_HOME=/dotenv")
    assert gather(site(), project, environ=mine)[0].variables["HF_HOME"] == "/dotenv"
    assert "HF_HOME" not in gather(site())[0].variables
    # It is no business of a cloud.
    cloud, cluster = (Site(name="x", profile=profile) for profile in (SageMakerSite(), SlurmSite()))
    assert "HF_HOME" not in gather(cloud, environ=mine)[0].variables
    assert gather(cluster, environ=mine)[0].variables["HF_HOME"] == "/mine"


def test_settings_of_a_profile_become_variables() -> None:
    variables = gather(site(offline=True, store="s3://bucket/root"))[0].variables
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["STROP_STORE_URI"] == "s3://bucket/root"


def test_lau_4_hostile_values_arrive_as_they_are(tmp_path: Path) -> None:
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
    # With what a killed writer left of it.
    partial_path_of(tmp_path / "secrets.json").write_text("half")
    remove_secrets(tmp_path)
    remove_secrets(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["env.json"]
    assert read_secrets(tmp_path) == {}


def test_a_role_gets_the_secrets_that_are_meant_for_it(tmp_path: Path) -> None:
    environ = {"JUDGE_KEY": "for the judge", "STORE_TOKEN": "for all"}
    environment, _ = gather(site(secrets=("JUDGE_KEY:trainer, judge", "STORE_TOKEN")), environ=environ)
    write_environment(tmp_path, environment, environ)
    assert read_environment(tmp_path, "judge")["JUDGE_KEY"] == "for the judge"
    engine = read_environment(tmp_path, "engine")
    assert "JUDGE_KEY" not in engine
    assert engine["STORE_TOKEN"] == "for all"
    remove_secrets(tmp_path)
    with pytest.raises(CheckRefused, match="role 'judge' lacks JUDGE_KEY"):
        read_environment(tmp_path, "judge")


def test_what_looks_like_a_credential_is_a_secret_wherever_it_stands(tmp_path: Path) -> None:
    project = with_dotenv(tmp_path, "WANDB_API_KEY=abc123\nPLAIN=1\nEMPTY_TOKEN=\n")
    extra = tmp_path / "extra.env"
    extra.write_text("FILE_PASSWORD=def456\nODD=hf_abcdefghijklmnopqrst\n")
    job = tmp_path / "job"
    job.mkdir()
    environ = {"MY_TOKEN": "ghi789", "WANDB_API_KEY": "not this one: nobody named it"}
    environment, _ = gather(site(), project, names=["MY_TOKEN"], env_file=extra, environ=environ)
    # A conflict shows no value.
    (told,) = gather(site(), with_dotenv(job, "FILE_PASSWORD=other\n"), env_file=extra)[1]
    assert "FILE_PASSWORD: using <redacted>" in told
    assert "other" not in told
    assert environment.secrets == ("FILE_PASSWORD", "MY_TOKEN", "ODD", "WANDB_API_KEY")
    assert environment.variables["PLAIN"] == "1"
    assert environment.variables["EMPTY_TOKEN"] == ""
    write_environment(job, environment, environ, project_path=project, env_file=extra)
    found = read_environment(job, "trainer")
    assert [found[name] for name in environment.secrets] == [
        *("def456", "ghi789", "hf_abcdefghijklmnopqrst", "abc123")
    ]


def login(home: Path, token: str = "hf_login") -> dict[str, str]:
    (home / ".cache/huggingface").mkdir(parents=True, exist_ok=True)
    (home / ".cache/huggingface/token").write_text(token + "\n")
    return {"HOME": str(home)}


@pytest.mark.parametrize(("own", "token"), [({}, "hf_login"), ({"HF_TOKEN": "my own"}, "my own")])
def test_auto_auth_takes_the_local_login_unless_a_token_is_set(
    tmp_path: Path, own: dict[str, str], token: str
) -> None:
    environ = {**login(tmp_path), **own}
    environment, _ = gather(site(), auto_auth=True, environ=environ)
    assert environment.secrets == ("HF_TOKEN",)
    assert any(line.startswith("HF_TOKEN: ") for line in describe_travelling(environment)) is (not own)
    job = tmp_path / "job"
    job.mkdir()
    write_environment(job, environment, environ)
    assert read_environment(job, "trainer")["HF_TOKEN"] == token
    # Without it no login is read.
    assert gather(site(), environ=login(tmp_path))[0].secrets == ()


def test_what_another_job_left_in_the_shell_is_not_inherited() -> None:
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3", "LC_ALL": "C"}
    dropped = (
        *("SLURM_JOB_ID", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "STROP_ATTEMPT", "PMI_RANK"),
        *("TORCHELASTIC_RUN_ID", "MY_KEY", "STROP_LEASE", "STROP_NODE", "RANKING", "HF_TOKEN"),
    )
    assert clean_inherited(kept | dict.fromkeys(dropped, "x"), secrets=["MY_KEY"]) == kept


def test_a_directory_that_submit_did_not_fill(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"env\.json is missing"):
        read_environment(tmp_path, "trainer")
    (tmp_path / "env.json").write_text('{"variables": {"A": "hunter2')
    with pytest.raises(StoreError, match=r"env\.json cannot be read") as caught:
        read_environment(tmp_path, "trainer")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreError, match=r"env\.json could not be written"):
        write_environment(tmp_path / "absent", JobEnvironment(), {})
    (tmp_path / "secrets.json").mkdir()
    with pytest.raises(StoreError, match=r"secrets\.json cannot be removed"):
        remove_secrets(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("  A = plain words  # comment", "plain words"),
        ("A=a#b", "a#b"),
        ('A="a\\nb\\t\\"\\\\ \\d # it\'s"', "a\nb\t\"\\ \\d # it's"),
        ("A=first\r\nA=last\r\n", "last"),
        ("\ufeffA=1", "1"),
        ("A=costs 5$", "costs 5$"),
        ("# only\n\n   \nA=x=y", "x=y"),
    ],
)
def test_dotenv_reads(text: str, value: str) -> None:
    assert parse_dotenv(text)["A"] == value


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("B=1\nA=$HOME/x", "line 2: A "),
        *(
            (text, "line 1: A ")
            for text in (
                *("A=`id`", "A=$(id)", 'A="${HOME}"', 'A="\\$x"', 'A=x"y"', "A=C:\\x", "A=#x"),
                *("A='\0'", "A='it\\'s'", "A='a\\\\b'"),
            )
        ),
        *((text, "line 1 ") for text in ("A='x' y", "A='x", 'A="x', "export A", "1A=x")),
        ("\n\nA='a\nb'\nset -a", "line 5 "),
    ],
)
def test_dotenv_refuses_what_has_two_meanings(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=rf"\.env {place}"):
        parse_dotenv(text)


def test_dotenv_agrees_with_a_shell_where_it_does_not_refuse(tmp_path: Path) -> None:
    text = "A=a,b\nexport B='x $HOME \"y\"'\nC=\"q \\\\ \\\" '\" # c\nD=\nE='1\n2'\n"
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


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.env").write_bytes(b"A=\xe4")
    with pytest.raises(ConfigError, match=r"latin\.env cannot be read"):
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


class Places:
    """A project and a user's configuration folder."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "my project"
        self.environ = {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder)}
        self.user_path, self.project_path = site_files(self.project, self.environ)
        for path in (self.user_path, self.project_path):
            path.parent.mkdir(parents=True)

    def refusal(self, name: str = "lab") -> str:
        with pytest.raises(ConfigError) as caught:
            find_site(name, self.project, self.environ)
        return str(caught.value)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def test_the_name_of_a_backend_is_a_site_without_a_profile(places: Places) -> None:
    assert site_files(places.project, {"HOME": "/h"})[0] == Path("/h/.config/strop/sites.toml")
    kinds = {name: type(find_site(name, places.project, places.environ).profile) for name in BACKENDS}
    assert kinds == {"local": LocalSite, "slurm": SlurmSite, "sagemaker": SageMakerSite}


def test_the_project_beats_the_user_setting_by_setting(places: Places) -> None:
    places.user_path.write_text('[sites.lab]\nbackend = "slurm"\npartition = "long"\naccount = "a1"\n')
    # The name of a backend needs no backend.
    places.project_path.write_text('[sites.lab]\npartition = "short"\n[sites.slurm]\npartition = "own"\n')
    profile, own = (find_site(name, places.project, places.environ).profile for name in ("lab", "slurm"))
    assert isinstance(profile, SlurmSite)
    assert isinstance(own, SlurmSite)
    assert (profile.partition, profile.account, own.partition) == ("short", "a1", "own")


def test_the_sites_of_both_files_are_listed(places: Places) -> None:
    places.user_path.write_text('[sites.lab]\nbackend = "slurm"\n[sites.cloud]\nbackend = "sagemaker"\n')
    places.project_path.write_text("[sites.lab]\ngpus_per_node = 4\n[sites.local]\noffline = true\n")
    assert list_site_names(places.project, places.environ) == ["cloud", "lab", "local"]


def test_an_unknown_site_names_the_near_one_and_where_was_looked(places: Places) -> None:
    places.project_path.write_text('[sites.laboratory]\nbackend = "slurm"\n')
    told = places.refusal("laboratry")
    for word in ("did you mean laboratory?", str(places.user_path), str(places.project_path), "local, slurm"):
        assert word in told
    assert "[sites.moon]" in places.refusal("moon")


SLURM = '[sites.lab]\nbackend = "slurm"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SLURM + 'partitoin = "x"\n', ["partitoin", ":3)", "did you mean partition?"]),
        ('[sites.lab]\nbackend = "local"\npartition = "x"\n', ["sites.lab.partition"]),
        ('[sites.lab]\nbackend = "lsf"\n', ["sites.lab.backend='lsf'", "local, slurm, sagemaker"]),
        ("[sites.lab]\noffline = true\n", ["sites.lab.backend=none"]),
        (SLURM + 'time_limit = "2 hours"\n', ["time_limit='2 hours'"]),
        ('[sites.lab]\nbackend = "sagemaker"\nmax_runtime = "5"\n', ["max_runtime='5'"]),
        (SLURM + 'cpus_per_gpu = "8"\n', ["cpus_per_gpu='8'", ":3)"]),
        (SLURM + 'env = ["A"]\n', ["sites.lab.env"]),
        *((text, ["[sites.NAME]"]) for text in ("[site.lab]\n", "[sites]\nlab = 1\n", "")),
        ("[sites.lab\n", ["strop-sites.toml:1"]),
        (SLURM + 'backend = "local"\n', ["written twice"]),
    ],
)
def test_a_broken_profile_is_refused_with_its_place(places: Places, text: str, words: list[str]) -> None:
    places.project_path.write_text(text)
    told = places.refusal()
    assert [word for word in words if word not in told] == []


def test_several_mistakes_are_told_at_once(places: Places) -> None:
    places.project_path.write_text('[sites.lab]\nbackend = "slurm"\nfoo = 1\ngpus_per_node = -1\n')
    assert len(places.refusal().splitlines()) == 2


TOKEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    "line",
    [
        f'env = {{ ANY = "{TOKEN}" }}',
        f'partition = "{TOKEN}"',
        # Shell lines of a job script are readable by everybody.
        f'setup = ["module load cuda", "export HF_TOKEN={TOKEN}"]',
        f'sbatch_args = ["--comment={TOKEN}"]',
    ],
)
def test_sec_4_a_pasted_credential_is_refused_and_not_repeated(places: Places, line: str) -> None:
    places.project_path.write_text(f'[sites.lab]\nbackend = "slurm"\n{line}\n')
    told = places.refusal()
    assert "looks like a model hub token" in told
    assert "`secrets`" in told
    assert TOKEN not in told


def test_settings_of_sites_are_explained_by_kind() -> None:
    found = explain_site(("sites", "slurm", "partition"))
    assert (found.type, found.default) == ("text or none", '"none"')
    assert found.description == (
        "Partition of the main part. Override for one job: `strop submit site.partition=VALUE`."
    )
    assert explain_site(("sites", "slurm", "secrets")).type == "list of texts"
    assert "sites.local.wrap" in explain_site(("sites", "local")).keys
    assert {"sites.local.python", "sites.sagemaker.role"} <= set(explain_site(("sites",)).keys)
    with pytest.raises(ConfigError, match=r"did you mean sites\.slurm\.partition"):
        explain_site(("sites", "slurm", "partitoin"))
