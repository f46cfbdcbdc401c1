"""The backend of a site. Imports that one alone."""

from __future__ import annotations

from pydantic import TypeAdapter

from strop.launch.contract import Backend, JobPlan
from strop.spec.site import ContainerSite, LocalSite, SageMakerSite, Site, SiteProfile, SlurmSite


def open_backend(site: Site) -> Backend:
    """Return the backend of a site. No scheduler is queried yet."""
    match site.profile:
        case LocalSite():
            from strop.launch.local.backend import LocalBackend

            return LocalBackend()
        case ContainerSite():
            from strop.launch.container.backend import ContainerBackend

            return ContainerBackend(site.profile)
        case SlurmSite():
            from strop.launch.slurm.backend import SlurmBackend

            return SlurmBackend(site.profile, site=site.name)
        case SageMakerSite():
            from strop.launch.sagemaker.backend import SageMakerBackend

            return SageMakerBackend(site.profile)


def backend_of(plan: JobPlan) -> Backend:
    """Return the backend that a plan was made for, by the profile that it was made with."""
    adapter: TypeAdapter[SiteProfile] = TypeAdapter(SiteProfile)
    return open_backend(Site(name=plan.site, profile=adapter.validate_python(dict(plan.profile))))
