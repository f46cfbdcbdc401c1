"""Check a request against SageMaker's limits before anything is sent.

The shapes are those of the service's model, which botocore ships; no network is used. botocore's
`ParamValidator` is not enough: it checks types, required and unknown fields and minima, but neither maxima
nor patterns nor enumerations (1.43.11 and 1.44.5), and accepts a boolean as a number.

Covered: types, required and unknown fields, lengths, sizes, patterns, enumerations, and rules between fields
that are only in the API's text. Not covered: rights, quotas, used names, missing images or buckets
(`backend.probe`), and anything that only the live service knows.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from strop.errors import ConfigError
from strop.hardware.findings import Finding
from strop.launch.sagemaker.client import INSTALL

# Source: the API's text on these fields; the model has other limits or none.
MAX_HYPERPARAMETER_CHARACTERS = 256
MAX_RUNTIME_S = 28 * 86_400
_SHOWN_CHARACTERS = 60
_SHOWN_CHOICES = 8
_NEXT = "change it in the site profile or by its flag"
# Java's named classes, which Python's `re` does not know. Alnum is ASCII there.
_NAMED_CLASS = re.compile(r"\\p\{(\w+)\}")
_ASCII_CLASSES = {"Alnum": "a-zA-Z0-9", "Alpha": "a-zA-Z", "Digit": "0-9"}
_TYPES: dict[str, Any] = {
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
_UNITS = {"string": "characters", "list": "items", "map": "entries"}


def check_request(request: Mapping[str, Any]) -> list[Finding]:
    """Return findings about everything in a `CreateTrainingJob` request that the service would refuse.

    Raises: ConfigError if botocore is not installed.
    """
    findings = check_value(request, load_model()["operations"]["CreateTrainingJob"]["input"]["shape"], "")
    if not any(finding.code == "type" for finding in findings):
        findings += [*_check_times(request), *_check_required(request), *_check_names(request)]
    return findings


def check_value(value: Any, shape: str, path: str) -> list[Finding]:
    """Check one value against one shape of the model, for example `TrainingJobName`."""
    shapes = load_shapes()
    return list(_check(value, shapes[shape], shapes, path))


@lru_cache(maxsize=1)
def load_model() -> Mapping[str, Any]:
    """Return the service's whole model.

    Raises: ConfigError if botocore is not installed.
    """
    try:
        from botocore.loaders import Loader
    except ImportError as error:
        raise ConfigError(
            "the limits of SageMaker come with the package boto3, which is not installed",
            allowed="a plan without a check of its request, or boto3",
            next_step=INSTALL,
        ) from error
    model: Mapping[str, Any] = Loader().load_service_model("sagemaker", "service-2")
    return model


def load_shapes() -> Mapping[str, Any]:
    """Return all shapes of the service by name. Raises: ConfigError as `load_model`."""
    shapes: Mapping[str, Any] = load_model()["shapes"]
    return shapes


def _check(value: Any, shape: Mapping[str, Any], shapes: Mapping[str, Any], path: str) -> Iterator[Finding]:
    kind = shape["type"]
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield _finding("type", path, value, f"a {kind}")
        return
    # The limits of a single value: its size, and the form of a string.
    unit = _UNITS.get(shape["type"], "")
    size, counted = (len(value), f"{len(value)} {unit}") if unit else (value, "")
    # Sizes are checked too: the pattern of names accepts 'a', a hundred hyphens, 'b'.
    if "min" in shape and size < shape["min"]:
        yield _finding("min", path, value, " ".join(f"{shape['min']} {unit} or more".split()), counted)
    if "max" in shape and size > shape["max"]:
        yield _finding("max", path, value, " ".join(f"{shape['max']} {unit} or fewer".split()), counted)
    if "pattern" in shape and not does_match(shape["pattern"], value):
        yield _finding("pattern", path, value, f"a text of the form {shape['pattern']}")
    if "enum" in shape and value not in shape["enum"]:
        yield _finding("enumeration", path, value, f"one of {_choices(shape['enum'], value)}")
    if kind == "structure":
        members = shape["members"]
        for name in shape.get("required", ()):
            if name not in value:
                yield _missing(_below(path, name))
        for name, inner in value.items():
            if name not in members:
                yield _finding("unknown", _below(path, name), inner, f"one of {_choices(sorted(members))}")
            else:
                yield from _check(inner, shapes[members[name]["shape"]], shapes, _below(path, name))
    elif kind == "list":
        for index, inner in enumerate(value):
            yield from _check(inner, shapes[shape["member"]["shape"]], shapes, f"{path}[{index}]")
    elif kind == "map":
        for key, inner in value.items():
            yield from _check(key, shapes[shape["key"]["shape"]], shapes, f"the key {_show(key)} of {path}")
            yield from _check(inner, shapes[shape["value"]["shape"]], shapes, _below(path, str(key)))


def _check_times(request: Mapping[str, Any]) -> Iterator[Finding]:
    stopping = request.get("StoppingCondition", {})
    runtime_s, wait_s = stopping.get("MaxRuntimeInSeconds"), stopping.get("MaxWaitTimeInSeconds")
    if runtime_s is not None and runtime_s > MAX_RUNTIME_S:
        allowed = f"{MAX_RUNTIME_S}, which are 28 days, or less"
        yield _finding("max", "StoppingCondition.MaxRuntimeInSeconds", runtime_s, allowed)
    if wait_s is not None and runtime_s is not None and wait_s < runtime_s:
        allowed = f"at least MaxRuntimeInSeconds={runtime_s}, which it includes"
        yield _finding("wait", "StoppingCondition.MaxWaitTimeInSeconds", wait_s, allowed)
    if request.get("EnableManagedSpotTraining") and (wait_s is None or runtime_s is None):
        allowed = "spot instances with both MaxRuntimeInSeconds and MaxWaitTimeInSeconds"
        yield _finding("spot", "EnableManagedSpotTraining", True, allowed)


def _check_required(request: Mapping[str, Any]) -> Iterator[Finding]:
    """Check fields that another field requires or excludes."""
    resources = request.get("ResourceConfig")
    if resources is None:
        yield _missing("ResourceConfig")
    else:
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
    algorithm = request.get("AlgorithmSpecification")
    if algorithm is None:
        yield _missing("AlgorithmSpecification")
    elif not ({"TrainingImage", "AlgorithmName"} & set(algorithm)):
        yield _missing("AlgorithmSpecification.TrainingImage")


def _check_names(request: Mapping[str, Any]) -> Iterator[Finding]:
    """Check names that must be unique, and the length of hyperparameters."""
    names = Counter(channel.get("ChannelName") for channel in request.get("InputDataConfig", ()))
    for name, count in names.items():
        if count > 1:
            yield _finding("channels", "InputDataConfig", f"{count} channels named {name}", "unique names")
    for key, value in request.get("HyperParameters", {}).items():
        if len(value) > MAX_HYPERPARAMETER_CHARACTERS:
            allowed = f"{MAX_HYPERPARAMETER_CHARACTERS} characters or fewer"
            yield _finding("max", f"HyperParameters.{key}", value, allowed, f"{len(value)} characters")
    tags = Counter(tag.get("Key", "") for tag in request.get("Tags", ()))
    for key, count in tags.items():
        if count > 1 or key.lower().startswith("aws:"):
            yield _finding("tags", "Tags", f"{count} of {key}", "unique keys that do not begin with aws:")


def does_match(pattern: str, text: str) -> bool:
    r"""Whether a whole text matches a pattern of the service.

    Patterns are Java's: `\d`, `\w` and `\s` mean ASCII, and `\p{L}` means a category of Unicode.
    """
    return _compile(pattern, text.isascii()).fullmatch(text) is not None


@lru_cache(maxsize=512)
def _compile(pattern: str, is_ascii: bool) -> re.Pattern[str]:
    # Most texts are ASCII, and collecting the classes of all of Unicode takes a fifth of a second.
    limit = 128 if is_ascii else sys.maxunicode + 1

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return _ASCII_CLASSES.get(name) or _category_class(name, limit)

    return re.compile(_NAMED_CLASS.sub(replace, pattern), re.ASCII)


@lru_cache(maxsize=32)
def _category_class(name: str, limit: int) -> str:
    """Return the characters of a Unicode category below a code point, as the inside of a class."""
    ranges: list[tuple[int, int]] = []
    for code in range(limit):
        if not unicodedata.category(chr(code)).startswith(name):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _finding(code: str, path: str, value: Any, allowed: str, size: str = "") -> Finding:
    problem = f"{path or 'the request'}={_show(value)}" + (f" has {size}" if size else "")
    return Finding(code=code, given=problem, allowed=allowed, next_step=_NEXT)


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
    """List the choices, those similar to `near` first."""
    from difflib import get_close_matches

    close = get_close_matches(near, values, n=_SHOWN_CHOICES) if near else []
    shown = list(dict.fromkeys([*close, *values]))[:_SHOWN_CHOICES]
    rest = len(values) - len(shown)
    return ", ".join(shown) + (f" and {rest} others" if rest > 0 else "")
