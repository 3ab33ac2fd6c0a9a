"""Checks and measures images once; the outcome is cached until a file changes."""

import concurrent.futures
import hashlib
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tqdm
from jaxtyping import Int

from hypjax.data import pixels
from hypjax.data.photos.photo import Photo
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import replacing
from hypjax.system.machine import usable_cores

_MAX_NAMED = 5  # Files that a message names.


def measure(photos: Sequence[Photo]) -> Int[np.ndarray, "photos 3"]:
    """Returns height, width and a checksum of each image, from the cache if no file has changed.

    Raises:
        UserError: If any image cannot be read; the message names the first ones.
    """
    cached = cache_folder() / "photos" / f"{hash_facts(map(_file_facts, photos))}.sizes"
    if (measured := _read(cached, len(photos))) is not None:
        return measured
    console.say(f"checking {len(photos)} images")
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        outcomes = list(
            tqdm.tqdm(
                pool.map(_measure_file, (photo.path for photo in photos)),
                total=len(photos),
                unit="image",
                disable=None,
                leave=False,
            )
        )
    broken = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if broken:
        more = f" (and {len(broken) - _MAX_NAMED} more)" if len(broken) > _MAX_NAMED else ""
        raise UserError(
            f"cannot read {len(broken)} of {len(photos)} images: "
            f"{'; '.join(broken[:_MAX_NAMED])}{more}; fix or remove them"
        )
    measured = np.array(outcomes, np.int64)
    with console.tolerating(f"the sizes of the images ({cached})"):
        cached.parent.mkdir(parents=True, exist_ok=True)
        content = measured.astype("<i8").tobytes()
        with replacing(cached) as temporary:
            temporary.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
    return measured


def _read(cached: pathlib.Path, photos: int) -> Int[np.ndarray, "photos 3"] | None:
    """Reads what was measured, unless it is missing or damaged."""
    try:
        stored = cached.read_bytes()
    except OSError:
        return None
    content, checksum = stored[:-4], stored[-4:]
    if len(content) != 24 * photos or zlib.crc32(content).to_bytes(4, "little") != checksum:
        console.warn(f"{cached} is damaged; the images are checked again")
        return None
    return np.frombuffer(content, "<i8").astype(np.int64).reshape(photos, 3)


def _measure_file(path: pathlib.Path) -> tuple[int, int, int] | str:
    """Returns height, width and checksum of an image, or the reason why it cannot be read."""
    try:
        content = pixels.read_bytes(path)
        image = pixels.decode(content, channels=3, upright=True)
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return f"{path} ({pixels.reason(error)})"
    return image.height, image.width, zlib.crc32(content)


def fingerprint(photos: Sequence[Photo]) -> str:
    """Returns a hash of the files' paths, sizes and times, their labels and their order."""
    return hash_facts((*_file_facts(photo), photo.label) for photo in photos)


def _file_facts(photo: Photo) -> tuple[Any, ...]:
    """Returns what changes with the file and is known without reading it."""
    try:
        stat = photo.path.stat()
    except (OSError, ValueError):  # The latter for a null character.
        return (str(photo.path.absolute()), None)
    return (str(photo.path.absolute()), stat.st_size, stat.st_mtime_ns)


def hash_facts(facts: Iterable[tuple[Any, ...]]) -> str:
    """Hashes tuples of simple values to 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(repr(fact).encode())
    return digest.hexdigest()[:32]
