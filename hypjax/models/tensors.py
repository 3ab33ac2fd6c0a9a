"""Parameters under timm's names: what each is called, and how its array is laid out there."""

import re
from collections.abc import Callable, Iterable

import numpy as np
from einops import rearrange

from hypjax.models.encoder import Encoder, Path

_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "variance": "running_var",
}


def renamed(name: str, table: Iterable[tuple[str, str | Callable[[re.Match], str]]]) -> str:
    """Replaces all patterns of a table in a name, one row after the other."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


def name_in_timm(encoder: Encoder, path: Path) -> str:
    """Name of a parameter in timm, or for a user's module its path: 'encoder/Dense_0/kernel'."""
    if encoder.names is None:
        return "/".join(("encoder", *path))
    *modules, leaf = (part for part in path if part != "statistics")
    return renamed(".".join((*modules, _LEAVES.get(leaf, leaf))), encoder.names)


def to_timm(encoder: Encoder, path: Path, array: np.ndarray) -> np.ndarray:
    """Lays out a parameter as in timm.

    Kernels are [inputs, outputs] and [h, w, inputs, outputs] here, [outputs, inputs] and [outputs,
    inputs, h, w] there. A convolution of patches is a dense layer on their values here.
    """
    if encoder.names is None or path[-1] != "kernel":
        return array
    if side := encoder.patches.get(path[-2]):
        return rearrange(array, "(p q i) o -> o i p q", p=side, q=side)
    return array.T if array.ndim == 2 else rearrange(array, "h w i o -> o i h w")


def from_timm(encoder: Encoder, path: Path, array: np.ndarray) -> np.ndarray:
    """Inverts `to_timm`."""
    if encoder.names is None or path[-1] != "kernel":
        return array
    if path[-2] in encoder.patches:
        return rearrange(array, "o i p q -> (p q i) o")
    return array.T if array.ndim == 2 else rearrange(array, "o i h w -> h w i o")
