"""What SageMaker would refuse, said before anything is sent: a validator made from the service's own model.

Covered: types, required and unknown fields, lengths, sizes, patterns, enumerations, and the rules
between fields that stand in the API's text only. Not covered: rights, quotas, names that are taken, whether
an image or a bucket is there (`backend.probe`), and anything that only the live service knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strop.hardware.findings import Finding
from strop.launch.sagemaker.service_model import does_match, input_shape, load_shapes

# Source: the text of the API on these fields; the model itself has other limits or none.
MAX_HYPERPARAMETER_CHARACTERS = 256
MAX_RUNTIME_S = 28 * 86_400
MAX_NAME_CHARACTERS = 63
_SHOWN_CHARACTERS = 60
_SHOWN_CHOICES = 8
_NEXT = "change it in the site profile or by its flag"

Shapes = Mapping[str, Any]


def check_request(request: Mapping[str, Any], operation: str = "CreateTrainingJob") -> list[Finding]:
    """Return everything in a request that the service would refuse; [] if nothing is known.

    Raises: ConfigError if botocore is not installed.
    """
    shapes = load_shapes()
    findings = list(_check(request, input_shape(operation), shapes, ""))
    if operation == "CreateTrainingJob" and not any(finding.code == "type" for finding in findings):
        findings += check_combinations(request)
    return findings


def check_value(value: Any, shape: str, path: str) -> list[Finding]:
    """Check one value against one shape of the model, for example `TrainingJobName`."""
    shapes = load_shapes()
    return list(_check(value, shapes[shape], shapes, path))


def check_combinations(request: Mapping[str, Any]) -> list[Finding]:
    """Check the rules that stand in no model: what fields mean together."""
    rules = (_check_times, _check_resources, _check_channels, _check_texts, _check_algorithm)
    return [finding for rule in rules for finding in rule(request)]


def _check(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    kind = shape["type"]
    expected = _TYPES[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
        yield _finding("type", path, value, f"a {kind}")
        return
    yield from _CHECKS.get(kind, _check_nothing)(value, shape, shapes, path)


def _check_nothing(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    yield from ()


def _check_structure(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    members = shape["members"]
    for name in shape.get("required", ()):
        if name not in value:
            yield _missing(_below(path, name))
    for name, inner in value.items():
        if name not in members:
            yield _finding("unknown", _below(path, name), inner, f"one of {_choices(sorted(members))}")
        else:
            yield from _check(inner, shapes[members[name]["shape"]], shapes, _below(path, name))


def _check_list(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    yield from _check_range(len(value), shape, path, value, "items")
    for index, inner in enumerate(value):
        yield from _check(inner, shapes[shape["member"]["shape"]], shapes, f"{path}[{index}]")


def _check_map(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    yield from _check_range(len(value), shape, path, value, "entries")
    for key, inner in value.items():
        yield from _check(key, shapes[shape["key"]["shape"]], shapes, f"the key {_show(key)} of {path}")
        yield from _check(inner, shapes[shape["value"]["shape"]], shapes, _below(path, str(key)))


def _check_string(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    # Apart from the pattern: that of names alone accepts 'a', a hundred hyphens, 'b'.
    yield from _check_range(len(value), shape, path, value, "characters")
    if "pattern" in shape and not does_match(shape["pattern"], value):
        yield _finding("pattern", path, value, f"a text of the form {shape['pattern']}")
    if "enum" in shape and value not in shape["enum"]:
        yield _finding("enumeration", path, value, f"one of {_choices(shape['enum'], value)}")


def _check_number(value: Any, shape: Mapping[str, Any], shapes: Shapes, path: str) -> Iterator[Finding]:
    yield from _check_range(value, shape, path, value, "")


_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (Mapping,),
    "map": (Mapping,),
    "list": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
}
_CHECKS: dict[str, Callable[[Any, Mapping[str, Any], Shapes, str], Iterator[Finding]]] = {
    "structure": _check_structure,
    "list": _check_list,
    "map": _check_map,
    "string": _check_string,
    "integer": _check_number,
    "long": _check_number,
    "float": _check_number,
    "double": _check_number,
}


def _check_range(
    size: float, shape: Mapping[str, Any], path: str, value: Any, unit: str
) -> Iterator[Finding]:
    low, high = shape.get("min"), shape.get("max")
    if low is not None and size < low:
        yield _finding("min", path, value, f"{low} {unit} or more".replace("  ", " "), size, unit)
    if high is not None and size > high:
        yield _finding("max", path, value, f"{high} {unit} or fewer".replace("  ", " "), size, unit)


def _check_times(request: Mapping[str, Any]) -> Iterator[Finding]:
    stopping = request.get("StoppingCondition", {})
    runtime_s, wait_s = stopping.get("MaxRuntimeInSeconds"), stopping.get("MaxWaitTimeInSeconds")
    if runtime_s is not None and runtime_s > MAX_RUNTIME_S:
        yield _finding(
            "max",
            "StoppingCondition.MaxRuntimeInSeconds",
            runtime_s,
            f"{MAX_RUNTIME_S}, which are 28 days, or less",
        )
    if wait_s is not None and runtime_s is not None and wait_s < runtime_s:
        yield _finding(
            "wait",
            "StoppingCondition.MaxWaitTimeInSeconds",
            wait_s,
            f"at least MaxRuntimeInSeconds={runtime_s}, which it includes",
        )
    is_spot = bool(request.get("EnableManagedSpotTraining"))
    if is_spot and (wait_s is None or runtime_s is None):
        yield _finding(
            "spot",
            "EnableManagedSpotTraining",
            True,
            "spot instances with both MaxRuntimeInSeconds and MaxWaitTimeInSeconds",
        )


def _check_resources(request: Mapping[str, Any]) -> Iterator[Finding]:
    resources = request.get("ResourceConfig")
    if resources is None:
        yield _missing("ResourceConfig")
        return
    has_groups = bool(resources.get("InstanceGroups"))
    tops = [name for name in ("InstanceType", "InstanceCount") if name in resources]
    if has_groups and tops:
        yield _finding(
            "groups", "ResourceConfig.InstanceGroups", "given", f"groups without a top-level {tops[0]}"
        )
    if not has_groups and len(tops) < 2 and "TrainingPlanArn" not in resources:
        lacking = "InstanceType" if "InstanceType" not in resources else "InstanceCount"
        yield _missing(f"ResourceConfig.{lacking}")
    if "StoppingCondition" not in request and "ServerlessJobConfig" not in request:
        yield _missing("StoppingCondition")


def _check_channels(request: Mapping[str, Any]) -> Iterator[Finding]:
    names = Counter(channel.get("ChannelName") for channel in request.get("InputDataConfig", ()))
    for name, count in names.items():
        if count > 1:
            yield _finding("channels", "InputDataConfig", f"{count} channels named {name}", "unique names")


def _check_texts(request: Mapping[str, Any]) -> Iterator[Finding]:
    for key, value in request.get("HyperParameters", {}).items():
        if len(value) > MAX_HYPERPARAMETER_CHARACTERS:
            yield _finding(
                "max",
                f"HyperParameters.{key}",
                value,
                f"{MAX_HYPERPARAMETER_CHARACTERS} characters or fewer",
                len(value),
                "characters",
            )
    tags = Counter(tag.get("Key", "") for tag in request.get("Tags", ()))
    for key, count in tags.items():
        if count > 1 or key.lower().startswith("aws:"):
            yield _finding("tags", "Tags", f"{count} of {key}", "unique keys that do not begin with aws:")


def _check_algorithm(request: Mapping[str, Any]) -> Iterator[Finding]:
    algorithm = request.get("AlgorithmSpecification")
    if algorithm is None:
        yield _missing("AlgorithmSpecification")
    elif not ({"TrainingImage", "AlgorithmName"} & set(algorithm)):
        yield _missing("AlgorithmSpecification.TrainingImage")


def _finding(
    code: str, path: str, value: Any, allowed: str, size: float | None = None, unit: str = ""
) -> Finding:
    counted = f" has {size:g} {unit}" if size is not None and unit else ""
    return Finding(
        code=code, given=f"{path or 'the request'}={_show(value)}{counted}", allowed=allowed, next_step=_NEXT
    )


def _missing(path: str) -> Finding:
    return Finding(
        code="required", given=f"{path} is missing", allowed="a request that has it", next_step=_NEXT
    )


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _show(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        return f"<{len(value)}>"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...'"


def _choices(values: list[str], near: str = "") -> str:
    """Name the choices, those that are like the given one first."""
    from difflib import get_close_matches

    close = get_close_matches(near, values, n=_SHOWN_CHOICES) if near else []
    shown = list(dict.fromkeys([*close, *values]))[:_SHOWN_CHOICES]
    rest = len(values) - len(shown)
    return ", ".join(shown) + (f" and {rest} others" if rest > 0 else "")
