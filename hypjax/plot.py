"""Draws embeddings in the Poincaré disk, their images on a grid, or what searches find."""

import pathlib

from hypjax import command
from hypjax.errors import UserError, require_package

EXAMPLE = "python -m hypjax.plot disk --workdir=runs/glyphs-hyp --output=disk.png"
FLAGS = command.Flags()
_WORKDIR = FLAGS.string("workdir", "Folder of a trained run, or its URL.")
_EMBEDDINGS = FLAGS.string(
    "embeddings", "Instead of --workdir: file written by python -m hypjax.embed."
)
_OUTPUT = FLAGS.string(
    "output",
    "Figure to write, such as disk.png, disk.svg or disk.pdf, or an interactive page, disk.html.",
)
_PARTS = FLAGS.words(
    "parts",
    "With --workdir: the images to draw, train, test, or both beside each other: train,test.",
    ["test"],
)
_LAYOUT = FLAGS.enum(
    "layout",
    ["mds", "umap"],
    "How points are placed: mds preserves distances, umap neighbours (extra viz).",
    "mds",
)
_COLOUR = FLAGS.string(
    "colour",
    "What colours stand for: class, or what classes are grouped by. Default: the groups, if any.",
)
_THUMBNAILS = FLAGS.boolean("thumbnails", "disk: draw images, as many as do not overlap.")
_IMAGES = FLAGS.positive(
    "images",
    "Largest number of images of each part; of more, random ones are drawn. Default: 5000 in a "
    "disk, 2000 on a page, 400 on a grid.",
)
_QUERIES = FLAGS.positive(
    "queries", "hits: number of queries; half find a wrong image first, if so many do.", 8
)
_K = FLAGS.positive("k", "hits: number of nearest images of each query.", 8)
_SEED = FLAGS.natural("seed", "Seed of the choice of images and of the layout.", 0)
PAGE = ".html"
CHOICES = ("disk", "grid", "hits")
_DEFAULT_IMAGES = {"disk": 5000, "grid": 400, PAGE: 2000}


def main(kind: str | None) -> None:
    """Draws the picture and says how faithful its layout is."""
    kind = kind or "disk"
    command.require(_OUTPUT)
    output = command.figure(_OUTPUT, *([PAGE] if kind == "disk" else []))
    command.require_one(_WORKDIR, _EMBEDDINGS)
    if kind == "hits" and _EMBEDDINGS.value:
        raise UserError("hits are those of a run's test images; give --workdir, not --embeddings")
    if kind == "grid" and len(_PARTS.value) > 1:
        raise UserError("a grid shows one part; give --parts=train or --parts=test")
    for part in _PARTS.value:
        if part not in ("train", "test"):
            raise UserError(f"--parts={part} is unknown; it must be train, test or train,test")
    if output.suffix == PAGE:
        require_package("bokeh", "an interactive page", "hypjax[viz]")
    if _LAYOUT.value == "umap":
        require_package("umap", "a layout by UMAP", "hypjax[viz]")
    from hypjax.analysis import disk
    from hypjax.analysis.run_hits import draw_hits
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    if kind == "hits":
        print(draw_hits(_WORKDIR.value, _QUERIES.value, _K.value, _SEED.value, output))
    else:
        most = _IMAGES.value or _DEFAULT_IMAGES[PAGE if output.suffix == PAGE else kind]
        if _EMBEDDINGS.value:
            path = pathlib.Path(_EMBEDDINGS.value).expanduser()
            data = disk.gallery_data(path, most, _SEED.value)
        else:
            data = disk.run_data(_WORKDIR.value, _PARTS.value, most, _SEED.value)
        drawing, ranks = disk.place_in_disk(data, _LAYOUT.value, _COLOUR.value, _SEED.value)
        if ranks:
            print(
                f"rank correlation of distances in the picture and in {data.space}: {ranks[0]:.3f} "
                f"({_LAYOUT.value}); of two principal components: {ranks[1]:.3f}"
            )
        if kind == "grid":
            disk.draw_image_grid(drawing.panels[0], output)
        elif output.suffix == PAGE:
            disk.write_disk_page(drawing, output)
        else:
            disk.draw_disks(drawing, output, _THUMBNAILS.value)
        for panel in drawing.panels:
            panel.read.warn()
    console.say(f"wrote {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
