"""Runs in cloud storage: carried out in a local folder of which the cloud has a copy.

Object stores can neither append, rename nor lock. So the run itself only ever sees a local folder,
and a thread copies what is new in it. Who wrote to the cloud last decides which copy counts: a
folder that did goes on as it is, since it has all that the cloud has, or more; every other one is
replaced by the cloud's copy at the start.
"""

import contextlib
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

from hypjax.errors import UserError
from hypjax.runs.files import (
    CHECKPOINTS,
    CONFIG,
    RESULTS,
    entries,
    link,
    local_folder,
    present,
    read_state,
    remove,
    steps,
    write_state,
)
from hypjax.system import console
from hypjax.system.cloud import CloudFolder, Stored, copying, is_url, reaching, reason
from hypjax.system.locks import LOCK, lock_or_refuse

_LOOK_SECONDS = 1.0  # Between looks for new checkpoints.
_COPY_SECONDS = 60.0  # Between copies of what else is new, such as measurements.
_WRITER = "writer.json"  # In the cloud: which local folder was copied there last.
_OUTGOING, _INCOMING = ".outgoing", ".incoming"  # In the local folder.


class Unmirrored(contextlib.AbstractContextManager):
    """The folder of a run that is on this machine.

    Attributes:
        folder: Where the run is carried out.
        place: The same, for messages.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Takes it as it is."""
        self.folder = folder
        self.place = str(folder.absolute())

    def __exit__(self, *args: object) -> None:
        """Nothing is left to do."""


class Mirror:
    """The local folder of a run in the cloud, and the copying; a context manager to write in.

    Attributes:
        folder: Where the run is carried out.
        place: The URL, for messages.
    """

    def __init__(self, url: str) -> None:
        """Makes the local folder and the cloud's copy agree.

        Args:
            url: The run's folder in the cloud, which may not exist yet.

        Raises:
            UserError: Another process has the local folder, or the storage cannot be reached.
        """
        self.place = url.rstrip("/")
        self.folder = local_folder(url)
        self._failing = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_copying, daemon=True)
        with reaching(url):
            self._cloud = CloudFolder(url)
        with _locked(self.folder):
            state = read_state(self.folder)
            self._id: str = state.get("id") or uuid.uuid4().hex
            # Files that the cloud may have, and the local file's size and time when they were
            # copied; None: perhaps not whole.
            self._known: dict[str, list[int] | None] = state.get("known", {})
            self._begin()

    def _begin(self) -> None:
        with reaching(self.place):
            stored = self._cloud.list()
            wrote_last = CONFIG in stored and self._is_writer() and self._is_intact()
        console.say(f"{self.place} is worked on in {self.folder}")
        if not wrote_last:
            self._put_unsent_aside()
            self._copy_down(stored)
            return
        for name, facts in self._known.items():
            if facts and (name not in stored or stored[name].size != facts[0]):
                self._known[name] = None
        with self._failures_told():
            self._push()

    def _is_intact(self) -> bool:
        """Whether nothing happened to what was copied, such as a power failure or a tidy user."""
        here = present(self.folder)
        sent = {n: facts for n, facts in self._known.items() if facts and n.startswith(CHECKPOINTS)}
        same = all(here[name] == facts for name, facts in sent.items() if name in here)
        return same and CONFIG in here and bool(steps(self.folder) or not sent)

    def _put_unsent_aside(self) -> None:
        """Keeps what was computed here and never reached the cloud, which is another one now."""
        unsent = [
            name
            for name, facts in present(self.folder).items()
            if name.startswith((CHECKPOINTS, RESULTS)) and self._known.get(name) != facts
        ]
        if not unsent:
            return
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}-unsent-{number}")).exists():
            number += 1
        aside.mkdir()
        for path in entries(self.folder):
            path.rename(aside / path.name)
        console.warn(
            f"{self.place} and its copy on this machine have parted; the run goes on from "
            f"the first, and what only this machine has is kept in {aside}"
        )

    def _copy_down(self, stored: dict[str, Stored]) -> None:
        """Replaces the local folder's content by the cloud's."""
        files = {name: stored[name] for name in stored if name != _WRITER and name[0] != "."}
        if CONFIG not in files:  # Whatever that is, it is no run.
            files = {}
        if RESULTS in files:  # They will be printed, and nothing else is read.
            files = {n: facts for n, facts in files.items() if not n.startswith(CHECKPOINTS)}
        incoming = self.folder / _INCOMING
        with copying(self.place, self.folder):
            remove(incoming)
            incoming.mkdir()
            self._cloud.get_all(files, incoming)
            for path in entries(self.folder):
                remove(path)
            for path in incoming.iterdir():
                path.rename(self.folder / path.name)
            incoming.rmdir()
            self._known = dict(present(self.folder))
            self._write_state()

    def __enter__(self) -> Self:
        """Takes the cloud's copy over and begins to copy; the folder must be locked.

        Raises:
            UserError: The storage cannot be written.
        """
        who = f"process {os.getpid()} on {socket.gethostname()}"
        with self._failures_told():
            self._write_state()
            self._cloud.write(_WRITER, json.dumps({"folder": self._id, "by": who}).encode())
            self._push()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: object) -> None:
        """Copies what is left.

        Raises:
            UserError: That failed, and no other error is under way.
        """
        self._ending.set()
        self._thread.join()
        try:
            with self._failures_told():
                self._push()
        except UserError as error:
            if kind is None:
                raise
            console.warn(str(error))

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"cannot write to {self.place} ({reason(error)}); all of this run is in "
                f"{self.folder}, and the same command on this machine copies it"
            ) from error

    def _keep_copying(self) -> None:
        """The thread: copies each new checkpoint at once, and all else from time to time."""
        copied, last = steps(self.folder), time.monotonic()
        while not self._ending.wait(_LOOK_SECONDS):
            now = steps(self.folder)
            if now != copied or time.monotonic() - last >= _COPY_SECONDS:
                self._attempt()
                copied, last = now, time.monotonic()

    def _attempt(self) -> None:
        """Copies what is new; a failure is told of once, and leaves all to the next attempt."""
        try:
            self._push()
        except Exception as error:
            if not self._failing:
                console.warn(
                    f"{self.place} could not be written ({reason(error)}); the run goes on in "
                    f"{self.folder}, and copying is tried again"
                )
            self._failing = True
            return
        if self._failing:
            console.say(f"{self.place} has everything again")
        self._failing = False

    def _push(self) -> None:
        """Copies what is new or changed, and removes from the cloud what is gone here.

        Measurements go before the checkpoints that follow them, old checkpoints only after new
        ones have come, and the results, by which a run is known as finished, at the end. Files
        that were never here are left alone.
        """
        here = present(self.folder)
        changed = [name for name, facts in here.items() if self._known.get(name) != facts]
        gone = self._known.keys() - here.keys()
        if not changed and not gone:
            return
        self._require_writer()
        self._known |= dict.fromkeys(changed)
        self._write_state()  # Else a killed process might leave files that nobody removes.
        try:
            outgoing = self._set_apart(changed)
            for name in sorted(outgoing - {RESULTS}, key=lambda n: (n.startswith(CHECKPOINTS), n)):
                self._send(name, here[name])
            if len(outgoing) == len(changed):  # Else a checkpoint was just replaced: see later.
                for name in gone:
                    self._cloud.remove(name)
                    del self._known[name]
            if RESULTS in outgoing:
                self._send(RESULTS, here[RESULTS])
        finally:
            self._write_state()
            remove(self.folder / _OUTGOING)

    def _send(self, name: str, facts: list[int]) -> None:
        self._cloud.put(self.folder / _OUTGOING / name, name)
        self._known[name] = facts

    def _set_apart(self, names: Collection[str]) -> set[str]:
        """Keeps files as they are now for the time of copying; returns those that still exist.

        A slow copy would otherwise never see the end of a checkpoint before it is replaced.
        """
        remove(self.folder / _OUTGOING)
        apart = set()
        for name in names:
            source, target = self.folder / name, self.folder / _OUTGOING / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(CHECKPOINTS):  # These never change.
                    link(source, target)
                else:
                    shutil.copyfile(source, target)
                apart.add(name)
        return apart

    def _writer(self) -> dict[str, Any] | None:
        try:
            content = self._cloud.read(_WRITER)
            return content and json.loads(content)
        except ValueError:
            return {}

    def _is_writer(self) -> bool:
        return (self._writer() or {}).get("folder") == self._id

    def _require_writer(self) -> None:
        writer = self._writer()
        if writer is None or writer.get("folder") != self._id:
            what = "removed" if writer is None else f"taken over by {writer.get('by')}"
            raise UserError(
                f"{self.place} was {what} during this run; what it computed is in {self.folder}"
            )

    def _write_state(self) -> None:
        state = {"url": self.place, "id": self._id, "known": self._known}
        write_state(self.folder, state)


def open_mirror(workdir: str | pathlib.Path) -> Unmirrored | Mirror:
    """Where a run is carried out whose folder may be in the cloud.

    Args:
        workdir: A folder, or a URL.

    Raises:
        UserError: A URL is in use on this machine, or its storage cannot be reached.
    """
    return Mirror(workdir) if is_url(workdir) else Unmirrored(pathlib.Path(workdir))


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Makes a folder, and refuses to share it during the body."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+b", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror})") from error
    with lock:
        lock_or_refuse(lock, folder)
        yield
