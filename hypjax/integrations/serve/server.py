"""The HTTP server: its socket, and the headers of all answers."""

import ipaddress
import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from hypjax.errors import explained

_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_OPTIONS: dict[str, Any] = {
    "access_log": False,
    "h11_max_incomplete_event_size": 2**16,
    "headers": [
        ("cache-control", "no-cache"),
        ("content-security-policy", _CONTENT_POLICY),
        ("cross-origin-resource-policy", "same-origin"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
    ],
    "http": "h11",
    "lifespan": "off",
    "limit_concurrency": 256,  # Connections.
    "log_config": None,
    "log_level": "critical",
    "proxy_headers": False,
    "server_header": False,
    "timeout_graceful_shutdown": 5,  # Seconds to finish answers at the end.
    "ws": "none",
}


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket; raises a `UserError` if the address is invalid or the port is taken."""
    with explained(f"cannot open port {port} of {host}", "; choose another by --port or --host"):
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], port), family=family, backlog=128)


def url_of(listener: socket.socket) -> str:
    """The URL of an open socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only programs on this machine can reach a socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def server_of(app: ASGIApp) -> uvicorn.Server:
    """Creates the server of an application, which ends after SIGINT or SIGTERM."""
    # Malformed forms are answered, so they need not be logged.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    return uvicorn.Server(uvicorn.Config(app, **_OPTIONS))
