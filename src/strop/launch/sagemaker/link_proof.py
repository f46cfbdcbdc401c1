"""How the hosts of a job prove to each other that they are of it: by a key that they alone were given.

32 random bytes, made at submission and sent in the channel `config`: never in a request, which everybody
who may describe the job can read. A host answers the other side's challenge with a MAC of it, both ways.
Not covered: what is said afterwards is neither encrypted nor signed; `encrypt_traffic` of the site profile
lets the platform encrypt it.
"""

from __future__ import annotations

import hmac
import secrets

from strop.errors import CheckRefused, explain_refusal
from strop.launch.sagemaker import places
from strop.launch.sagemaker.opt_ml import OptMl

_NUM_BYTES = 32


def make_key() -> bytes:
    """Return the text of a new key."""
    return secrets.token_hex(_NUM_BYTES).encode()


def read_key(tree: OptMl) -> str:
    """Return the key that came with the job. Raises: CheckRefused if none did."""
    path = tree.channel_path(places.CONFIG_CHANNEL) / places.LINK_KEY
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"{path} cannot be read ({type(error).__name__})") from error
    if len(key) != 2 * _NUM_BYTES:
        raise _unusable(f"{path} holds {len(key)} characters")
    return key


def prove(key: str, side: str, host: str, challenge: str) -> str:
    """Return the answer of a side, 'head' or 'host', to the other's challenge. `host`: the one that joins."""
    return hmac.digest(key.encode(), f"{side} {host} {challenge}".encode(), "sha256").hex()


def is_proof(given: object, key: str, side: str, host: object, challenge: str) -> bool:
    """Whether an answer is that of a host which knows the key."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), prove(key, side, str(host), challenge).encode()
    )


def _unusable(given: str) -> CheckRefused:
    return CheckRefused(
        explain_refusal(
            given,
            allowed=f"the key of {2 * _NUM_BYTES} characters that a job of several hosts is sent with",
            next_step="submit again",
        )
    )
