r"""Find the final answer in a worked solution. `equivalence` compares it.

The first form that occurs counts, in this order:
1. the last balanced `\boxed{...}` or `\fbox{...}`, also `\boxed 5`. `\boxed{}`, `\boxed{...}` and
   `\boxed{answer}` are the prompt's wording: no answers; if there is no other box, they end the search;
2. the last sentence such as 'The final answer is X.' or 'Answer: X', up to its end, or an `<answer>` tag;
3. the last formula between `$..$`, `$$..$$`, `\(..\)`, `\[..\]` or of an environment, of its lines the last;
4. an expression that ends the last line: the whole line, or what follows its last '=', ':', 'is' or 'are'.

Callers pass the text after the last closed thinking block, before any marker of a follow-up problem. All
scans are linear in the text, whatever the policy writes.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class FoundAnswer(NamedTuple):
    """A final answer, as it was written."""

    text: str
    is_boxed: bool
    num_marks: int
    """How many boxes, or else answer sentences, the text has; 0: nothing marks the answer."""


_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox)(?![a-zA-Z{])|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\s*([-+]?[0-9][0-9/,]*(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z]))")
_SENTENCE = re.compile(
    r"\b(?:(?<!/)answer>|answer(?:[*_]*\s*[:=]|\s+is\b))[\s:*_=]*"
    # 'Final Answer: The final answer is' is one sentence.
    r"(?:(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is\b|\s*:)[\s:*_=]*)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    r"\n|</|[.?;](?=\s|$)|,?[ \t](?:I hope|because|since|so|where|as)\b", re.IGNORECASE
)
_REASON = re.compile(r",[ \t](?:I hope|because|since|so|where|as)\b", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:align|gather|equation|split)[a-z]*\*?\}")
_DELIMITER = re.compile(rf"{_ENVIRONMENT.pattern}|\\\\|\\\$|\$\$|\$|\\\(|\\\)|\\\[|\\\]")
_CLOSES = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_PLACEHOLDER = re.compile(
    r"[\s.\u2026]*|(?:\\[cl]?dots|(?:your |the )?(?:final )?answer)(?: here)?", re.IGNORECASE
)
_ANCHOR = re.compile(r"[=:\u2248]|\b(?:is|are|equals|get|have)\b")
_WORDS = re.compile(r"\\[a-zA-Z]+|[^\W\d_]{2,}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")
_EXPRESSION_WORDS = frozenset({"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "or", "and"})
_EDGES = " \t\r\n,;:?*_`'\""
"""Stripped from both ends of an answer; a period only from the right ('.5'), and '!' is a factorial."""
_MAX_EXPRESSION_CHARS = 200
_MAX_SENTENCE_CHARS = 1000
_MAX_LAST_LINE_CHARS = 4000


def find_answer(text: str) -> FoundAnswer | None:
    """Return the final answer of a text, or None."""
    found = marked_answer(text)
    if found is None:
        found = FoundAnswer(last_formula(text) or _last_expression(text) or "", is_boxed=False, num_marks=0)
    return found if found.text else None


def marked_answer(text: str) -> FoundAnswer | None:
    """Return the answer in the last box or sentence, or None; without text if all boxes are placeholders."""
    if boxes := find_boxes(text):
        filled = [box for part in boxes if not _PLACEHOLDER.fullmatch(box := part.strip())]
        return FoundAnswer(filled[-1] if filled else "", is_boxed=True, num_marks=len(filled))
    sentences = list(_SENTENCE.finditer(text))
    answers = (answer for match in reversed(sentences) if (answer := _sentence_answer(text, match.end())))
    answer = next(answers, None)
    return None if answer is None else FoundAnswer(answer, is_boxed=False, num_marks=len(sentences))


def is_marked(text: str) -> bool:
    """Whether a text marks an answer: a box, or a sentence with a formula or at most two words."""
    found = marked_answer(text)
    is_said = found is not None and (len(found.text.split()) <= 2 or _is_expression(found.text))
    return found is not None and found.text != "" and (found.is_boxed or is_said)


def find_boxes(text: str) -> list[str]:
    r"""Return the contents of the outermost balanced boxes, in the order of the text."""
    boxes: list[tuple[int, str]] = []
    opened: list[int | None] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.startswith(("\\boxed", "\\fbox")):
            if token.endswith("{"):
                opened.append(match.end())
            elif bare := _BARE_BOX.match(text, match.end()):
                boxes.append((match.end(), bare.group(1)))
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:
            start = opened.pop()
            if start is not None:
                # A box closes after the boxes inside it.
                while boxes and boxes[-1][0] >= start:
                    boxes.pop()
                boxes.append((start, text[start : match.start()]))
    return [content for _, content in boxes]


def last_formula(text: str) -> str | None:
    """Return the text between the last pair of formula delimiters, or None."""
    opened: re.Match[str] | None = None
    last: str | None = None
    for delimiter in _DELIMITER.finditer(text):
        token = delimiter.group()
        if opened is None:
            opened = delimiter if token in _CLOSES or token.startswith("\\begin") else None
        elif token == _CLOSES.get(opened.group(), opened.group().replace("begin", "end")):
            content = text[opened.start() : delimiter.end()].removeprefix(opened.group()).removesuffix(token)
            if token.startswith("\\end") or _ENVIRONMENT.search(content):
                lines = [line.strip(" \n&") for line in _ENVIRONMENT.sub("", content).split("\\\\")]
                content = next((line.replace("&", "") for line in reversed(lines) if line), "")
            last, opened = content.strip() or last, None
    return last


def _sentence_answer(text: str, start: int) -> str | None:
    """Return the answer that begins at `start`: a formula as a whole, else the rest of the sentence."""
    opening = _DELIMITER.match(text, start)
    if opening is not None and (closing := _CLOSES.get(opening.group())):
        # A '$' may also be money ('The answer is $5.'), and its next one far away.
        rest = _DELIMITER.finditer(text, opening.end(), start + _MAX_EXPRESSION_CHARS)
        end = next((delimiter.start() for delimiter in rest if delimiter.group() == closing), -1)
        if end >= 0 and "\n\n" not in text[start:end]:
            return text[opening.end() : end].strip() or None
    sentence = text[start : start + _MAX_SENTENCE_CHARS]
    end_match = _SENTENCE_END.search(sentence)
    return _trim(sentence[: None if end_match is None else end_match.start()]) or None


def _last_expression(text: str) -> str | None:
    line = next((line for line in reversed(text[-_MAX_LAST_LINE_CHARS:].splitlines()) if line.strip()), "")
    line = _REASON.split(line, maxsplit=1)[0]
    if _is_expression(line):
        return _trim(line)
    anchors = list(_ANCHOR.finditer(line))
    rest = line[anchors[-1].end() :] if anchors else ""
    return _trim(rest) if _is_expression(rest) else None


def _trim(text: str) -> str:
    return text.strip(_EDGES).rstrip("." + _EDGES)


def _is_expression(text: str) -> bool:
    """Whether a text is a formula rather than prose: no words, and a digit or a command in it."""
    stripped = _trim(text)
    if not stripped or len(stripped) > _MAX_EXPRESSION_CHARS or "\\boxed" in stripped:
        return False
    words = {word.lower() for word in _WORDS.findall(_TEXT.sub("", stripped)) if not word.startswith("\\")}
    has_value = any(character.isdigit() for character in stripped) or "\\" in stripped
    return words <= _EXPRESSION_WORDS and has_value
