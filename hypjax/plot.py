"""Draws embeddings in the Poincaré disk, their images on a grid, or what searches find."""

import dataclasses
import pathlib
from typing import Any, Literal

from hypjax import command
from hypjax.errors import UserError, require_package


@dataclasses.dataclass(frozen=True)
class Style:
    """The flags that choose the images to draw, and how they lie in the disk.

    Args:
        parts: With --workdir: the images to draw, train, test, or both, train,test.
        colour: disk, grid: class, or another grouping to colour by. Default: the coarsest.
        images: disk, grid: largest number of images of each part; of more, a random sample is
            drawn. Default: 5000 in a disk, 400 on a grid.
        first: disk, grid: draw the first images instead of a random sample.
        seed: Seed of the random sample and of the layout.
        layout: disk, grid: mds preserves distances, umap neighbours (extra viz).
        neighbours: disk, grid: number of neighbours of a point in umap's graph.
        thumbnails: disk: draw images, as many as do not overlap.
    """

    parts: tuple[Literal["train", "test"], ...] = ("test",)
    colour: str | None = None
    images: command.Positive | None = None
    first: bool = False
    seed: command.Natural = 0
    layout: Literal["mds", "umap"] = "mds"
    neighbours: command.Positive = 15
    thumbnails: bool = False


def main(
    kind: Literal["disk", "grid", "hits"] = "disk",
    /,
    *,
    overrides: list[str],
    workdir: str | None = None,
    embeddings: str | None = None,
    output: command.Figure,
    style: Style,
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
        style: The images to draw, and how.
        queries: hits: number of queries; half of them, if possible, find a wrong image first.
        k: hits: number of nearest images of each query.

    Example:
        python -m hypjax.plot disk --workdir=runs/glyphs-hyp --output=disk.png
    """
    command.require_one(workdir=workdir, embeddings=embeddings)
    if kind == "grid" and len(style.parts) > 1:
        raise UserError("a grid shows one part; give --parts=train or --parts=test")
    if style.layout == "umap":
        require_package("umap", "a layout by UMAP", "hypjax[viz]")
    if embeddings:
        command.refuse_overrides(overrides)
    from hypjax.analysis.run_embeddings import open_runs
    from hypjax.analysis.run_hits import draw_hits
    from hypjax.system import caches, console

    caches.keep_compiled_programs()
    runs = open_runs([workdir], overrides) if workdir else []
    if kind == "hits":
        print(draw_hits(runs[0], queries, k, style.seed, output))
    else:
        _draw_layout(kind, runs[0] if runs else str(embeddings), style, output)
    console.say(f"wrote {output}")


def _draw_layout(kind: str, source: Any, style: Style, output: pathlib.Path) -> None:
    """Draws the images of a `Run` or of a file of embeddings; prints how faithful the layout is."""
    from hypjax.analysis import disk

    limit = style.images or (400 if kind == "grid" else 5000)
    seed = None if style.first else style.seed
    if isinstance(source, str):
        path = pathlib.Path(source).expanduser()
        drawing, space = disk.drawing_of_gallery(path, limit, seed, style.colour)
    else:
        drawing, space = disk.drawing_of_run(source, style.parts, limit, seed, style.colour)
    layout = style.layout
    drawing, ranks = disk.place_in_disk(drawing, space, layout, style.seed, style.neighbours)
    if ranks:
        correlations = f"{ranks[0]:.3f} ({layout}); of two principal components: {ranks[1]:.3f}"
        print(f"rank correlation of distances in the picture and in {space}: {correlations}")
    if kind == "grid":
        disk.draw_image_grid(drawing.panels[0], output)
    else:
        disk.draw_disks(drawing, output, style.thumbnails)


if __name__ == "__main__":
    command.run(main)
