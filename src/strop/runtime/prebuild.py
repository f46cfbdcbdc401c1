"""The images of a data set, fetched before a run needs them: in shards, resumable, one result file for each.

An image that has a result of success is left alone, so the same command goes on where it stopped. A failure
is written down with its reason and tried again next time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.io.atomic import write_bytes_atomically
from strop.runtime.planes import SandboxFailed
from strop.runtime.pulling import Images


def list_images(dataset: Path, field: str) -> list[str]:
    """Return the images that rows of a JSONL or Parquet file name, each once, in the order of the file.

    Raises: ConfigError if the file cannot be read, or a row does not name an image.
    """
    found: dict[str, None] = {}
    try:
        for number, row in enumerate(_read_rows(dataset), start=1):
            image = row.get(field) if isinstance(row, dict) else None
            if not isinstance(image, str) or not image:
                raise _bad(dataset, f"has no image in field {field!r} of row {number}")
            found[image] = None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _bad(dataset, f"cannot be read ({error})") from error
    return list(found)


def shard_of(images: Sequence[str], shard: str) -> list[str]:
    """Return a part of images, such as '2/8': the second of eight. Raises: ConfigError if it is none."""
    first, _, second = shard.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise ConfigError(f"shard {shard!r}", allowed="I/N with 1 <= I <= N", next_step="give it so, as 1/1")
    # By the name and not by the place: a file that grows moves no image to another shard.
    number, count = int(first) - 1, int(second)
    return [one for one in images if int(_key_of(one), 16) % count == number]


async def prebuild(
    images: Sequence[str], store: Images, results: Path, *, num_at_once: int, say: Callable[[str], None]
) -> int:
    """Fetch images that have no result of success in a folder, which exists; return how many failed now."""
    turn = asyncio.Semaphore(num_at_once)
    ends = await asyncio.gather(*(_fetch(one, store, results, turn, say) for one in images))
    return ends.count(False)


async def _fetch(
    image: str, store: Images, results: Path, turn: asyncio.Semaphore, say: Callable[[str], None]
) -> bool:
    place = results / f"{_key_of(image)}.json"
    if _has_succeeded(place):
        say(f"{image}: done before")
        return True
    async with turn:
        began = time.monotonic()
        result: dict[str, Any] = {"image": image, "at": time.time()}
        try:
            result["image_id"] = await store.fetch(image, "IfNotPresent", lambda line: None)
        except SandboxFailed as failure:
            result |= {"error": failure.cause, "failure_kind": failure.kind.value}
        result["seconds"] = time.monotonic() - began
    write_bytes_atomically(place, json.dumps(result).encode())
    say(f"{image}: {result.get('error', 'done')}")
    return "error" not in result


def _has_succeeded(place: Path) -> bool:
    try:
        return bool(json.loads(place.read_bytes()).get("image_id"))
    except (OSError, ValueError, AttributeError):
        return False


def _key_of(image: str) -> str:
    return hashlib.sha256(image.encode()).hexdigest()[:16]


def _read_rows(dataset: Path) -> Iterator[Any]:
    if dataset.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(dataset).iter_batches():
            yield from batch.to_pylist()
        return
    with dataset.open() as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _bad(dataset: Path, what: str) -> ConfigError:
    return ConfigError(
        f"data set {dataset} {what}",
        allowed="a JSONL or Parquet file whose rows name an image",
        next_step="name its field by --field",
    )
