"""Searches of a run as a picture: queries that find a wrong image first, and others."""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from PIL import Image

from hypjax.analysis.disk import read_rgb
from hypjax.analysis.hit_grid import Picture, draw_rows
from hypjax.analysis.report import ReportData, Search, report_data
from hypjax.analysis.run_embeddings import open_runs, searched
from hypjax.data.dataset import Dataset

_COLOURS = {True: "tab:green", False: "tab:red"}


def draw_hits(workdir: str, queries: int, k: int, seed: int, output: pathlib.Path) -> str:
    """Draws random test images of a run, each with its k nearest images, and says which they are.

    At most half of them, the first, find an image of another class first; if there are fewer such
    queries, more others are drawn. Classes take turns.
    """
    (run,) = open_runs({workdir: pathlib.Path(workdir).name})
    found = report_data(run, k)
    rng = np.random.default_rng(seed)
    labels = run.splits.test.labels
    wrong, right = (
        _in_turn(part, labels, rng)
        for part in (found.searches[: found.failures], found.searches[found.failures :])
    )
    wrong = wrong[: max(queries // 2, queries - len(right))]
    right = right[: queries - len(wrong)]
    draw_rows([_row(found, search) for search in wrong + right], output, _read)
    return (
        f"{found.failures} of {len(found.searches)} queries find an image of another class first; "
        f"drawn: {len(wrong)} of these, then {len(right)} of the others"
    )


def _in_turn(
    searches: Sequence[Search], labels: Int[np.ndarray, " images"], rng: np.random.Generator
) -> list[Search]:
    """The searches in random order, but the first of each class before any second one."""
    shuffled = [searches[i] for i in rng.permutation(len(searches))]
    seen, turns = np.zeros(labels.max(initial=0) + 1, int), []
    for search in shuffled:
        turns.append(seen[labels[search.query]])
        seen[labels[search.query]] += 1
    return [shuffled[i] for i in np.argsort(turns, kind="stable")]


def _row(found: ReportData, search: Search) -> list[Picture]:
    test, items = found.run.splits.test, searched(found.run.splits)
    row = [Picture((test, search.query), f"query {test.class_name(search.query)}", "black")]
    for i, distance, right in zip(search.hits, search.distances, search.right, strict=True):
        row.append(Picture((items, i), f"{distance:.3f} {items.class_name(i)}", _COLOURS[right]))
    return row


def _read(chosen: tuple[Dataset, int]) -> Image.Image:
    images, i = chosen
    return read_rgb(images)(i)
