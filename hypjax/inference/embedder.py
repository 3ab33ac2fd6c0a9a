"""A trained run that embeds a user's images."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np
import tqdm
from jaxtyping import Float, PyTree

from hypjax import parallel
from hypjax.data.dataset import Dataset
from hypjax.data.photo_dataset import files_of, fingerprint
from hypjax.data.photos import Photo
from hypjax.data.pipeline import readable_batches
from hypjax.errors import Interrupted, UserError, redacted
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.inference.matches import read_matches
from hypjax.inference.partial_gallery import Embedded, PartialGallery, concatenated
from hypjax.inference.postprocess import model_fingerprint, saved_projection
from hypjax.inference.weights import restore_best
from hypjax.models import Embedder
from hypjax.retrieval.embeddings import Embeddings
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import RESULTS, is_published, read_whole
from hypjax.system import console, exits, machine
from hypjax.types import View, Workers

Part = Literal["head", "encoder"]
_INTERRUPTED = "interrupted: saving what is done; once more to stop at once"


class TrainedEmbedder:
    """A trained run's model: the best on its validation classes if there are any, else the last.

    Attributes:
        fingerprint: Hash of everything that the embeddings depend on besides the images. Embeddings
            of equal fingerprints can be compared.
        match: What the run knows of the distance of matches; None if it does not.
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
        self._model = model
        self._function = embed_function(model, pixel_scaling, spaces, config.eval.scales)
        # By the numbers of devices and of images of each.
        self._compiled: dict[tuple[int, int], Callable[[PyTree], PyTree]] = {}

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

    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields the embeddings of a dataset's images in order, one batch at a time.

        Each device of this process embeds whole batches. With each batch come the images that could
        not be read, as {index in the batch: reason}; their embeddings are meaningless. Fewer images
        than a batch has are padded to a whole one or, if `few`, to a power of two: that takes less
        time, and rounds differently.
        """
        self._check_kind(dataset)
        size, total = self.batch_size, len(dataset)
        size = min(size, 1 << (total - 1).bit_length()) if few else size
        devices = jax.local_devices()[: -(-total // size)]
        rows = size * len(devices)
        with machine.memory_explained("run.eval_batch_size"):
            embed = self._embed_on(devices, size)
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

    def warm(self) -> None:
        """Compiles the programs for one image, and for more up to a whole batch."""
        with machine.memory_explained("run.eval_batch_size"):
            for bits in range(self.batch_size.bit_length() + 1):
                self._embed_on(jax.local_devices()[:1], min(1 << bits, self.batch_size))

    def _check_kind(self, dataset: Dataset) -> None:
        """Raises a `UserError` for features instead of images, or the other way round."""
        encoder, name = self._model.encoder, dataset.name(0)
        if encoder.takes_pixels and dataset.vectors is not None:
            raise UserError(f"this run embeds images, but {name} stands for features")
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
            params = parallel.place(self._params, parallel.replicated(mesh))
            encoder = self._model.encoder
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

    def embed(self, photos: Sequence[Photo]) -> Embeddings:
        """Embeds images in one go, for example a search's queries; see `batches` of few images."""
        points, broken = concatenated(self.batches(files_of(photos), few=True))
        return self._embeddings(photos, points, broken)

    def embed_to(self, path: pathlib.Path, photos: Sequence[Photo]) -> Embeddings:
        """Embeds images into a file, or resumes where that was interrupted.

        What is done is saved every minute, and at an interrupt, in a folder beside the file.

        Raises:
            UserError: The file or the folder cannot be written, the file exists and holds something
                else, or no image can be read.
            Interrupted: An interrupt arrived, and what is done is saved.
        """
        if path.exists():
            done = Embeddings.load(path)
            if (done.fingerprint, done.images) != (self.fingerprint, fingerprint(photos)):
                raise UserError(
                    f"{path} exists already and holds other images or another run's embeddings; "
                    "name another file, or remove it"
                )
            console.say(f"{path} is complete already")
            return done
        with PartialGallery(path, f"{self.fingerprint} {fingerprint(photos)}") as unfinished:
            self._finish(unfinished, photos)
            embeddings = self._embeddings(photos, *unfinished.contents())
            if not len(embeddings):
                unfinished.remove()
                raise UserError(
                    f"none of the {len(photos)} images can be read; of the first: "
                    f"{next(iter(embeddings.unreadable.values()))}"
                )
            embeddings.save(path)
            unfinished.remove()
        return embeddings

    def _finish(self, unfinished: PartialGallery, photos: Sequence[Photo]) -> None:
        """Embeds the images that are not done yet; after an interrupt it saves, and raises that."""
        total, done = len(photos), unfinished.done
        with (
            tqdm.tqdm(total=total, unit="image", disable=None, initial=done) as bar,
            exits.deferred(_INTERRUPTED) as interrupted,
        ):
            for points, broken in self.batches(files_of(photos[done:])):
                stopping = interrupted()
                unfinished.add(points, broken, saving=stopping)
                bar.update(len(points))
                if stopping and unfinished.done < total:
                    raise Interrupted(
                        f"{unfinished.done} of {total} images are saved, and the same command "
                        "resumes from there",
                        interrupted.status,
                    )

    def _embeddings(
        self, photos: Sequence[Photo], points: Float[np.ndarray, "n d"], broken: dict[int, str]
    ) -> Embeddings:
        kept = [i for i in range(len(photos)) if i not in broken]
        return Embeddings(
            vectors=points[kept].astype(np.float32),
            ids=np.array([str(photos[i].path) for i in kept], dtype=str),
            labels=np.array([photos[i].label for i in kept], dtype=str),
            space=self.space,
            fingerprint=self.fingerprint,
            images=fingerprint(photos),
            unreadable={str(photos[i].path): reason for i, reason in broken.items()},
        )
