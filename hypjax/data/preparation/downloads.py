"""Downloads that are checked, and that are there whole or not at all."""

import logging
import pathlib
import urllib.parse
from collections.abc import Callable

import tqdm

from hypjax.system import console

_SILENCE = 30  # Seconds without a byte after which a download is given up.


def download(
    url: str, path: pathlib.Path, *, sha256: str, scratch: Callable[[], pathlib.Path]
) -> None:
    """Downloads a file, unless it is there with the right checksum.

    Args:
        url: Where from.
        path: Where to.
        sha256: Its checksum.
        scratch: Returns a folder on the same disk, for what is not complete.

    Raises:
        OSError: The file cannot be reached, or cannot be written.
        ValueError: It has another checksum.
    """
    import pooch

    if path.is_file() and pooch.file_hash(str(path)) == sha256:
        return
    unfinished = scratch() / path.name
    console.say(f"downloading {url} to {path.parent}")
    pooch.get_logger().setLevel(logging.WARNING)
    bar = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm.tqdm(total=1, desc=path.name, **bar) as progress:  # Pooch corrects the total.
        downloader = pooch.HTTPDownloader(progress, chunk_size=1 << 20, timeout=_SILENCE)
        known = f"sha256:{sha256}"
        pooch.retrieve(url, known, path.name, str(unfinished.parent), downloader=downloader)
    unfinished.replace(path)


def reason(error: OSError | ValueError, url: str) -> str:
    """Why a download failed, in a few words."""
    import requests

    host = urllib.parse.urlsplit(url).netloc
    if isinstance(error, requests.HTTPError):
        return f"{host} answers {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return f"the connection to {host} broke"
    if isinstance(error, requests.RequestException):
        return f"no connection to {host}"
    if isinstance(error, ValueError):
        return "its SHA-256 is not that of the official file"
    return error.strerror or str(error)
