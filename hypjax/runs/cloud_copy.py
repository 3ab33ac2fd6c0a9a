"""A run in cloud storage: it works in a local folder, which a thread copies to the cloud.

Object stores can neither append nor rename nor lock, so the run itself only uses a local folder.
The last writer decides which copy counts: if this machine's folder was the last writer, the run
continues from the folder. Otherwise the cloud's copy replaces the folder at the start.
"""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from hypjax.errors import UserError, reason, redacted
from hypjax.runs.files import (
    CHECKPOINTS,
    CONFIG,
    HASHED,
    MATCHES,
    METRICS,
    PROJECTIONS,
    PUBLISHED,
    RESULTS,
    TIMES,
)
from hypjax.system import console, hub
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, explained, is_url, url_hash
from hypjax.system.locks import claimed, claimed_or_refused

_INTERVAL = 30.0  # Seconds between uploads.
_ATTEMPTS = 5  # A run that is being trained may remove checkpoints during the download.
_WRITER = ".writer"  # In both copies: which local folder was copied to the cloud last.
_PUBLISHED = (CONFIG, PUBLISHED, *HASHED, f"{PROJECTIONS}*")  # Files of a published model.
_STEP = re.compile(rf"{CHECKPOINTS}(\d+)/")  # Unfinished checkpoints have other names.
_COPIED = re.compile(rf"(?!\.|{CHECKPOINTS}(?!\d+/)|.*\.unfinished$)")


def _local_folder(url: str, suffix: str = "") -> pathlib.Path:
    return cache_folder() / "workdirs" / (url_hash(url) + suffix)


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """The sizes in bytes of the files in a local copy, unless they are hidden or unfinished."""
    found = {}
    for root, _, names in os.walk(folder):
        for path in (pathlib.Path(root, name) for name in names):
            if _COPIED.match(name := path.relative_to(folder).as_posix()):
                with contextlib.suppress(FileNotFoundError):  # A checkpoint was just removed.
                    found[name] = path.stat().st_size
    return found


def _step(name: str) -> str | None:
    """The step of the checkpoint that a file belongs to, if any."""
    step = _STEP.match(name)
    return step and step[1]


def _changed(names: Mapping[str, int], others: Mapping[str, int]) -> set[str]:
    """Steps of whose checkpoints a file is missing elsewhere, or of another size.

    They are copied whole: a checkpoint that was saved again may have files of equal sizes.
    """
    return {_step(name) for name, size in names.items() if others.get(name) != size} - {None}


def _newest(names: Iterable[str]) -> int:
    """The step of the last checkpoint; 0 if there is none."""
    return max((int(step) for step in map(_step, names) if step), default=0)


def _replace(folder: pathlib.Path, cloud: CloudFolder, stored: Mapping[str, int]) -> None:
    """Makes the files in a folder those of the cloud; equal files of checkpoints are kept."""
    here = _sizes(folder)
    for step in {*map(_step, here)} - {*map(_step, stored), None}:
        shutil.rmtree(folder / CHECKPOINTS / step)
    for name in here.keys() - stored.keys():
        (folder / name).unlink(missing_ok=True)
    steps = {*_changed(stored, here), None}
    cloud.get({name for name in stored if _step(name) in steps}, folder)


class CloudCopy:
    """The local folder of a run in the cloud; as a context manager it uploads what is new."""

    def __init__(self, url: str) -> None:
        """Downloads the run, or uploads what this machine wrote last and the cloud lacks."""
        self.location = redacted(url.rstrip("/"))
        self.folder = _local_folder(url)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_uploading, daemon=True)
        console.say(f"{self.location} is kept in {self.folder} during the run")
        with claimed_or_refused(self.folder), self._errors_explained():
            self._cloud, mark = CloudFolder(url), self.folder / _WRITER
            self._id = mark.read_text() if mark.exists() else ""
            stored = self._cloud.sizes()
            # The local folder may have been emptied, or restored from an older copy.
            current = _newest(_sizes(self.folder)) >= _newest(stored)
            if self._id and self._cloud.read(_WRITER) == self._id and current:
                self._upload(everything=True)
                return
            mark.unlink(missing_ok=True)
            self._id = uuid.uuid4().hex
            names = [name for name in stored if CONFIG in stored and _COPIED.match(name)]
            if RESULTS in stored:  # A finished run is only printed.
                names = [name for name in names if not _step(name)]
            _replace(self.folder, self._cloud, {name: stored[name] for name in names})

    def __enter__(self) -> Self:
        """Becomes the writer of the cloud's copy and starts to upload into it."""
        with self._errors_explained():
            (self.folder / _WRITER).write_text(self._id)
            self._cloud.put([_WRITER], self.folder)
            self._upload(everything=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: object) -> None:
        """Uploads what is left; a failure is an error unless another one is being handled."""
        self._ending.set()
        self._thread.join()
        try:
            with self._errors_explained():
                self._upload(everything=True)
        except UserError as error:
            if kind is None:
                raise
            console.warn(str(error))

    def _errors_explained(self) -> contextlib.AbstractContextManager[None]:
        return explained(
            f"cannot copy {self.folder} to {self.location}, or back",
            "; the same command on this machine copies what is missing",
        )

    def _keep_uploading(self) -> None:
        """Body of the thread."""
        warned = False
        while not self._ending.wait(_INTERVAL):
            try:
                self._upload()
            except Exception as error:  # Storage may be away for hours.
                if not warned:
                    console.warn(f"cannot write to {self.location} now ({reason(error)})")
                warned = True

    def _upload(self, everything: bool = False) -> None:
        """Uploads files of new sizes, or all but known checkpoints; removes old checkpoints.

        Metrics precede the checkpoints that follow them. Old checkpoints are removed after new ones
        have been uploaded. The results, which mark a run as finished, come last.
        """
        if self._cloud.read(_WRITER) != self._id:
            raise UserError(
                f"{self.location} was removed, or taken over by another machine; the results of "
                f"this run are in {self.folder}"
            )
        here, stored = _sizes(self.folder), self._cloud.sizes()
        steps = _changed(here, stored)
        others = {
            name
            for name, size in here.items()
            if not _step(name) and (everything or size != stored.get(name))
        }
        self._cloud.put(others - {RESULTS}, self.folder)
        for step in sorted(steps, key=int):
            self._put_checkpoint(step, [name for name in here if _step(name) == step])
        self._cloud.remove(name for name in stored if _step(name) and name not in here)
        self._cloud.put(others & {RESULTS}, self.folder)

    def _put_checkpoint(self, step: str, names: Iterable[str]) -> None:
        """Uploads a checkpoint through hard links: it may be removed during a slow upload."""
        source = self.folder / CHECKPOINTS / step
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as links:
            try:
                shutil.copytree(
                    source, pathlib.Path(links, CHECKPOINTS, step), copy_function=os.link
                )
            except OSError:
                if source.exists():
                    raise
                return
            self._cloud.put(names, pathlib.Path(links))


@contextlib.contextmanager
def reading(workdir: str | pathlib.Path, *, training: bool = False) -> Iterator[pathlib.Path]:
    """Opens a run for reading its models; what lies elsewhere is downloaded first.

    A run is a folder, a URL, or a published model on the hub, hf://OWNER/NAME. What only training
    needs, such as the objective's parameters, is left out unless it is asked for. The copy of a URL
    is locked during the body.
    """
    if hub.is_repository(workdir):
        folder = hub.download(workdir, _PUBLISHED)
        if not (folder / PUBLISHED).exists():
            raise UserError(f"{workdir} holds no model of hypjax (there is no {PUBLISHED})")
        yield folder
        return
    if not is_url(workdir):
        yield pathlib.Path(workdir).expanduser()
        return
    folder = _local_folder(workdir, "-read")
    with claimed(folder, f"reading {workdir}"):
        with explained(f"cannot copy {workdir} to {folder}"):
            cloud = CloudFolder(workdir)
            for attempt in range(_ATTEMPTS):
                names = cloud.sizes().items()
                stored = {name: size for name, size in names if _is_needed(name, training)}
                if CONFIG not in stored:
                    raise UserError(
                        f"{workdir} holds no run; name the folder of one with --workdir"
                    )
                try:
                    _replace(folder, cloud, stored)
                    break
                except FileNotFoundError:
                    if attempt == _ATTEMPTS - 1:
                        raise
        yield folder


def _is_needed(name: str, training: bool) -> bool:
    """Whether a file is needed to read models; what only training needs is not, unless asked."""
    if step := _STEP.match(name):
        return training or not name.startswith("training/", step.end())
    return name in (CONFIG, RESULTS, MATCHES, METRICS, TIMES) or name.startswith(PROJECTIONS)
