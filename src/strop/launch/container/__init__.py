"""Jobs in a container on this machine, by podman or docker.

`backend.ContainerBackend` implements `launch.contract.Backend`; `engine` finds the program that starts
containers; `image` builds the project's own image, also without a registry.
"""
