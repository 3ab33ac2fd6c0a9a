"""A trained model in one line of Python: `hypjax.load`."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config.choices import OWN
from hypjax.config.own import own_name
from hypjax.data.dataset import Dataset
from hypjax.data.photos import Given, given_images
from hypjax.data.pipeline import readable_batches
from hypjax.errors import UserError, redacted, require_package
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.inference.hits import Hits, find_hits
from hypjax.inference.image_embedder import Embedded, ImageEmbedder
from hypjax.inference.matches import read_matches
from hypjax.inference.model_folder import describe
from hypjax.inference.postprocess import model_fingerprint, saved_projection
from hypjax.inference.weights import restore_best
from hypjax.models import ARCHITECTURES, register_encoder
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.galleries import Gallery
from hypjax.retrieval.gallery_files import is_gallery, open_gallery
from hypjax.retrieval.refinement import Refinement
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import RESULTS, is_published
from hypjax.runs.workdir import saved_architecture
from hypjax.system import console, hub, integrations, machine
from hypjax.system.caches import keep_compiled_programs
from hypjax.types import View

AnyImages = Given | Sequence[Given]


class Model(ImageEmbedder):
    """A trained model, which embeds images and searches among them.

    It is the best on the validation classes of its run, if there are any, or else the last. Each
    device of this process embeds whole batches.

    Attributes:
        source: Where it was loaded from.
        part: Which embedding is computed: "head", "encoder", or another name of `scored_spaces`,
            such as "head@16".
        config: The configuration of its run.
        model: The encoder and the head.
        params: Their parameters.
        projection: What follows it, if `eval.pca` is set.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        part: str = "head",
        batch_size: int | None = None,
        *,
        encoder: nn.Module | None = None,
    ) -> None:
        """Restores a run's model, see `load`."""
        self.source, self.part = str(source), part
        keep_compiled_programs()
        with reading(source) as folder:
            if encoder is not None:
                _register(folder, encoder)
            self._read(folder)
            if not is_published(folder) and not (folder / RESULTS).exists():
                console.say(f"{redacted(self.source)} is not finished; its model so far is used")
        self.batch_size = batch_size or self.config.run.eval_batch_size
        pixel_scaling = (self.config.data.mean, self.config.data.std)
        self._function = embed_function(
            self.model, pixel_scaling, lambda _: {part: self.space}, self.config.eval.scales
        )
        # By the numbers of devices and of images of each.
        self._compiled: dict[tuple[int, int], Callable[[PyTree], PyTree]] = {}

    def _read(self, folder: pathlib.Path) -> None:
        self.config: ConfigDict
        self.config, self.model, self.params, objective = restore_best(folder)
        spaces = scored_spaces(self.config, objective, self.params)
        if self.part not in spaces:
            raise UserError(f"part is {self.part!r}; it must be {' or '.join(spaces)}")
        self.space = spaces[self.part]
        whose = self.config, self.part, self.space
        self.fingerprint = model_fingerprint(*whose, self.params)
        self.projection = saved_projection(folder, *whose, self.fingerprint)
        if self.projection is not None:
            self.fingerprint = self.projection.fingerprint(self.fingerprint)
        self.match = read_matches(folder).get(self.fingerprint)

    def embed(self, images: AnyImages) -> Float[np.ndarray, "images d"]:
        """Embeds images.

        Args:
            images: A path, an image of Pillow's, an array of pixels, or a sequence of these; see
                `hypjax.data.photos.given_images`. A folder or a pattern stands for its images.

        Returns:
            Points of the model's space, float32, one row for each image. One that cannot be read is
            a `UserError`.
        """
        embeddings = self.gallery(images)
        for name, reason in embeddings.unreadable.items():
            raise UserError(f"cannot read {name} ({reason})")
        return embeddings.vectors

    def gallery(self, images: AnyImages) -> Embeddings:
        """Embeds images, given as for `embed`, to search among, with their paths and classes.

        Sub-folders of a folder are classes. `hypjax.search` reads the embeddings if they are saved.
        Images that cannot be read are listed as such.
        """
        return self.embed_few(given_images(images))

    def search(
        self,
        gallery: Gallery | AnyImages,
        query: AnyImages,
        k: int = 10,
        refinement: Refinement | None = None,
    ) -> list[Hits]:
        """Finds the nearest images of a gallery.

        Args:
            gallery: What `gallery` returned, what `hypjax.search` accepts as --gallery, or images.
            query: As for `embed`. A file is not found as its own neighbour.
            k: Number of neighbours.
            refinement: Query expansion or re-ranking.

        Returns:
            The hits of each query, nearest first. `print(hits[0])` shows those of the first.
        """
        if isinstance(gallery, str | os.PathLike) and is_gallery(gallery):
            path, gallery = gallery, open_gallery(gallery)
            if not (self.takes_pixels or gallery.fingerprint == self.fingerprint):
                gallery = self.gallery(path)  # A file of features, which stand for images.
        elif not isinstance(gallery, Gallery):
            gallery = self.gallery(gallery)
        images = given_images(query)
        return find_hits(self.embed_few(images), images, gallery, k, refinement, self.match)

    def to_onnx(self, path: str | os.PathLike[str], precision: str = "float32") -> str:
        """Writes the model, from pixels to points, into an ONNX file.

        The manual's page "Take it with you" has a program that searches with such a file.

        Args:
            path: The file, 'NAME.onnx'.
            precision: 'float32'; or 'float16' or 'int8' for smaller files, whose neighbours are
                compared with those in float32.

        Returns:
            How far the points and their neighbours agree with hypjax's, in words.

        Raises:
            UserError: They do not, or the encoder is none of timm's.
        """
        for package in ("timm", "onnxscript"):  # Encoders in ONNX files need none of them.
            require_package(package, "converting to onnx", "hypjax[onnx]")
        write = integrations.find("convert", "onnx")
        return write(self, pathlib.Path(path).expanduser(), precision)

    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields the points of a dataset's images in order, one batch at a time.

        Each device of this process embeds whole batches. Fewer images than a batch has are padded
        to a whole one or, if `few`, to a power of two: that takes less time, and rounds
        differently.
        """
        self._check_kind(dataset)
        size, total = self.batch_size, len(dataset)
        size = min(size, 1 << (total - 1).bit_length()) if few else size
        devices = jax.local_devices()[: -(-total // size)]
        rows = size * len(devices)
        with machine.memory_explained("run.eval_batch_size"):
            embed = self._embed_on(devices, size)
        view = View.of(self.config.data)
        batches = readable_batches(dataset, view, rows, self.config.run.workers)
        with contextlib.closing(batches), machine.memory_explained("run.eval_batch_size"):
            for first, batch in zip(range(0, total, rows), batches, strict=True):
                points = np.asarray(embed(batch.images)[self.part])[: total - first]
                broken = {int(index): str(reason) for index, reason in batch.broken.items()}
                for start in range(0, len(points), size):
                    part = points[start : start + size]
                    if self.projection is not None:
                        part = self.projection.apply(part)
                    yield (
                        part,
                        {i - start: why for i, why in broken.items() if 0 <= i - start < size},
                    )

    @property
    def takes_pixels(self) -> bool:
        """Whether it embeds images, and not features of another model."""
        return self.model.encoder.takes_pixels

    def _check_kind(self, dataset: Dataset) -> None:
        """Raises a `UserError` for features instead of images, or the other way round."""
        encoder, given = self.model.encoder, dataset.vectors
        if encoder.takes_pixels and given is not None:
            raise UserError("this run embeds images, but was given features; pixels are uint8")
        if not encoder.takes_pixels and (given is None or given.shape[1] != encoder.dim):
            raise UserError(
                "this run was trained on features of another model, so it cannot embed "
                f"{dataset.name(0)}; give a file of such features, of dimension {encoder.dim}"
            )

    def _embed_on(self, devices: Sequence[jax.Device], size: int) -> Callable[[PyTree], PyTree]:
        """The embedding of a batch on each device, whose roundings are those of one device."""
        # Each device has a whole batch: a program of fewer rows would round differently, and a
        # gallery must not depend on the number of devices, or on where it was resumed.
        if (len(devices), size) not in self._compiled:
            mesh = parallel.create_mesh(devices=devices)
            params = parallel.place(self.params, parallel.replicated(mesh))
            encoder = self.model.encoder
            shape = encoder.example(View.of(self.config.data)).shape[1:]
            images = jax.ShapeDtypeStruct(
                (size * len(devices), *shape),
                np.uint8 if encoder.takes_pixels else np.float32,
                sharding=parallel.sharded(mesh),
            )
            function = jax.jit(parallel.map_local_images(self._function, mesh))
            program = function.lower(params, images).compile()
            machine.require_memory(program, mesh, "the batch size (run.eval_batch_size)")
            self._compiled[len(devices), size] = lambda images: program(
                params, parallel.shard(mesh, images)
            )
        return self._compiled[len(devices), size]

    def __repr__(self) -> str:
        return f"{self.source}\n{describe(self.config)}\n{self.part} in {self.space}"


def _located(source: str | os.PathLike[str]) -> str | pathlib.Path:
    """The URL or the path of a source; a repository of the hub may be named without hf://."""
    if not isinstance(source, str):
        return pathlib.Path(source)
    path = pathlib.Path(source).expanduser()
    if "://" in source or path.exists() or path.parent.exists():
        return source
    if not hub.is_name(hub.split(source)[0]):
        return source
    console.say(f"there is no folder {source} here; looking for it on the Hugging Face hub")
    return f"{hub.SCHEME}{source}"


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
        part: Which embedding to compute: "head", which the loss trained, "encoder", or a prefix of
            the head's that the run scores, such as "head@16".
        batch_size: Largest number of images that are embedded at once, on which roundings may
            depend. By default it is that of the run's evaluation. Fewer images are padded to a
            power of two.
        encoder: The module that was trained, if it is not one of hypjax's.
    """
    return Model(_located(source), part, batch_size, encoder=encoder)


def _register(folder: pathlib.Path, encoder: nn.Module) -> None:
    """Makes a module the encoder that the run in a folder names."""
    name = saved_architecture(folder)
    if name in ("vit", *ARCHITECTURES) or (str(name).startswith(OWN) and own_name(encoder) != name):
        raise UserError(
            f"the encoder of this model is {name.removeprefix(OWN)}; pass the module that was "
            "trained as encoder=, and none if it is hypjax's own"
        )
    if name is not None:  # Otherwise what is wrong is reported when the model is read.
        register_encoder(name, encoder)
