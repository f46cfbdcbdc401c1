"""Judgements that were made, on this disk: the same judge is not asked the same thing twice.

Kept are scores only; what failed is asked again. An entry that cannot be read counts as absent.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from strop.io import user_cache_dir, write_bytes_atomically
from strop.tasks.llm_judge.verdict import Judgement


def judgement_path(judge_digest: str, question: str) -> Path:
    """Return where the judgement of a question is kept; the question holds example, rubric and reply."""
    key = hashlib.sha256(f"{judge_digest}\0{question}".encode()).hexdigest()
    return user_cache_dir() / "judgements" / judge_digest[:16] / key[:2] / f"{key}.json"


def find_judgement(path: Path) -> Judgement | None:
    """Return a stored judgement, or None if there is none."""
    try:
        values = json.loads(path.read_bytes())
        found = Judgement(score=float(values["score"]), reason=str(values["reason"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if 0.0 <= found.score <= 1.0 else None


def keep_judgement(path: Path, judgement: Judgement) -> None:
    """Store a judgement.

    Raises: StoreError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, json.dumps({"score": judgement.score, "reason": judgement.reason}).encode())
