"""The table of backends: a new backend is its folder and one line here."""

from __future__ import annotations

from strop.launch.contract import Backend, JobPlan
from strop.launch.local.options import LocalSite
from strop.launch.options import Site, SiteOptions
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.slurm.options import SlurmSite

BACKENDS: dict[str, type[SiteOptions]] = {
    "local": LocalSite,
    "slurm": SlurmSite,
    "sagemaker": SageMakerSite,
}
"""Kind of site to its options. Each kind is also the name of a site without a profile."""


def open_backend(site: Site) -> Backend:
    """Import and return the backend of a site. Queries no scheduler."""
    return site.profile.open(site.name)


def backend_of(plan: JobPlan) -> Backend:
    """Return the backend of a plan, with the profile that the plan was made with."""
    section = BACKENDS[str(plan.profile["backend"])]
    return open_backend(Site(name=plan.site, profile=section.model_validate(dict(plan.profile))))
