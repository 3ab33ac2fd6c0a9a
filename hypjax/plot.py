"""Draws embeddings in the Poincaré disk, their images on a grid, or what searches find."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

from hypjax import command
from hypjax.errors import UserError, require_package


@dataclasses.dataclass(frozen=True)
class Sample:
    """The flags that choose the images to draw.

    Args:
        parts: With --workdir: the images to draw, train, test, or both, train,test.
        colour: disk, grid: class, or another grouping to colour by. Default: the coarsest.
        images: disk, grid: largest number of images of each part; of more, a random sample is
            drawn. Default: 5000 in a disk, 400 on a grid.
        first: disk, grid: draw the first images instead of a random sample.
        seed: Seed of the random sample and of the layout.
    """

    parts: tuple[Literal["train", "test"], ...] = ("test",)
    colour: str | None = None
    images: command.Positive | None = None
    first: bool = False
    seed: command.Natural = 0


def main(
    kind: Literal["disk", "grid", "hits"] = "disk",
    /,
    *,
    overrides: list[str],
    workdir: str | None = None,
    embeddings: str | None = None,
    output: command.Figure,
    sample: Sample,
    layout: Literal["mds", "umap"] = "mds",
    neighbours: command.Positive = 15,
    thumbnails: bool = False,
    queries: command.Positive = 8,
    k: command.Positive = 8,
) -> None:
    """Draws the figure, and prints how faithful its layout is.

    Args:
        kind: What to draw.
        overrides: Where the images are if they have moved, as data.path=photos.
        workdir: Folder of a trained run, or its URL.
        embeddings: disk, grid: file written by python -m hypjax.embed, instead of --workdir.
        output: Figure to write, such as disk.png or disk.svg.
        sample: The images to draw.
        layout: disk, grid: mds preserves distances, umap neighbours (extra viz).
        neighbours: disk, grid: number of neighbours of a point in umap's graph.
        thumbnails: disk: draw images, as many as do not overlap.
        queries: hits: number of queries; half of them, if possible, find a wrong image first.
        k: hits: number of nearest images of each query.

    Example:
        python -m hypjax.plot disk --workdir=runs/glyphs-hyp --output=disk.png
    """
    command.require_one(workdir=workdir, embeddings=embeddings)
    _require_drawable(kind, sample.parts, layout)
    from hypjax.analysis import disk, run_embeddings, run_hits
    from hypjax.system import caches, console

    limit = sample.images or (400 if kind == "grid" else 5000)
    seed = None if sample.first else sample.seed
    caches.keep_compiled_programs()
    if embeddings:
        command.refuse_overrides(overrides)
        path = pathlib.Path(embeddings).expanduser()
        drawing, space = disk.drawing_of_gallery(path, limit, seed, sample.colour)
    else:
        (run,) = run_embeddings.open_runs([str(workdir)], overrides)
        if kind == "hits":
            print(run_hits.draw_hits(run, queries, k, sample.seed, output))
            console.say(f"wrote {output}")
            return
        drawing, space = disk.drawing_of_run(run, sample.parts, limit, seed, sample.colour)
    drawing, ranks = disk.place_in_disk(drawing, space, layout, sample.seed, neighbours)
    _print_ranks(ranks, f"{space}", layout)
    if kind == "grid":
        disk.draw_image_grid(drawing.panels[0], output)
    else:
        disk.draw_disks(drawing, output, thumbnails)
    console.say(f"wrote {output}")


def _require_drawable(kind: str, parts: Sequence[str], layout: str) -> None:
    if kind == "grid" and len(parts) > 1:
        raise UserError("a grid shows one part; give --parts=train or --parts=test")
    if layout == "umap":
        require_package("umap", "a layout by UMAP", "hypjax[viz]")


def _print_ranks(ranks: tuple[float, float] | None, space: str, layout: str) -> None:
    if ranks:
        correlations = f"{ranks[0]:.3f} ({layout}); of two principal components: {ranks[1]:.3f}"
        print(f"rank correlation of distances in the picture and in {space}: {correlations}")


if __name__ == "__main__":
    command.run(main)
