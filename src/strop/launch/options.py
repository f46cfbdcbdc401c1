"""The options of a site and of a job on it: the base of every backend's options.

A backend has one model, in `launch/<backend>/options.py`, which everything about its options is derived from:
the keys of a site profile (`sites`), the output of `strop explain sites`, and the words `site.KEY=VALUE` that
set an option for one job. A field with `exclude=True` belongs to one job: profiles and their records do not
have it. Methods and class variables describe the backend before it is opened. Models import pydantic and no
backend.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, ValidationError

from strop.errors import ConfigError
from strop.hardware.visible_devices import count_gpus
from strop.spec.base import Section
from strop.spec.display import NULL_WORD, show_text, show_value
from strop.spec.job import JobSpec
from strop.spec.sources import parse_override

if TYPE_CHECKING:
    from strop.launch.contract import Backend

WRAP_HELP = (
    "Words put before the agent's command, such as `podman run --rm --interactive ... IMAGE`; they pass"
    " signals, the exit code and standard input on."
)
DEVICES_HELP = "GPUs of this machine, by index or UUID. none = free ones."
KIND_HELP = "What kind of site it is."
DeviceGrant = Literal["none", "instance", "named"]
SITE_PREFIX = "site."


def split_at_commas(value: Any) -> Any:
    """Return the parts of a text such as `0,1` as a tuple; return any other value unchanged."""
    return tuple(word for part in value.split(",") if (word := part.strip())) if type(value) is str else value


class ByLauncher:
    """Marks a field that only the launcher sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHardware:
    """The hardware of a site's node; None: the profile does not name it."""

    gpu: str | None = None
    """A name that --hardware accepts, or the scheduler's name."""
    num_cores: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    """Disk space for the run, if the node has its own disk."""


class SiteOptions(Section):
    """The options that every kind of site has."""

    run_root: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for runs on the site, absolute. none = output.root of the run file.",
    )
    python: str | None = Field(
        default=None,
        min_length=1,
        description="Interpreter of the environment that has strop, as the site sees it. none = the one that"
        " submits; in an image, the image's own.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of every job.")
    secrets: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Names of environment variables whose values are read when a job is submitted, kept in a"
        " file that other users cannot read, and removed when it ends.",
    )
    hf_home: str | None = Field(default=None, min_length=1, description="Model cache, as HF_HOME.")
    store: str | None = Field(
        default=None,
        min_length=1,
        description="Root of the store that runs are mirrored to and models come from.",
    )
    offline: bool = Field(default=False, description="Whether jobs may not ask a model hub.")
    gpus_per_node: int = Field(default=8, ge=0, le=64, description="GPUs that one node has.")
    accelerator: str | None = Field(
        default=None,
        min_length=1,
        description="GPU of its nodes, for `strop plan --on`, as --hardware takes it: h100, l4, ... or a TOML"
        " file. none = by gpu_type or instance_type, where strop knows it.",
    )
    usd_per_gpu_hour: float | None = Field(
        default=None,
        ge=0.0,
        description="Price, for plan, dry run and report. none = no price is shown.",
    )

    has_shared_disk: ClassVar[bool] = True
    """Whether a job's nodes share a disk, which may hold files of the submitting machine."""
    is_here: ClassVar[bool] = False
    """Whether jobs run on the submitting machine, which can be polled often."""
    device_grant: ClassVar[DeviceGrant] = "none"
    """The GPUs that a job may use. `none`: free ones of the machine; `instance`: all of its instance;
    `named`: those that the scheduler lists in CUDA_VISIBLE_DEVICES."""

    @classmethod
    def kind(cls) -> str:
        """Return the backend's name: the one value of the field `backend`."""
        return str(get_args(cls.model_fields["backend"].annotation)[0])

    @classmethod
    def settable(cls) -> list[str]:
        """Return the fields that a user may set for one job, by `site.FIELD`."""
        return [
            name
            for name, info in cls.model_fields.items()
            if name != "backend" and ByLauncher not in info.metadata
        ]

    def of_job(self) -> dict[str, Any]:
        """Return the options that belong to this job alone, where they are set."""
        values = {name: getattr(self, name) for name, info in type(self).model_fields.items() if info.exclude}
        return {
            name: value
            for name, value in values.items()
            if value != type(self).model_fields[name].get_default(call_default_factory=True)
        }

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return this profile with other values.

        Raises: ConfigError for an option that this backend does not have, or an invalid value.
        """
        unknown = sorted(values.keys() - type(self).model_fields.keys())
        if unknown:
            raise unknown_key(
                f"{unknown[0]} is no option of backend {self.kind()}", unknown[0], self.settable()
            )
        try:
            return type(self).model_validate(self.model_dump() | self.of_job() | dict(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise ConfigError(
                f"{SITE_PREFIX}{name}={show_value(values.get(name))} is not allowed: {first['msg']}",
                allowed=type(self).model_fields[name].description or "a value of another kind",
                next_step=f"correct {SITE_PREFIX}{name}",
            ) from error

    def implied_settings(self, job: JobSpec) -> tuple[str, ...]:
        """Return settings of `job` that follow from these options, as overrides, unless they are set.

        Raises: ConfigError if the job requests other GPUs than it would get.
        """
        return ()

    def variables(self) -> dict[str, str]:
        """Return the environment variables of every job."""
        implied = {
            "HF_HOME": self.hf_home,
            "HF_HUB_OFFLINE": "1" if self.offline else None,
            "STROP_STORE_URI": self.store,
        }
        # Last: a variable that the user set by name overrides one that a setting implies.
        return {name: value for name, value in implied.items() if value is not None} | self.env

    def resource_defaults(self) -> Mapping[str, Any]:
        """Return defaults of `time_limit`, `cpus_per_gpu` and `memory`, and the `gpu_type`."""
        return {}

    def describe_node(self) -> NodeHardware:
        """Return the hardware of a node as far as the profile names it."""
        return NodeHardware(gpu=self.accelerator)

    def count_paid_gpus(self, num_nodes: int, gpus_per_node: int) -> int:
        """Return the number of GPUs that a job with so many pays for."""
        return num_nodes * gpus_per_node

    def files_written(self, project_path: Path) -> list[Path]:
        """Return files that a submission writes into the project, which are no code of the job."""
        return []

    def open(self, site: str) -> Backend:
        """Return the backend of the site named `site`. Queries no scheduler."""
        raise NotImplementedError


def imply_gpus(job: JobSpec, number: int, source: str) -> tuple[str, ...]:
    """Return `job.gpus` as an override for a job without settings of GPUs that gets some by `source`.

    Raises: ConfigError if the job requests another number.
    """
    if job.gpus_per_node == 0 and job.gpus is None and number:
        return (f"job.gpus={number}",)
    if job.gpus_per_node != number:
        requested = count_gpus(job.gpus_per_node)
        raise ConfigError(
            f"{requested} asked for in the job section, and {source} gives {number}"
            + (f": {number - job.gpus_per_node} would be idle" if number > job.gpus_per_node else ""),
            allowed="as many as the roles use",
            next_step="choose others, or give the roles other shares (job.gpus, job.train_gpus, ...)",
        )
    return ()


def read_site_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split words `key=value` into settings of the run file and options of the site, by field.

    Raises: ConfigError for a malformed word, such as site.env.NAME=VALUE, and for two values of an option.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    for word in words:
        if not word.startswith(SITE_PREFIX):
            rest.append(word)
            continue
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or name.count(".") != 1:
            raise ConfigError(
                f"override {show_text(word)} is not understood",
                allowed='site.KEY=VALUE; a table as a whole, as site.env={NAME = "value"}',
                next_step="correct it; `strop explain sites` lists the settings of sites",
            )
        if (other := options.setdefault(name.removeprefix(SITE_PREFIX), value)) != value:
            raise ConfigError(
                f"{name}={value}, and {other} is given for it too",
                allowed="one value per setting",
                next_step="remove one of the two",
            )
    return rest, options


def unknown_key(problem: str, name: str, names: Collection[str]) -> ConfigError:
    """Return the error about an unknown name. `names`: the allowed ones."""
    near = difflib.get_close_matches(name, names, n=1)
    next_step = f"did you mean {near[0]}?" if near else "remove it"
    return ConfigError(problem, allowed=", ".join(names), next_step=next_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A profile and its name."""

    name: str
    """The name in a file or a command."""
    profile: SiteOptions

    def for_job(self, words: Mapping[str, str]) -> Site:
        """Return the site with the options of one job, as they are written behind `site.FIELD=`.

        Raises: ConfigError for an option that this backend does not have, or an invalid value.
        """
        kind, names = self.profile.kind(), [f"{SITE_PREFIX}{field}" for field in self.profile.settable()]
        values: dict[str, Any] = {}
        for field, text in words.items():
            name = f"{SITE_PREFIX}{field}"
            if name not in names:
                raise unknown_key(f"{name} is no setting of backend {kind}", name, names)
            info = type(self.profile).model_fields[field]
            _, value = parse_override(f"{name}={text}")
            if value == NULL_WORD:
                value = info.get_default(call_default_factory=True)
            elif isinstance(value, int | float) and str in {info.annotation, *get_args(info.annotation)}:
                # A text field takes a number as text.
                value = text
            values[field] = value
        return self.changed(**values)

    def changed(self, **values: Any) -> Site:
        """Return the site with other values in its profile. Raises: as `SiteOptions.changed`."""
        return replace(self, profile=self.profile.changed(values))
