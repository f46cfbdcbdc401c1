"""Which language a text is in: langdetect with a seed of its own, so equal texts give equal answers.

Tried with langdetect 1.0.9. Its own entry point draws from a generator that nobody seeds (REW-5), and
reads its profiles in the order in which the disk lists them; neither is used here. Nothing is
downloaded: the profiles are part of the package, and are read when a language is first asked for.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, explain_refusal

_SEED = 0


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the most probable language, or None if the text has no feature.

    Chinese is 'zh-cn' or 'zh-tw'; a text that could be anything is 'unknown'. Judged are the first ten
    thousand characters.
    Raises: ConfigError if the package is not installed.
    """
    factory = _load_factory()
    from langdetect.lang_detect_exception import LangDetectException

    detector = factory.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        # The package's word for a text without letters that it knows.
        return None


@functools.cache
def known_languages() -> frozenset[str]:
    """Return the codes that can be told apart.

    Raises: ConfigError if the package is not installed.
    """
    return frozenset(_load_factory().get_lang_list())


@functools.cache
def _load_factory() -> Any:
    require_language_detection()
    import langdetect
    from langdetect.detector_factory import DetectorFactory

    folder = Path(langdetect.__file__).parent / "profiles"
    profiles = [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()) if path.is_file()]
    factory = DetectorFactory()
    factory.load_json_profile(profiles)
    factory.set_seed(_SEED)
    return factory


def require_language_detection() -> None:
    """Refuse where the package that tells languages apart is missing.

    Raises: ConfigError if it is not installed.
    """
    if find_spec("langdetect") is None:
        raise ConfigError(
            explain_refusal(
                "an instruction asks for a language, and the package langdetect is not installed",
                allowed="langdetect 1.0.9 or later, part of the extra 'tasks'",
                next_step="pip install 'strop[tasks]'",
            )
        )
