"""Serves searches: a page for images, and a JSON interface."""

from hypjax import command
from hypjax.errors import require_package

EXAMPLE = "python -m hypjax.serve --workdir=runs/glyphs-hyp --gallery=gallery.npz"
FLAGS = command.Flags()
_WORKDIR = FLAGS.string("workdir", None, "Folder or URL of the run that embedded the gallery.")
_GALLERY = FLAGS.string(
    "gallery", None, "What python -m hypjax.embed wrote; see --gallery of python -m hypjax.search."
)
_EMBEDDING = FLAGS.enum(
    "embedding", "head", ["head", "encoder"], "Embedding that the gallery contains."
)
_HOST = FLAGS.string(
    "host", "127.0.0.1", "Address to listen at. By default only this machine reaches it."
)
_PORT = FLAGS.integer("port", 8000, "Port; 0 for any that is free.", lower_bound=0)
_NAME = FLAGS.strings(
    "name", [], "Further name of the server, such as that of a reverse proxy; may be repeated."
)


def main(overrides: list[str]) -> None:
    """Loads the model, opens the gallery, and answers until it is interrupted."""
    command.require(_WORKDIR, _GALLERY)
    command.refuse_overrides(overrides)
    for module in ("starlette", "uvicorn", "python_multipart"):
        require_package(module, "hypjax.serve", "hypjax[serve]")
    import warnings

    from PIL import Image

    from hypjax.engines.exports import open_gallery
    from hypjax.inference.model import load
    from hypjax.serving import server
    from hypjax.serving.app import create_app
    from hypjax.serving.searcher import Searcher
    from hypjax.system import console

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # They are refused.
    with server.listen(_HOST.value, _PORT.value) as listener:
        console.say("opening the gallery, and placing some of its images in the disk")
        gallery = open_gallery(_GALLERY.value)
        searcher = Searcher(load(_WORKDIR.value, _EMBEDDING.value), gallery)
        if not server.is_loopback(listener):
            console.warn(
                "all who reach this address see the gallery's images, names and classes, and "
                "search in it; there is no password"
            )
        print(
            f"{searcher.about['images']:,} images at {server.url_of(listener)} (Ctrl-C ends it)",
            flush=True,
        )
        names = [_HOST.value, *_NAME.value]
        server.server_of(create_app(searcher, names)).run(sockets=[listener])


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
