"""Finds the nearest neighbours of query images and texts."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hypjax import command
from hypjax.catalogue import Engine
from hypjax.errors import UserError

if TYPE_CHECKING:  # These modules import JAX, which would slow down --help.
    from hypjax.data.dataset import Dataset
    from hypjax.galleries.embeddings import Embeddings
    from hypjax.galleries.search import Gallery
    from hypjax.inference.hits import Hits


def main(
    *,
    workdir: str | None = None,
    external: command.EncoderFlags,
    gallery: str,
    query: str | None = None,
    text: list[str] | None = None,
    template: list[str] | None = None,
    tokenizer: str | None = None,
    engine: Engine = "auto",
    exclude: list[str] | None = None,
    k: command.Positive = 10,
    expand: command.Natural = 0,
    alpha: command.NonNegative = 0.0,
    rerank: bool = False,
    embedding: str = "head",
    keep_self: bool = False,
    output: command.Figure | None = None,
) -> None:
    """Searches the gallery and prints one table per query.

    Args:
        workdir: Folder or URL of the run, or the released model, that embedded the gallery;
            queries of features need none.
        external: An encoder instead of a run.
        gallery: What python -m hypjax.embed wrote: a .npz file, or for an approximate search an
            export to another program, such as gallery.ann or qdrant://host:6333/name.
        query: An image, also at https://..., or several, as for --images of python -m hypjax.embed.
        text: Words to search for, with a model of images and texts; repeat the flag for several.
        template: With --text: a prompt such as 'a photo of a {}.'; repeat the flag to average
            several.
        tokenizer: With --text: file or folder of the tokenizer. Default: in the weights' folder.
        exclude: Files and folders of the queries to leave out, as for python -m hypjax.embed.
        k: Number of neighbours; a smaller gallery returns all of its images.
        expand: Query expansion: search for the mean of the query and its N nearest images.
        alpha: With --expand: exponent of the similarities that weight the mean; 0 weights all
            images alike.
        rerank: Re-rank results by their neighbours: the first 100, or k if that is more.
        embedding: With --workdir: the gallery's embedding: head, encoder, or a prefix (head@16).
        keep_self: Let queries that are in the gallery find themselves.
        output: Figure of the hits to draw, such as hits.png.
        engine: What runs an encoder of hypjax on a CPU; auto is OpenVINO where installed.

    Example:
        python -m hypjax.search --workdir=runs/glyphs-hyp --gallery=gallery.npz
        --query='letters/test/D */*.png' --k=5
    """
    from hypjax.data.photos import find_images
    from hypjax.galleries.embeddings import open_gallery
    from hypjax.inference.hits import find_hits, require_searchable
    from hypjax.retrieval.postprocessing import Postprocessing, Reranking
    from hypjax.system import caches

    postprocessing = Postprocessing(expand, alpha, Reranking() if rerank else None)
    opened_gallery = open_gallery(gallery)
    require_searchable(opened_gallery, k, postprocessing)
    if query is None and not text or not all(x.strip() for x in text or ()):
        raise UserError("name what to search for: --query=IMAGE, or --text='a plum'")
    images = None if query is None else find_images(query, exclude or ())
    caches.keep_compiled_programs()
    if text or workdir or external.encoder or (images is not None and images.vectors is None):
        space = opened_gallery.space
        embedder = external.open(
            workdir, embedding, space=space, tokenizer=tokenizer, engine=engine
        )
        embedded = _embedded(embedder, opened_gallery, text or (), template or (), images)
    elif images is not None:
        names = str(query), gallery
        embedded = [(_feature_queries(images.vectors, opened_gallery, names), images)]
    results: list[Hits] = []
    for queries, table in embedded:
        results += find_hits(queries, table, opened_gallery, k, postprocessing, keep_self=keep_self)
    if output:
        _draw(results, output, opened_gallery.noun)
    for hits in results:
        print(hits)


def _embedded(
    embedder: Any,
    gallery: Gallery,
    texts: Sequence[str],
    templates: Sequence[str],
    images: Dataset | None,
) -> list[tuple[Embeddings, Dataset]]:
    """Embeds the queries, texts first, by the model that must have embedded the gallery."""
    from hypjax.data.texts import table_of_texts
    from hypjax.galleries.search import require_model

    require_model(gallery, embedder.fingerprint, embedder.name)
    queries: list[tuple[Embeddings, Dataset]] = []
    if texts:
        queries.append((embedder.embed_texts(texts, templates), table_of_texts(texts)))
    if images is not None:
        readable = _readable(embedder.embed_images(images, few=True), images, bool(texts))
        queries += [readable] if len(readable[1]) else []
    return queries


def _readable(queries: Embeddings, images: Dataset, has_texts: bool) -> tuple[Embeddings, Dataset]:
    """Leaves out the images that cannot be read, with a warning for each."""
    import numpy as np

    from hypjax.system import console

    if not len(queries) and not has_texts:  # `find_hits` raises an error that says why.
        return queries, images
    for path, reason in queries.unreadable.items():
        console.warn(f"cannot read {path} ({reason}); the other queries are searched for")
    readable = [i for i in range(len(images)) if images.name(i) not in queries.unreadable]
    return dataclasses.replace(queries, unreadable={}), images.take(np.array(readable, int))


def _feature_queries(features: Any, gallery: Gallery, names: tuple[str, str]) -> Embeddings:
    """Maps query features into the gallery's space; refuses features of another dimension."""
    from hypjax.galleries.embeddings import Embeddings

    queries = Embeddings.from_arrays(features, space=gallery.space)
    dim = queries.vectors.shape[1]
    for item in gallery.sample(1):
        if len(item.point) != dim:
            problem = f"{names[0]} has {dim} coordinates, but {names[1]} has {len(item.point)}"
            raise UserError(f"{problem}; compute both with one model")
    # A file of features does not say which model computed them: assume the gallery's.
    return dataclasses.replace(queries, fingerprint=gallery.fingerprint)


def _draw(results: Sequence[Hits], output: pathlib.Path, noun: str) -> None:
    """Draws the hits, of which some must be image files."""
    from hypjax.system import console

    paths = [path for hits in results for path in hits.paths]
    if any("://" in path or os.path.exists(path) for path in paths):
        from hypjax.analysis.hit_grid import draw

        console.say(f"wrote {', '.join(map(str, draw(results, output)))}")
        return
    problem = "no hit is an image file" if noun == "image" else "its hits are texts"
    example = f", such as {paths[0]}" if paths else ""
    console.warn(f"{output} is not drawn: {problem}{example}")


if __name__ == "__main__":
    command.run(main)
