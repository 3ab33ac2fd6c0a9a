"""The feature cache: a frozen encoder's embeddings of images on disk, which runs share.

Each combination of images, view, encoder and parameters has a folder of its own, named by a hash of
all that the embeddings depend on, so nothing in it is ever out of date. One process at a time fills
it, and others wait. It may be deleted at any time.
"""

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Sequence

import jax
import jaxlib
import numpy as np
from jaxtyping import Float, PyTree

import hypjax
from hypjax.system import console
from hypjax.system.files import flush, read_npz, replacing
from hypjax.system.locks import claimed

_FORMAT = "hypjax features 1"  # Increase it if an encoder or a view computes something else.
_FILE = "features.npz"
Features = list[Float[np.ndarray, "images dim"]]  # At each scale, float32.


def key(facts: Sequence[object], params: PyTree) -> str:
    """Hash of facts, whose `repr` says all about them, of parameters, and of versions."""
    versions = hypjax.__version__, jax.__version__, jaxlib.__version__
    digest = hashlib.sha256(repr((_FORMAT, *versions, *facts)).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:32]


def shared(folder: pathlib.Path, compute: Callable[[], Features]) -> Features:
    """Returns the features that a folder holds; otherwise computes them, and keeps them there.

    A damaged file is replaced. Where nothing can be written, a warning says so, and the features
    are returned all the same.
    """
    if (found := _read(folder / _FILE)) is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(claimed(folder, "embedding images"))
        except OSError as error:
            console.warn(f"features cannot be kept in {folder} ({error.strerror})")
            return compute()
        if (found := _read(folder / _FILE)) is not None:  # Another process has computed them.
            return found
        features = compute()
        with (
            console.tolerating(str(folder / _FILE)),
            replacing(folder / _FILE) as unfinished,
            unfinished.open("wb") as file,
        ):
            np.savez(file, *features)
            flush(file)
        return features


def _read(path: pathlib.Path) -> Features | None:
    """Reads a file; None if there is none, or it is damaged, which a warning then reports."""
    try:
        arrays = read_npz(path)  # In the order in which they were written.
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # It may be read later.
        console.warn(f"{path} cannot be read ({error.strerror}); the images are embedded again")
        return None
    except ValueError as error:
        console.warn(f"{path} is damaged ({error}); the images are embedded again")
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return list(arrays.values())
