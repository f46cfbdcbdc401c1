"""Check a request against SageMaker's limits before anything is sent. No network is used.

botocore's `ParamValidator` checks types, required and unknown fields, and minima. Beside it: maxima, patterns
and enumerations of the service's model, and what only the API's text says of values that users choose. Not
covered: rights, quotas, used names, missing images or buckets (`backend.probe`), what only the service knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from strop.hardware.findings import Finding

if TYPE_CHECKING:
    from botocore.model import ServiceModel, Shape

MAX_RUNTIME_S = 28 * 86_400
"""Source: the API's text."""
_SHOWN_CHARACTERS = 60
_SHOWN_CHOICES = 8
_UNITS = {"string": "characters", "list": "items", "map": "entries"}


def check_request(request: Mapping[str, Any]) -> list[Finding]:
    """Return findings about everything in a `CreateTrainingJob` request that the service would refuse."""
    from botocore.validate import ParamValidator

    shape = load_model().operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape).generate_report()
    if report:
        return [_finding("model", line, "a request of the service's model") for line in report.splitlines()]
    return [*_check_limits(request, shape, ""), *_check_choices(request)]


@lru_cache(maxsize=1)
def load_model() -> ServiceModel:
    """Return the service's model, which botocore ships."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"))


def _check_limits(value: Any, shape: Shape, path: str) -> Iterator[Finding]:
    """Check a valid value against what the validator leaves out."""
    kind, limits = shape.type_name, shape.metadata
    unit = _UNITS.get(kind, "")
    size = len(value) if unit else value
    if "max" in limits and size > limits["max"]:
        allowed = f"{limits['max']} {unit} or fewer".replace("  ", " ")
        yield _finding("max", _show(path, value) + (f" has {size} {unit}" if unit else ""), allowed)
    # Java's classes of Unicode are left to the service.
    pattern = limits.get("pattern", r"\p{")
    if r"\p{" not in pattern and not re.fullmatch(pattern, value, re.ASCII):
        yield _finding("pattern", _show(path, value), f"a text of the form {pattern}")
    if limits.get("enum") and value not in limits["enum"]:
        yield _finding("enumeration", _show(path, value), f"one of {_choices(limits['enum'], value)}")
    if kind == "structure":
        for name, inner in value.items():
            yield from _check_limits(inner, shape.members[name], f"{path}.{name}" if path else name)
    elif kind == "list":
        for index, inner in enumerate(value):
            yield from _check_limits(inner, shape.member, f"{path}[{index}]")
    elif kind == "map":
        for key, inner in value.items():
            yield from _check_limits(key, shape.key, f"a key of {path}")
            yield from _check_limits(inner, shape.value, f"{path}.{key}")


def _check_choices(request: Mapping[str, Any]) -> Iterator[Finding]:
    """Check times and tags, which users choose."""
    stopping = request["StoppingCondition"]
    runtime_s = stopping["MaxRuntimeInSeconds"]
    wait_s = stopping.get("MaxWaitTimeInSeconds", runtime_s)
    if runtime_s > MAX_RUNTIME_S:
        allowed = f"{MAX_RUNTIME_S}, which are 28 days, or less"
        yield _finding("max", f"StoppingCondition.MaxRuntimeInSeconds={runtime_s}", allowed)
    if wait_s < runtime_s:
        allowed = f"at least MaxRuntimeInSeconds={runtime_s}, which it includes"
        yield _finding("wait", f"StoppingCondition.MaxWaitTimeInSeconds={wait_s}", allowed)
    for tag in request.get("Tags", ()):
        if tag["Key"].lower().startswith("aws:"):
            yield _finding("tags", f"the tag {tag['Key']}", "keys that do not begin with aws:")


def _finding(code: str, given: str, allowed: str) -> Finding:
    next_step = "change it in the site profile, or by its word site.KEY=VALUE"
    return Finding(code=code, given=given, allowed=allowed, next_step=next_step)


def _show(path: str, value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return f"{path}=<{len(value)}>"
    text = repr(value)
    return f"{path}={text if len(text) <= _SHOWN_CHARACTERS else f'{text[:_SHOWN_CHARACTERS]}...'}"


def _choices(values: list[str], near: str) -> str:
    """List the choices, those similar to `near` first."""
    from difflib import get_close_matches

    close = get_close_matches(near, values, n=_SHOWN_CHOICES)
    shown = list(dict.fromkeys([*close, *values]))[:_SHOWN_CHOICES]
    rest = len(values) - len(shown)
    return ", ".join(shown) + (f" and {rest} others" if rest > 0 else "")
