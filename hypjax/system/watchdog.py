"""Ends all processes of a run soon after one of them is lost, so that none waits for it forever.

The heartbeat of `jax.distributed` is not enough: it aborts the survivors with SIGABRT and a stack
trace, so their exit status cannot distinguish a lost process (75, worth a retry) from a user error
(1). And after an error in one process it never fires: that process, still alive, waits in JAX's
shutdown barrier for the others, while they wait for it in a collective operation.

Each process therefore keeps a TCP connection to the first and announces its exit on it. The
operating system closes the connection of a process that was killed, and TCP keepalive detects a
machine that no longer answers.
"""

import contextlib
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from hypjax.errors import INTERRUPTED, TRY_AGAIN
from hypjax.system import console, exits

_CONNECT_TIMEOUT = 10  # Seconds.
_CLEANUP_TIMEOUT = 3600  # Seconds.
_GRACE = 5  # Seconds: an error may follow from the loss of a process, which is then reported first.
_DONE, _FAILED, _LOST = "done", "failed", "lost"  # Messages.

_connections: dict[int, socket.socket] = {}  # By process; all but the first have only process 0.
_watchers: list[threading.Thread] = []
_lock = threading.Lock()
_enabled = threading.Event()  # Whether the run has several processes.
_exiting = threading.Event()  # Whether this process is already exiting by itself.


def listen(processes: int, host: str | None) -> dict[str, Any]:
    """Opens the first process's port; returns what the others need in order to `connect`."""
    _enabled.set()
    listener = socket.create_server(("", 0), backlog=processes)
    token = secrets.token_hex(16)
    threading.Thread(target=_accept_all, args=(listener, token, processes), daemon=True).start()
    hosts = [*([host] if host else []), socket.gethostname(), _address()]
    return {"hosts": hosts, "port": listener.getsockname()[1], "token": token}


def connect(server: Mapping[str, Any], process: int, processes: int) -> None:
    """Connects this process to the first one, by what `listen` returned there."""
    _enabled.set()
    if process == 0:
        return
    for host in server["hosts"]:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, server["port"]), timeout=_CONNECT_TIMEOUT)
            connection.settimeout(None)
            _add(connection, 0)
            connection.sendall(f"{server['token']} {process}\n".encode())
            _start_watching(0, processes)
            return
    console.warn(
        f"process {process} cannot reach {' or '.join(server['hosts'])} at port "
        f"{server['port']}; if a process is lost, the others may wait for minutes"
    )


@contextlib.contextmanager
def protected_cleanup() -> Iterator[None]:
    """After an error in the body, lets this process clean up even if others end meanwhile."""
    try:
        yield
    except BaseException:
        _exiting.set()
        raise


@contextlib.contextmanager
def announced_exit() -> Iterator[None]:
    """Tells the other processes whether this one ends normally or with an error."""
    try:
        yield
    except SystemExit as end:
        if not _enabled.is_set():
            raise
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status in (0, INTERRUPTED, TRY_AGAIN):
            _send(_DONE)
            raise
        _fail(status)
    except Exception as error:
        if not _enabled.is_set():
            raise
        time.sleep(_GRACE)  # If a lost process caused this error, the watchers exit meanwhile.
        traceback.print_exc()
        _fail(TRY_AGAIN if type(error).__name__ == "JaxRuntimeError" else 1)


def _fail(status: int) -> NoReturn:
    """Exits without Python's and JAX's exit handlers, which would wait for the other processes."""
    _exiting.set()
    _send(f"{_FAILED} {status}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if 0 in _connections:  # The first process may still be saving.
        _watchers[0].join(_CLEANUP_TIMEOUT)
    exits.at_once(status)


def _send(message: str) -> None:
    with _lock:
        for connection in _connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{message}\n".encode())


def _address() -> str:
    """Returns this machine's address on the network, for hosts that resolve no names."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing; it only selects a route.
            return probe.getsockname()[0]
        except OSError:
            return "localhost"


def _add(connection: socket.socket, process: int) -> None:
    """Stores a connection and enables TCP keepalive on it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with _lock:
        _connections[process] = connection


def _accept_all(listener: socket.socket, token: str, processes: int) -> None:
    with listener:
        while len(_connections) < processes - 1:
            connection, _ = listener.accept()
            line = _first_line(connection).split()
            if len(line) != 2 or line[0] != token:
                connection.close()
                continue
            process = int(line[1])
            _add(connection, process)
            _start_watching(process, processes)


def _start_watching(process: int, processes: int) -> None:
    watcher = threading.Thread(target=_watch, args=(process, processes), daemon=True)
    _watchers.append(watcher)
    watcher.start()


def _first_line(connection: socket.socket) -> str:
    """Reads the line with which a process identifies itself, or '' if none arrives."""
    connection.settimeout(_CONNECT_TIMEOUT)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 99 and (byte := connection.recv(1)):
            line += byte
    connection.settimeout(None)
    return line.decode(errors="replace")


def _watch(process: int, processes: int) -> None:
    """Waits until a process announces its exit or is lost, and exits too if necessary."""
    message = []
    with contextlib.suppress(OSError):
        message = _connections[process].makefile().readline().split()
    match message:
        case ["done"]:
            return
        case ["failed", status]:
            _exit_after(process, processes, int(status))
        case ["lost", lost, status]:  # The first process reports on a third one.
            _exit_after(int(lost), processes, int(status))
        case _:
            _exit_after(process, processes, None)


def _exit_after(process: int, processes: int, status: int | None) -> None:
    """Exits because another process did, unless this process is already exiting by itself."""
    if _exiting.wait(_GRACE if status else 0):
        return
    code = TRY_AGAIN if status is None else status
    _send(f"{_LOST} {process} {code}")
    reason = "failed, see its own output; this one stops too"
    if code == TRY_AGAIN:
        reason = (
            "was lost (killed, or its machine is gone); this one stops too, and the same command "
            "continues from the last checkpoint"
        )
    print(f"error: process {process} of {processes} {reason}", file=sys.stderr, flush=True)
    exits.at_once(code)
