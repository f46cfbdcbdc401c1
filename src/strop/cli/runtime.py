"""`strop runtime`: the sandbox service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.arguments import takes
from strop.cli.output import Output
from strop.errors import EXIT_FAILED, ConfigError

runtime_commands = typer.Typer(
    help="Sandboxes as a service, for OpenHands' clients and for runs.", no_args_is_help=True
)

DEFAULT_FOLDER = Path("strop-runtime")
Folder = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="The service's folder: keys, logs, address.")
]
Host = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of this machine to listen on. Default: in a job the node's, else the loopback's.",
    ),
]
BackendNames = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A kind of sandbox that may be made: podman, docker, bubblewrap, process; repeated. Default: all"
        " that work here.",
    ),
]
Network = Annotated[
    str, typer.Option(help="What sandboxes reach: none, host, or a list, allow:HOST:PORT,HOST:PORT.")
]
Registries = Annotated[
    list[str] | None,
    typer.Option(
        "--registry",
        metavar="HOST[:PORT]",
        help="A registry that clients' images may be pulled from, as docker.io; repeated. Default: none.",
    ),
]
PolicyText = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help='Limits of sandboxes that differ, such as {"slot": {"cpus": 1, "memory_bytes": 1073741824,'
        ' "disk_bytes": 1073741824, "processes": 256}, "idle_limit_s": 600}.',
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeArguments:
    """Arguments of `strop runtime serve`."""

    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="With --on: settings of its job, such as job.nodes=4 or name=sandboxes.",
        ),
    ] = None
    on: Annotated[
        str | None, typer.Option(metavar="SITE", help="Serve as a job of a site. Default: here.")
    ] = None
    dir: Folder = DEFAULT_FOLDER
    backend: BackendNames = None
    network: Network = "none"
    registry: Registries = None
    policy: PolicyText = "{}"
    host: Host = None
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the service; 0: a free one.")] = 0
    nodes: Annotated[
        int, typer.Option(min=1, help="Nodes of the service; Ray joins them. Others come by `join`.")
    ] = 1
    node: Annotated[
        str, typer.Option(metavar="K/FIRST", help="This is node K of a job; those after FIRST join it.")
    ] = "0/0"
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --on: show everything; submit nothing.")
    ] = False


@runtime_commands.command("serve")
@takes(ServeArguments)
def serve(context: typer.Context, args: ServeArguments) -> None:
    """Serve sandboxes until a signal, here or on the nodes of a job."""
    import asyncio
    import logging
    import os

    output: Output = context.obj
    if args.on is not None:
        _submit(output, args.on, args)
        return
    for_jobs = [*(args.settings or ()), *(["--dry-run"] if args.dry_run else [])]
    if for_jobs:
        raise ConfigError(
            f"{' '.join(for_jobs)} without --on",
            allowed="settings of a job and --dry-run for a service that is one",
            next_step="name the site with --on, or leave them out",
        )
    from strop.io.variables import LOG_FORMAT
    from strop.runtime.contract import Options
    from strop.runtime.serve import read_policy, serve_until_signal
    from strop.runtime.service_dir import KEYS

    folder, address = args.dir.absolute(), _find_host(args.host, os.environ)
    node, first = _read_node(args.node)
    if node > first:
        join_service(args.dir)
    _words_of_hosts(args)
    options = Options(
        folder=folder,
        address=address,
        port=args.port,
        num_nodes=args.nodes,
        policy=read_policy(args.policy),
        backends=tuple(name for name in args.backend or () if name != "auto"),
        network=args.network,
        registries=tuple(args.registry or ()),
    )
    # Each change of a sandbox is a line of the log.
    logging.basicConfig(format=LOG_FORMAT)
    logging.getLogger("strop.runtime").setLevel(logging.INFO)
    asyncio.run(
        serve_until_signal(
            options,
            lambda endpoint: output.say(f"serving at {endpoint.url}; its keys are in {folder / KEYS}"),
        )
    )


@runtime_commands.command("join")
def join_service(dir: Folder = DEFAULT_FOLDER) -> None:
    """Be a node of a service of several nodes, until a signal or until the service ends."""
    from strop.runtime.cluster import join

    join(dir)


@runtime_commands.command("prebuild")
def fetch_images(
    context: typer.Context,
    images: Annotated[
        typer.FileText,
        typer.Argument(metavar="FILE", help="Names of images, one a line; -: standard input."),
    ],
) -> None:
    """Fetch images to this node; those that are here are left alone."""
    import asyncio
    import shutil

    from strop.runtime.images import Images, prebuild
    from strop.sandbox.container import ENGINES

    output: Output = context.obj
    engine = next(filter(shutil.which, ENGINES), ENGINES[0])
    names = list(dict.fromkeys(images.read().split()))
    num_failed = asyncio.run(prebuild(names, Images(engine), output.say))
    output.give(f"{len(names)} images, {num_failed} failed")
    if num_failed:
        raise typer.Exit(EXIT_FAILED)


def _submit(output: Output, site: str, args: ServeArguments) -> None:
    import os
    import time

    from strop.cli.submit import SubmitArguments, prepare, submit_request, to_options
    from strop.launch.build_request import read_request
    from strop.launch.serving import SERVE

    local_options = [name for name in ("host", "port") if getattr(args, name)]
    if local_options or args.dir != DEFAULT_FOLDER:
        raise ConfigError(
            f"{', '.join(local_options or ['dir'])} with --on {site}",
            allowed="options of sandboxes and settings of the job, whose folder is the service's",
            next_step="leave it out; output.dir=DIR names the job's folder",
        )
    # The same arguments as of `strop submit`, without a run file.
    submit_args = SubmitArguments(
        run_file="", overrides=args.settings, on=site, command=SERVE, snapshot=False, dry_run=args.dry_run
    )
    words = [*_words_of_hosts(args), *(["--policy", args.policy] if args.policy != "{}" else [])]
    options = replace(to_options(submit_args), service_words=tuple(words))
    request = read_request("", options, environ=os.environ, now=time.time())
    launcher, request = prepare(output, request, submit_args)
    submit_request(output, launcher, request, submit_args)


def _words_of_hosts(args: ServeArguments) -> list[str]:
    """Return the options of the hosts of a service. Raises: ConfigError as `make_backend`."""
    from strop.sandbox import make_backend

    for name in args.backend or ():
        if name != "auto":
            # Checked here, before anything is started.
            make_backend(name)
    words = [word for name in args.backend or () for word in ("--backend", name)]
    words += [word for host in args.registry or () for word in ("--registry", host)]
    return words + (["--network", args.network] if args.network != "none" else [])


def _read_node(text: str) -> tuple[int, int]:
    node, _, first = text.partition("/")
    if not (node.isdecimal() and first.isdecimal()):
        raise ConfigError(
            f"--node {text} is not understood",
            allowed="K/FIRST, two numbers of nodes",
            next_step="leave it out on a machine of your own",
        )
    return int(node), int(first)


def _find_host(address: str | None, environ: Mapping[str, str]) -> str:
    from strop.hardware.ports import find_host_address

    if address is not None:
        return address
    # Other nodes of the job, or workers of other jobs, must reach the service.
    return find_host_address(2 if "SLURM_JOB_ID" in environ else 1, environ.get("GLOO_SOCKET_IFNAME"))
