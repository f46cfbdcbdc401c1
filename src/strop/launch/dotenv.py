"""`.env` files, read by python-dotenv as data: nothing in them is ever run or expanded.

Refused, because shells and the usual readers disagree on them: variables and commands outside single quotes,
quotes or backslashes inside an unquoted value, escapes in single quotes. Messages name the line and the
variable, never the value: it may be a secret.
"""

from __future__ import annotations

import io
import re

from strop.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DOUBTFUL = {
    "'": re.compile(r"\0|\\[\\']"),
    '"': re.compile(r"\0|\$[A-Za-z_{(]|`|\\\$"),
    "": re.compile(r"""^#|\0|\$[A-Za-z_{(]|[`"'\\]"""),
}
"""What shells and python-dotenv take differently, by the quote before it."""


def is_variable_name(name: str) -> bool:
    """Whether a shell accepts this as the name of a variable."""
    return _NAME.match(name) is not None


def parse_dotenv(text: str, *, source: str = ".env") -> dict[str, str]:
    """Return the variables of a `.env` file in the order of their last assignments.

    `source` names the file in messages.

    Raises: ConfigError naming the line if it is ambiguous.
    """
    # Here: the agent of a node has no such file.
    from dotenv.parser import parse_stream

    variables: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text.removeprefix("\ufeff"))):
        name, value, line = binding.key, binding.value, binding.original.string
        number = binding.original.line + len(line[: -len(line.lstrip()) or None].splitlines())
        place = f"{source} line {number}"
        if not binding.error and name is None:
            continue
        if binding.error or name is None or value is None or not is_variable_name(name):
            raise _refuse(f"{place} is no assignment", "NAME=value, # comment, or nothing")
        quote = line.partition("=")[2].lstrip()[:1]
        # Escapes in single quotes are gone from the value.
        if _DOUBTFUL.get(quote, _DOUBTFUL[""]).search(line if quote == "'" else value):
            raise _refuse(
                f"{place}: {name} has $, a quote, a backslash or a NUL that shells and other readers take"
                " differently",
                "such a value in single quotes, where every character stands for itself",
            )
        variables.pop(name, None)
        variables[name] = value
    return variables


def _refuse(problem: str, allowed: str) -> ConfigError:
    return ConfigError(problem, allowed=allowed, next_step="change that line of the file")
