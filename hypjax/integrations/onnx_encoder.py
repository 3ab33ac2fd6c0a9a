"""Encoders in ONNX files, run by ONNX Runtime."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from jaxtyping import Shaped
from onnx import load
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from PIL import Image

from hypjax.data.pixels import show
from hypjax.errors import UserError, explained
from hypjax.system.files import sha256
from hypjax.types import Frame

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")  # The first that works.
_Channels = Sequence[float] | None  # Mean or deviation of each channel; None for raw pixels.


class OnnxEncoder:
    """An encoder in an ONNX file, which takes images and returns one vector for each."""

    def __init__(
        self, name: str, mean: _Channels = None, std: _Channels = None, resize: int | None = None
    ) -> None:
        """Opens 'FILE', or 'FILE@OUTPUT' to select one of several outputs.

        Images are resized to the shorter side `resize` and cropped to the file's size; `mean` and
        `std` normalise pixels in [0, 1].
        """
        name, _, selected = name.partition("@")
        self._path = path = pathlib.Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"there is no file {path}")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        available = onnxruntime.get_available_providers()
        providers = [name for name in _PROVIDERS if name in available]
        with explained(f"cannot load {path}"):
            self._session = onnxruntime.InferenceSession(path, options, providers=providers)
        outputs = [output.name for output in self._session.get_outputs()]
        self._output = selected or outputs[0]
        if self._output not in outputs or (len(outputs) > 1 and not selected):
            raise UserError(f"name an output of {path} ({', '.join(outputs)}): onnx:FILE@OUTPUT")
        self.output = f"output {self._output}"
        self._input, *other_inputs = self._session.get_inputs()
        self._batch_size, *shape = self._input.shape
        channel_axes = [i for i, size in enumerate(shape) if size == 3 or "channel" in str(size)]
        if other_inputs or channel_axes not in ([0], [2]) or self._input.type not in _TYPES:
            kind = f"{self._input.type} of the shape {self._input.shape}"
            raise UserError(f"{path} takes {kind}; it must take images of three channels")
        self._channels_first = channel_axes == [0]
        self._dtype = _TYPES[self._input.type]
        size = shape[1:] if self._channels_first else shape[:2]
        self._check_scaling(mean, std)
        self._mean, self._std = mean, std
        self._side, self._resize = self._check_sizes(size, resize)
        settings = [self._resize, self._side, mean, std]
        self.facts = ["onnx", self.output, settings, _hashes(path)]

    def _check_scaling(self, mean: _Channels, std: _Channels) -> None:
        """Refuses --mean and --std where the file takes bytes, and their absence elsewhere."""
        path = self._path
        if self._dtype == np.uint8 and (mean is not None or std is not None):
            raise UserError(f"{path} takes pixels as they are; leave out --mean and --std")
        for name, values in (("mean", mean), ("std", std)) if self._dtype != np.uint8 else ():
            if values is None or len(values) != 3 or (name == "std" and not min(values) > 0):
                kind = "three numbers each, of pixels from 0 to 1"
                raise UserError(f"{path} needs --mean and --std, {kind}: --{name}=0.5,0.5,0.5")

    def _check_sizes(self, size: Sequence[Any], resize: int | None) -> tuple[int, int]:
        """The side of the square images, and that to which images are resized before the crop."""
        # A model of any size gets squares of --resize pixels.
        side, width = (length if isinstance(length, int) else resize for length in size)
        if side is None or side != width:
            advice = "they must be squares, and --resize their side if the file leaves it open"
            raise UserError(f"{self._path} takes images of {size} pixels; {advice}")
        if resize is not None and resize < side:
            raise UserError(f"--resize is {resize}, less than the {side} pixels of {self._path}")
        return side, resize or side

    def prepare(self, image: Image.Image) -> Shaped[np.ndarray, "..."]:
        """Resizes the shorter side of an image, crops a square, and normalises its pixels."""
        side = self._side
        width, height = (self._resize * length // min(image.size) for length in image.size)
        left, top = round((width - side) / 2), round((height - side) / 2)  # As torchvision crops.
        values = show(image, Frame((height, width), (top, left, side, side)), side)
        if self._mean is not None:
            mean, std = np.array(self._mean, np.float32), np.array(self._std, np.float32)
            values = (values.astype(np.float32) * np.float32(1 / 255) - mean) / std
        values = values.astype(self._dtype)
        return np.moveaxis(values, -1, 0) if self._channels_first else values

    def features(self, prepared: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the output for each image, float32; pads batches if the file fixes their size."""
        size = self._batch_size if isinstance(self._batch_size, int) else len(prepared)
        outputs = []
        with explained(f"{self._path} cannot embed its images"):
            for start in range(0, len(prepared), size):
                batch = np.stack(prepared[start : start + size])
                padded = np.pad(batch, [(0, size - len(batch)), (0, 0), (0, 0), (0, 0)])
                (rows,) = self._session.run([self._output], {self._input.name: padded})
                outputs.append(np.asarray(rows)[: len(batch)])
        return np.concatenate(outputs).astype(np.float32)


def _hashes(path: pathlib.Path) -> list[str]:
    """Hashes of an ONNX file and of the files with its external weights."""
    weights = load(path, load_external_data=False).graph.initializer
    external = {ExternalDataInfo(x).location for x in weights if uses_external_data(x)}
    return [sha256(path.parent / name) for name in [path.name, *sorted(external)]]
