"""Finds the nearest neighbours of query images."""

import dataclasses
import functools

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = (
    "python -m hypjax.search --workdir=runs/glyphs-hyp --gallery=gallery.npz"
    " --query='letters/test/D */*.png' --k=5"
)
FLAGS = command.Flags()
_WORKDIR = FLAGS.string(
    "workdir",
    None,
    "Folder or URL of the run that embedded the gallery; not needed if --query is a file of "
    "features.",
)
_ENCODER = FLAGS.encoders()
_GALLERY = FLAGS.string(
    "gallery",
    None,
    "What python -m hypjax.embed wrote: a .npz file, or for an approximate search a .usearch or "
    ".qdrant folder, or qdrant://host:6333/name.",
)
_QUERY = FLAGS.string(
    "query", None, "An image, or several as in --images of python -m hypjax.embed."
)
_K = FLAGS.integer("k", 10, "Number of neighbours.", lower_bound=1)
_EXPAND = FLAGS.integer(
    "expand",
    0,
    "Query expansion: search for the mean of the query and its N nearest images.",
    lower_bound=0,
)
_ALPHA = FLAGS.number(
    "alpha",
    0.0,
    "With --expand: exponent of their similarities as weights; 0 weights all alike.",
    lower_bound=0,
)
_RERANK = FLAGS.boolean(
    "rerank", False, "Re-rank results by their neighbours: the first 100, or k if that is more."
)
_PREFIX = FLAGS.integer(
    "prefix",
    None,
    "Search with the first N dimensions of the embeddings, and rank --candidates by all of them.",
    lower_bound=1,
)
_CANDIDATES = FLAGS.integer(
    "candidates", 100, "With --prefix: number of images that are ranked.", lower_bound=1
)
_EMBEDDING = FLAGS.string(
    "embedding",
    "head",
    "Embedding of the run that the gallery contains: head, encoder, or a scored prefix (head@16).",
)
_OUTPUT = FLAGS.string("output", None, "Figure of the hits to draw, such as hits.png.")


def main() -> None:
    """Searches the gallery and prints one table per query."""
    command.require(_GALLERY, _QUERY)
    output = command.figure(_OUTPUT)
    if _ALPHA.value and not _EXPAND.value:
        raise UserError("--alpha weights the images of --expand; give that flag, too")
    from hypjax.data.photos import find_photos
    from hypjax.data.pixels import read_image
    from hypjax.inference.hits import find_hits
    from hypjax.inference.model import Model
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.retrieval.gallery_files import open_gallery
    from hypjax.retrieval.refinement import Refinement
    from hypjax.retrieval.reranking import Reranking
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    gallery = open_gallery(_GALLERY.value)
    photos = find_photos(_QUERY.value)
    keep_compiled_programs()
    match = None
    if photos[0].vector is not None and not (_WORKDIR.value or _ENCODER.encoder.value):
        # Features: nothing tells which model made them.
        features = [photo.vector for photo in photos]
        queries = Embeddings.from_arrays(features, space=gallery.space)
        queries = dataclasses.replace(queries, fingerprint=gallery.fingerprint)
    else:
        command.require_one(_WORKDIR, _ENCODER.encoder)
        if _WORKDIR.value:
            embedder = Model(_WORKDIR.value, _EMBEDDING.value)
        else:
            embedder = _ENCODER.open(gallery.space)
        queries, match = embedder.embed_photos(photos), embedder.match
    reranking = Reranking() if _RERANK.value else None
    prefix = (_PREFIX.value, _CANDIDATES.value) if _PREFIX.value else ()
    refinement = Refinement(_EXPAND.value, _ALPHA.value, reranking, *prefix)
    results = find_hits(queries, photos, gallery, _K.value, refinement, match)
    if output:
        from hypjax.analysis.hit_grid import draw

        read = functools.partial(read_image, channels=3)
        files = draw(results, output, read)
        console.say(f"wrote {', '.join(map(str, files))}")
    for hits in results:
        print(hits)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
