"""`strop envs run` ended in a traceback if a tool raised; an MCP server's old log was named as the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = """
import os
class Notes:
    max_turns = 3
    def examples(self, split):
        return [{"split": split}]
    def reset(self, example, seed):
        if RESET:
            raise ValueError("broken reset")
        return "Note something."
    def shout(self, text: str) -> str:
        \"\"\"Shout.\"\"\"
        raise ValueError("broken tool")
    def score(self):
        return {}["x"] if SCORE else 1.0
"""
SERVER = """
import json, sys
print("WARNING: KeyError: an old one (old.py:3)", file=sys.stderr, flush=True)
tool = {"name": "note", "description": "", "inputSchema": {"type": "object", "properties": {"text": {}}}}
answers = {
    "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "x"}},
    "tools/list": {"tools": [tool]},
}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "tools/call":
        raise RuntimeError("the store is gone")
    if "id" in asked:
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]}
        print(json.dumps(answer), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "said", "cause"),
    [
        ("", "/shout text=a\n", "broken tool"),
        ("", "/note text=a\n", "the store is gone"),
        ("RESET", "", "broken reset"),
        ("SCORE", "", "KeyError"),
    ],
)
def test_a_failure_of_an_environment_is_one_line(tmp_path: Path, broken: str, said: str, cause: str) -> None:
    text = ENVIRONMENT
    for name in ("RESET", "SCORE"):
        text = text.replace(name, str(name == broken))
    (tmp_path / "notes.py").write_text(text)
    (tmp_path / "server.py").write_text(SERVER)
    words = ["envs", "run", "notes.py:Notes"]
    if "note" in said:
        words.append(f'mcp_servers=["{sys.executable} server.py"]')
    ended = subprocess.run(
        [sys.executable, "-m", "strop.cli", *words],
        cwd=tmp_path,
        input=said,
        check=False,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in ended.stdout + ended.stderr
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if cause in line]
    assert len(lines) == 1, ended
    assert "an old one" not in lines[0]
