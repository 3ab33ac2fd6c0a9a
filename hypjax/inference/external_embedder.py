"""Encoders of other libraries that embed images: timm's, Transformers', and ONNX files.

The library prepares the images. Its features are float32, by default compared by cosine.
"""

import concurrent.futures
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float
from PIL import Image

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError, reason
from hypjax.geometry import Space, Sphere
from hypjax.inference.embedding import fingerprint
from hypjax.inference.image_embedder import Embedded, ImageEmbedder
from hypjax.retrieval.embeddings import Embeddings
from hypjax.system import console, integrations
from hypjax.system.machine import usable_cores

BATCH_SIZE = 64


class ExternalEncoder(Protocol):
    """An encoder of another library."""

    output: str  # What its features are, in words.
    facts: Any  # Its output, preparation and weights, to be hashed.

    def prepare(self, image: Image.Image) -> Any:
        """Prepares an RGB image, in any thread."""

    def features(self, prepared: Sequence[Any]) -> np.ndarray:
        """Returns the features [images, dim] of prepared images."""


class ExternalEmbedder(ImageEmbedder):
    """Embeds images with an encoder of another library; galleries also hold its raw features."""

    def __init__(
        self,
        spec: str,
        encoder: ExternalEncoder,
        space: Space | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Checks on an image of noise that the encoder returns one vector, always the same."""
        self.space, self.batch_size = space or Sphere(), batch_size or BATCH_SIZE
        self.name, self._encoder = spec, encoder
        self.fingerprint = fingerprint(encoder.facts)
        noise = np.random.default_rng(0).integers(256, size=(256, 256, 3), dtype=np.uint8)
        prepared = encoder.prepare(Image.fromarray(noise))
        first, second = (encoder.features([prepared]) for _ in range(2))
        if first.ndim != 2 or len(first) != 1:
            shape = f"the shape {list(first.shape)} for one image, not [1, dim]"
            raise UserError(f"the {encoder.output} of {spec} has {shape}")
        # On a GPU roundings may differ; random masks or dropout change the first digit.
        if not np.allclose(first, second, rtol=0, atol=1e-2 * np.ptp(first), equal_nan=True):
            raise UserError(f"{spec} embeds one image in different ways, so it cannot be searched")
        self._dim = first.shape[1]
        console.say(f"{spec}: features are its {encoder.output}, of dimension {self._dim}")

    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields the features of a dataset's images in order, one batch at a time."""
        del few  # Libraries need no padding.
        if dataset.vectors is not None:
            raise UserError(f"{self.name} embeds images, but {dataset.name(0)} stands for features")
        prepare, size = functools.partial(self._prepare, dataset), self.batch_size
        batches = [range(len(dataset))[i : i + size] for i in range(0, len(dataset), size)]
        with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
            try:
                next_batch = pool.map(prepare, batches[0])
                for indices in [*batches[1:], []]:
                    # The next batch is prepared while this one is embedded.
                    batch, next_batch = next_batch, pool.map(prepare, indices)
                    prepared = list(batch)
                    broken = {i: why for i, why in enumerate(prepared) if isinstance(why, str)}
                    readable = [i for i in range(len(prepared)) if i not in broken]
                    rows = np.zeros((len(prepared), self._dim), np.float32)
                    if readable:
                        rows[readable] = self._encoder.features([prepared[i] for i in readable])
                    yield rows, broken
            finally:
                pool.shutdown(cancel_futures=True)

    def _prepare(self, dataset: Dataset, i: int) -> Any | str:
        """Prepares an image for the encoder, or returns why the image cannot be read."""
        try:
            return self._encoder.prepare(dataset.image(i, channels=3))
        except Exception as error:  # Libraries raise almost anything on images of odd shapes.
            return reason(error.__cause__ or error)

    def columns(self, rows: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n k"]]:
        """The points of features in the space, and the features."""
        if not len(rows):
            return {"vectors": rows}
        points = Embeddings.from_arrays(rows, space=self.space).vectors
        return {"vectors": points, "raw_features": rows}


def open_encoder(
    spec: str, space: Space | None = None, batch_size: int | None = None, **pixels: Any
) -> ExternalEmbedder:
    """Opens an encoder of another library, whose features are mapped into a space.

    Args:
        spec: 'timm:NAME'; 'hf:NAME', a model of Transformers on the hub or in a folder;
            'onnx:FILE', or 'onnx:FILE@OUTPUT' if the file has several outputs.
        space: The space of the points; by default the sphere.
        batch_size: Number of images that are embedded at once; by default 64.
        **pixels: `mean`, `std` and `resize`, by which pixels are prepared for an ONNX model.
    """
    library, _, name = spec.partition(":")
    if library not in integrations.names("encode") or not name:
        raise UserError(f"the encoder is {spec!r}; it must be timm:NAME, hf:NAME or onnx:FILE")
    encoder = integrations.find("encode", library)(name, **pixels)
    return ExternalEmbedder(spec, encoder, space, batch_size)
