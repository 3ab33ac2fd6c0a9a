"""Runs in cloud storage: executed in a local folder that a thread copies to the cloud.

Object stores can neither append nor rename nor lock, so the run itself only uses a local folder,
and a thread uploads what is new. The last writer decides which copy counts. If this machine's
folder was the last writer, the run continues from the folder, which has everything that the cloud
has, or more. Otherwise the cloud's copy replaces the folder at the start.
"""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from typing import Any, Self

from hypjax.errors import UserError, redacted
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
    present,
    steps,
)
from hypjax.system import console, hub
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, Stored, explained, is_url, reason, url_hash
from hypjax.system.files import remove, write_json
from hypjax.system.locks import claimed, claimed_or_refused

_POLL_SECONDS = 1.0  # Interval between checks for new checkpoints.
_UPLOAD_SECONDS = 60.0  # Interval between uploads of other new files, such as metrics.
_WRITER = "writer.json"  # In the cloud: which local folder was copied there last.
_OUTGOING, _INCOMING = ".outgoing", ".incoming"  # In the local folder.
_PUBLISHED = (CONFIG, PUBLISHED, *HASHED, f"{PROJECTIONS}*")  # Files of a published model.
_STATE = ".mirror.json"  # Of a local copy.
_ATTEMPTS = 5  # A run that is being trained may remove checkpoints during the download.


def _local_folder(url: str, suffix: str = "") -> pathlib.Path:
    """Returns the folder on this machine that holds the copy of a run in the cloud."""
    return cache_folder() / "workdirs" / (url_hash(url) + suffix)


def _read_state(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the state of a local copy; empty if it is missing or damaged."""
    try:
        state = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


class CloudCopy:
    """The local folder of a run in the cloud; as a context manager it uploads what is new."""

    def __init__(self, url: str) -> None:
        """Synchronises the local folder and the cloud's copy, which may not exist yet."""
        self.location = redacted(url.rstrip("/"))
        self.folder = _local_folder(url)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_uploading, daemon=True)
        with explained(f"cannot read {url}"):
            self._cloud = CloudFolder(url)
        with claimed_or_refused(self.folder):
            state = _read_state(self.folder)
            self._id: str = state.get("id") or uuid.uuid4().hex
            # Files that the cloud may have, with size and time of the local file when it was
            # uploaded, or None if the upload may be incomplete.
            self._known: dict[str, list[int] | None] = state.get("known", {})
            self._synchronise()

    def _synchronise(self) -> None:
        with explained(f"cannot read {self.location}"):
            stored = self._cloud.list()
            wrote_last = (
                CONFIG in stored
                and (self._writer() or {}).get("folder") == self._id
                and self._is_intact()
            )
        console.say(f"{self.location} is kept in {self.folder} during the run")
        if not wrote_last:
            self._set_unsent_aside()
            self._download(stored)
            return
        for name, stat in self._known.items():
            if stat and (name not in stored or stored[name].size != stat[0]):
                self._known[name] = None
        with self._errors_explained():
            self._upload()

    def _is_intact(self) -> bool:
        """Whether no uploaded file was changed or lost since, say by a user or a power failure."""
        here = present(self.folder)
        sent = {n: stat for n, stat in self._known.items() if stat and n.startswith(CHECKPOINTS)}
        same = all(here[name] == stat for name, stat in sent.items() if name in here)
        return same and CONFIG in here and bool(steps(self.folder) or not sent)

    def _set_unsent_aside(self) -> None:
        """Moves results that were never uploaded out of the way of the cloud's copy."""
        unsent = [
            name
            for name, stat in present(self.folder).items()
            if name.startswith((CHECKPOINTS, RESULTS)) and self._known.get(name) != stat
        ]
        if not unsent:
            return
        asides = (f"{self.folder.name}-unsent-{number}" for number in itertools.count(1))
        aside = next(p for p in map(self.folder.with_name, asides) if not p.exists())
        aside.mkdir()
        for path in _visible(self.folder):
            path.rename(aside / path.name)
        console.warn(
            f"{self.location} and its copy on this machine differ; the run continues from the "
            f"former, and what was never uploaded from here is kept in {aside}"
        )

    def _download(self, stored: dict[str, Stored]) -> None:
        files = {name: stored[name] for name in stored if name != _WRITER and name[0] != "."}
        if CONFIG not in files:  # Whatever the URL holds, it is not a run.
            files = {}
        if RESULTS in files:  # A finished run: only its results are read, in order to print them.
            files = {n: info for n, info in files.items() if not n.startswith(CHECKPOINTS)}
        incoming = self.folder / _INCOMING
        with explained(f"cannot copy {self.location} to {self.folder}"):
            remove(incoming)
            incoming.mkdir()
            self._cloud.get_all(files, incoming)
            for path in _visible(self.folder):
                remove(path)
            for path in incoming.iterdir():
                path.rename(self.folder / path.name)
            incoming.rmdir()
            self._known = dict(present(self.folder))
            self._write_state()

    def __enter__(self) -> Self:
        """Becomes the writer of the cloud's copy and starts to upload into it."""
        who = f"process {os.getpid()} on {socket.gethostname()}"
        with self._errors_explained():
            self._write_state()
            self._cloud.write(_WRITER, json.dumps({"folder": self._id, "by": who}).encode())
            self._upload()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: object) -> None:
        """Uploads what is left; a failure is an error unless another one is being handled."""
        self._ending.set()
        self._thread.join()
        try:
            with self._errors_explained():
                self._upload()
        except UserError as error:
            if kind is None:
                raise
            console.warn(str(error))

    def _errors_explained(self) -> contextlib.AbstractContextManager[None]:
        advice = f"; the whole run is in {self.folder}, and the same command on this machine "
        return explained(f"cannot write to {self.location}", f"{advice}uploads it")

    def _keep_uploading(self) -> None:
        """Body of the thread: uploads a new checkpoint at once, other files at intervals.

        A series of failures is reported once and retried: storage may be away for hours.
        """
        uploaded, last, failing = steps(self.folder), time.monotonic(), False
        while not self._ending.wait(_POLL_SECONDS):
            now = steps(self.folder)
            if now == uploaded and time.monotonic() - last < _UPLOAD_SECONDS:
                continue
            try:
                self._upload()
                if failing:
                    console.say(f"{self.location} is up to date again")
                failing = False
            except Exception as error:
                if not failing:
                    console.warn(
                        f"cannot write to {self.location} ({reason(error)}); the run continues in "
                        f"{self.folder}, and the upload will be retried"
                    )
                failing = True
            uploaded, last = now, time.monotonic()

    def _upload(self) -> None:
        """Uploads new and changed files, and removes from the cloud what was removed here.

        Metrics are uploaded before the checkpoints that follow them. Old checkpoints are removed
        after new ones have been uploaded. The results, which mark a run as finished, come last.
        Files that were never in the local folder are left alone.
        """
        here = present(self.folder)
        changed = [name for name, stat in here.items() if self._known.get(name) != stat]
        removed = self._known.keys() - here.keys()
        if not changed and not removed:
            return
        writer = self._writer()
        if writer is None or writer.get("folder") != self._id:
            change = "removed" if writer is None else f"taken over by {writer.get('by')}"
            raise UserError(
                f"{self.location} was {change} during this run, whose results are in {self.folder}"
            )
        self._known |= dict.fromkeys(changed)
        self._write_state()  # So that files of a killed process are removed later.
        try:
            outgoing = self._snapshot(changed)
            for name in sorted(outgoing - {RESULTS}, key=lambda n: (n.startswith(CHECKPOINTS), n)):
                self._send(name, here[name])
            if len(outgoing) == len(changed):  # Else a checkpoint was just replaced; do it later.
                for name in removed:
                    self._cloud.remove(name)
                    del self._known[name]
            if RESULTS in outgoing:
                self._send(RESULTS, here[RESULTS])
        finally:
            self._write_state()
            remove(self.folder / _OUTGOING)

    def _send(self, name: str, stat: list[int]) -> None:
        self._cloud.put(self.folder / _OUTGOING / name, name)
        self._known[name] = stat

    def _snapshot(self, names: Collection[str]) -> set[str]:
        """Preserves files in their present state for the upload; returns those that still exist."""
        # Otherwise a slow upload might never finish a checkpoint before it is replaced.
        remove(self.folder / _OUTGOING)
        preserved = set()
        for name in names:
            source, target = self.folder / name, self.folder / _OUTGOING / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(CHECKPOINTS):  # These never change.
                    _link(source, target)
                else:
                    shutil.copyfile(source, target)
                preserved.add(name)
        return preserved

    def _writer(self) -> dict[str, Any] | None:
        """Returns who copied a folder to the cloud last, or None if nobody did."""
        try:
            content = self._cloud.read(_WRITER)
            return content and json.loads(content)
        except ValueError:
            return {}

    def _write_state(self) -> None:
        state = {"url": self.location, "id": self._id, "known": self._known}
        write_json(self.folder / _STATE, state)


def _visible(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.iterdir() if path.name[0] != "."]


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Makes a hard link to a file, or a copy if the file system has no hard links."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def open_url(workdir: str | pathlib.Path) -> CloudCopy | None:
    """Opens the copy of a run's folder in the cloud for writing; None if it is no URL."""
    if not is_url(workdir):
        return None
    if workdir.startswith("memory:"):
        raise UserError(f"{workdir} ends with this process; name another --workdir")
    return CloudCopy(workdir)


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
    with contextlib.ExitStack() as stack:
        with explained(f"cannot copy {workdir} to {folder}"):
            stack.enter_context(claimed(folder, f"reading {workdir}"))
            _update(folder, workdir, training)
        yield folder


def _update(folder: pathlib.Path, url: str, training: bool) -> None:
    """Downloads the necessary files that are new or changed; removes all others."""
    versions = _read_state(folder).get("versions", {})
    with explained(f"cannot read {url}"):
        cloud = CloudFolder(url)
    for attempt in range(_ATTEMPTS):
        with explained(f"cannot read {url}"):
            stored = {n: info for n, info in cloud.list().items() if _is_needed(n, training)}
        if CONFIG not in stored:
            raise UserError(f"{url} holds no run; name the folder of one with --workdir")
        new = {n: info for n, info in stored.items() if versions.get(n) != info.version}
        try:
            cloud.get_all(new, folder)
            break
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
    for name in present(folder).keys() - stored.keys():
        remove(folder / name)
    for step in steps(folder) - {name.split("/")[1] for name in stored if "/" in name}:
        remove(folder / CHECKPOINTS / step)
    versions = {name: info.version for name, info in stored.items()}
    write_json(folder / _STATE, {"url": redacted(url), "versions": versions})


def _is_needed(name: str, training: bool) -> bool:
    """Whether a file is needed to read models; what only training needs is not, unless asked."""
    if name.startswith(CHECKPOINTS):
        return training or name.split("/")[2:3] != ["training"]
    return name in (CONFIG, RESULTS, MATCHES, METRICS, TIMES) or name.startswith(PROJECTIONS)
