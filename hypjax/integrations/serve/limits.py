"""Bounds on uploads and searches, and the origins whose requests are answered."""

import asyncio
import contextlib
import io
import ipaddress
import urllib.parse
from collections.abc import AsyncIterator, Collection

from PIL import Image
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 32 * 2**20  # Of an upload.
MOST_PIXELS = 64_000_000
# Others run programs, such as EPS, or may hold more pixels than their headers say, such as TIFF.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
BODY_SECONDS = 30.0  # For an upload to arrive.
MOST_HELD = 16 * MOST_BYTES  # Of all uploads in memory.
AT_ONCE = 16  # Searches that are answered or queued.
WAIT_SECONDS = 10.0  # For one of them to end.
IDLE_SECONDS = 1.0  # Longest pause in a refused body, before its connection is closed.
_END = {"connection": "close"}  # What remains of a body is not read.

MultiPartParser.spool_max_size = MOST_BYTES  # Nothing is written to a disk.


@contextlib.asynccontextmanager
async def admitted(free: asyncio.Semaphore) -> AsyncIterator[None]:
    """Waits briefly until another search may begin, or refuses."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await free.acquire()
    except TimeoutError as error:
        raise _busy() from error
    try:
        yield
    finally:
        free.release()


class Uploads:
    """Uploads in memory, bounded by their bytes: slow ones hold few, and keep out no others."""

    _held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Reads a small image file that arrives in time: the body, or the file of a form."""
        received = 0

        async def receive() -> Message:
            nonlocal received
            message = await request.receive()
            size = len(message.get("body", b""))
            received += size
            self._held += size
            if received > MOST_BYTES:
                raise _too_large()
            if self._held > MOST_HELD:
                raise _busy()
            return message

        try:
            yield await _read(Request(request.scope, receive))
        finally:
            self._held -= received


def _busy() -> HTTPException:
    message = "too many searches at once; try again in a few seconds"
    return HTTPException(503, message, {"Retry-After": "5", **_END})


def _too_large() -> HTTPException:
    return HTTPException(413, f"the image is larger than {MOST_BYTES // 2**20} MiB", _END)


async def _read(request: Request) -> bytes:
    if int(request.headers.get("content-length", "0")) > MOST_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            kind = request.headers.get("content-type", "").lower()
            if not kind.startswith("multipart/form-data"):
                content = await request.body()
            else:
                async with request.form(max_files=1, max_fields=8, max_part_size=1024) as form:
                    files = [value for value in form.values() if isinstance(value, UploadFile)]
                    content = await files[0].read() if files else b""
    except TimeoutError as error:
        message = f"the image did not arrive within {BODY_SECONDS:g} seconds"
        raise HTTPException(408, message, _END) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the connection ended before the image did") from error
    if not content:
        raise HTTPException(400, "there is no image; send the bytes of a file, or a form with one")
    return content


def check_image(encoded: bytes) -> None:
    """Refuses files that do not begin like an image of a bounded size; decodes nothing."""
    too_many = HTTPException(413, f"the image has more than {MOST_PIXELS:,} pixels; scale it down")
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise too_many from error
    except Exception as error:  # Decoders raise almost anything on damaged files.
        message = f"the file is not an image that can be read; send {', '.join(FORMATS)}"
        raise HTTPException(415, message) from error
    if image.width * image.height > MOST_PIXELS:
        raise too_many


class Guard:
    """Answers only requests that name this server, and no uploads of other sites' pages.

    Another site's page could otherwise post to this address, or have its own name resolve to it.
    Unlike with Starlette's TrustedHostMiddleware, localhost and addresses always name this server.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names if not _is_own(name)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if message := self._refusal(scope["method"], headers):
                app = JSONResponse({"error": message}, 403, _END)
            # A client that expects to be asked for the body has not sent it yet.
            receive, send = _reading_all(receive, send, unread="expect" not in headers)
        await app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> str:
        host, origin = (headers.get(name, "").lower() for name in ("host", "origin"))
        name = _name(f"//{host}")
        if not (_is_own(name) or name in self._names):
            return "this server has another name; start it with --name to add one"
        # Another port of this machine is another site, unless a name was added for a proxy.
        known = origin in ("", f"http://{host}", f"https://{host}") or _name(origin) in self._names
        return "" if known or method in ("GET", "HEAD") else "pages of other sites may not search"


def _reading_all(receive: Receive, send: Send, unread: bool) -> tuple[Receive, Send]:
    # A socket that is closed with unread bytes is reset, and most clients then lose the answer.

    async def next_part() -> Message:
        nonlocal unread
        message = await receive()
        unread = message.get("more_body", False)
        return message

    async def send_after(message: Message) -> None:
        nonlocal unread
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                while unread:
                    await asyncio.wait_for(next_part(), IDLE_SECONDS)
        unread = False
        await send(message)

    return next_part, send_after


def _is_own(name: str) -> bool:
    try:
        return name.lower() == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _name(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""
