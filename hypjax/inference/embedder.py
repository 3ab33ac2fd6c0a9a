"""A trained run that embeds a user's images."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import PyTree

from hypjax import parallel
from hypjax.config.choices import OWN
from hypjax.config.own import own_name
from hypjax.data.dataset import Dataset
from hypjax.data.pipeline import readable_batches
from hypjax.errors import UserError, redacted
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.inference.image_embedder import Embedded, ImageEmbedder
from hypjax.inference.matches import read_matches
from hypjax.inference.postprocess import model_fingerprint, saved_projection
from hypjax.inference.weights import restore_best
from hypjax.models import ARCHITECTURES, Embedder, register_encoder
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import RESULTS, is_published
from hypjax.runs.workdir import saved_architecture
from hypjax.system import console, machine
from hypjax.types import View

Part = str  # "head", "encoder", or another name of `scored_spaces`, such as "head@16".


class TrainedEmbedder(ImageEmbedder):
    """A trained run's model: the best on its validation classes if there are any, else the last.

    Each device of this process embeds whole batches.

    Attributes:
        config: The configuration of the run.
        model: The encoder and the head.
        params: Their parameters.
        part: Which embedding is computed, see `Part`.
        projection: What follows it, if `eval.pca` is set.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        part: Part = "head",
        batch_size: int | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        """Restores a run's model; a module stands for an encoder that is not one of hypjax's."""
        with reading(workdir) as folder:
            if encoder is not None:
                _register(folder, encoder)
            model = self._read(folder, part)
            if not is_published(folder) and not (folder / RESULTS).exists():
                name = redacted(str(workdir))
                console.say(f"{name} is not finished; its model so far is used")
        config = self.config
        self.part, self.batch_size = part, batch_size or config.run.eval_batch_size
        pixel_scaling = (config.data.mean, config.data.std)
        self.model = model
        self._function = embed_function(
            model, pixel_scaling, lambda params: {part: self.space}, config.eval.scales
        )
        # By the numbers of devices and of images of each.
        self._compiled: dict[tuple[int, int], Callable[[PyTree], PyTree]] = {}

    def _read(self, folder: pathlib.Path, part: Part) -> Embedder:
        config, model, self.params = restore_best(folder)
        spaces = scored_spaces(config, self.params)
        if part not in spaces:
            raise UserError(f"part is {part!r}; it must be {' or '.join(spaces)}")
        self.config, self.space = config, spaces[part]
        self.fingerprint = model_fingerprint(config, part, self.space, self.params)
        self.projection = saved_projection(folder, config, part, self.space, self.fingerprint)
        if self.projection is not None:
            self.fingerprint = self.projection.fingerprint(self.fingerprint)
        self.match = read_matches(folder).get(self.fingerprint)
        return model

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
        batches = readable_batches(
            dataset, View.of(self.config.data), rows, self.config.run.workers
        )
        with contextlib.closing(batches), machine.memory_explained("run.eval_batch_size"):
            for first, batch in zip(range(0, total, rows), batches, strict=True):
                points = np.asarray(embed(batch.images)[self.part])[: total - first]
                broken = {int(index): str(reason) for index, reason in batch.broken.items()}
                for start in range(0, len(points), size):
                    part = points[start : start + size]
                    if self.projection is not None:
                        part = self.projection.apply(part)
                    own = {i - start: why for i, why in broken.items() if 0 <= i - start < size}
                    for i in np.flatnonzero(~np.isfinite(part).all(axis=1)).tolist():
                        if i not in own:
                            raise UserError(
                                f"the embedding of {dataset.names[first + start + i]} is not "
                                "finite: the weights are damaged, or training diverged; train "
                                "again, with a lower optim.learning_rate if it diverged"
                            )
                    yield part, own

    @property
    def takes_pixels(self) -> bool:
        """Whether it embeds images, and not features of another model."""
        return self.model.encoder.takes_pixels

    def warm(self) -> None:
        """Compiles the programs for one image, and for more up to a whole batch."""
        with machine.memory_explained("run.eval_batch_size"):
            for bits in range(self.batch_size.bit_length() + 1):
                self._embed_on(jax.local_devices()[:1], min(1 << bits, self.batch_size))

    def _check_kind(self, dataset: Dataset) -> None:
        """Raises a `UserError` for features instead of images, or the other way round."""
        encoder, name = self.model.encoder, dataset.name(0)
        if encoder.takes_pixels and dataset.vectors is not None:
            raise UserError(
                "this run embeds images, but was given features, which are floating-point numbers; "
                "pixels are uint8"
            )
        if encoder.takes_pixels:
            return
        if dataset.vectors is None:
            raise UserError(
                f"this run was trained on features of another model, so it cannot embed {name}; "
                "give a .npz, .npy or .parquet file of such features"
            )
        if (dim := dataset.vectors.shape[1]) != encoder.dim:
            raise UserError(
                f"this run was trained on features of dimension {encoder.dim}, but these have {dim}"
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


def _register(folder: pathlib.Path, encoder: nn.Module) -> None:
    """Makes a module the encoder that the run in a folder names."""
    name = saved_architecture(folder)
    if name in ("vit", *ARCHITECTURES):
        raise UserError(f"the encoder of this model is {name}, hypjax's own; leave out encoder=")
    if str(name).startswith(OWN) and (given := own_name(encoder)) != name:
        raise UserError(
            f"the encoder of this model is {name.removeprefix(OWN)}, but encoder= is "
            f"{given.removeprefix(OWN)}; pass the module that was trained"
        )
    if name is not None:  # Otherwise what is wrong is reported when the model is read.
        register_encoder(name, encoder)
