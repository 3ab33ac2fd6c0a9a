"""Draws embeddings in the Poincaré disk, their images on a grid, or what searches find."""

import pathlib

from hypjax import command
from hypjax.errors import UserError, require_package

EXAMPLE = "python -m hypjax.plot disk --workdir=runs/glyphs-hyp --output=disk.png"
FLAGS = command.Flags(
    workdir=command.RUN,
    embeddings=command.string("Instead of --workdir: file written by python -m hypjax.embed."),
    output=command.string(
        "Figure to write, such as disk.png, disk.svg or disk.pdf, or an interactive page, "
        "disk.html."
    ),
    parts=command.words(
        "With --workdir: the images to draw, train, test, or both beside each other: train,test.",
        ["test"],
    ),
    layout=command.enum(
        "How points are placed: mds preserves distances, umap neighbours (extra viz).",
        "mds",
        enum_values=["mds", "umap"],
    ),
    colour=command.string(
        "What colours stand for: class, or what classes are grouped by. Default: the groups, if "
        "any."
    ),
    thumbnails=command.boolean("disk: draw images, as many as do not overlap."),
    images=command.positive(
        "Largest number of images of each part; of more, random ones are drawn. Default: 5000 in a "
        "disk, 2000 on a page, 400 on a grid."
    ),
    queries=command.positive(
        "hits: number of queries; half find a wrong image first, if so many do.", 8
    ),
    k=command.positive("hits: number of nearest images of each query.", 8),
    seed=command.natural("Seed of the choice of images and of the layout.", 0),
)
PAGE = ".html"
CHOICES = ("disk", "grid", "hits")
_DEFAULT_IMAGES = {"disk": 5000, "grid": 400, PAGE: 2000}


def main(kind: str | None) -> None:
    """Draws the picture and says how faithful its layout is."""
    kind = kind or "disk"
    FLAGS.require("output")
    output = FLAGS.output_file("output", *command.FIGURES, *[PAGE] * (kind == "disk"))
    FLAGS.require_one("workdir", "embeddings")
    if kind == "hits" and FLAGS.embeddings:
        raise UserError("hits are those of a run's test images; give --workdir, not --embeddings")
    if kind == "grid" and len(FLAGS.parts) > 1:
        raise UserError("a grid shows one part; give --parts=train or --parts=test")
    for part in set(FLAGS.parts) - {"train", "test"}:
        raise UserError(f"--parts={part} is unknown; it must be train, test or train,test")
    if output.suffix == PAGE:
        require_package("bokeh", "an interactive page", "hypjax[viz]")
    if FLAGS.layout == "umap":
        require_package("umap", "a layout by UMAP", "hypjax[viz]")
    from hypjax.analysis import disk
    from hypjax.analysis.run_hits import draw_hits
    from hypjax.system import caches, console

    caches.keep_compiled_programs()
    if kind == "hits":
        print(draw_hits(FLAGS.workdir, FLAGS.queries, FLAGS.k, FLAGS.seed, output))
        console.say(f"wrote {output}")
        return
    most = FLAGS.images or _DEFAULT_IMAGES[PAGE if output.suffix == PAGE else kind]
    if FLAGS.embeddings:
        path = pathlib.Path(FLAGS.embeddings).expanduser()
        shown = disk.drawing_of_gallery(path, most, FLAGS.seed, FLAGS.colour)
    else:
        shown = disk.drawing_of_run(FLAGS.workdir, FLAGS.parts, most, FLAGS.seed, FLAGS.colour)
    drawing, ranks = disk.place_in_disk(*shown, FLAGS.layout, FLAGS.seed)
    if ranks:
        print(
            f"rank correlation of distances in the picture and in {shown[1]}: {ranks[0]:.3f} "
            f"({FLAGS.layout}); of two principal components: {ranks[1]:.3f}"
        )
    if kind == "grid":
        disk.draw_image_grid(drawing.panels[0], output)
    elif output.suffix == PAGE:
        disk.write_disk_page(drawing, output)
    else:
        disk.draw_disks(drawing, output, FLAGS.thumbnails)
    for panel in drawing.panels:
        panel.read.warn()
    console.say(f"wrote {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
