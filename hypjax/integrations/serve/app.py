"""The application: the page, its files, and the JSON interface that openapi.json describes."""

import asyncio
import functools
import importlib.resources
import json
import sys
import traceback
import zlib
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hypjax import __version__
from hypjax.errors import UserError, on_one_line
from hypjax.integrations.serve.limits import Gate, Guard, Refused, read_upload
from hypjax.integrations.serve.searcher import Searcher

_MOST_HITS = 1000
_HITS = 10
_FILES = {
    "icon.svg": "image/svg+xml",
    "openapi.json": "application/json",
    "page.css": "text/css",
    "page.js": "text/javascript",
}
_NOT_CACHED = {"cache-control": "no-cache"}
_Handler = Callable[[Request], Awaitable[Response]]


def create_app(searcher: Searcher, names: Collection[str] = ()) -> Starlette:
    """Returns the application of a searcher, which answers to further names, too."""
    own = _Handlers(searcher)
    routes = [
        Route("/", _static("page.html", "text/html")),
        *(Route(f"/{name}", _static(name, kind)) for name, kind in _FILES.items()),
        Route("/docs", _documentation()),
        Route("/health", _reported(own.health)),
        Route("/gallery", _reported(own.gallery)),
        Route("/thumbnail/{key}", _reported(own.thumbnail)),
        Route("/embed", _reported(own.embed), methods=["POST"]),
        Route("/search", _reported(own.search), methods=["POST"]),
        Route("/search/{key}", _reported(own.search_by_key)),
    ]
    guard = Middleware(Guard, names=names)
    return Starlette(
        routes=routes, middleware=[guard], exception_handlers={HTTPException: _no_such_page}
    )


class _Handlers:
    """The handlers of one searcher."""

    def __init__(self, searcher: Searcher) -> None:
        self._searcher, self._gate = searcher, Gate()
        self._worker = ThreadPoolExecutor(1)  # Two searches at once would each take twice as long.
        self._readers = ThreadPoolExecutor(2)  # Of the gallery's files, for thumbnails.

    async def health(self, request: Request) -> Response:
        """Says that searches are answered, and of what."""
        del request
        model, about = self._searcher.model, self._searcher.about
        return JSONResponse(
            {
                "status": "ok",
                "version": __version__,
                "model": model.fingerprint,
                "images": about["images"],
                "space": about["space"],
            }
        )

    async def gallery(self, request: Request) -> Response:
        """The classes of the gallery, and a sample of its images in the disk."""
        del request
        return JSONResponse(self._searcher.about)

    async def thumbnail(self, request: Request) -> Response:
        """A small copy of an image of the gallery."""
        key = request.path_params["key"]
        content = await _in(self._readers, self._searcher.thumbnail, key)
        # Another gallery may be served at this address later.
        headers = {"cache-control": "private, no-cache", "etag": f'"{zlib.crc32(content):08x}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="image/jpeg", headers=headers)

    async def embed(self, request: Request) -> Response:
        """Embeds an uploaded image."""
        async with self._gate.admitted():
            encoded = await read_upload(request)
            point = await _in(self._worker, self._searcher.embed, encoded)
        return JSONResponse({"space": str(self._searcher.model.space), "vector": point.tolist()})

    async def search(self, request: Request) -> Response:
        """Searches with an uploaded image."""
        options = self._options(request)
        async with self._gate.admitted():
            encoded = await read_upload(request)
            found = await _in(self._worker, self._searcher.by_image, encoded, *options)
        return JSONResponse(found)

    async def search_by_key(self, request: Request) -> Response:
        """Searches with an image of the gallery."""
        options = self._options(request)
        async with self._gate.admitted():
            key = request.path_params["key"]
            found = await _in(self._worker, self._searcher.by_item, key, *options)
        return JSONResponse(found)

    def _options(self, request: Request) -> tuple[int, str | None, bool]:
        """The number of hits, their class, and whether they are placed in the disk."""
        given = request.query_params
        if unknown := set(given) - {"k", "class", "places"}:
            names = "k, class and places are known"
            raise Refused(400, f"{on_one_line(min(unknown))[:40]!r} is no parameter; {names}")
        k = given.get("k", str(_HITS))
        if not (k.isascii() and k.isdigit() and len(k) < 9 and 1 <= int(k) <= _MOST_HITS):
            raise Refused(400, f"k must be a whole number from 1 to {_MOST_HITS}")
        places = given.get("places", "false")
        if places not in ("true", "false"):
            raise Refused(400, "places must be true or false")
        return int(k), given.get("class") or None, places == "true"


def _reported(handler: _Handler) -> _Handler:
    """Answers with one sentence where a handler fails."""

    @functools.wraps(handler)
    async def reporting(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return refused.response()
        except UserError as error:  # Such as that of a collection that does not answer.
            print(f"error: {error}", file=sys.stderr)
            words = "the gallery cannot be searched now; the server's log says why"
            return JSONResponse({"error": words}, 503, {"Retry-After": "5"})
        except Exception:
            for line in traceback.format_exc().splitlines():
                print(on_one_line(line), file=sys.stderr)
            return JSONResponse({"error": "the server failed; its log says why"}, 500)

    return reporting


async def _no_such_page(request: Request, error: Exception) -> Response:
    del request
    status = getattr(error, "status_code", 500)
    words = {
        404: "there is no such page; /docs lists them",
        405: "this takes another method; /docs lists them",
    }
    return JSONResponse({"error": words.get(status, "the request is wrong")}, status)


async def _in(pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _static(name: str, kind: str) -> _Handler:
    content = _read(name)

    async def handler(request: Request) -> Response:
        del request
        return Response(content, media_type=kind, headers=_NOT_CACHED)

    return handler


def _documentation() -> _Handler:
    """The page that shows openapi.json."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    described = json.loads(_read("openapi.json"))
    page = environment.from_string(_read("docs.html.j2")).render(api=described)

    async def handler(request: Request) -> Response:
        del request
        return Response(page, media_type="text/html", headers=_NOT_CACHED)

    return handler


def _read(name: str) -> str:
    return (importlib.resources.files("hypjax.integrations.serve") / name).read_text("utf-8")
