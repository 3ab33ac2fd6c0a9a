"""Draws embeddings in the Poincaré disk, or their images on a grid."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from absl import flags

from hypjax import command
from hypjax.errors import UserError, require_package

if TYPE_CHECKING:  # They import JAX or NumPy.
    from collections.abc import Sequence

    import numpy as np
    from jaxtyping import Complex

    from hypjax.analysis.disk import Panel
    from hypjax.analysis.plot_data import Drawn, Part

EXAMPLE = "python -m hypjax.plot disk --workdir=runs/glyphs-hyp --output=disk.png"
FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a trained run, or its URL.", flag_values=FLAGS
)
_EMBEDDINGS = flags.DEFINE_string(
    "embeddings",
    None,
    "Instead of --workdir: file written by python -m hypjax.embed.",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Figure to write, such as disk.png, disk.svg or disk.pdf, or an interactive page, disk.html.",
    flag_values=FLAGS,
)
_PARTS = flags.DEFINE_list(
    "parts",
    ["test"],
    "With --workdir: the images to draw, train, test, or both beside each other: train,test.",
    flag_values=FLAGS,
)
_LAYOUT = flags.DEFINE_enum(
    "layout",
    "mds",
    ["mds", "umap"],
    "How points are placed: mds preserves distances, umap neighbours (extra viz).",
    flag_values=FLAGS,
)
_COLOUR = flags.DEFINE_string(
    "colour",
    None,
    "What colours stand for: class, or what classes are grouped by. Default: the groups, if any.",
    flag_values=FLAGS,
)
_THUMBNAILS = flags.DEFINE_boolean(
    "thumbnails", False, "disk: draw images, as many as do not overlap.", flag_values=FLAGS
)
_IMAGES = flags.DEFINE_integer(
    "images",
    None,
    "Largest number of images of each part; of more, random ones are drawn. Default: 5000 in a "
    "disk, 2000 on a page, 400 on a grid.",
    lower_bound=1,
    flag_values=FLAGS,
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the choice of images and of the layout.", lower_bound=0, flag_values=FLAGS
)
_NOTES = {
    "mds": "distances resemble those of the embeddings (scaling in the hyperbolic plane)",
    "umap": "neighbours are those of the embeddings (UMAP on the hyperboloid)",
}
PAGE = ".html"
CHOICES = ("disk", "grid")
_DEFAULT_IMAGES = {"disk": 5000, "grid": 400, PAGE: 2000}


def main(overrides: list[str], kind: str | None) -> None:
    """Draws the picture and says how faithful its layout is."""
    command.refuse_overrides(overrides)
    kind = kind or "disk"
    command.require(_OUTPUT)
    output = command.figure(_OUTPUT, *([PAGE] if kind == "disk" else []))
    if bool(_WORKDIR.value) == bool(_EMBEDDINGS.value):
        raise UserError("give either --workdir, a trained run, or --embeddings, a gallery")
    for part in _PARTS.value:
        if part not in ("train", "test"):
            raise UserError(f"--parts={part} is unknown; it must be train, test or train,test")
    if kind == "grid" and len(_PARTS.value) > 1:
        raise UserError("a grid shows one part; give --parts=train or --parts=test")
    is_page = output.suffix == PAGE
    if is_page and _THUMBNAILS.value:
        raise UserError("a page shows images under the pointer; leave out --thumbnails")
    if is_page:
        require_package("bokeh", "an interactive page", "hypjax[viz]")
    if _LAYOUT.value == "umap":
        require_package("umap", "a layout by UMAP", "hypjax[viz]")
    from hypjax.analysis.disk import Proxies, draw_disks, draw_image_grid
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    drawn = _drawn(_IMAGES.value or _DEFAULT_IMAGES[PAGE if is_page else kind])
    grouping = _grouping(drawn.parts)
    places = _places(drawn)
    names, panels = _panels(drawn.parts, grouping, places)
    if kind == "grid":
        draw_image_grid(panels[0], output)
    elif is_page:
        from hypjax.analysis.disk_page import write_disk_page

        proxies = Proxies(places[-1], drawn.parents)
        note = _NOTES[_LAYOUT.value]
        write_disk_page(panels, names, grouping, output, proxies=proxies, note=note)
    else:
        note = _NOTES[_LAYOUT.value]
        proxies = Proxies(places[-1], drawn.parents)
        options = {"proxies": proxies, "thumbnails": _THUMBNAILS.value, "note": note}
        draw_disks(panels, names, grouping, output, **options)
    for panel in panels:
        panel.read.warn()
    console.say(f"wrote {output}")


def _drawn(most: int) -> Drawn:
    """Embeds, or reads, what is to be drawn."""
    if _EMBEDDINGS.value:
        from hypjax.analysis.plot_data import draw_gallery

        return draw_gallery(pathlib.Path(_EMBEDDINGS.value).expanduser(), most, _SEED.value)
    from hypjax.analysis.plot_data_of_run import draw_run

    return draw_run(_WORKDIR.value, _PARTS.value, most, _SEED.value)


def _grouping(parts: Sequence[Part]) -> str:
    """Name of the grouping that colours stand for.

    Raises:
        UserError: There is no such grouping.
    """
    known = list(parts[0].groupings)
    if _COLOUR.value and _COLOUR.value not in known:
        raise UserError(
            f"--colour={_COLOUR.value} is unknown; it must be one of {', '.join(known)}"
        )
    return _COLOUR.value or known[1 if len(known) > 1 else 0]


def _places(drawn: Drawn) -> list[Complex[np.ndarray, " n"]]:
    """Lays out all parts, and the proxies, together; says how faithful the layout is."""
    import numpy as np

    from hypjax.geometry import layout

    points = np.concatenate([*(part.points for part in drawn.parts), drawn.proxies])
    lay_out = {"mds": layout.lay_out, "umap": layout.lay_out_by_umap}[_LAYOUT.value]
    places = lay_out(points, drawn.space, seed=_SEED.value)
    if len(points) > 2:
        plain = layout.to_disk(
            1e-6 * layout.principal_components(np.asarray(drawn.space.features(points)))
        )
        found, other = (layout.rank_correlation(points, p, drawn.space) for p in (places, plain))
        print(
            f"rank correlation of distances in the picture and in {drawn.space}: {found:.3f} "
            f"({_LAYOUT.value}); of two principal components: {other:.3f}"
        )
    return np.split(places, np.cumsum([len(part.points) for part in drawn.parts]))


def _panels(
    parts: Sequence[Part], grouping: str, places: Sequence[Complex[np.ndarray, " n"]]
) -> tuple[list[str], list[Panel]]:
    """Returns the names of all groups, and the panels, whose labels are indices of these."""
    import numpy as np

    from hypjax.analysis.disk import Panel
    from hypjax.analysis.hit_grid import Images
    from hypjax.analysis.plot_data import captions

    found = [part.groupings[grouping] for part in parts]
    names = list(dict.fromkeys(name for each in found for name in each.names))
    index = {name: i for i, name in enumerate(names)}
    panels = []
    for part, each, own in zip(parts, found, places, strict=False):
        labels = np.array([index[name] for name in each.names])[each.labels]
        panels.append(Panel(part.title, own, labels, captions(part), Images(part.read)))
    return names, panels


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
