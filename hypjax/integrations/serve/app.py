"""The web server: the page, and the JSON interface that static/openapi.json describes."""

import asyncio
import http
import ipaddress
import logging
import pathlib
import re
import socket
import sys
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hypjax import __version__
from hypjax.errors import UserError, explained, on_one_line
from hypjax.integrations.serve.batches import Batcher
from hypjax.integrations.serve.limits import Guard, read_uploads
from hypjax.integrations.serve.searcher import MOST_TOGETHER, Query, Searcher

_STATIC = pathlib.Path(__file__).parent / "static"
_DECODERS = 4  # Threads; an image of 50 million pixels takes 500 MB in each.
_LONGEST_TEXT = 1000  # Characters; models read some 77 tokens.
_Options = tuple[int, str | None, bool]  # See `_search_options`.
_FROM_1_TO_1000 = re.compile("[1-9][0-9]{0,2}|1000")
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    ("cache-control", "no-cache"),
    ("content-security-policy", _CONTENT_POLICY),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
]


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


def create_server(searcher: Searcher, names: Collection[str] = ()) -> uvicorn.Server:
    """Creates the server, which also answers to `names` and ends after SIGINT or SIGTERM."""
    # Malformed forms are answered, so they need not be logged.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    handlers, about = _Handlers(searcher), searcher.about
    facts = {"status": "ok", "version": __version__, "model": searcher.model.fingerprint}
    facts |= {"images": about["images"], "space": about["space"]}
    app = Starlette(
        routes=[
            Route("/health", JSONResponse(facts), methods=["GET"]),
            Route("/gallery", JSONResponse(about), methods=["GET"]),
            Route("/thumbnail/{key}", handlers.thumbnail),
            Route("/embed", handlers.embed, methods=["POST"]),
            Route("/search", handlers.search, methods=["POST"]),
            Route("/search", handlers.search_text, methods=["GET"]),
            Route("/search/{key}", handlers.search_item),
            Mount("/", StaticFiles(directory=_STATIC, html=True)),
        ],
        middleware=[Middleware(Guard, names=names)],
        exception_handlers={
            HTTPException: _describe_refusal,
            UserError: _describe_unavailability,
            Exception: _describe_failure,
        },
    )
    app.router.redirect_slashes = False  # Redirections have no JSON body.
    config = uvicorn.Config(
        app,
        access_log=False,
        h11_max_incomplete_event_size=2**16,
        headers=_HEADERS,
        http="h11",
        lifespan="off",
        limit_concurrency=256,  # Connections.
        log_config=None,
        log_level="critical",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=5,  # Seconds to finish answers at the end.
        ws="none",
    )
    return uvicorn.Server(config)


class _Handlers:
    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._embed: Batcher[np.ndarray, np.ndarray] = Batcher(searcher.embed, MOST_TOGETHER)
        self._search = Batcher(searcher.search, MOST_TOGETHER)
        self._text_pool = ThreadPoolExecutor(1)
        self._image_pool = ThreadPoolExecutor(_DECODERS)

    async def thumbnail(self, request: Request) -> Response:
        key = request.path_params["key"]
        content = await _run_in(self._image_pool, self._searcher.thumbnail, key)
        return Response(content, media_type="image/jpeg")

    async def embed(self, request: Request) -> Response:
        return await self._answer_images(request, None)

    async def search(self, request: Request) -> Response:
        return await self._answer_images(request, _search_options(request))

    async def search_item(self, request: Request) -> Response:
        options = _search_options(request)
        item = await _run_in(self._image_pool, self._searcher.find, request.path_params["key"])
        return JSONResponse(await self._search(Query(item.point, item, *options)))

    async def search_text(self, request: Request) -> Response:
        if not self._searcher.model.takes_texts:
            raise HTTPException(404, "this model embeds images alone; POST an image")
        text = request.query_params.get("text", "").strip()
        if not 0 < len(text) <= _LONGEST_TEXT:
            raise HTTPException(400, f"text must have 1 to {_LONGEST_TEXT} characters")
        options = _search_options(request)
        texts = await _run_in(self._text_pool, self._searcher.model.embed_texts, text)
        return JSONResponse(await self._search(Query(texts.vectors[0], None, *options)))

    async def _answer_images(self, request: Request, options: _Options | None) -> Response:
        """Answers an image by its hits, or without options by its point; several by a list."""

        async def answer_or_error(encoded: bytes) -> dict[str, Any]:
            try:
                return await self._answer_image(encoded, options)
            except HTTPException as error:
                return {"error": error.detail}

        files = await read_uploads(request)
        if len(files) == 1:
            return JSONResponse(await self._answer_image(files[0], options))
        return JSONResponse(await asyncio.gather(*map(answer_or_error, files)))

    async def _answer_image(self, encoded: bytes, options: _Options | None) -> dict[str, Any]:
        view = await _run_in(self._image_pool, self._searcher.view, encoded)
        point = await self._embed(view)
        if options is None:
            return {"space": str(self._searcher.model.space), "vector": point.tolist()}
        return await self._search(Query(point, None, *options))


def _search_options(request: Request) -> _Options:
    """Parses k, the class to search in, and whether to place the images in the disk."""
    options = {"k": "10", "class": "", "places": "false"}
    if unknown := set(request.query_params) - {*options, "text"}:
        name = on_one_line(min(unknown))[:40]
        raise HTTPException(400, f"unknown parameter {name!r}; use text, k, class and places")
    options |= request.query_params
    if not _FROM_1_TO_1000.fullmatch(options["k"]):
        raise HTTPException(400, "k must be a whole number from 1 to 1000")
    if options["places"] not in ("true", "false"):
        raise HTTPException(400, "places must be true or false")
    return int(options["k"]), options["class"] or None, options["places"] == "true"


async def _describe_refusal(_: Request, error: Any) -> Response:
    message = error.detail
    if message == http.HTTPStatus(error.status_code).phrase:  # Raised by Starlette.
        message += "; /openapi.json lists what this server answers"
    return JSONResponse({"error": message}, error.status_code, error.headers)


async def _describe_unavailability(_: Request, error: Exception) -> Response:
    print(f"error: {error}", file=sys.stderr)  # For example, Qdrant does not answer.
    message = "the gallery cannot be searched now; the server's log says why"
    return JSONResponse({"error": message}, 503, {"Retry-After": "5"})


async def _describe_failure(_: Request, error: Exception) -> Response:
    for line in "".join(traceback.format_exception(error)).splitlines():
        print(on_one_line(line), file=sys.stderr)
    return JSONResponse({"error": "the server failed; its log says why"}, 500)


async def _run_in(pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
