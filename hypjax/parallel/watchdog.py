"""Ends all processes of a run soon after one of them is lost, which otherwise would wait for it.

Each process keeps a connection to the first. The operating system closes it when its process ends,
however that ends; a machine that is gone stops answering. Before it ends in good order a process
says so. JAX's own watch needs minutes, and aborts without saying what happened.
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

_CONNECTING = 10  # Seconds.
_DONE, _FAILED, _LOST = "done", "failed", "lost"
_CLOSING = 3600  # Seconds.
_GRACE = 5  # Seconds in which the loss of a process is noticed, before an error is told as its own.

_connections: dict[int, socket.socket] = {}  # By process; of all but the first, only to it.
_followers: list[threading.Thread] = []
_lock = threading.Lock()
_together = threading.Event()  # Whether there are others at all.
_leaving = threading.Event()  # Whether this process is about to end by itself.


def invite(processes: int, host: str | None) -> dict[str, Any]:
    """Opens a place for the others to connect to, in the first process.

    Args:
        processes: How many there are.
        host: By which name the others know this machine, if that is known.

    Returns:
        What they have to know.
    """
    _together.set()
    listener = socket.create_server(("", 0), backlog=processes)
    token = secrets.token_hex(16)
    threading.Thread(target=_listen, args=(listener, token, processes), daemon=True).start()
    hosts = [*([host] if host else []), socket.gethostname(), _address()]
    return {"hosts": hosts, "port": listener.getsockname()[1], "token": token}


def accept(invitation: Mapping[str, Any], process: int, processes: int) -> None:
    """Connects to the first process, in the others."""
    _together.set()
    if process == 0:
        return
    for host in invitation["hosts"]:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, invitation["port"]), timeout=_CONNECTING)
            connection.settimeout(None)
            _keep(connection, 0)
            connection.sendall(f"{invitation['token']} {process}\n".encode())
            _begin_to_follow(0, processes)
            return
    console.warn(
        f"process {process} cannot reach {' or '.join(invitation['hosts'])} at port "
        f"{invitation['port']}; if a process is lost, the others may wait for minutes"
    )


@contextlib.contextmanager
def closing_in_peace() -> Iterator[None]:
    """After an error in the body, lets this process close what it has open, whatever others do."""
    try:
        yield
    except BaseException:
        _leaving.set()
        raise


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Tells the others how this process ends: in good order, or by an error."""
    try:
        yield
    except SystemExit as end:
        if not _together.is_set():
            raise
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status in (0, INTERRUPTED, TRY_AGAIN):
            _tell(_DONE)
            raise
        _fail(status)
    except Exception as error:
        if not _together.is_set():
            raise
        time.sleep(_GRACE)  # A lost process breaks what it took part in.
        traceback.print_exc()
        _fail(TRY_AGAIN if type(error).__name__ == "JaxRuntimeError" else 1)


def _fail(status: int) -> NoReturn:
    """Ends without Python's and JAX's ceremonies, which would wait for the others."""
    _leaving.set()
    _tell(f"{_FAILED} {status}")
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if 0 in _connections:  # The first may be about to close what all have computed.
        _followers[0].join(_CLOSING)
    exits.at_once(status)


def _tell(message: str) -> None:
    with _lock:
        for connection in _connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{message}\n".encode())


def _address() -> str:
    """This machine's address, as seen from elsewhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Nothing is sent; it only chooses a route.
            return probe.getsockname()[0]
        except OSError:
            return "localhost"


def _keep(connection: socket.socket, process: int) -> None:
    """Keeps a connection, and has it ask some seconds of silence whether the machine is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with _lock:
        _connections[process] = connection


def _listen(listener: socket.socket, token: str, processes: int) -> None:
    """Takes the others' connections."""
    with listener:
        while len(_connections) < processes - 1:
            connection, _ = listener.accept()
            line = _first_line(connection).split()
            if len(line) != 2 or line[0] != token:
                connection.close()
                continue
            process = int(line[1])
            _keep(connection, process)
            _begin_to_follow(process, processes)


def _begin_to_follow(process: int, processes: int) -> None:
    follower = threading.Thread(target=_follow, args=(process, processes), daemon=True)
    _followers.append(follower)
    follower.start()


def _first_line(connection: socket.socket) -> str:
    """The line by which a process introduces itself; '' if none comes."""
    connection.settimeout(_CONNECTING)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < 99 and (byte := connection.recv(1)):
            line += byte
    connection.settimeout(None)
    return line.decode(errors="replace")


def _follow(process: int, processes: int) -> None:
    """Waits until a process tells that it ends, or does so, and ends this one too if need be."""
    told = []
    with contextlib.suppress(OSError):
        told = _connections[process].makefile().readline().split()
    match told:
        case ["done"]:
            return
        case ["failed", status]:
            _end(process, processes, int(status))
        case ["lost", lost, status]:  # Of a third process, which the first knows of.
            _end(int(lost), processes, int(status))
        case _:
            _end(process, processes, None)


def _end(process: int, processes: int, status: int | None) -> None:
    """Ends this process after another one, unless it is about to end by an error of its own."""
    if _leaving.wait(_GRACE if status else 0):
        return
    code = TRY_AGAIN if status is None else status
    _tell(f"{_LOST} {process} {code}")
    reason = "ended with an error, which its own output tells; this one ends too"
    if code == TRY_AGAIN:
        reason = (
            "was lost (killed, or its machine is gone); this one ends too, and the same command "
            "goes on from the last checkpoint"
        )
    print(f"error: process {process} of {processes} {reason}", file=sys.stderr, flush=True)
    exits.at_once(code)
