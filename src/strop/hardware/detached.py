"""Starting a program that outlives this process and its terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.errors import CheckRefused, explain_refusal
from strop.hardware.identity import ProcessIdentity, identify
from strop.io.atomic import explain_write_failure

# Runs in a child: a grandchild in a session of its own becomes the program and belongs to nobody here, so
# that nobody has to wait for it. Its number comes back on the descriptor named first.
_STUB = """
import os, sys
number = os.fork()
if number:
    os.write(int(sys.argv[1]), str(number).encode())
    os._exit(0)
os.setsid()
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_detached(
    args: Sequence[str], log_path: Path, env: Mapping[str, str], *, cwd: Path
) -> ProcessIdentity | None:
    """Start a program with its output appended to `log_path`; return who it is, None if it has ended already.

    `args[0]` is a path. Raises: CheckRefused if it cannot be started; StoreError if the log cannot be opened.
    """
    reader, writer = os.pipe()
    try:
        with log_path.open("ab") as log:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _STUB, str(writer), *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                pass_fds=(writer,),
                check=True,
            )
        return identify(int(os.read(reader, 32)))
    except OSError as error:
        raise explain_write_failure(error, log_path) from error
    except (subprocess.SubprocessError, ValueError) as error:
        raise CheckRefused(
            explain_refusal(
                f"{args[0]} could not be started ({error})",
                allowed="a machine with room for one more process",
                next_step=f"read {log_path}",
            )
        ) from error
    finally:
        os.close(reader)
        os.close(writer)
