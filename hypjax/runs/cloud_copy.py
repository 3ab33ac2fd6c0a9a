"""A run in cloud storage: it works in a local folder, which a thread copies to the cloud.

Object stores can neither append nor rename nor lock, so the run itself only uses a local folder. If
this folder wrote the cloud's copy last, the run continues from the folder; otherwise the cloud's
copy replaces it at the start.
"""

import contextlib
import functools
import os
import pathlib
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

from hypjax.errors import UserError, explained, reason, redacted
from hypjax.runs import files
from hypjax.system import console, hub
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, is_url, url_hash
from hypjax.system.files import locked

_INTERVAL = 30.0  # Seconds between uploads.
_ATTEMPTS = 5  # A run that is being trained may remove checkpoints during the download.
_WRITER = ".writer"  # In both copies: which local folder was copied to the cloud last.
_PUBLISHED = (files.CONFIG, files.PUBLISHED, *files.HASHED)  # Files of a published model.
# A run's files, except checkpoints, that its readers may need.
_NEEDED = (files.CONFIG, files.RESULTS, files.MATCHES, files.METRICS, files.TIMES)
_STEP = re.compile(rf"{files.CHECKPOINTS}(\d+)/")  # Unfinished checkpoints have other names.
_COPIED = re.compile(rf"(?!\.|{files.CHECKPOINTS}(?!\d+/)|.*\.unfinished$)")


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    """Sizes in bytes of a local copy's files, without hidden and unfinished ones."""
    bytes_of = {}
    for root, _, names in os.walk(folder):
        for path in (pathlib.Path(root, name) for name in names):
            if _COPIED.match(name := path.relative_to(folder).as_posix()):
                with contextlib.suppress(FileNotFoundError):  # A checkpoint was just removed.
                    bytes_of[name] = path.stat().st_size
    return bytes_of


def _steps(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_STEP.match, names) if match}


def _changed(names: Mapping[str, int], others: Mapping[str, int]) -> set[int]:
    """Steps of the checkpoints with a file that is missing elsewhere, or of another size."""
    return _steps(name for name, size in names.items() if others.get(name) != size)


def _replace(folder: pathlib.Path, cloud: CloudFolder, stored: Mapping[str, int]) -> None:
    """Replaces the files in a folder by the cloud's; keeps equal files of checkpoints."""
    here = _sizes(folder)
    for step in _steps(here) - _steps(stored):
        shutil.rmtree(folder / files.CHECKPOINTS / str(step))
    for name in here.keys() - stored.keys():
        (folder / name).unlink(missing_ok=True)
    changed = _changed(stored, here)  # All their files: a step saved twice has equal sizes.
    cloud.get({name for name in stored if _steps([name]) <= changed}, folder)


class CloudCopy:
    """The local folder of a run in the cloud; as a context manager it uploads new files."""

    def __init__(self, url: str) -> None:
        """Downloads the run, or uploads what this machine wrote last and the cloud lacks."""
        self.location = redacted(url.rstrip("/"))
        self.folder = cache_folder() / "workdirs" / url_hash(url)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_uploading, daemon=True)
        console.say(f"{self.location} is kept in {self.folder} during the run")
        with locked(self.folder), self._errors_explained():
            self._cloud, mark = CloudFolder(url), self.folder / _WRITER
            self._id = mark.read_text() if mark.exists() else ""
            stored = self._cloud.sizes()
            # The folder may have been emptied, or restored from an older copy.
            newest, here = (max(_steps(x), default=0) for x in (stored, _sizes(self.folder)))
            if self._id and self._cloud.read(_WRITER) == self._id and here >= newest:
                self._upload(everything=True)
                return
            mark.unlink(missing_ok=True)
            self._id = uuid.uuid4().hex
            names = [name for name in stored if files.CONFIG in stored and _COPIED.match(name)]
            if files.RESULTS in stored:  # A finished run is only printed.
                names = [name for name in names if not _steps([name])]
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
        """Uploads the rest; a failure is an error unless another one is being handled."""
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
        advice = "; the same command on this machine copies the rest"
        return explained(f"cannot copy {self.folder} to {self.location}, or back", advice)

    def _keep_uploading(self) -> None:
        warn = functools.cache(console.warn)  # Once: storage may be away for hours.
        while not self._ending.wait(_INTERVAL):
            try:
                self._upload()
            except Exception as error:
                warn(f"cannot write to {self.location} now ({reason(error)})")

    def _upload(self, everything: bool = False) -> None:
        """Uploads files of new sizes, or all but known checkpoints; removes old checkpoints.

        The order is metrics, new checkpoints, removals, and results, which mark a run as finished.
        """
        if self._cloud.read(_WRITER) != self._id:
            problem = f"{self.location} was removed or taken over"
            raise UserError(f"{problem}; this run is in {self.folder}")
        here, stored = _sizes(self.folder), self._cloud.sizes()
        changed = {name for name in here if everything or here[name] != stored.get(name)}
        others = {name for name in changed if not _steps([name])}
        self._cloud.put(others - {files.RESULTS}, self.folder)
        for step in sorted(_changed(here, stored)):
            self._put_checkpoint(step, [name for name in here if _steps([name]) == {step}])
        self._cloud.remove(name for name in stored if _steps([name]) and name not in here)
        self._cloud.put(others & {files.RESULTS}, self.folder)

    def _put_checkpoint(self, step: int, names: Iterable[str]) -> None:
        """Uploads a checkpoint through hard links: it may be removed during a slow upload."""
        source = self.folder / files.CHECKPOINTS / str(step)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as links:
            target = pathlib.Path(links, files.CHECKPOINTS, str(step))
            try:
                shutil.copytree(source, target, copy_function=os.link)
            except OSError:
                if source.exists():
                    raise
                return
            self._cloud.put(names, pathlib.Path(links))


@contextlib.contextmanager
def reading(workdir: str | pathlib.Path, *, training: bool = False) -> Iterator[pathlib.Path]:
    """Opens a run for reading: a folder, a URL, or a published model, hf://OWNER/NAME.

    Remote files are downloaded, without those that only `training` needs, such as the objective's
    parameters. The copy of a URL is locked during the body.
    """
    if hub.is_repository(workdir):
        folder = hub.download(workdir, _PUBLISHED)
        if not (folder / files.PUBLISHED).exists():
            raise UserError(f"{workdir} holds no model of hypjax (there is no {files.PUBLISHED})")
        yield folder
    elif is_url(workdir):
        folder = cache_folder() / "workdirs" / f"{url_hash(workdir)}-read"
        with locked(folder, f"reading {workdir}"):
            with explained(f"cannot copy {workdir} to {folder}"):
                _download(workdir, folder, training)
            yield folder
    else:
        yield pathlib.Path(workdir).expanduser()


def _download(url: str, folder: pathlib.Path, training: bool) -> None:
    def is_needed(name: str) -> bool:
        if step := _STEP.match(name):
            return training or not name.startswith("training/", step.end())
        return name in _NEEDED or name.startswith(files.PROJECTIONS)

    cloud = CloudFolder(url)
    for attempts_left in reversed(range(_ATTEMPTS)):
        stored = {name: size for name, size in cloud.sizes().items() if is_needed(name)}
        if files.CONFIG not in stored:
            raise UserError(f"{url} holds no run; name the folder of one with --workdir")
        try:
            return _replace(folder, cloud, stored)
        except FileNotFoundError:
            if not attempts_left:
                raise
