"""The server: its socket, and the connections of clients that say nothing."""

import asyncio
import ipaddress
import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from hypjax.errors import UserError

HEADER_SECONDS = 10.0  # For a request's first line and headers to arrive.
_CONNECTIONS = 256
_BACKLOG = 128
_ENDING_SECONDS = 5  # For requests that are being answered when the server ends.


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket, or raises a `UserError` if the address is none or the port is taken."""
    if port >= 2**16:
        raise UserError(f"--port is {port}; ports are below {2**16}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot open port {port} of {host} ({reason}); choose another with --port or --host"
        ) from error


def url_of(listener: socket.socket) -> str:
    """The URL of an open socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only programs of this machine reach a socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class _Protocol(H11Protocol):
    """A connection, which ends if no further request arrives in time, whole but for its body."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts the clock."""
        super().connection_made(transport)
        self._watch(seen=self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self, seen: object) -> None:
        """Ends the connection if its last request is answered, and was the last one before, too."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is seen:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._watch, self.cycle)


def server_of(app: ASGIApp) -> uvicorn.Server:
    """Returns a server of an application, which ends after SIGINT or SIGTERM."""
    # What clients send wrong is answered, and not logged as well.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {
        "access_log": False,
        "h11_max_incomplete_event_size": 2**16,
        "lifespan": "off",
        "limit_concurrency": _CONNECTIONS,
        "log_config": None,
        "log_level": "critical",
        "proxy_headers": False,
        "server_header": False,
        "timeout_graceful_shutdown": _ENDING_SECONDS,
        "ws": "none",
    }
    return uvicorn.Server(uvicorn.Config(app, http=_Protocol, **options))
