"""Answers each query by the cheapest arithmetic that proves its answer."""

import logging
from collections.abc import Callable

import numpy as np

from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Points, Rows
from hypjax.retrieval.scores import DOUBLE, Score
from hypjax.retrieval.subtraction import unique_rows

_ByProducts = Callable[[Rows, Score], Rows]
_LOG = logging.getLogger(__name__)
_MAX_CROWDS, _CROWD = 16, 1024  # Largest number of crowds, and their least mean size.
_CENTRED = 4096  # Most points of a crowd that its centre is the mean of.
_FEW = 64  # Distinct queries for which subtraction costs less than products in float64.


def certify(
    result: str, queries: Points, score: Score, by_products: _ByProducts, by_subtraction: Callable
) -> None:
    """Answers all queries exactly, and logs how many each arithmetic answered.

    Products in float32 answer most queries. Where points crowd, rounding their lengths hides their
    differences: those queries are asked again by products in float64 around the centre of their
    crowd. Queries with duplicates or near-ties beyond the candidates remain for `by_subtraction`.
    `by_products` returns the rows of queries whose answer it cannot certify. `result` names the
    answers in the log.
    """
    rows = by_products(np.arange(len(queries)), score)
    repeated = len(rows)
    if not _are_few(queries, rows):
        uncertain = []
        for crowd in _crowds(queries, rows):
            sample = inputs.host_rows(queries, crowd[:: -(-len(crowd) // _CENTRED)])
            uncertain.append(by_products(crowd, Score.around(score.space, sample, DOUBLE)))
        rows = np.sort(np.concatenate(uncertain))
    for part in inputs.split(rows, inputs.PART_BYTES // (4 * queries.shape[1])):
        by_subtraction(part)
    _LOG.info(
        "%s of %d queries, all exact: certified=%d by products in float32, "
        "%d by products in float64, %d by subtraction",
        *(result, len(queries), len(queries) - repeated, repeated - len(rows), len(rows)),
    )


def _are_few(queries: Points, rows: Rows) -> bool:
    """Whether few queries are distinct, so that subtraction costs less than another search."""
    distinct: set[bytes] = set()
    for part in inputs.split(rows, _CROWD):
        distinct.update(row.tobytes() for row in unique_rows(inputs.host_rows(queries, part))[0])
        if len(distinct) > _FEW:
            return False
    return True


def _crowds(queries: Points, rows: Rows) -> list[Rows]:
    """Splits rows where the projections of their points on a line are farthest apart."""
    line = np.random.default_rng(0).normal(size=queries.shape[1])
    parts = inputs.split(rows, _CROWD)
    projected = np.concatenate([inputs.host_rows(queries, part) @ line for part in parts])
    order = np.argsort(projected)
    cuts = int(np.clip(len(rows) // _CROWD, 1, _MAX_CROWDS)) - 1
    widest = np.argsort(np.diff(projected[order]))[len(rows) - 1 - cuts :]
    return np.split(rows[order], np.sort(widest) + 1)
