"""Embedding images with a trained run, so that they can be searched."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import time
import zipfile
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np
import tqdm
from jaxtyping import Float

from hypjax.data.dataset import Dataset
from hypjax.data.photos import Photo, files_of, fingerprint
from hypjax.data.pipeline import readable_batches
from hypjax.errors import Interrupted, UserError
from hypjax.geometry import Sphere
from hypjax.inference.embedding import embed_function
from hypjax.inference.weights import restore_best
from hypjax.objectives import create_objective
from hypjax.reports.hits import Hits
from hypjax.retrieval.embeddings import Embeddings, describe_space
from hypjax.retrieval.neighbors import search
from hypjax.runs.cloud_read import reading
from hypjax.runs.workdir import saved_config
from hypjax.system import console, interrupts, memory
from hypjax.system.files import write_text
from hypjax.types import View, Workers

Part = Literal["head", "encoder"]
_SECONDS_BETWEEN_SAVES = 60
_INTERRUPTED = "interrupted: saving what is done; once more to stop at once"


class TrainedEmbedder:
    """A trained run's model: the best by its validation classes where there are any, or the last.

    Attributes:
        space: Where its embeddings lie.
        fingerprint: Of all that they depend on; equal ones can be compared.
    """

    def __init__(self, workdir: str | pathlib.Path, part: Part = "head") -> None:
        """Restores the model.

        Args:
            workdir: The run's folder, possibly a URL of cloud storage.
            part: The embedding that the loss trained, or the encoder's before it.

        Raises:
            UserError: The folder holds no trained model.
        """
        with reading(workdir) as folder:
            self._config = config = saved_config(folder)
            model, self._params = restore_best(folder)
        space = create_objective(config).score_space if part == "head" else Sphere()
        self.space = space
        self._part = part
        self._embed = jax.jit(embed_function(config, model, {part: space}))
        self.fingerprint = self._fingerprint()

    def _fingerprint(self) -> str:
        data = self._config.data
        view = [data[name] for name in ("channels", "image_size", "resize", "mean", "std")]
        pooling = self._config.model.eval_pooling
        facts = [self._part, describe_space(self.space), view, pooling]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for leaf in jax.tree.leaves(self._params):
            digest.update(np.ascontiguousarray(leaf))
        return digest.hexdigest()[:32]

    def batches(
        self, dataset: Dataset
    ) -> Iterator[tuple[Float[np.ndarray, "batch d"], dict[int, str]]]:
        """Yields the embeddings of a dataset's images in order, batch by batch.

        Beside them stands, for those that could not be read, why; their embeddings mean nothing.

        Raises:
            UserError: The device's memory does not suffice.
        """
        data, run = self._config.data, self._config.run
        size = run.eval_batch_size
        batches = readable_batches(
            dataset,
            View(data.image_size, data.resize, data.channels),
            size,
            Workers(run.workers, run.input_timeout),
        )
        with contextlib.closing(batches), memory.explained("run.eval_batch_size"):
            for first, batch in zip(range(0, len(dataset), size), batches, strict=True):
                points = self._embed(self._params, batch.images)[self._part]
                broken = {int(place): str(reason) for place, reason in batch.broken.items()}
                yield np.asarray(points)[: len(dataset) - first], broken

    def embed(self, photos: Sequence[Photo]) -> Embeddings:
        """Embeds images at once, as few as a query has."""
        points, broken = _joined(self.batches(files_of(photos)))
        return self._embeddings(photos, points, broken)

    def embed_to(self, path: pathlib.Path, photos: Sequence[Photo]) -> Embeddings:
        """Embeds images into a file, or goes on where that was interrupted.

        What is done is saved every minute, and at an interrupt, in a folder beside the file, which
        is removed at the end.

        Raises:
            UserError: The file or the folder cannot be written, the file exists and holds something
                else, or no image can be read.
            Interrupted: An interrupt came, and what is done is saved.
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
        with _Parts(path, f"{self.fingerprint} {fingerprint(photos)}") as parts:
            with (
                tqdm.tqdm(total=len(photos), unit="image", disable=None, initial=parts.done) as bar,
                interrupts.deferred(_INTERRUPTED) as interrupted,
            ):
                for points, broken in self.batches(files_of(photos[parts.done :])):
                    stopping = interrupted()
                    parts.add(points, broken, saving=stopping)
                    bar.update(len(points))
                    if stopping and parts.done < len(photos):
                        raise Interrupted(
                            f"{parts.done} of {len(photos)} images are saved, and the same command "
                            "goes on from there",
                            interrupted.status,
                        )
            embeddings = self._embeddings(photos, *parts.joined())
            if not len(embeddings):
                parts.remove()
                raise UserError(
                    f"none of the {len(photos)} images can be read; of the first: "
                    f"{next(iter(embeddings.unreadable.values()))}"
                )
            embeddings.save(path)
            parts.remove()
        return embeddings

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


def _joined(
    batches: Iterator[tuple[Float[np.ndarray, "batch d"], dict[int, str]]],
) -> tuple[Float[np.ndarray, "n d"], dict[int, str]]:
    points, broken, count = [], {}, 0
    for batch, reasons in batches:
        points.append(batch)
        broken |= {count + place: reason for place, reason in reasons.items()}
        count += len(batch)
    return np.concatenate(points), broken


class _Parts:
    """What is done of a file, in a folder beside it."""

    def __init__(self, path: pathlib.Path, facts: str) -> None:
        """Takes up what was done of the same images by the same model, and drops anything else.

        Raises:
            UserError: The folder cannot be written, or another process is at it.
        """
        self._folder = path.with_name(f"{path.name}.unfinished")
        self._pending: list[tuple[np.ndarray, dict[int, str]]] = []
        self._saved = time.monotonic()
        owner = self._folder / "facts"
        with _written(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{path} is being written by another process") from error
            if not owner.exists() or owner.read_text() != facts:
                for part in self._folder.glob("*.npz"):
                    part.unlink()
                write_text(owner, facts)
            self.done = sum(len(points) for points, _ in self._load())
            for part in self._folder.glob("*.npz"):
                if part.stem >= _stem(self.done):
                    part.unlink()  # Damaged, or after one that is.

    def __enter__(self) -> "_Parts":
        """Nothing more to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """Lets others have the folder."""
        self._lock.close()

    def _load(self) -> Iterator[tuple[np.ndarray, dict[int, str]]]:
        """Yields the parts in order, up to the first that is damaged."""
        done = 0
        for path in sorted(self._folder.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as file:
                    part = {name: file[name] for name in ("points", "places", "reasons")}
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                return
            if path.stem != _stem(done):
                return
            done += len(part["points"])
            reasons = zip(part["places"].tolist(), part["reasons"].tolist(), strict=True)
            yield part["points"], dict(reasons)

    def add(self, points: np.ndarray, broken: dict[int, str], *, saving: bool) -> None:
        """Takes a batch, and saves those that have waited long enough, or all if told to."""
        self._pending.append((points, broken))
        if saving or time.monotonic() - self._saved >= _SECONDS_BETWEEN_SAVES:
            self._save()

    def _save(self) -> None:
        points, broken = _joined(iter(self._pending))
        path = self._folder / f"{_stem(self.done)}.npz"
        with _written(self._folder):
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                places, reasons = np.array(list(broken), int), np.array(list(broken.values()), str)
                np.savez(file, points=points, places=places, reasons=reasons)
            unfinished.replace(path)
        self.done += len(points)
        self._pending, self._saved = [], time.monotonic()

    def joined(self) -> tuple[Float[np.ndarray, "n d"], dict[int, str]]:
        """All that is done."""
        return _joined(iter([*self._load(), *self._pending]))

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _stem(done: int) -> str:
    """Name of the part before which so many images are done."""
    return f"{done:012d}"


@contextlib.contextmanager
def _written(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror or error})") from error


def find(
    embedder: TrainedEmbedder, photos: Sequence[Photo], gallery: Embeddings, k: int
) -> list[Hits]:
    """The nearest images of a gallery to each query.

    They come in the order of their distances. An image is not found as its own neighbour. A query's
    class is known where it is told, where the image is in the gallery, or where its folder has the
    name of one of the gallery's classes.

    Raises:
        UserError: The gallery comes from another run, a query cannot be read, or k is too large.
    """
    if gallery.fingerprint != embedder.fingerprint:
        raise UserError(
            "the gallery was embedded by another run, by other parameters or as another embedding; "
            "embed it again with this run"
        )
    queries = embedder.embed(photos)
    for path, reason in queries.unreadable.items():
        raise UserError(f"cannot read {path} ({reason})")
    places = {os.path.realpath(path): i for i, path in enumerate(gallery.ids.tolist())}
    own = np.array([places.get(os.path.realpath(path), -1) for path in queries.ids])
    excluded = own if (own >= 0).any() else None
    distances, found = search(queries.vectors, excluded, gallery.vectors, k=k, space=gallery.space)
    # By the distances that are shown: the search's products put near-ties in another order.
    order = np.argsort(distances, axis=1, kind="stable")
    distances, found = (np.take_along_axis(x, order, axis=1) for x in (distances, found))
    classes = set(gallery.labels.tolist()) - {""}
    hits = []
    for i, photo in enumerate(photos):
        folder = photo.path.absolute().parent.name
        label = photo.label or (str(gallery.labels[own[i]]) if own[i] >= 0 else "")
        label = label or (folder if folder in classes else "")
        hits.append(
            Hits(
                query=str(photo.path),
                label=label,
                paths=gallery.ids[found[i]].tolist(),
                labels=gallery.labels[found[i]].tolist(),
                distances=distances[i].tolist(),
            )
        )
    return hits
