"""Text that a model wrote, made safe to show to a person.

A reply can hold terminal escape codes that move the cursor, rename the window or hide lines, and
direction marks that make a line read other than it is. Each such character is replaced by a visible
one, so that nothing is hidden and nothing acts.

Covered: C0 and C1 control characters, direction marks, invisible separators, lone surrogates.
Not covered: letters that look alike, and meaning.
"""

from __future__ import annotations

import re

# Line feed and tab stay. U+2028 and U+2029 end a line in some programs and not in others.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_FIRST_CONTROL_PICTURE = 0x2400
_DELETE_PICTURE = "\u2421"


def make_harmless(text: str) -> str:
    """Replace what acts on a terminal or hides from a reader by something visible.

    Control characters become their pictures in Unicode (escape becomes U+241B), everything else its
    code point in angle brackets. Line feeds and tabs stay; a carriage return before a line feed goes.
    """
    return _HARMFUL.sub(lambda match: _show(match[0]), text.replace("\r\n", "\n"))


def _show(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(_FIRST_CONTROL_PICTURE + code)
    if code == 0x7F:
        return _DELETE_PICTURE
    return f"<U+{code:04X}>"
