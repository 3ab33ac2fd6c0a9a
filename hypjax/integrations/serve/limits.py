"""Limits on uploads, and the check of each request's host and origin."""

import asyncio
import io
import ipaddress
import urllib.parse
from collections.abc import Collection

from PIL import Image
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 32 * 2**20  # Of an upload.
MOST_FILES = 32  # Of an upload.
MOST_PIXELS = 64_000_000
# Not EPS, whose files are programs, or TIFF, whose files may hold more pixels than headers say.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
BODY_SECONDS = 30.0  # In which an upload must arrive.

MultiPartParser.spool_max_size = MOST_BYTES  # Keeps uploads in memory, off the disk.


async def read_uploads(request: Request) -> list[bytes]:
    """Reads an image file from the body, or those of a form in the body, within the limits."""
    too_large = HTTPException(413, f"the upload is larger than {MOST_BYTES // 2**20} MiB")
    if int(request.headers.get("content-length", "0")) > MOST_BYTES:
        raise too_large
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > MOST_BYTES:
            raise too_large
        return message

    try:
        async with asyncio.timeout(BODY_SECONDS):
            files = await _read(Request(request.scope, receive))
    except TimeoutError as error:
        message = f"the image did not arrive within {BODY_SECONDS:g} seconds"
        raise HTTPException(408, message) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the connection ended before the image did") from error
    if not any(files):
        raise HTTPException(400, "there is no image; send a file, or a form with a file")
    return files


async def _read(request: Request) -> list[bytes]:
    """Reads the body, or the files of a form in their order."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return [await request.body()]
    async with request.form(max_files=MOST_FILES, max_fields=8, max_part_size=1024) as form:
        values = [value for _, value in form.multi_items()]
        # A field without a file has no name.
        uploads = [x for x in values if isinstance(x, UploadFile) and x.filename]
        return [await upload.read() for upload in uploads]


def check_image(encoded: bytes) -> None:
    """Refuses a file whose header shows another format, or too many pixels; decodes nothing."""
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        too_large = image.width * image.height > MOST_PIXELS
    except Image.DecompressionBombError:
        too_large = True
    except Exception as error:  # Decoders raise almost anything on damaged files.
        message = f"the file is not an image of a known format; send {', '.join(FORMATS)}"
        raise HTTPException(415, message) from error
    if too_large:
        message = f"the image has more than {MOST_PIXELS:,} pixels; scale it down"
        raise HTTPException(413, message)


class Guard:
    """Middleware that refuses requests for other hosts, and posts from other sites' pages.

    Otherwise another site's page could post to this server, or read from it once the site's name
    resolves to this address (DNS rebinding). Unlike Starlette's TrustedHostMiddleware, this accepts
    localhost and IP addresses.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names if not _is_local(name)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        message = self._refusal(scope["method"], Headers(scope=scope))
        app = JSONResponse({"error": message}, 403) if message else self._app
        await app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> str:
        """Says why a request is refused; '' if it is not."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        name = _host_name(f"//{host}")
        if not (_is_local(name) or name in self._names):
            return f"this server is not known as {name}; add the name with --name"
        # Pages of another port of this machine are another site's, unless --name adds a proxy.
        same_site = origin in ("", f"http://{host}", f"https://{host}")
        if same_site or _host_name(origin) in self._names or method in ("GET", "HEAD"):
            return ""
        return "pages of other sites may not search"


def _is_local(name: str) -> bool:
    """Whether a host name is localhost or an IP address."""
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _host_name(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""
