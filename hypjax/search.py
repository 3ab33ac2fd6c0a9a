"""Finds the nearest neighbours of query images."""

import dataclasses

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = (
    "python -m hypjax.search --workdir=runs/glyphs-hyp --gallery=gallery.npz"
    " --query='letters/test/D */*.png' --k=5"
)
FLAGS = command.Flags(
    workdir=command.string(
        "Folder or URL of the run that embedded the gallery; not needed if --query is a file of "
        "features."
    ),
    **command.ENCODER,
    gallery=command.string(
        "What python -m hypjax.embed wrote: a .npz file, or for an approximate search a .usearch "
        "or .qdrant folder, or qdrant://host:6333/name."
    ),
    query=command.string("An image, or several as in --images of python -m hypjax.embed."),
    k=command.positive("Number of neighbours.", 10),
    expand=command.natural(
        "Query expansion: search for the mean of the query and its N nearest images.", 0
    ),
    alpha=command.number(
        "With --expand: exponent of their similarities as weights; 0 weights all alike.",
        0.0,
        lower_bound=0,
    ),
    rerank=command.boolean(
        "Re-rank results by their neighbours: the first 100, or k if that is more."
    ),
    prefix=command.positive(
        "Search with the first N dimensions of the embeddings, and rank --candidates by all of "
        "them."
    ),
    candidates=command.positive("With --prefix: number of images that are ranked.", 100),
    embedding=command.string(
        "Embedding of the run that the gallery contains: head, encoder, or a scored prefix "
        "(head@16).",
        "head",
    ),
    output=command.string("Figure of the hits to draw, such as hits.png."),
)


def main() -> None:
    """Searches the gallery and prints one table per query."""
    FLAGS.require("gallery", "query")
    output = FLAGS.output_file("output", *command.FIGURES)
    if FLAGS.alpha and not FLAGS.expand:
        raise UserError("--alpha weights the images of --expand; give that flag, too")
    from hypjax.data.photos import find_images
    from hypjax.inference.hits import find_hits
    from hypjax.retrieval.embeddings import Embeddings, open_gallery
    from hypjax.retrieval.refinement import Refinement
    from hypjax.retrieval.reranking import Reranking
    from hypjax.system import caches, console

    gallery, images = open_gallery(FLAGS.gallery), find_images(FLAGS.query)
    caches.keep_compiled_programs()
    match = None
    if images.vectors is None or FLAGS.workdir or FLAGS.encoder:
        FLAGS.require_one("workdir", "encoder")
        embedder = FLAGS.open_embedder(gallery.space)
        queries, match = embedder.embed_images(images, few=True), embedder.match
    else:  # Features: nothing tells which model made them.
        queries = Embeddings.from_arrays(images.vectors, space=gallery.space)
        queries = dataclasses.replace(queries, fingerprint=gallery.fingerprint)
        dim = queries.vectors.shape[1]
        if wrong := [len(item.point) for item in gallery.sample(1) if len(item.point) != dim]:
            raise UserError(
                f"{FLAGS.query} has {dim} coordinates an image, but {FLAGS.gallery} has {wrong[0]};"
                " compute the queries' features with the model of the gallery"
            )
    reranking = Reranking() if FLAGS.rerank else None
    prefix = (FLAGS.prefix, FLAGS.candidates) if FLAGS.prefix else ()
    refinement = Refinement(FLAGS.expand, FLAGS.alpha, reranking, *prefix)
    results = find_hits(queries, images, gallery, FLAGS.k, refinement, match)
    if output:
        from hypjax.analysis.hit_grid import draw

        console.say(f"wrote {', '.join(map(str, draw(results, output)))}")
    for hits in results:
        print(hits)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
