"""What clients may do: bounds of uploads and their number, and the origins that are answered."""

import asyncio
import contextlib
import io
import ipaddress
import urllib.parse
from collections.abc import AsyncIterator, Collection

from PIL import Image
from starlette.datastructures import Headers, MutableHeaders
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hypjax.data import pixels

MOST_BYTES = 32 * 2**20  # Of an upload.
MOST_PIXELS = 64_000_000
# Others run programs, such as EPS, or may hold more pixels than their headers say, such as TIFF.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
BODY_SECONDS = 30.0  # For an upload to arrive.
AT_ONCE = 16  # Uploads that are received, or searched with.
WAIT_SECONDS = 10.0  # For one of these to end.
_SAFE = {"GET", "HEAD"}
_SCHEMES = ("http", "https")
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Refused(Exception):
    """A request that is not answered: the status, and one sentence that says why."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """The answer to the client."""
        return JSONResponse({"error": str(self)}, self.status, self.headers)


class Gate:
    """Bounds the requests that are worked on at once. Others wait a little, and are refused."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._free = asyncio.Semaphore(at_once)

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Waits until there is room for the body, or raises `Refused`."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError as error:
            message = "too many searches at once; try again in a few seconds"
            raise Refused(503, message, retry_after="5") from error
        try:
            yield
        finally:
            self._free.release()


async def read_upload(request: Request) -> bytes:
    """Reads an image file: the body itself, or the first file of a form.

    Raises `Refused` if it is too large or too slow, or there is none.
    """
    # What remains of a body that is too long is not read.
    if int(request.headers.get("content-length", "0")) > MOST_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        message = f"the image did not arrive within {BODY_SECONDS:g} seconds"
        raise Refused(408, message, connection="close") from error
    except ClientDisconnect as error:
        raise Refused(400, "the connection ended before the image did") from error
    content = bytes(body)
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        content = await _file_of_form(request.headers, content)
    if not content:
        raise Refused(400, "there is no image; send the bytes of a file, or a form with one")
    return content


def check_image(encoded: bytes) -> None:
    """Raises `Refused` unless a file begins like an image of a bounded size; decodes nothing."""
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_many_pixels() from error
    except Exception as error:  # Decoders raise almost anything on damaged files.
        kinds = ", ".join(FORMATS)
        reason = pixels.reason(error)
        raise Refused(415, f"the file cannot be read ({reason}); send one of {kinds}") from error
    if image.width * image.height > MOST_PIXELS:
        raise _too_many_pixels()


class Guard:
    """Answers only requests that name this server, and changes nothing for other sites' pages.

    A page of another site could otherwise have its own name resolve to this address, or post to it.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """Wraps an application that is reached by these names, besides localhost and addresses."""
        self._app, self._names = app, {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks a request and adds headers to its answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] != "http":  # The start and the end of the server, and websockets.
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope["method"], Headers(scope=scope))
        except Refused as refused:
            await refused.response()(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if not self._is_known(_name(f"//{host}")):
            message = "this server has another name; start it with --name to add one"
            raise Refused(403, message, connection="close")
        origin = headers.get("origin")
        if method in _SAFE or origin is None:
            return
        name, own = _name(origin), origin.lower() in (f"{s}://{host.lower()}" for s in _SCHEMES)
        # Another port of this machine is another site, unless a name was added for a proxy.
        if not own and (name not in self._names - {"localhost"} or _is_address(name)):
            raise Refused(403, "pages of other sites may not search here", connection="close")

    def _is_known(self, name: str) -> bool:
        return name in self._names or _is_address(name)  # An address leads nowhere else.


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(url: str) -> str:
    """The host of a URL, without its port; '' if there is none."""
    try:
        return urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return ""


async def _file_of_form(headers: Headers, body: bytes) -> bytes:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(headers, stream(), max_files=1, max_fields=8, max_part_size=1024)
    parser.spool_max_size = MOST_BYTES  # Nothing is written to a disk.
    try:
        form = await parser.parse()
    except (KeyError, MultiPartException) as error:
        raise Refused(400, "the form cannot be read; send one file and nothing else") from error
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(form.close)
        files = [value for value in form.values() if not isinstance(value, str)]
        return await files[0].read() if files else b""


def _too_large() -> Refused:
    message = f"the image is larger than {MOST_BYTES // 2**20} MiB"
    return Refused(413, message, connection="close")


def _too_many_pixels() -> Refused:
    return Refused(413, f"the image has more than {MOST_PIXELS:,} pixels; scale it down")
