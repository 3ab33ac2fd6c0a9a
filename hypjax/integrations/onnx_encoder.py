"""Encoders in ONNX files, run by ONNX Runtime."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped
from PIL import Image

from hypjax.errors import UserError, require_package

_CONFIG = "preprocessor_config.json"
# Processors of Transformers that resize, crop the centre, rescale and normalise, in this order.
_PROCESSORS = ("BLIP", "Beit", "Bit", "Blip", "CLIP", "ChineseCLIP", "DPT", "DeiT", "Flava")
_PROCESSORS += ("MobileNetV1", "MobileNetV2", "Siglip", "ViT")
_KIND = re.compile(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$")
_OTHER_STEPS = ("crop_pct", "do_flip_channel_order", "do_pad", "include_top", "rescale_offset")
_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_BYTES = "tensor(uint8)"
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")  # The first that works.
# Where the file names another one that holds weights: a key and a value of Protocol Buffers.
_EXTERNAL = re.compile(rb"\x0a\x08location\x12([\x80-\xff]*[\x00-\x7f])", re.DOTALL)


class PixelOptions(NamedTuple):
    """How pixels reach an ONNX model, where no file beside it says so.

    Attributes:
        mean: Mean of each channel, for pixels scaled to [0, 1].
        std: Standard deviation of each channel.
        resize: Shorter side before the square is cropped from the centre; None for its own side.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    resize: int | None = None


NO_OPTIONS = PixelOptions()


@dataclasses.dataclass(frozen=True)
class PixelSteps:
    """How an image becomes an array of pixels.

    Attributes:
        resize: Shorter side, or height and width, to which the image is resized; None for neither.
        crop: Height and width of the box that is then cropped from the centre, if one is.
        resample: Number of Pillow's filter.
        scale: Factor of pixels, before the mean is subtracted.
        mean: Of each channel.
        std: Of each channel.
    """

    resize: int | tuple[int, int] | None
    crop: tuple[int, int] | None
    resample: int = Image.Resampling.BICUBIC.value
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def square(self, image: Image.Image) -> Image.Image:
        """Resizes and crops an image; what a box has beyond it is black."""
        if self.resize is not None:
            size = self.resize
            if isinstance(size, int):
                shorter = min(image.size)
                size = (size * image.height // shorter, size * image.width // shorter)
            image = image.resize(size[::-1], self.resample)
        if self.crop is None:
            return image
        height, width = self.crop
        top, left = (image.height - height) // 2, (image.width - width) // 2
        return image.crop((left, top, left + width, top + height))

    def scaled(self, image: Image.Image) -> Float[np.ndarray, "height width 3"]:
        """Scales the pixels of an image."""
        values = np.asarray(image, np.float32) * np.float32(self.scale)
        return (values - np.float32(self.mean)) / np.float32(self.std)


class OnnxEncoder:
    """An ONNX file with one input, images, and an output of one vector for each."""

    def __init__(self, name: str, options: PixelOptions) -> None:
        """Opens 'FILE', or 'FILE@OUTPUT' for one of several outputs."""
        require_package("onnxruntime", "--encoder=onnx:FILE", "hypjax[onnx]")
        import onnxruntime

        name, _, output = name.partition("@")
        self._path = path = pathlib.Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"there is no file {path}")
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        available = onnxruntime.get_available_providers()
        providers = [name for name in _PROVIDERS if name in available]
        try:
            self._session = onnxruntime.InferenceSession(
                os.fspath(path), settings, providers=providers
            )
        except Exception as error:  # ONNX Runtime has many types of its own.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UserError(f"cannot load {path} ({reason})") from error
        self._output = self._choose_output(output)
        self.output = f"output {self._output}"
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or len(inputs[0].shape) != 4:
            shapes = ", ".join(f"{own.name} {own.shape}" for own in inputs)
            raise UserError(f"{path} has the inputs {shapes}; it must have one, a batch of images")
        (self._input,) = inputs
        self._batch, *image = self._input.shape
        channels = [i for i, size in enumerate(image) if size == 3 or "channel" in str(size)]
        if channels not in ([0], [2]):
            raise UserError(
                f"the images of {path} have the shape {image}; it must be [3, height, width] or "
                "[height, width, 3]"
            )
        self._channels_first = channels == [0]
        self._steps = self._read_steps(image[1:] if self._channels_first else image[:2], options)
        self.facts = ["onnx", self.output, dataclasses.astuple(self._steps), _hash_file(path)]

    def _choose_output(self, chosen: str) -> str:
        names = [own.name for own in self._session.get_outputs()]
        if chosen:
            if chosen not in names:
                raise UserError(f"{self._path} has no output {chosen}, but {', '.join(names)}")
            return chosen
        if len(names) > 1:
            raise UserError(
                f"{self._path} has the outputs {', '.join(names)}; name one, as in "
                f"onnx:{self._path}@{names[0]}"
            )
        return names[0]

    def _read_steps(self, size: Sequence[int | str | None], options: PixelOptions) -> PixelSteps:
        """The steps by the options, or by the file beside the model."""
        path, config = self._path, self._path.with_name(_CONFIG)
        size = tuple(length if isinstance(length, int) else None for length in size)
        scaled = options.mean is not None or options.std is not None
        if self._input.type == _BYTES and scaled:
            raise UserError(f"{path} takes pixels as they are; leave out --mean and --std")
        if self._input.type not in (_BYTES, *_FLOATS):
            raise UserError(f"{path} takes {self._input.type}; it must be float or uint8")
        known = scaled or self._input.type == _BYTES
        if config.is_file() and not known and options.resize is None:
            return _checked(_parse(config), size, config)
        if not known:
            raise UserError(
                f"how {path} takes pixels is not known; give --mean and --std, of pixels from 0 to "
                f"1, or put a {_CONFIG} beside it"
            )
        if None in size or size[0] != size[1]:
            raise UserError(
                f"{path} takes images of {_shown(size)} pixels, for which --resize does not say "
                f"how they are cropped; put a {_CONFIG} beside it"
            )
        resize = options.resize or size[0]
        if resize < size[0]:
            raise UserError(f"--resize is {resize}, less than the {size[0]} pixels of {path}")
        if not scaled:
            return PixelSteps(resize, size)
        mean, std = (_three(name, getattr(options, name)) for name in ("mean", "std"))
        return PixelSteps(resize, size, mean=mean, std=std)

    def prepare(self, image: Image.Image) -> Shaped[np.ndarray, "..."]:
        """Resizes, crops and scales an image."""
        image = self._steps.square(image)
        if self._input.type == _BYTES:
            values = np.asarray(image)
        else:
            values = self._steps.scaled(image).astype(_FLOATS[self._input.type])
        return np.moveaxis(values, -1, 0) if self._channels_first else values

    def features(self, prepared: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the output for each image, float32; a batch of fixed size is padded."""
        images = np.stack([*prepared])
        size = self._batch if isinstance(self._batch, int) else len(images)
        found = []
        for first in range(0, len(images), size):
            batch = images[first : first + size]
            padded = np.pad(batch, [(0, size - len(batch)), *[(0, 0)] * 3])
            (rows,) = self._session.run([self._output], {self._input.name: padded})
            found.append(np.asarray(rows)[: len(batch)])
        return np.concatenate(found).astype(np.float32)


def _three(name: str, values: Sequence[float] | None) -> tuple[float, ...]:
    if values is None or len(values) != 3 or (name == "std" and not min(values) > 0):
        raise UserError(f"--{name} must be three numbers, such as --{name}=0.5,0.5,0.5")
    return tuple(map(float, values))


def _parse(path: pathlib.Path) -> PixelSteps:
    """Reads the steps of a Transformers processor that resizes, crops and scales."""
    try:
        config: dict[str, Any] = json.loads(path.read_text("utf-8"))
        kind = str(config.get("image_processor_type", config.get("feature_extractor_type", "")))
        if kind and _KIND.sub("", kind) not in _PROCESSORS:
            raise ValueError(f"{kind} may take steps that are not known here")
        if others := sorted(step for step in _OTHER_STEPS if config.get(step)):
            raise ValueError(f"it has {others[0]}")
        resize = crop = None
        if config.get("do_resize", True):
            size = config["size"]
            if isinstance(size, int):
                # Older processors that crop mean the shorter side.
                size = {"shortest_edge": size} if "crop_size" in config else _sides(size)
            resize = int(size["shortest_edge"]) if "shortest_edge" in size else _pair(size)
        if config.get("do_center_crop", "crop_size" in config):
            crop = _pair(_sides(config["crop_size"]))
        scale = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
        steps = PixelSteps(
            resize, crop, int(config.get("resample", PixelSteps.resample)), float(scale)
        )
        if not config.get("do_normalize", True):
            return steps
        mean, std = (tuple(map(float, config[f"image_{name}"])) for name in ("mean", "std"))
        return dataclasses.replace(steps, mean=mean, std=std)
    except (KeyError, OSError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"cannot use {path} ({reason}); give --mean and --std instead") from error


def _sides(size: Any) -> dict[str, int]:
    return {"height": size, "width": size} if isinstance(size, int) else size


def _pair(size: dict[str, int]) -> tuple[int, int]:
    return int(size["height"]), int(size["width"])


def _checked(steps: PixelSteps, size: tuple[int | None, ...], config: pathlib.Path) -> PixelSteps:
    """Refuses steps whose images have another size than the model takes."""
    made = steps.crop or steps.resize
    if not isinstance(made, tuple):
        raise UserError(f"{config} keeps the shapes of images, so they cannot share a batch")
    if any(own not in (None, length) for own, length in zip(size, made, strict=True)):
        raise UserError(
            f"{config} makes images of {_shown(made)} pixels, but the model takes {_shown(size)}"
        )
    return steps


def _shown(size: tuple[int | None, ...]) -> str:
    return "×".join("any" if length is None else str(length) for length in size)


def _hash_file(path: pathlib.Path) -> str:
    """Hash of a model's file, and of those beside it that hold its weights."""
    content = path.read_bytes()
    names = set()
    for found in _EXTERNAL.finditer(content):
        length = sum((byte & 127) << (7 * i) for i, byte in enumerate(found[1]))  # A varint.
        names.add(content[found.end() : found.end() + length])
    digest = hashlib.sha256(content)
    for name in sorted(names):
        beside = path.parent / os.fsdecode(name)
        if beside.is_file():
            with beside.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
