"""Draws embeddings in the Poincaré disk, their images on a grid, or what searches find."""

import pathlib
from typing import Literal

from hypjax import command
from hypjax.errors import UserError, require_package


def main(
    kind: Literal["disk", "grid", "hits"] = "disk",
    /,
    *,
    overrides: list[str],
    workdir: str | None = None,
    embeddings: str | None = None,
    output: command.Figure,
    parts: tuple[str, ...] = ("test",),
    layout: Literal["mds", "umap"] = "mds",
    colour: str | None = None,
    thumbnails: bool = False,
    neighbours: command.Positive = 15,
    images: command.Positive | None = None,
    first: bool = False,
    queries: command.Positive = 8,
    k: command.Positive = 8,
    seed: command.Natural = 0,
) -> None:
    """Draws the figure, and prints how faithful its layout is.

    Args:
        kind: What to draw.
        overrides: Where the images are if they have moved, as data.path=photos.
        workdir: Folder of a trained run, or its URL.
        embeddings: disk, grid: file written by python -m hypjax.embed, instead of --workdir.
        output: Figure to write, such as disk.png or disk.svg.
        parts: With --workdir: the images to draw, train, test, or both, train,test.
        layout: disk, grid: mds preserves distances, umap neighbours (extra viz).
        neighbours: disk, grid: number of neighbours of a point in umap's graph.
        colour: disk, grid: class, or another grouping to colour by. Default: the coarsest.
        thumbnails: disk: draw images, as many as do not overlap.
        images: disk, grid: largest number of images of each part; of more, a random sample is
            drawn. Default: 5000 in a disk, 400 on a grid.
        first: disk, grid: draw the first images instead of a random sample.
        queries: hits: number of queries; half of them, if possible, find a wrong image first.
        k: hits: number of nearest images of each query.
        seed: Seed of the random sample and of the layout.

    Example:
        python -m hypjax.plot disk --workdir=runs/glyphs-hyp --output=disk.png
    """
    command.require_one(workdir=workdir, embeddings=embeddings)
    _require_drawable(kind, parts, layout)
    from hypjax.analysis import disk
    from hypjax.analysis.run_embeddings import open_runs
    from hypjax.analysis.run_hits import draw_hits
    from hypjax.system import caches, console

    choice = (images or (400 if kind == "grid" else 5000), None if first else seed, colour)
    if embeddings:
        command.refuse_overrides(overrides)
        caches.keep_compiled_programs()
        drawing, space = disk.drawing_of_gallery(pathlib.Path(embeddings).expanduser(), *choice)
    else:
        [run] = open_runs([workdir], overrides)
        if kind == "hits":
            print(draw_hits(run, queries, k, seed, output))
            console.say(f"wrote {output}")
            return
        drawing, space = disk.drawing_of_run(run, parts, *choice)
    drawing, ranks = disk.place_in_disk(drawing, space, layout, seed, neighbours)
    if ranks:
        print(
            f"rank correlation of distances in the picture and in {space}: {ranks[0]:.3f} "
            f"({layout}); of two principal components: {ranks[1]:.3f}"
        )
    if kind == "grid":
        disk.draw_image_grid(drawing.panels[0], output)
    else:
        disk.draw_disks(drawing, output, thumbnails)
    console.say(f"wrote {output}")


def _require_drawable(kind: str, parts: tuple[str, ...], layout: str) -> None:
    """Raises a `UserError` for parts that cannot be drawn, or a layout without its package."""
    if kind == "grid" and len(parts) > 1:
        raise UserError("a grid shows one part; give --parts=train or --parts=test")
    for part in set(parts) - {"train", "test"}:
        raise UserError(f"--parts={part} is unknown; it must be train, test or train,test")
    if layout == "umap":
        require_package("umap", "a layout by UMAP", "hypjax[viz]")


if __name__ == "__main__":
    command.run(main)
