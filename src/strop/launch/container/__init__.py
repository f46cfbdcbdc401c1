"""Runs in a container on this machine, by podman or docker.

`ContainerBackend` keeps the seam of `jobs.contract`; `find_engine` says which program starts containers here,
and with which flags; `plan_image` and `build_image` make the project's own image, also without a registry.
"""
