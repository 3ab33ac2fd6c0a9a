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
from typing import Any

from hypjax import ending, reporting
from hypjax.errors import INTERRUPTED, TRY_AGAIN

_CONNECTING = 10  # Seconds.
_DONE, _FAILED, _LOST = "done", "failed", "lost"
_GRACE = 5  # Seconds in which the loss of a process is noticed, before an error is told as its own.

_connections: dict[int, socket.socket] = {}  # By process; of all but the first, only to it.
_lock = threading.Lock()


def invite(processes: int, host: str | None) -> dict[str, Any]:
    """Opens a place for the others to connect to, in the first process.

    Args:
        processes: How many there are.
        host: By which name the others know this machine, if that is known.

    Returns:
        What they have to know.
    """
    listener = socket.create_server(("", 0), backlog=processes)
    token = secrets.token_hex(16)
    threading.Thread(target=_listen, args=(listener, token, processes), daemon=True).start()
    hosts = [*([host] if host else []), socket.gethostname(), _address()]
    return {"hosts": hosts, "port": listener.getsockname()[1], "token": token}


def accept(invitation: Mapping[str, Any], process: int, processes: int) -> None:
    """Connects to the first process, in the others."""
    if process == 0:
        return
    for host in invitation["hosts"]:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, invitation["port"]), timeout=_CONNECTING)
            connection.settimeout(None)
            _keep(connection, 0)
            connection.sendall(f"{invitation['token']} {process}\n".encode())
            threading.Thread(target=_follow, args=(0, processes), daemon=True).start()
            return
    reporting.warn(
        f"process {process} cannot reach {' or '.join(invitation['hosts'])} at port "
        f"{invitation['port']}; if a process is lost, the others may wait for minutes"
    )


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Tells the others how this process ends: in good order, or by an error."""
    try:
        yield
    except SystemExit as end:
        if not _connections:
            raise
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status in (0, INTERRUPTED, TRY_AGAIN):
            _tell(_DONE)
            raise
        _fail(status)
    except Exception:
        if not _connections:
            raise
        time.sleep(_GRACE)  # A lost process breaks what it took part in.
        traceback.print_exc()
        _fail(1)


def _fail(status: int) -> None:
    """Ends at once: an orderly end would wait for the others."""
    _tell(f"{_FAILED} {status}")
    ending.at_once(status)


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
            threading.Thread(target=_follow, args=(process, processes), daemon=True).start()


def _first_line(connection: socket.socket) -> str:
    """The line by which a process introduces itself; '' if none comes."""
    connection.settimeout(_CONNECTING)
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and (byte := connection.recv(1)):
            line += byte
    connection.settimeout(None)
    return line.decode(errors="replace")


def _follow(process: int, processes: int) -> None:
    """Reads what a process tells until it ends, and ends this one too if that was not in order."""
    told = [_LOST]
    with contextlib.suppress(OSError):
        for line in _connections[process].makefile():
            told = line.split()
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
    code = TRY_AGAIN if status is None else status
    _tell(f"{_LOST} {process} {code}")
    reason = "was lost (killed, or its machine is gone)"
    if code != TRY_AGAIN:
        reason = "ended with an error, which its own output tells"
    print(
        f"error: process {process} of {processes} {reason}; this one ends too, and the same "
        "command goes on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    ending.at_once(code)
