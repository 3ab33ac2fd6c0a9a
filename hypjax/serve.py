"""Serves searches: a page for images, and a JSON interface."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypjax import command
from hypjax.catalogue import Engine
from hypjax.errors import UserError, counted, require_package

if TYPE_CHECKING:  # These modules import JAX, which would slow down --help.
    from hypjax.galleries.search import Gallery
    from hypjax.inference.model import Model


def main(
    *,
    workdir: str,
    gallery: str,
    embedding: str = "head",
    host: str = "127.0.0.1",
    port: command.Natural = 8000,
    name: list[str] | None = None,
    tokenizer: str | None = None,
    engine: Engine = "auto",
) -> None:
    """Loads the model, opens the gallery, and answers until it is interrupted.

    Args:
        workdir: Folder or URL of the run, or the released model, that embedded the gallery.
        gallery: What python -m hypjax.embed wrote; see --gallery of python -m hypjax.search.
        embedding: Embedding that the gallery contains: head, encoder, or a scored prefix (head@16).
        host: Address to listen on. By default only this machine can reach it.
        port: Port; 0 for any free port.
        tokenizer: With a model of images and texts: file or folder of its tokenizer. Default:
            in the weights' folder.
        engine: What runs the encoder on a CPU; auto is OpenVINO where installed.
        name: Another name of the server, such as a reverse proxy's; repeat the flag for several.

    Example:
        python -m hypjax.serve --workdir=runs/glyphs-hyp --gallery=gallery.npz
    """
    from hypjax.galleries.embeddings import open_gallery
    from hypjax.inference.model import load

    opened = open_gallery(gallery)
    model = load(workdir, embedding, tokenizer=tokenizer, engine=engine)
    serve(model, opened, host=host, port=port, names=name or ())


def serve(
    model: Model,
    gallery: Gallery,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    names: Sequence[str] = (),
) -> None:
    """Serves searches of a gallery by a model from `hypjax.load`, until interrupted.

    The same model must have embedded the gallery, such as `model.gallery("photos")`. `names` are
    further host names of the server, such as a reverse proxy's.

    Raises:
        UserError: A package is missing, the port is taken, the model takes no images, or another
            model embedded the gallery.
    """
    if not model.takes_pixels:
        raise UserError("hypjax.serve needs a run that embeds images; this one embeds features")
    for module in ("starlette", "uvicorn", "python_multipart"):
        require_package(module, "hypjax.serve", "hypjax[serve]")
    from PIL import Image

    from hypjax.galleries.search import require_model
    from hypjax.integrations.serve import app
    from hypjax.integrations.serve.searcher import Searcher
    from hypjax.system import console

    require_model(gallery, model.fingerprint, model.name)
    # Images that are too large are refused, so Pillow need not warn.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    with app.listen(host, port) as listener:
        console.say(f"laying out some of the gallery's {gallery.noun}s in the Poincaré disk")
        searcher = Searcher(model, gallery)
        if not app.is_loopback(listener):
            console.warn("anyone who reaches this address can see and search the gallery")
        images = counted(searcher.about["images"], gallery.noun)
        print(f"{images} at {app.url_of(listener)} (Ctrl-C ends it)", flush=True)
        app.create_server(searcher, [host, *names]).run(sockets=[listener])


if __name__ == "__main__":
    command.run(main)
