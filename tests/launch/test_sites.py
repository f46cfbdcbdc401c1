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
