"""Rewards of a user's rows: functions of the user, and built-in ones.

A reward takes a reply and the values of its row by name, and returns named parts. What a user's function
returns is checked: a text, NaN or a list of another length is an error, not a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from strop.errors import ConfigError
from strop.rollout import Outcome
from strop.tasks.answers import text_after_thinking
from strop.tasks.mathematics.answers import find_answer
from strop.tasks.mathematics.equivalence import Strictness, answers_equal
from strop.user_code import CodeRef, InspectedFunction, hash_sources, inspect_function, load_code

Parts = dict[str, float | None]
"""Named parts of a reward; None where there is no score."""
REPLY, REPLIES = "reply", "completions"
"""The parameter that a function of the user's gets the reply in: strop's form, and TRL's."""
GIVEN = frozenset({REPLY, "answer", "prompt", REPLIES, "prompts"})
"""What a function may take in addition to the columns of its row."""
_FORMS = "def score(reply, answer, **columns), or TRL's def score(completions, **columns)"
_VALUES = "a finite number, true or false, None, or a table of them"
FULL_MARKS_SLACK = 1e-9


class UserReward:
    """A function of the user's, called by the names of its parameters."""

    def __init__(self, text: str) -> None:
        """Inspect the function; it is not loaded.

        Raises: ConfigError if it cannot be imported, or takes no reply.
        """
        self.ref = CodeRef.parse(text)
        self.name = self.ref.name
        self.signature: InspectedFunction = inspect_function(self.ref)
        self.digest = hash_sources(self.ref.path)
        """Hash of the file and its imports from the same folder, as they are now."""
        if not {REPLY, REPLIES} & set(self.signature.parameters):
            taken = ", ".join(self.signature.parameters) or "nothing"
            raise ConfigError(
                f"{self.ref} (line {self.signature.line}) takes {taken}, and no reply",
                allowed=_FORMS,
                next_step="name the parameter that takes the reply so",
            )

    def load(self) -> Callable[..., Any]:
        """Load the function into this process. Raises: ConfigError like `load_code`."""
        found: Callable[..., Any] = load_code(self.ref, self.digest)
        return found

    def score(self, values: Mapping[str, Any]) -> Parts:
        """Call the function with the values that it takes.

        Raises: TypeError or ValueError for what it may not return; whatever it raises.
        """
        is_batched = REPLIES in self.signature.parameters
        taken = self.signature.parameters
        given = {key: one for key, one in values.items() if self.signature.takes_others or key in taken}
        if is_batched:
            is_chat = not isinstance(values["prompt"], str)
            reply = values[REPLY]
            given = {key: [value] for key, value in given.items() if key not in GIVEN or key == "answer"}
            given[REPLIES] = [[{"role": "assistant", "content": reply}] if is_chat else reply]
            if self.signature.takes_others or "prompts" in self.signature.parameters:
                given["prompts"] = [values["prompt"]]
        returned = await_if_needed(self.load()(**given))
        return to_parts(self._only(returned) if is_batched else returned, self.name, self._where)

    def _only(self, returned: Any) -> Any:
        """Return the one score of a list of one reply. Raises: TypeError for any other list."""
        scores = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(scores, list | tuple) or len(scores) != 1:
            what = f"{len(scores)} scores" if isinstance(scores, list | tuple) else type(scores).__name__
            raise TypeError(f"{self._where} returned {what} for 1 completion; allowed: a list of as many")
        return scores[0]

    @property
    def _where(self) -> str:
        return f"{self.ref} (line {self.signature.line})"


def await_if_needed(returned: Any) -> Any:
    """Return what a user's function returned; of a coroutine, its result."""

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait()) if inspect.isawaitable(returned) else returned


def as_outcome(found: Any, where: str, full_marks: float) -> Outcome:
    """Return what a class said of a reply, or an attempt, as an outcome; right is what earns full marks.

    Raises: TypeError or ValueError as `to_parts`.
    """
    if isinstance(found, Outcome):
        return found
    outcome = Outcome(parts=to_parts(found, "reward", where))
    reward = outcome.reward
    is_full = reward is not None and reward >= full_marks - FULL_MARKS_SLACK
    return Outcome(parts=outcome.parts, is_correct=None if reward is None else is_full)


def to_parts(returned: Any, name: str, where: str) -> Parts:
    """Check what a function returned. Raises: TypeError or ValueError saying what is allowed."""
    if isinstance(returned, Mapping):
        if not returned:
            raise ValueError(f"{where} returned an empty table; allowed: {_VALUES}")
        return {f"{name}.{key}": _to_number(value, where) for key, value in returned.items()}
    return {name: _to_number(returned, where)}


def _to_number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    # A number of NumPy or PyTorch.
    plain = value.item() if hasattr(value, "item") and not isinstance(value, int | float) else value
    if not isinstance(plain, bool | int | float):
        raise TypeError(f"{where} returned {plain!r:.60}, a {type(plain).__name__}; allowed: {_VALUES}")
    if not math.isfinite(plain):
        raise ValueError(f"{where} returned {plain}; allowed: {_VALUES}")
    return float(plain)


def score_built_in(name: str, reply: str, answer: Any) -> float:
    """Judge a reply by one of `BUILT_IN`.

    Judged is what stands behind the last closed thinking block.
    """
    text = text_after_thinking(reply)
    if text is None:
        return 0.0
    return float(BUILT_IN[name](text, answer))


def _contains(text: str, answer: Any) -> bool:
    wanted = _plain(show_answer(answer))
    # As words of their own: 4 is not in 42.
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", _plain(text)) is not None


def _is_equal_math(text: str, answer: Any) -> bool:
    found = find_answer(text)
    return found is not None and answers_equal(show_answer(answer), found.text, Strictness.STANDARD)


def _fits_schema(text: str, answer: Any) -> bool:
    from jsonschema import ValidationError, validators

    try:
        fenced = _FENCED.fullmatch(text)
        value = json.loads(fenced.group(1) if fenced else text)
    except ValueError:
        return False
    schema = read_schema(answer)
    try:
        validators.validator_for(schema)(schema).validate(value)
    except ValidationError:
        return False
    return True


def read_schema(answer: Any) -> Any:
    """Return the JSON Schema of a row: a table, or its text.

    Raises: ValueError if it is none.
    """
    from jsonschema import SchemaError, validators

    schema = json.loads(answer) if isinstance(answer, str) else answer
    try:
        validators.validator_for(schema).check_schema(schema)
    except (SchemaError, AttributeError, TypeError) as error:
        raise ValueError(f"{getattr(error, 'message', error)}") from error
    return schema


_FENCED = re.compile(r"\s*```[\w-]*\n(.*?)\n?```\s*", re.DOTALL)
BUILT_IN: Mapping[str, Callable[[str, Any], bool]] = {
    "exact": lambda text, answer: _plain(text) == _plain(show_answer(answer)),
    "contains": _contains,
    "math": _is_equal_math,
    "json-schema": _fits_schema,
}


def _plain(text: str) -> str:
    return " ".join(text.split())


def show_answer(answer: Any) -> str:
    """Return an answer as a text: a number as it is written, anything else but text as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
