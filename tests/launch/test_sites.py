"""Profiles of sites: where they are found, which one wins, and what is refused in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.backends import BACKENDS
from strop.launch.local.options import LocalSite
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sites import explain_site, find_site, list_site_names, site_files
from strop.launch.slurm.options import SlurmSite


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
    kinds = {name: type(find_site(name, places.project, places.environ).profile) for name in BACKENDS}
    assert kinds == {
        "local": LocalSite,
        "slurm": SlurmSite,
        "sagemaker": SageMakerSite,
    }


def test_the_project_beats_the_user_setting_by_setting(places: Places) -> None:
    places.user_path.write_text('[sites.lab]\nbackend = "slurm"\npartition = "long"\naccount = "a1"\n')
    places.project_path.write_text('[sites.lab]\npartition = "short"\n')
    profile = find_site("lab", places.project, places.environ).profile
    assert isinstance(profile, SlurmSite)
    assert (profile.partition, profile.account) == ("short", "a1")


def test_a_backends_own_name_may_have_a_profile_that_needs_no_backend(places: Places) -> None:
    places.project_path.write_text('[sites.slurm]\npartition = "short"\n')
    profile = find_site("slurm", places.project, places.environ).profile
    assert isinstance(profile, SlurmSite)
    assert profile.partition == "short"


def test_without_xdg_the_user_file_is_in_dot_config(tmp_path: Path) -> None:
    user_path, _ = site_files(tmp_path, {"HOME": "/h"})
    assert user_path == Path("/h/.config/strop/sites.toml")


def test_the_sites_of_both_files_are_listed(places: Places) -> None:
    places.user_path.write_text('[sites.lab]\nbackend = "slurm"\n[sites.cloud]\nbackend = "sagemaker"\n')
    places.project_path.write_text("[sites.lab]\ngpus_per_node = 4\n[sites.local]\noffline = true\n")
    assert list_site_names(places.project, places.environ) == ["cloud", "lab", "local"]


def test_an_unknown_site_names_the_near_one_and_where_was_looked(places: Places) -> None:
    places.project_path.write_text('[sites.laboratory]\nbackend = "slurm"\n')
    told = places.refusal("laboratry")
    assert "there is no site 'laboratry'" in told
    assert "did you mean laboratory?" in told
    assert str(places.user_path) in told
    assert str(places.project_path) in told
    assert "local, slurm, sagemaker" in told


def test_an_unknown_site_without_a_near_one_says_what_to_write(places: Places) -> None:
    assert "write a table [sites.moon]" in places.refusal("moon")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[sites.lab]\nbackend = "slurm"\npartitoin = "x"\n',
            ["partitoin", ":3)", "did you mean partition?"],
        ),
        ('[sites.lab]\nbackend = "local"\npartition = "x"\n', ["unknown key sites.lab.partition"]),
        ('[sites.lab]\nbackend = "lsf"\n', ["sites.lab.backend='lsf'", "local, slurm, sagemaker"]),
        ("[sites.lab]\noffline = true\n", ["sites.lab.backend=none", "set backend"]),
        (
            '[sites.lab]\nbackend = "slurm"\ntime_limit = "2 hours"\n',
            ["time_limit='2 hours'", "90s, 30m, 2h"],
        ),
        ('[sites.lab]\nbackend = "sagemaker"\nmax_runtime = "5"\n', ["max_runtime='5'", "90s, 30m, 2h"]),
        ('[sites.lab]\nbackend = "slurm"\ncpus_per_gpu = "8"\n', ["cpus_per_gpu='8'", ":3)"]),
        ('[sites.lab]\nbackend = "slurm"\nenv = ["A"]\n', ["sites.lab.env"]),
        ("[site.lab]\n", ["holds no table of sites", "[sites.NAME]"]),
        ("[sites]\nlab = 1\n", ["holds no table of sites"]),
        ("", ["holds no table of sites"]),
        ("[sites.lab\n", ["cannot be read as TOML", "strop-sites.toml:1"]),
        ('[sites.lab]\nbackend = "slurm"\nbackend = "local"\n', ["written twice"]),
    ],
)
def test_a_broken_profile_is_refused_with_its_place(places: Places, text: str, words: list[str]) -> None:
    places.project_path.write_text(text)
    told = places.refusal()
    for word in words:
        assert word in told


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
def test_a_pasted_credential_is_refused_and_not_repeated(places: Places, line: str) -> None:
    places.project_path.write_text(f'[sites.lab]\nbackend = "slurm"\n{line}\n')
    told = places.refusal()
    assert "looks like a model hub token" in told
    assert "`secrets`" in told
    assert TOKEN not in told


def test_settings_of_sites_are_explained_by_kind() -> None:
    found = explain_site(("sites", "slurm", "partition"))
    assert (found.type, found.default) == ("text or none", '"none"')
    assert (
        found.description == "Partition of the main part. Override for one job: `strop submit --partition`."
    )
    assert explain_site(("sites", "slurm", "secrets")).type == "list of texts"
    assert "sites.local.wrap" in explain_site(("sites", "local")).keys
    assert {"sites.local.python", "sites.sagemaker.role"} <= set(explain_site(("sites",)).keys)
    with pytest.raises(ConfigError, match=r"did you mean sites\.slurm\.partition"):
        explain_site(("sites", "slurm", "partitoin"))
