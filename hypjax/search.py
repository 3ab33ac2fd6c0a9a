"""Finds the nearest neighbours of images.

python -m hypjax.search --workdir=runs/a --gallery=gallery.npz --query=bird.jpg
"""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder or URL of the run that embedded the gallery."
)
_GALLERY = flags.DEFINE_string("gallery", None, "File that python -m hypjax.embed wrote.")
_QUERY = flags.DEFINE_string(
    "query", None, "An image; or several, named as by --images of python -m hypjax.embed."
)
_K = flags.DEFINE_integer("k", 10, "Number of neighbours.", lower_bound=1)
_EMBEDDING = flags.DEFINE_enum(
    "embedding", "head", ["head", "encoder"], "What the gallery was embedded by."
)
_PICTURES = (".png", ".pdf", ".svg", ".jpg")
_OUTPUT = flags.DEFINE_string("output", None, "Picture of the hits to draw, such as hits.png.")


def main(overrides: list[str]) -> None:
    """Searches, and prints a table for each query."""
    command.require("workdir", "gallery", "query")
    command.refuse_overrides(overrides)
    output = _OUTPUT.value and pathlib.Path(_OUTPUT.value).expanduser()
    if output and output.suffix not in _PICTURES:
        raise UserError(f"--output is {output}; its name must end in {', '.join(_PICTURES)}")
    if output and not output.parent.is_dir():
        raise UserError(f"--output is {output}, but there is no folder {output.parent}")
    from hypjax.data.photos import find_photos
    from hypjax.inference.embedder import TrainedEmbedder
    from hypjax.inference.hits import find_hits
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    gallery = Embeddings.load(pathlib.Path(_GALLERY.value).expanduser())
    photos = find_photos(_QUERY.value)
    keep_compiled_programs()
    embedder = TrainedEmbedder(_WORKDIR.value, _EMBEDDING.value)
    found = find_hits(embedder, photos, gallery, _K.value)
    if output:
        from hypjax.reports.hit_grid import draw

        draw(found, output)
        console.say(f"drawn in {output}")
    for hits in found:
        print(hits.table())


if __name__ == "__main__":
    command.run(main)
