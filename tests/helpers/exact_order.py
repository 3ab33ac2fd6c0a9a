"""Crowded points, and the order and the ranks of items by subtraction in float64."""

import jax
import numpy as np

from hypjax.geometry import Composite, Fused, Lorentz, PoincareBall, Product, Sphere
from hypjax.retrieval import inputs
from hypjax.retrieval.ranks import NO_MATCH, first_ranks

FUSED = Fused(((Sphere(), 10.0), (PoincareBall(1.0, 2.3), 15.0)), normalized=False)
PRODUCTS = [Product(FUSED.parts), Product(FUSED.parts, summed=True)]


def crowds(space, spread, n=1000, dim=32):
    """Three crowds far from each other, with some duplicates."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, dim))[rng.integers(0, 3, n)] + spread * rng.normal(size=(n, dim))
    x = np.array(jax.jit(space.embed)(features.astype(np.float32)))
    x[100:200] = x[:100]
    return x


def keys(space, query, gallery):
    """Increasing functions of a query's distances to the items, by subtraction in float64."""
    if isinstance(space, Composite):
        halves = zip(*(np.split(points, 2, axis=-1) for points in (query, gallery)), strict=True)
        (x, y), other = halves
        gap = 1 - np.sum(other[0].astype(np.float64) ** 2)
        distance = 2 * np.arcsinh(np.sqrt(keys(PoincareBall(1.0), *other) / gap))
        if space == PRODUCTS[0]:
            return 100 * keys(Sphere(), x, y) + 225 * distance**2
        return 10 * keys(Sphere(), x, y) + 15 * distance
    if isinstance(space, Lorentz):
        return _keys_on_hyperboloid(query, gallery, space.c)
    c, y = np.float64(getattr(space, "c", 0.0)), gallery.astype(np.float64)
    return np.sum((query.astype(np.float64) - y) ** 2, axis=1) / (1 - c * np.sum(y * y, axis=1))


def _keys_on_hyperboloid(x, y, c):
    """‖x·(1 + T_y) − y·(1 + T_x)‖² / (1 + T_y); it loses digits, so it has more than float64."""
    x, y = (z.astype(np.longdouble) for z in (x, y))
    of_x, of_y = (1 + np.sqrt(1 + c * np.sum(z * z, axis=-1, keepdims=True)) for z in (x, y))
    return np.sum((x * of_y - y * of_x) ** 2 / of_y, axis=1)


def true_order(space, queries, gallery):
    """All items by distance, ties by index."""
    return np.stack([np.argsort(keys(space, x, gallery), kind="stable") for x in queries])


def match_ranks(queries, query_labels, gallery=None, gallery_labels=None, *, space):
    """Ranks of nearest matches, by the search."""
    points = inputs.labelled(queries, query_labels, gallery, gallery_labels)
    return first_ranks(*points, space, None)


def true_ranks(order, labels, item_labels, exclude_self):
    found = []
    for i, row in enumerate(order):
        row = row[row != i] if exclude_self else row
        hits = np.flatnonzero(item_labels[row] == labels[i])
        found.append(hits[0] if len(hits) else NO_MATCH)
    return np.array(found)
