"""The feature cache: a frozen encoder's embeddings of images on disk, which runs share.

Each combination of images, view, encoder and parameters has a folder of its own. One process at a
time fills it, and others wait; what one has embedded before it was killed is kept.
"""

import hashlib
import pathlib
from collections.abc import Callable, Iterable, Sequence

import jax
import jaxlib
import numpy as np
from jaxtyping import Float, PyTree

import hypjax
from hypjax.system import console
from hypjax.system.array_cache import ArrayCache
from hypjax.system.locks import claimed

_FORMAT = "hypjax features 2"  # Increase it if an encoder or a view computes something else.
Features = list[Float[np.ndarray, "images dim"]]  # At each scale, float32.


def key(facts: Sequence[object], params: PyTree) -> str:
    """Hash of facts, whose `repr` says all about them, of parameters, and of versions."""
    versions = hypjax.__version__, jax.__version__, jaxlib.__version__
    digest = hashlib.sha256(repr((_FORMAT, *versions, *facts)).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:32]


def shared(
    folder: pathlib.Path, count: int, scales: int, compute: Callable[[int], Iterable[Features]]
) -> Features:
    """Returns the features of so many images from a folder, and computes those it lacks.

    `compute` gets the number of images whose features are there, and yields the others' in batches.
    Damaged features are computed again. Where nothing can be written, a warning says so, and the
    features are returned all the same.
    """
    try:
        table = None
        while table is None:
            cache = ArrayCache(folder, count)
            if not cache.is_complete():
                with cache.filling(claimed(folder, "embedding images")) as done:
                    for batch in compute(done):
                        cache.append(np.stack(batch, axis=1))
            table = cache.table(np.float32)
        return list(table[0].reshape(count, scales, -1).swapaxes(0, 1).copy())
    except OSError as error:
        console.warn(f"features cannot be kept in {folder} ({error.strerror})")
        return [np.concatenate(batches) for batches in zip(*compute(0), strict=True)]
