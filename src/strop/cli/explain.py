"""`strop explain [KEY] [RUN.toml] [key=value ...]`."""

from __future__ import annotations

from typing import Annotated

import typer

from strop.cli.arguments import Overrides
from strop.cli.output import Output


def explain(
    context: typer.Context,
    key: Annotated[
        str | None, typer.Argument(help="A setting such as optimizer.lr, or a section such as train.")
    ] = None,
    run_file: Annotated[
        str | None, typer.Argument(metavar="[RUN.toml]", help="Also show this run's value and its origin.")
    ] = None,
    overrides: Overrides = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list the expert settings, and why each exists.")
    ] = False,
) -> None:
    """Explain a setting: meaning, allowed values, origin of its value. Without KEY: list them."""
    from strop.spec import Explanation, all_keys, load_spec
    from strop.spec import explain as explain_setting
    from strop.spec.base import DEFAULT
    from strop.spec.display import show_value

    output: Output = context.obj

    def explain_key(name: str) -> Explanation:
        path = tuple(name.split("."))
        if path[0] != "sites":
            return explain_setting(name, resolved)
        from strop.launch.sites import explain_site

        return explain_site(path)

    resolved = load_spec(run_file, overrides or ()) if run_file is not None else None
    known = explain_key(key) if key is not None else None
    if known is None or known.keys:
        found = [explain_key(name) for name in (known.keys if known else all_keys())]
        everyday = [one for one in found if one.reason is None or one.origin not in (None, DEFAULT)]
        # A section of expert settings alone, as `tripwires`, shows them.
        listed = found if everything or not everyday else everyday
        columns = ["setting", "type", "default", *(("value", "origin") if resolved else ())]
        columns += ["an expert setting because"] if everything else []

        def row(one: Explanation) -> tuple[str, ...]:
            mine = (show_value(one.value) if one.origin else "-", one.origin or "-") if resolved else ()
            return (one.key, one.type, one.default, *mine, *((one.reason or "-",) if everything else ()))

        if known is not None:
            output.give(known.description)
        output.give_table(columns, [row(one) for one in listed])
        if len(listed) < len(found):
            words = " ".join(["strop explain", *([key] if key else []), "--all"])
            output.give(f"{len(found) - len(listed)} expert settings more: {words}")
        return
    output.give(f"{known.key}: {known.description}")
    output.give(f"  allowed  {known.allowed}")
    output.give(f"  default  {known.default}")
    if known.reason is not None:
        output.give(f"  expert   it exists because {known.reason}")
    if known.origin is not None:
        output.give(f"  value    {show_value(known.value)} ({known.origin})")
    elif resolved is not None:
        output.give(f"  value    none: task {resolved.spec.task.name} has no such setting")
