"""Check whether third-party tools find their API key. The key itself is never read."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from urllib.parse import urlsplit


def has_wandb_key(environ: Mapping[str, str], *, sees_home: bool = True) -> bool:
    """Whether wandb would find a key with these variables, or needs none; otherwise it would prompt.

    `sees_home`: whether the login of `wandb login` on this machine is also available there.
    """
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return True
    own = urlsplit(environ.get("WANDB_BASE_URL", "")).netloc
    hosts = [own] if own else ["api.wandb.ai", "api.forge.coreweave.com"]
    try:
        return sees_home and any(map(netrc.netrc(environ.get("NETRC")).authenticators, hosts))
    except (OSError, netrc.NetrcParseError):
        return False
