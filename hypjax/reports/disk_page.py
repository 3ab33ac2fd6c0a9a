"""The Poincaré disk as an interactive page that works from the disk, drawn by Bokeh."""

import base64
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from hypjax.errors import UserError, require_package
from hypjax.reports.disk import COLOURS, OTHER, Panel, Proxies, grid_lines, largest_groups
from hypjax.system.files import write_text

_PIXELS = 640  # Largest width of one disk.
_LEAST = 340  # Least width of one disk, below which disks stand under each other.
_LEGEND = 140  # Height of title and legend.
_THUMBNAIL = 64  # Pixels of the longer side of an image under the pointer.
_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "plus", "x")
_HOVER = """
<div style="max-width: 14rem; font: 13px sans-serif">
  <img src="@image" alt="" style="display: block; width: 96px; image-rendering: pixelated">
  @caption<br>distance from the origin: @radius{0.00}
</div>
"""


def write_disk_page(
    panels: Sequence[Panel],
    names: Sequence[str],
    legend: str,
    output: pathlib.Path,
    *,
    proxies: Proxies | None = None,
    note: str = "",
) -> None:
    """Writes a page with points in Poincaré disks beside each other.

    The pointer shows a point's image, class and distance from the origin in the disk; the wheel
    zooms, and the legend hides groups. The page holds all that it needs.

    Args:
        panels: The points; their groups are those of `names`.
        names: Name of each group. The seven largest have colours and markers of their own.
        legend: What the groups are.
        output: File to write.
        proxies: Proxies, drawn in each disk.
        note: A line above the disks.

    Raises:
        UserError: Bokeh is not installed, an image cannot be read, or the file cannot be written.
    """
    require_package("bokeh", "an interactive page", "hypjax[viz]")
    from bokeh.embed import file_html
    from bokeh.layouts import column, row
    from bokeh.models import Div
    from bokeh.resources import INLINE

    shown = largest_groups(panels, len(names))
    disks = [_disk(panel, shown, names, legend, proxies) for panel in panels]
    title = f"Poincaré disk: {', '.join(panel.title for panel in panels)}"
    beside = row(*disks, sizing_mode="stretch_width", styles={"flex-wrap": "wrap"})
    content = column(Div(text=note), beside, sizing_mode="stretch_width")
    page = file_html(content, INLINE, title)
    page = page.replace("<html", '<html lang="en"', 1) if "<html lang" not in page else page
    try:
        write_text(output, page)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error


def _disk(
    panel: Panel,
    shown: np.ndarray,
    names: Sequence[str],
    legend: str,
    proxies: Proxies | None,
) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    plot = figure(
        title=panel.title,
        sizing_mode="scale_width",
        min_width=_LEAST,
        max_width=_PIXELS,
        aspect_ratio=_PIXELS / (_PIXELS + _LEGEND),
        match_aspect=True,
        x_range=(-1.03, 1.03),
        y_range=(-1.03, 1.03),
        tools="pan,wheel_zoom,box_zoom,reset,save",
        active_scroll="wheel_zoom",
    )
    plot.axis.visible = plot.grid.visible = False
    plot.circle(0, 0, radius=1, fill_color=None, line_color="black")
    lines = grid_lines()
    plot.multi_line(list(lines.real), list(lines.imag), line_color="#dddddd", line_width=1)
    renderers = []
    for place, group in enumerate([*shown.tolist(), None]):
        own = panel.labels == group if group is not None else ~np.isin(panel.labels, shown)
        if not own.any():
            continue
        source = ColumnDataSource(_columns(panel, np.flatnonzero(own)))
        label = names[group] if group is not None else f"{len(names) - len(shown)} others"
        colour = COLOURS[place] if group is not None else OTHER
        marker = _MARKERS[place] if group is not None else "circle"
        style = {"size": 6, "color": colour, "marker": marker, "alpha": 0.8}
        renderers.append(plot.scatter("x", "y", source=source, legend_label=label, **style))
    if proxies is not None and len(proxies.places):
        style = {"size": 8, "fill_color": "white", "line_color": "black"}
        places = proxies.places.real, proxies.places.imag
        plot.scatter(*places, legend_label="proxy", **style)
    plot.add_tools(HoverTool(renderers=renderers, tooltips=_HOVER))
    plot.legend.title, plot.legend.click_policy = legend, "hide"
    plot.add_layout(plot.legend[0], "below")
    plot.legend.orientation, plot.legend.ncols = "horizontal", 4
    return plot


def _columns(panel: Panel, chosen: np.ndarray) -> dict[str, Any]:
    places = panel.places[chosen]
    return {
        "x": places.real,
        "y": places.imag,
        "radius": 2 * np.arctanh(np.abs(places)),
        "caption": [panel.captions[i] for i in chosen.tolist()],
        "image": [_data_url(panel.read(i)) for i in chosen.tolist()],
    }


def _data_url(image: Image.Image) -> str:
    image = image.copy()
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "jpeg", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
