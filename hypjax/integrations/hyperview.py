"""Galleries for HyperView, a viewer of hyperbolic embeddings."""

import hashlib
import json
import os
import pathlib
from typing import Any

import hyperview
import jax
import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError
from hypjax.geometry import Space, layout, lorentz
from hypjax.retrieval.embeddings import Embeddings

# HyperView's own default view shows no Poincaré layouts.
_OPEN = """import hyperview as hv
images, disk = hv.ui.Samples(id="images"), hv.ui.Scatter(id="disk", layout_key="{layout}")
hv.launch(hv.Dataset({name}), view=hv.ui.View(hv.ui.Horizontal(images, disk)))"""
_SPACE, _LAYOUT = "hypjax", "hypjax__poincare_precomputed__2d"


def export_hyperview(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes a dataset of HyperView's: images, classes, points, and their places in the disk.

    The stem of the path names the dataset; HyperView selects the folder. Returns the program that
    opens it.
    """
    name, files = path.stem, [os.path.abspath(file) for file in embeddings.ids.tolist()]
    # HyperView writes ids into URLs.
    ids = [hashlib.sha256(file.encode()).hexdigest()[:16] for file in files]
    geometry, vectors = _vectors(embeddings)
    dataset = hyperview.Dataset(name)
    if len(dataset):
        raise UserError(
            f"HyperView has a dataset {name} already, perhaps of an interrupted export; remove it, "
            "or give --output another name"
        )
    places = layout.lay_out(embeddings.vectors, embeddings.space)
    coordinates = np.stack([places.real, places.imag], axis=1)
    dataset.add_samples(
        hyperview.Sample(id=i, filepath=file, label=label or None)
        for i, file, label in zip(ids, files, embeddings.labels.tolist(), strict=True)
    )
    dataset.register_embeddings(_SPACE, "hypjax", ids, vectors, config=geometry)
    dataset.register_layout(
        _LAYOUT, _SPACE, ids, coordinates, method="precomputed", geometry="poincare"
    )
    program = _OPEN.format(layout=_LAYOUT, name=json.dumps(name))
    return f"HyperView; to open them there, run in Python:\n{program}"


def _vectors(embeddings: Embeddings) -> tuple[dict[str, Any], Float[np.ndarray, "n k"]]:
    """HyperView's description of the space, and the points in its coordinates."""
    space: Space = embeddings.space
    if space.squared:
        return {"provider": "hypjax", "geometry": "hypersphere"}, embeddings.vectors
    ball = space.ball()
    if ball is None or ball.c <= 0:
        raise UserError(f"HyperView has no space for {space}; it knows balls and the sphere")
    with jax.enable_x64(True):
        points = space.to_ball(np.asarray(embeddings.vectors, np.float64))
        hyperboloid = np.asarray(lorentz.with_time(lorentz.from_poincare(points, ball.c), ball.c))
    geometry = {"geometry": "hyperboloid", "params": {"curvature": float(ball.c)}}
    return {"provider": "hypjax", **geometry}, hyperboloid.astype(np.float32)
