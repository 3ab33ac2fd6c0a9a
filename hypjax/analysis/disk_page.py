"""The Poincaré disk as an interactive page that works from the disk, drawn by Bokeh."""

import base64
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from hypjax.analysis.disk import Colours, Panel, Proxies, colours, grid_lines
from hypjax.errors import UserError, require_package
from hypjax.system.files import write_text

_LEAST = 340  # Least width of one disk, below which disks stand under each other.
_LEGEND = 140  # Height of title and legend.
_NAME = 30  # Characters of a group's name.
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
        names: Name of each group; see `colours`.
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

    chosen = colours(sum(np.bincount(panel.labels, minlength=len(names)) for panel in panels))
    disks = [_disk(panel, chosen, names, legend, proxies) for panel in panels]
    title = f"Poincaré disk: {', '.join(panel.title for panel in panels)}"
    head = Div(text=f"<h1 style='font: bold 1.3rem sans-serif'>Poincaré disk</h1><p>{note}</p>")
    beside = row(*disks, sizing_mode="stretch_both", styles={"flex-wrap": "wrap"})
    content = column(head, beside, sizing_mode="stretch_both")
    page = file_html(content, INLINE, title)
    page = page.replace("<html", '<html lang="en"', 1) if "<html lang" not in page else page
    try:
        write_text(output, page)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error


def _disk(
    panel: Panel,
    chosen: Colours,
    names: Sequence[str],
    legend: str,
    proxies: Proxies | None,
) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.plotting import figure

    tools = "pan,wheel_zoom,box_zoom,reset,save"
    plot = figure(
        title=panel.title,
        sizing_mode="stretch_both",
        min_width=_LEAST,
        min_height=_LEAST + _LEGEND,
        match_aspect=True,
        tools=tools,
        active_scroll="wheel_zoom",
    )
    plot.x_range.range_padding = plot.y_range.range_padding = 0.02
    plot.axis.visible = plot.grid.visible = False
    lines, circle = grid_lines(), np.exp(2j * np.pi * np.linspace(0, 1, 361))
    plot.multi_line(list(lines.real), list(lines.imag), line_color="#dddddd", line_width=1)
    plot.line(circle.real, circle.imag, line_color="black")
    shown = [([group], names[group]) for group in chosen.shown.tolist()]
    shown.append((np.setdiff1d(np.arange(len(names)), chosen.shown), chosen.rest))
    renderers = []
    for (groups, label), marker in zip(shown, [*chosen.markers, 0], strict=True):
        own = np.flatnonzero(np.isin(panel.labels, groups))
        if len(own):
            columns = _columns(panel, own) | {"colour": chosen.of[panel.labels[own]]}
            style = {"size": 6, "color": "colour", "marker": _MARKERS[marker], "alpha": 0.8}
            style["legend_label"] = label if len(label) < _NAME else f"{label[:_NAME]}…"
            renderers.append(plot.scatter("x", "y", source=ColumnDataSource(columns), **style))
    if proxies is not None and len(proxies.places):
        style = {"size": 8, "fill_color": "white", "line_color": "black"}
        places = proxies.places.real, proxies.places.imag
        plot.scatter(*places, legend_label="proxy", **style)
    plot.add_tools(HoverTool(renderers=renderers, tooltips=_HOVER))
    plot.legend.title, plot.legend.click_policy = legend, "hide"
    plot.add_layout(plot.legend[0], "below")
    longest = max(len(item.label.value) for item in plot.legend[0].items)
    plot.legend.ncols = max(1, _LEAST // (7 * longest + 40))
    plot.legend.update(label_text_font_size="12px", spacing=0, padding=2, location="top_left")
    plot.legend.update(label_height=14, glyph_height=14)
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
