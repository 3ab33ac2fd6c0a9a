"""Runs in cloud storage: a run writes to a local folder, which a thread uploads.

Object stores can neither append nor rename nor lock, so a run uses only its local folder. At the
start, the cloud copy replaces the folder's files, unless the folder was the last to be uploaded.
"""

import contextlib
import functools
import os
import pathlib
import re
import shutil
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
_WRITER = ".writer"  # File with the id of the local folder that was uploaded last.
# A run's files, except checkpoints, that its readers may need, by the beginnings of their names.
_NEEDED = (
    *(files.CONFIG, files.RESULTS, files.METRICS, files.TIMES, files.PROJECTIONS),
    *files.TOKENS,
)
_STEP = re.compile(rf"{files.CHECKPOINTS}(\d+)/")  # Unfinished checkpoints have other names.
# Names of files to copy: not hidden, and neither unfinished files nor unfinished checkpoints.
_COPIED = re.compile(rf"(?!\.|{files.CHECKPOINTS}(?!\d+/)|.*\.unfinished$)")

_Sizes = Mapping[str, int]  # Bytes of files, by their path relative to the run's folder.


def _local_sizes(folder: pathlib.Path) -> _Sizes:
    """Sizes of a folder's files, without hidden and unfinished files."""
    sizes = {}
    for root, _, names in os.walk(folder):
        for path in (pathlib.Path(root, name) for name in names):
            name = path.relative_to(folder).as_posix()
            if _COPIED.match(name):
                with contextlib.suppress(FileNotFoundError):  # A checkpoint was just removed.
                    sizes[name] = path.stat().st_size
    return sizes


def _step_of(name: str) -> int | None:
    """Step of the checkpoint to which a file belongs; None for other files."""
    return int(match[1]) if (match := _STEP.match(name)) else None


def _steps(names: Iterable[str]) -> set[int]:
    return {step for name in names if (step := _step_of(name)) is not None}


def _changed_steps(source: _Sizes, target: _Sizes) -> set[int]:
    """Steps of the checkpoints in `source` that are missing or have changed in `target`."""
    return _steps(name for name, size in source.items() if target.get(name) != size)


def _download(cloud: CloudFolder, stored: _Sizes, folder: pathlib.Path) -> None:
    """Replaces a folder's files by the stored files; keeps checkpoints that have not changed."""
    local = _local_sizes(folder)
    for step in _steps(local) - _steps(stored):
        shutil.rmtree(folder / files.CHECKPOINTS / str(step))
    for name in local.keys() - stored.keys():
        (folder / name).unlink(missing_ok=True)
    # Changed checkpoints are downloaded whole: files of a step that was saved twice may differ and
    # still have equal sizes.
    changed_steps = _changed_steps(stored, local)
    names = {name for name in stored if _step_of(name) is None or _step_of(name) in changed_steps}
    cloud.get(names, folder)


class CloudCopy:
    """The local folder of a run in the cloud; uploads new files while it is a context manager."""

    def __init__(self, url: str) -> None:
        """Downloads the run, or uploads the rest if this machine wrote the cloud copy last."""
        self.location = redacted(url.rstrip("/"))
        self.folder = cache_folder() / "workdirs" / url_hash(url)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_uploading, daemon=True)
        console.say(f"{self.location} is kept in {self.folder} during the run")
        with locked(self.folder), self._errors_explained():
            self._cloud = CloudFolder(url)
            writer_file = self.folder / _WRITER
            self._id = writer_file.read_text() if writer_file.exists() else ""
            stored = self._cloud.sizes()
            # The folder may have been emptied, or restored from an older copy.
            last_stored = max(_steps(stored), default=0)
            is_newest = max(_steps(_local_sizes(self.folder)), default=0) >= last_stored
            if self._id and self._cloud.read(_WRITER) == self._id and is_newest:
                self._upload(everything=True)
                return
            writer_file.unlink(missing_ok=True)
            self._id = uuid.uuid4().hex
            names = filter(_COPIED.match, stored) if files.CONFIG in stored else []
            if files.RESULTS in stored:  # Only the results of a finished run are printed.
                names = [name for name in names if _step_of(name) is None]
            _download(self._cloud, {name: stored[name] for name in names}, self.folder)

    def __enter__(self) -> Self:
        """Becomes the writer of the cloud copy and starts to upload."""
        with self._errors_explained():
            (self.folder / _WRITER).write_text(self._id)
            self._cloud.put([_WRITER], self.folder)
            self._upload(everything=True)
        self._thread.start()
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *args: object) -> None:
        """Uploads the rest; a failure is an error, or a warning if an exception ended the run."""
        self._ending.set()
        self._thread.join()
        try:
            with self._errors_explained():
                self._upload(everything=True)
        except UserError as error:
            if exception_type is None:
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
        """Uploads new checkpoints and changed files, and removes old checkpoints from the cloud.

        A file has changed if its size has; with `everything`, all files except checkpoints are
        uploaded again. The order is metrics and other files, new checkpoints, removals, and last
        the results, which mark a run as finished.
        """
        if self._cloud.read(_WRITER) != self._id:
            problem = f"{self.location} was removed or taken over"
            raise UserError(f"{problem}; this run is in {self.folder}")
        local, stored = _local_sizes(self.folder), self._cloud.sizes()
        changed = {name for name in local if everything or local[name] != stored.get(name)}
        changed = {name for name in changed if _step_of(name) is None}
        self._cloud.put(changed - {files.RESULTS}, self.folder)
        # The newest first: the run may remove an old checkpoint during its upload. The error then
        # ends this upload before the cloud's old checkpoints are removed.
        for step in sorted(_changed_steps(local, stored), reverse=True):
            self._cloud.put([name for name in local if _step_of(name) == step], self.folder)
        removed = stored.keys() - local.keys()
        # A run that is trained for longer sets its earlier results aside.
        stale = [name for name in removed if _step_of(name) is not None or name == files.RESULTS]
        self._cloud.remove(stale)
        self._cloud.put(changed & {files.RESULTS}, self.folder)


@contextlib.contextmanager
def reading(workdir: str | os.PathLike[str], *, training: bool = False) -> Iterator[pathlib.Path]:
    """Yields a local folder with the files of a run: a folder, a URL, or hf://OWNER/NAME.

    Remote files are downloaded, with the state of the optimiser and the objective if `training`.
    The download of a URL stays locked until the context ends.
    """
    workdir = str(workdir)
    if hub.is_repository(workdir):
        folder = hub.download(workdir, files.MODEL_FILES)
        if not (folder / files.PUBLISHED).exists():
            raise UserError(f"{workdir} holds no model of hypjax (there is no {files.PUBLISHED})")
        yield folder
    elif is_url(workdir):
        folder = cache_folder() / "workdirs" / f"{url_hash(workdir)}-read"
        with locked(folder, f"reading {workdir}"):
            # A run that is being trained may remove a checkpoint meanwhile.
            with explained(f"cannot copy {workdir} to {folder}", "; run the command again"):
                cloud = CloudFolder(workdir)
                sizes = cloud.sizes()
                stored = {name: sizes[name] for name in sizes if _is_needed(name, training)}
                if files.CONFIG not in stored:
                    raise UserError(f"{workdir} holds no run; name a run's folder with --workdir")
                _download(cloud, stored, folder)
            yield folder
    else:
        yield pathlib.Path(workdir).expanduser()


def _is_needed(name: str, training: bool) -> bool:
    """Whether readers need a run's file; if `training`, all files of checkpoints are needed."""
    if checkpoint := _STEP.match(name):
        return training or not name.startswith("training/", checkpoint.end())
    return name.startswith(_NEEDED)
