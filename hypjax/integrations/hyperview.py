"""Galleries for HyperView, a viewer of hyperbolic embeddings."""

import hashlib
import json
import os
import pathlib
from typing import Any

import hyperview
import jax
import numpy as np

from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import layout, lorentz

# HyperView's own default view shows no Poincaré layouts.
_OPEN = """import hyperview as hv
images, disk = hv.ui.Samples(id="images"), hv.ui.Scatter(id="disk", layout_key="{layout}")
hv.launch(hv.Dataset({name}), view=hv.ui.View(hv.ui.Horizontal(images, disk)))"""
_SPACE, _LAYOUT = "hypjax", "hypjax__poincare_precomputed__2d"


def export_hyperview(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes images, classes, points and their layout in the disk as a dataset of HyperView.

    HyperView chooses the folder; only the stem of `path` is used, as the dataset's name. Returns
    the end of a message, with a program that opens the dataset.
    """
    name, space, vectors = path.stem, embeddings.space, embeddings.vectors
    config: dict[str, Any] = {"provider": "hypjax", "geometry": "hypersphere"}
    if not (space.squared and space.normalized):
        ball: Any = space.ball()
        if ball is None or ball.c <= 0:
            raise UserError(f"HyperView shows balls and the sphere, but not {space}")
        config |= {"geometry": "hyperboloid", "params": {"curvature": float(ball.c)}}
        with jax.enable_x64(True):
            points = lorentz.from_poincare(space.to_ball(np.asarray(vectors, np.float64)), ball.c)
            vectors = np.asarray(lorentz.with_time(points, ball.c)).astype(np.float32)
    dataset = hyperview.Dataset(name)
    if len(dataset):
        raise UserError(f"HyperView already has a dataset {name}; remove it, or rename --output")
    positions = layout.lay_out(embeddings.vectors, space)
    coordinates = np.stack([positions.real, positions.imag], axis=1)
    files = [os.path.abspath(file) for file in embeddings.ids.tolist()]
    # Hashes, since HyperView writes ids into URLs.
    ids = [hashlib.sha256(file.encode()).hexdigest()[:16] for file in files]
    dataset.add_samples(
        hyperview.Sample(id=key, filepath=file, label=label or None)
        for key, file, label in zip(ids, files, embeddings.labels.tolist(), strict=True)
    )
    dataset.register_embeddings(_SPACE, "hypjax", ids, vectors, config=config)
    dataset.register_layout(
        _LAYOUT, _SPACE, ids, coordinates, method="precomputed", geometry="poincare"
    )
    program = _OPEN.format(layout=_LAYOUT, name=json.dumps(name))
    return f"HyperView; to open them there, run in Python:\n{program}"
