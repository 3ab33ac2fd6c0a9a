"""A trained model in one line of Python: `hypjax.load`."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Array, Float

from hypjax import parallel
from hypjax.config.choices import CUSTOM
from hypjax.config.custom import custom_name
from hypjax.data.dataset import Dataset
from hypjax.data.photos import ImageLike, given_images
from hypjax.data.pipeline import readable_batches
from hypjax.errors import UserError, at_the_call, redacted, require_package
from hypjax.inference.embedding import embed_function
from hypjax.inference.hits import Hits, find_hits, read_matches
from hypjax.inference.image_embedder import Embedded, ImageEmbedder
from hypjax.inference.run import Run
from hypjax.inference.save import describe
from hypjax.models import ARCHITECTURES, register_encoder
from hypjax.retrieval.embeddings import Embeddings, is_gallery, open_gallery
from hypjax.retrieval.galleries import Gallery
from hypjax.retrieval.postprocessing import Postprocessing
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import RESULTS, is_published
from hypjax.runs.workdir import saved_fields
from hypjax.system import console, hub, integrations, machine
from hypjax.system.caches import keep_compiled_programs
from hypjax.types import View

AnyImages = ImageLike | Sequence[ImageLike]


class Model(ImageEmbedder):
    """A trained model, which embeds images and searches among them.

    It is the best on the validation images of its run, if there are any, or else the last.

    Attributes:
        source: Where it was loaded from.
        part: The embedding: "head", "encoder", or another of the `scored_spaces`, like "head@16".
        run: Its run, whose images are opened on first use.
        config: The configuration of its run.
        module: The encoder and the head, a Flax module, with the parameters `params`.
        projection: The projection of `eval.pca`, if any.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        part: str = "head",
        batch_size: int | None = None,
        *,
        encoder: nn.Module | None = None,
    ) -> None:
        self.source, self.part = str(source), part
        self.name = f"{redacted(self.source)} ({part})"
        keep_compiled_programs()
        with reading(source) as folder:
            if encoder is not None:
                _register(folder, encoder)
            self.run = Run.saved(folder)
            trained = self.run.restore_best(folder)
            if part not in trained.spaces:
                known = " or ".join(trained.spaces)
                raise UserError(f"{part!r} is no embedding of this run; it must be {known}")
            self.projection, self.fingerprint = trained.projection(folder, part)
            self.match = read_matches(folder).get(self.fingerprint)
            if not (is_published(folder) or (folder / RESULTS).exists()):
                console.say(f"{redacted(self.source)} is not finished; its model so far is used")
        self.config, self.module, self.params, _ = trained
        self.space = trained.spaces[part]
        self.batch_size = batch_size or self.config.run.eval_batch_size
        self._programs: dict[int, Callable[[np.ndarray], dict[str, Array]]] = {}

    @at_the_call
    def embed(self, images: AnyImages) -> Float[np.ndarray, "images d"]:
        """Embeds images as points of the model's space, float32; raises UserError if one is broken.

        `images`: a path, folder, pattern, Pillow image or array of pixels, or several of these.
        """
        embeddings = self.gallery(images)
        for name, reason in embeddings.unreadable.items():
            raise UserError(f"cannot read {name} ({reason})")
        return embeddings.vectors

    @at_the_call
    def gallery(self, images: AnyImages) -> Embeddings:
        """Embeds images, passed as to `embed`, to search among, with their paths and classes.

        Sub-folders are classes. Unreadable images are listed. `hypjax.search` reads saved ones.
        """
        return self.embed_images(given_images(images), few=True)

    @at_the_call
    def search(
        self,
        gallery: Gallery | AnyImages,
        query: AnyImages,
        k: int = 10,
        postprocessing: Postprocessing | None = None,
    ) -> list[Hits]:
        """Finds the k nearest images of a gallery, nearest first, to each query.

        `print(hits[0])` shows the first query's hits. The gallery is a result of `gallery`, a path
        or URL as for `hypjax.search`, or images; queries are images. A file does not find itself.
        """
        if isinstance(gallery, str | os.PathLike) and is_gallery(gallery):
            path, gallery = gallery, open_gallery(gallery)
            if not (self.takes_pixels or gallery.fingerprint == self.fingerprint):
                gallery = self.gallery(path)  # A file of features, which stand for images.
        elif not isinstance(gallery, Gallery):
            gallery = self.gallery(gallery)
        images = given_images(query)
        queries = self.embed_images(images, few=True)
        return find_hits(queries, images, gallery, k, postprocessing, self.match)

    @at_the_call
    def to_onnx(self, path: str | os.PathLike[str], precision: str = "float32") -> str:
        """Writes the model, from pixels to points, into an ONNX file 'NAME.onnx'.

        The precision is 'float32', or 'float16' or 'int8' for smaller files. Returns how far points
        and neighbours agree with hypjax's; raises UserError if they do not.
        """
        for package in ("timm", "onnxscript"):  # Encoders in ONNX files need none of them.
            require_package(package, "converting to onnx", "hypjax[onnx]")
        write = integrations.find("convert", "onnx")
        return write(self, pathlib.Path(path).expanduser(), precision)

    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields points of images in order; a batch is padded, or if `few` to a power of two."""
        encoder, vectors = self.module.encoder, dataset.vectors
        if encoder.takes_pixels and vectors is not None:
            raise UserError("this run embeds images, not features; pixels are uint8")
        if not encoder.takes_pixels and (vectors is None or vectors.shape[1] != encoder.dim):
            problem = f"this run embeds features of another model, not {dataset.name(0)}"
            raise UserError(f"{problem}; pass a file of such features, of dimension {encoder.dim}")
        total = len(dataset)
        size = min(self.batch_size, 1 << (total - 1).bit_length()) if few else self.batch_size
        devices = min(jax.local_device_count(), -(-total // size))
        embed, rows, view = self._on_devices(devices), size * devices, View.of(self.config.data)
        batches = readable_batches(dataset, view, rows, self.config.run.workers)
        with contextlib.closing(batches), machine.memory_explained("run.eval_batch_size"):
            for first, (pixels, broken) in zip(range(0, total, rows), batches, strict=True):
                points = np.asarray(embed(pixels)[self.part])[: total - first]
                for start in range(0, len(points), size):
                    part = points[start : start + size]
                    if self.projection is not None:
                        part = self.projection.apply(part)
                    yield part, {i: broken[start + i] for i in range(size) if start + i in broken}

    @property
    def takes_pixels(self) -> bool:
        """Whether it embeds images, not features of another model."""
        return self.module.encoder.takes_pixels

    def _on_devices(self, count: int) -> Callable[[np.ndarray], dict[str, Array]]:
        """The embedding of one batch on each of `count` devices."""
        # Each device has a full batch: a program of fewer rows would round differently, and a
        # gallery must not depend on the number of devices, or on where it was resumed.
        if count not in self._programs:
            mesh, config = parallel.create_mesh(devices=jax.local_devices()[:count]), self.config
            params = parallel.place(self.params, parallel.replicated(mesh))
            scaling, spaces = (config.data.mean, config.data.std), {self.part: self.space}
            embed = embed_function(self.module, scaling, spaces, config.eval.scales)
            embed = parallel.map_local_images(embed, mesh)
            program = jax.jit(embed, compiler_options=parallel.compiler_options(mesh))
            self._programs[count] = lambda images: program(params, parallel.shard(mesh, images))
        return self._programs[count]

    def __repr__(self) -> str:
        return f"{self.source}\n{describe(self.config)}\n{self.part} in {self.space}"


def _located(source: str | os.PathLike[str]) -> str | pathlib.Path:
    """The URL or path of a source; a repository on the hub may be named without hf://."""
    if isinstance(source, os.PathLike):
        return pathlib.Path(source)
    if not isinstance(source, str):
        raise UserError(f"a run is named by its folder or address, not by {source!r:.40}")
    path = pathlib.Path(source).expanduser()
    named = "://" not in source and hub.is_name(hub.split(source)[0])
    if not named or path.exists() or path.parent.exists():
        return source
    console.say(f"there is no folder {source} here; looking for it on the Hugging Face hub")
    return f"{hub.SCHEME}{source}"


@at_the_call
def load(
    source: str | os.PathLike[str],
    part: str = "head",
    batch_size: int | None = None,
    *,
    encoder: nn.Module | None = None,
) -> Model:
    """Loads a trained model.

    Args:
        source: Folder of a run, its URL, a folder that `push` wrote, or a repository on the Hugging
            Face hub, 'hf://OWNER/NAME', or at a tag, a branch or a commit, 'hf://OWNER/NAME@v1'.
            Without hf://, there must be no folder OWNER here.
        part: The embedding: "head", which the loss trained, "encoder", or a prefix like "head@16".
        batch_size: Largest number of images that are embedded at once, on which roundings may
            depend. Default: the batch size of the run's evaluation.
        encoder: The module that was trained, if it is not one of hypjax's.
    """
    return Model(_located(source), part, batch_size, encoder=encoder)


def _register(folder: pathlib.Path, encoder: nn.Module) -> None:
    """Makes a module the encoder that the run in a folder names."""
    name = saved_fields(folder).get("model.architecture")
    other = str(name).startswith(CUSTOM) and custom_name(encoder) != name
    if other or name in ("vit", *ARCHITECTURES):
        actual = f"the encoder of this model is {name.removeprefix(CUSTOM)}"
        raise UserError(f"{actual}; pass its module as encoder=, and none if it is hypjax's")
    if name is not None:  # Reading the model reports what else is wrong.
        register_encoder(name, encoder)
