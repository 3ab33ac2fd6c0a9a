"""A trained run that embeds a user's images."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import PyTree

from hypjax import parallel
from hypjax.data.dataset import Dataset
from hypjax.data.pipeline import readable_batches
from hypjax.errors import UserError, redacted
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.inference.image_embedder import ImageEmbedder
from hypjax.inference.matches import read_matches
from hypjax.inference.partial_gallery import Embedded
from hypjax.inference.postprocess import model_fingerprint, saved_projection
from hypjax.inference.weights import restore_best
from hypjax.models import Embedder
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import RESULTS, is_published, read_whole
from hypjax.system import console, machine
from hypjax.types import View, Workers

Part = Literal["head", "encoder"]


class TrainedEmbedder(ImageEmbedder):
    """A trained run's model: the best on its validation classes if there are any, else the last.

    Each device of this process embeds whole batches.
    """

    def __init__(
        self, workdir: str | pathlib.Path, part: Part = "head", batch_size: int | None = None
    ) -> None:
        with reading(workdir) as folder:
            model = read_whole(folder, lambda: self._read(folder, part))
            if not is_published(folder) and not (folder / RESULTS).exists():
                name = redacted(str(workdir))
                console.say(f"{name} is not finished; its model so far is used")
        config = self.config
        self._part, self.batch_size = part, batch_size or config.run.eval_batch_size
        pixel_scaling = (config.data.mean, config.data.std)
        spaces = {part: self.space}
        self._function = embed_function(model, pixel_scaling, spaces, config.eval.scales)
        self._compiled: dict[int, Callable[[PyTree], PyTree]] = {}  # By the number of devices.

    def _read(self, folder: pathlib.Path, part: Part) -> Embedder:
        config, model, self._params = restore_best(folder)
        spaces = scored_spaces(config)
        if part not in spaces:
            raise UserError(f"part is {part!r}; it must be {' or '.join(spaces)}")
        self.config, self.space = config, spaces[part]
        self.fingerprint = model_fingerprint(config, part, self.space, self._params)
        self._projection = saved_projection(folder, config, part, self.space, self.fingerprint)
        if self._projection is not None:
            self.fingerprint = self._projection.fingerprint(self.fingerprint)
        self.match = read_matches(folder).get(self.fingerprint)
        return model

    def batches(self, dataset: Dataset) -> Iterator[Embedded]:
        """Yields the points of a dataset's images in order, one batch at a time."""
        size, total = self.batch_size, len(dataset)
        devices = jax.local_devices()[: -(-total // size)]
        rows = size * len(devices)
        with machine.memory_explained("run.eval_batch_size"):
            embed = self._embed_on(devices)
        batches = readable_batches(
            dataset, View.of(self.config.data), rows, Workers.of(self.config.run)
        )
        with contextlib.closing(batches), machine.memory_explained("run.eval_batch_size"):
            for first, batch in zip(range(0, total, rows), batches, strict=True):
                points = np.asarray(embed(batch.images)[self._part])[: total - first]
                broken = {int(index): str(reason) for index, reason in batch.broken.items()}
                for start in range(0, len(points), size):
                    part = points[start : start + size]
                    if self._projection is not None:
                        part = self._projection.apply(part)
                    own = {i - start: why for i, why in broken.items() if 0 <= i - start < size}
                    for i in np.flatnonzero(~np.isfinite(part).all(axis=1)).tolist():
                        if i not in own:
                            raise UserError(
                                f"the embedding of {dataset.names[first + start + i]} is not "
                                "finite: the weights are damaged, or training diverged; train "
                                "again, with a lower optim.learning_rate if it diverged"
                            )
                    yield part, own

    def _embed_on(self, devices: Sequence[jax.Device]) -> Callable[[PyTree], PyTree]:
        """The embedding of a batch on each device, whose roundings are those of one device."""
        # Each device has a whole batch: a program of fewer rows would round differently, and a
        # gallery must not depend on the number of devices, or on where it was resumed.
        if len(devices) not in self._compiled:
            mesh = parallel.create_mesh(devices=devices)
            params = parallel.place(self._params, parallel.replicated(mesh))
            view = View.of(self.config.data)
            images = jax.ShapeDtypeStruct(
                (self.batch_size * len(devices), view.side, view.side, view.channels),
                np.uint8,
                sharding=parallel.sharded(mesh),
            )
            function = jax.jit(parallel.map_local_images(self._function, mesh))
            program = function.lower(params, images).compile()
            machine.require_memory(program, mesh, "the batch size (run.eval_batch_size)")
            self._compiled[len(devices)] = lambda images: program(
                params, parallel.shard(mesh, images)
            )
        return self._compiled[len(devices)]
