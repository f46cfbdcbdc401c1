r"""One spelling for answers that are written differently and mean the same.

Unicode, spacing, delimiters, synonyms, units, degrees, percent, money and thousands separators go or become
LaTeX; '\frac12' is '\frac{1}{2}', '3 1/2' is '3\frac{1}{2}', 'a/b' of whole numbers is a fraction, ' and '
a comma; one word alone has no case, a single letter keeps its own. Words that make another number stay: '5
million', 'mod'. '(1,234)' is a pair. No rule removes or adds a sign, and none reduces or evaluates:
`equivalence` does that.
"""

from __future__ import annotations

import re
from functools import partial
from unicodedata import normalize

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ",
        "\u00f7": "/",
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u00b0": r"^\circ ",
        "\u222a": r"\cup ",
        "\u00b1": r"\pm ",
        "\u2248": r"\approx ",
        "\u00bc": r"\frac{1}{4}",
        "\u00bd": r"\frac{1}{2}",
        "\u00be": r"\frac{3}{4}",
        "\u2153": r"\frac{1}{3}",
        "\u2154": r"\frac{2}{3}",
        "\u00a0": " ",
        "~": " ",
    }
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_CLOSING = ".,;:? \t\r\n"
_SPACING = re.compile(
    r"(?<!\\)\\[,!;: ]|\\(?:quad|qquad|left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])"
)
_SEPARATED_DIGITS = re.compile(r"(?<=[0-9])(?:\\[,!]|\{,\}|\\!,|,\\!)+(?=[0-9]{3}(?![0-9]))")
_SYNONYMS = (
    (
        re.compile(r"(?:\u221a|(?<![\\a-zA-Z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[a-zA-Z]))"),
        r"\\sqrt{\1\2\3}",
    ),
    (
        re.compile("([\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+)"),
        lambda raised: f"^{{{normalize('NFKC', raised[1])}}}",
    ),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"<=|=<"), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\leq(?:slant)?(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\geq(?:slant)?(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\(?:lbrace)(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"(?<![0-9./])([0-9]+)\s+([0-9]+)/([0-9]+)(?![0-9./])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9a-zA-Z])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z])"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"(?:,\s*)?(?:\\(?:text|mbox|textrm)\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))"), ","),
    (re.compile(r"\^\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\?%|\\\$|\$"), ""),
)
_NO_UNIT = (
    r"(?![^}]*\b(?:and|or|to|of|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|hal(?:f|ves)|thirds?"
    r"|quarters?|fourths?|fifths?|sixths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|squared|cubed|pi|root"
    r"|roots|base|mod|modulo|plus|minus|times|over|divided|factorial|more|less|not|sin|cos|tan|log|sqrt)\b)"
)
_UNIT = r"(?:[a-zA-Z]{3,}|(?:mm|cm|dm|km|in|ft|yd|mi|kg|mg|lb|oz|ml|hr|am|pm)(?![a-zA-Z]))"
_POWER = r"(?:\^\{?[23]\}?)?"
_PLAIN_UNIT = re.compile(
    # Directly behind digits only units that cannot be variables.
    rf"(?<=[0-9}}])(?:\s+{_NO_UNIT}{_UNIT}(?:(?:\s+|/){_UNIT}|/[a-zA-Z])*|(?:mm|cm|km|kg|mph)){_POWER}$"
)
_TEXT_COMMAND = r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf|textit|operatorname|mathit|textsf|bold|bf|rm)"
_TEXT_UNIT = re.compile(
    rf"(?:(?<=[0-9}})])|(?<=\\pi))\s*{_TEXT_COMMAND}\s*\{{{_NO_UNIT}[a-zA-Z./ ()]*\}}{_POWER}$"
)
_TEXT = re.compile(_TEXT_COMMAND + r"\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9]|,[0-9])")
_WHITE = re.compile(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|(?<=[0-9])(\s)\s*(?=[0-9])|\s+")
_TIDY = (
    (re.compile(r"([\^_])\{([0-9a-zA-Z])\}"), r"\1\2"),
    (re.compile(r"(?<![0-9a-zA-Z./})])([0-9]+)/([0-9]+)(?![0-9a-zA-Z./^])"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<![0-9.])\.(?=[0-9])"), "0."),
    (re.compile(r"(?<=[0-9])\.(?![0-9])"), ""),
    (re.compile(r"^(?:\+|\\approx(?![a-zA-Z]))"), ""),
)


def normal_form(answer: str) -> str:
    """Return the normal form of an answer; may be empty."""
    text = _SEPARATED_DIGITS.sub("", answer.translate(_UNICODE))
    # Spacing goes before closing punctuation, which is part of '\\,' and '\\;'.
    text = _strip_wrappers(_SPACING.sub(" ", text))
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    text = _TEXT_UNIT.sub("", text.strip())
    text = _PLAIN_UNIT.sub("", text.rstrip(_CLOSING))
    text = _TEXT.sub(r" \1 ", text).strip().rstrip(_CLOSING)
    text = _join_thousands(text)
    text = _WHITE.sub(lambda white: f"{white[1]} " if white[1] else " " * bool(white[2]), text)
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    if text[:1] == "{" and text.find("}") == len(text) - 1:
        text = text[1:-1]
    return text.lower() if len(text) > 1 and text.isalpha() else text


def without_name(form: str) -> str | None:
    """Return the part behind 'x=' or 'f(x)=' of a normal form, or None if it has no name."""
    match = _NAMED.match(form)
    return None if match is None else form[match.end() :]


_NAMED = re.compile(r"(?:\\?[a-zA-Z]+(?:_[0-9a-zA-Z])?(?:\([a-zA-Z]\))?)(?:=|\\in(?![a-zA-Z]))(?=[^=]+$)")


def _strip_wrappers(text: str) -> str:
    while True:
        stripped = text.strip().rstrip(_CLOSING)
        for opening, closing in _DELIMITERS:
            inner = stripped[len(opening) : -len(closing)]
            if stripped == opening + inner + closing and closing not in inner:
                stripped = inner
                break
        boxed = re.fullmatch(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", stripped)
        if boxed is not None:
            stripped = boxed.group(1)
        if stripped == text:
            return text
        text = stripped


_joined = partial(_THOUSANDS.sub, lambda digits: digits[0].replace(",", "").replace(" ", ""))


def _join_thousands(text: str) -> str:
    """Join grouped digits outside of all brackets."""
    if not ("," in text or " " in text):
        return text
    depth, parts, start = 0, [], 0
    for index, character in enumerate(text):
        if character in "([{":
            if depth == 0:
                parts.append(_joined(text[start:index]))
                start = index
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
            if depth == 0:
                parts.append(text[start : index + 1])
                start = index + 1
    tail = text[start:]
    parts.append(tail if depth else _joined(tail))
    return "".join(parts)
