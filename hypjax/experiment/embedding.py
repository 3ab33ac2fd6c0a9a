"""Embeds images with a model, as points of the spaces in which evaluation compares them."""

import contextlib
import dataclasses
import functools
import hashlib
import operator
import pathlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, UInt8

from hypjax import __version__, parallel
from hypjax.data.dataset import Dataset, union
from hypjax.data.pipeline import ReadableBatch, readable_batches
from hypjax.data.pixels import DECODER
from hypjax.data.plans import padded_rows
from hypjax.errors import UserError, counted
from hypjax.experiment import engines
from hypjax.geometry import Space
from hypjax.models import Embedder
from hypjax.models.embedder import at_side, in_precision, scaled_side
from hypjax.models.layers import normalize
from hypjax.settings import Embedding, Pixels
from hypjax.system import console, machine, progress
from hypjax.system.array_cache import ArrayCache
from hypjax.system.files import contiguous, locked
from hypjax.types import Outputs

ONE_SCALE = (1.0,)


def part_of(name: str) -> str:
    """The part of the model, "head" or "encoder", in a name of `Method.spaces`."""
    return name.partition(":")[0].partition("@")[0]


def prefix_of(name: str) -> int | None:
    """Dimension of a prefix in a name of `Method.spaces`: 16 for "head@16", None for "head"."""
    dim = name.partition(":")[0].partition("@")[2]
    return int(dim) if dim else None


def _features(
    model: Embedder, params: PyTree, pooled: Float[Array, "batch encoder_dim"], name: str
) -> Float[Array, "batch d"]:
    """The features that a name of `Method.spaces` means: the encoder's, the head's or a prefix."""
    if part_of(name) == "encoder":
        return pooled
    outputs = cast(Outputs, model.apply({"params": params}, pooled, method="project"))
    features = outputs.projected
    prefix_dim, full_dim = prefix_of(name), features.shape[-1]
    # Without a head, the configuration does not know the full dimension.
    if prefix_dim is not None and prefix_dim >= full_dim:
        problem = f"embeddings of dimension {full_dim} have no prefix of {prefix_dim}"
        raise UserError(f"{problem}; lower config.eval.prefixes below {full_dim}")
    return features[:, :prefix_dim]


def encode(
    model: Embedder,
    pixels: Pixels,
    scales: Sequence[float],
    params: PyTree,
    images: UInt8[Array, "batch side side channels"],
) -> Float[Array, "batch scales encoder_dim"]:
    """Embeds images with the encoder, at each of several scales (see `scaled_side`)."""
    if not model.encoder.takes_pixels:  # The images are features of another model.
        return images[:, None]
    images = normalize(images, pixels.mean, pixels.std)
    embeddings = []
    for scale in scales:
        side = scaled_side(model.encoder, scale)
        scaled_model, scaled_params = at_side(model, params, side)
        scaled_images = images
        if side != model.encoder.image_size:  # Bilinear without antialiasing, as in PyTorch.
            shape = (images.shape[0], side, side, images.shape[-1])
            scaled_images = jax.image.resize(images, shape, "linear", antialias=False)
        with jax.named_scope("encoder"):  # As in the train step, for profiles of the program.
            pooled = scaled_model.encoder.apply({"params": scaled_params["encoder"]}, scaled_images)
        embeddings.append(cast(Array, pooled).astype(jnp.float32))
    return jnp.stack(embeddings, axis=1)


def to_points(
    model: Embedder,
    params: PyTree,
    spaces: Mapping[str, Space],
    pooled: Float[Array, "batch scales encoder_dim"],
) -> dict[str, Float[Array, "batch d"]]:
    """Maps the encoder's embeddings to points of each space, averaged over the scales."""
    points = {}
    for name, space in spaces.items():
        scales = range(pooled.shape[1])
        by_scale = [space.embed(_features(model, params, pooled[:, i], name)) for i in scales]
        points[name] = space.mean(jnp.stack(by_scale, axis=-2)) if len(scales) > 1 else by_scale[0]
    return points


def embed_function(
    model: Embedder,
    pixels: Pixels,
    spaces: Mapping[str, Space],
    scales: Sequence[float] = ONE_SCALE,
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], dict[str, Array]]:
    """Builds the function from parameters and pixels to points of each space, to be jitted."""
    return lambda params, images: to_points(
        model, params, spaces, encode(model, pixels, scales, params, images)
    )


def fingerprint(facts: object, params: PyTree = None) -> str:
    """Hash of parameters and of facts, which are compared by their `repr`."""
    digest = hashlib.sha256(repr(facts).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(contiguous(leaf).data)
    return digest.hexdigest()[:32]


_FORMAT = "hypjax features 2"  # Increase the number if an encoder's or a view's results change.
Features = Float[np.ndarray, "images scales dim"]


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetEmbedder:
    """Embeds images with a model: in evaluation, searches, galleries and exports.

    Datasets of all sizes share one compiled program.

    The encoder embeds the images of `cached`, for which it must be frozen, only once. Their
    embeddings stay in memory, and a single process also keeps them in `folder`, for other runs.
    """

    model: Embedder
    pixels: Pixels
    mesh: Mesh  # Devices that share each batch.
    options: Embedding
    cached: Sequence[Dataset] = ()
    folder: pathlib.Path | None = None
    programs: pathlib.Path | None = None  # Folder of engines' programs.
    is_final: bool = False  # Whether the encoder's weights stay as they are.
    # By facts about a function of images, its weights and an engine's program.
    _programs: dict[Hashable, tuple[list, engines.Program]] = dataclasses.field(
        default_factory=dict, init=False
    )
    # Embeddings of cached images, by their position in `_cached_images`.
    _features: dict[int, Features] = dataclasses.field(default_factory=dict, init=False)

    def points(
        self,
        params: PyTree,
        dataset: Dataset,
        spaces: Mapping[str, Space],
        scales: Sequence[float] | None = None,
    ) -> dict[str, Float[np.ndarray, "images d"]]:
        """Points of a dataset's images in each space, averaged over scales (`options.scales`)."""
        params = parallel.place(params, parallel.replicated(self.mesh))
        scales = tuple(scales or self.options.scales)
        points_of_batch = functools.partial(self._to_points, (params, dict(spaces)))
        if (features := self._features_in_memory(params, dataset, scales)) is not None:
            return self.mapped(points_of_batch, features)
        encode = self._encoder(scales, params, len(dataset))
        return self.mapped(lambda x: points_of_batch(encode(x)), dataset)

    def features(self, params: PyTree, dataset: Dataset) -> Float[np.ndarray, "images dim"]:
        """The encoder's embeddings of a dataset's images, at full scale only."""
        params = parallel.place(params, parallel.replicated(self.mesh))
        if (features := self._features_in_memory(params, dataset, ONE_SCALE)) is None:
            features = self.mapped(self._encoder(ONE_SCALE, params, len(dataset)), dataset)
        return features[:, 0]

    def mapped(self, function: Callable[[Array], PyTree], images: Dataset | Features) -> PyTree:
        """Applies a function to batches of images in the test view, or of features, on the mesh."""
        return _concatenated(self._reported_batches(function, images))

    def _reported_batches(
        self, function: Callable[[Array], PyTree], images: Dataset | Features
    ) -> Iterator[PyTree]:
        """Yields the results of `batches` with lines of progress."""
        lines = progress.ProgressLines("embedded", len(images))
        batches = self.batches(function, images, self.options.batch_size)
        with contextlib.closing(batches), machine.memory_explained("run.eval_batch_size"):
            for result, _ in batches:
                lines.advance(len(jax.tree.leaves(result)[0]))
                yield result

    def point_batches(
        self, params: PyTree, images: Dataset, spaces: Mapping[str, Space], size: int
    ) -> Generator[tuple[dict[str, np.ndarray], dict[int, str]], None, None]:
        """Yields points of images, a batch of at most `size` at a time, as `points` computes them.

        Points of unreadable images have no meaning; by row, it is said why they are unreadable.
        """
        encode = self._encoder(self.options.scales, params, len(images))
        points_of_batch = functools.partial(self._to_points, (params, dict(spaces)))
        return self.batches(lambda x: points_of_batch(encode(x)), images, size, tolerant=True)

    def batches(
        self,
        function: Callable[[Array], PyTree],
        images: Dataset | Features,
        size: int,
        *,
        tolerant: bool = False,
    ) -> Generator[tuple[PyTree, dict[int, str]], None, None]:
        """Yields a function's results for batches of images in the test view, or of features.

        All batches fit one program: the last is padded, and its result has no padding. If
        `tolerant`, unreadable images are black, and the second value says why, by row.
        """
        size = parallel.slices(size, self.mesh).rows
        batches = self._local_batches(images, size, tolerant=tolerant)
        results = (
            (parallel.gather(function(parallel.shard(self.mesh, x))), broken)
            for x, broken in batches
        )
        with contextlib.closing(batches):
            upcoming: tuple[PyTree, dict[int, str]] = next(results, (None, {}))
            for start in range(0, len(images), size):
                # A batch is copied to the host once the device computes the next one.
                (result, broken), upcoming = upcoming, next(results, (None, {}))
                count = min(size, len(images) - start)
                yield jax.tree.map(lambda x, count=count: np.asarray(x)[:count], result), broken

    def _local_batches(
        self, images: Dataset | Features, size: int, *, tolerant: bool
    ) -> Generator[ReadableBatch, None, None]:
        """Yields this process's rows of each batch of `size` rows."""
        rows = parallel.local_rows(self.mesh, size)
        if isinstance(images, Dataset):
            view, workers = self.pixels.view, self.options.workers
            return readable_batches(images, view, size, workers, rows, tolerant=tolerant)
        starts = range(0, len(images), size)
        return ((padded_rows(images[start : start + size], rows, 0), {}) for start in starts)

    def _features_in_memory(
        self, params: PyTree, dataset: Dataset, scales: tuple[float, ...]
    ) -> Features | None:
        """Embeddings of a dataset's images at some scales; None unless `cached` has the images."""
        cached_scales = self.options.scales
        if dataset.boxes is not None or not {*scales} <= {*cached_scales}:
            return None
        merged = enumerate(self._cached_images)
        i, images = next((x for x in merged if x[1].records is dataset.records), (0, None))
        if images is None or not np.isin(dataset.positions, images.positions).all():
            return None
        if i not in self._features:
            self._features[i] = self._stored_features(params, images)
        rows = np.searchsorted(images.positions, dataset.positions)
        return self._features[i][rows][:, list(map(cached_scales.index, scales))]

    @functools.cached_property
    def _cached_images(self) -> list[Dataset]:
        """Merges the `cached` datasets that share records."""
        whole = [images for images in self.cached if images.boxes is None]
        sharing = [[y for y in whole if y.records is x.records] for x in whole]
        return [union(group) for x, group in zip(whole, sharing, strict=True) if group[0] is x]

    def _stored_features(self, params: PyTree, images: Dataset) -> Features:
        """Embeds images with the frozen encoder, or reads their embeddings from the folder."""
        scales, pixels = self.options.scales, self.pixels

        def compute(done: int) -> Iterator[Features]:
            rest = images[done:]
            if len(rest):
                console.say(f"embedding {counted(len(rest), 'image')} once: the encoder is frozen")
            return self._reported_batches(self._encoder(scales, params, len(rest)), rest)

        if self.folder is None or images.records_fingerprint is None or jax.process_count() > 1:
            return _concatenated(compute(0))
        versions = _FORMAT, __version__, jax.__version__, jaxlib.__version__
        precision = self.options.engine.partition(":")[2]  # Engines of one precision agree.
        source = images.records_fingerprint, images.positions.tolist(), images.upright, images.fast
        view = DECODER, pixels.view, pixels.mean, pixels.std, scales, self.model.encoder
        platform = self.mesh.devices.flat[0].platform
        name = fingerprint((*versions, *source, *view, platform, precision), params["encoder"])
        return cached_features(self.folder / name, len(images), len(scales), compute)

    def _encoder(self, scales: tuple[float, ...], params: PyTree, count: int) -> engines.Function:
        """The program that encodes `count` images at some scales."""
        by_jax = functools.partial(self._encode, scales, params)
        model = in_precision(self.model, jnp.float32)
        function = functools.partial(encode, model, self.pixels, scales, params)
        if count >= engines.FEWEST:
            if self.model.encoder.takes_pixels and not self._is_rounded:
                engines.advise(self.options.engine, self.mesh)
        elif not self.is_final:
            return by_jax
        weights = params.get("encoder", {})  # Features of other models need none.
        return self.program(by_jax, function, weights, scales, keep=self.is_final)

    @property
    def _is_rounded(self) -> bool:
        """Whether the encoder's own precision is below float32, which engines leave to JAX."""
        return getattr(self.model.encoder, "dtype", jnp.float32) != jnp.float32

    @property
    def engines_used(self) -> list[str]:
        """Engines that have embedded images in JAX's place."""
        return sorted({x.description for _, x in self._programs.values() if x.description})

    def program(
        self,
        by_jax: engines.Function,
        function: engines.Function,
        weights: PyTree,
        facts: Hashable,
        *,
        keep: bool = True,
    ) -> engines.Function:
        """The program of a function of images: an engine's where one serves.

        `by_jax` is the compiled function, and `function` the one in float32, to be translated. It
        depends on `weights`, and `facts` tell it from others of this embedder. `keep` says whether
        the engine's program is kept for later processes.
        """
        engine = engines.choose(self.options.engine, self.mesh)
        encoder = self.model.encoder
        if engine is None or not encoder.takes_pixels:
            return by_jax
        if self._is_rounded:
            console.say_once(f"JAX runs the encoder, since model.precision is {encoder.dtype}")
            return by_jax
        leaves, view, translation = jax.tree.leaves(weights), self.pixels.view, None
        earlier, program = self._programs.get(facts, ([], None))
        if program is not None and all(map(operator.is_, earlier, leaves)):
            return program
        if keep and self.programs is not None:
            sizes = view.side, view.channels
            about = engines.FORMAT, self.pixels.mean, self.pixels.std, sizes, facts
            translation = self.programs / fingerprint((*about, encoder), weights)
        example = jax.ShapeDtypeStruct((view.side, view.side, view.channels), np.uint8)
        program = engines.Program(engine, by_jax, function, example, translation)
        self._programs[facts] = leaves, program
        return program

    @functools.cached_property
    def _encode(self) -> Callable[[tuple[float, ...], PyTree, Array], Array]:
        def encode_batch(scales: tuple[float, ...], params: PyTree, images: Array) -> Array:
            is_rounded = self.options.engine == "jax:bfloat16"
            model = in_precision(self.model, jnp.bfloat16) if is_rounded else self.model
            function = functools.partial(encode, model, self.pixels, scales)
            return parallel.map_images(function, self.mesh)(params, images)

        options = parallel.compiler_options(self.mesh)
        return jax.jit(encode_batch, static_argnums=0, compiler_options=options)

    @functools.cached_property
    def _to_points(self) -> Callable[[tuple[PyTree, Mapping[str, Space]], Array], dict[str, Array]]:
        def points_of(args: tuple[PyTree, Mapping[str, Space]], pooled: Array) -> dict[str, Array]:
            params, spaces = args
            return to_points(self.model, params, spaces, pooled)

        mapped = parallel.map_images(points_of, self.mesh)
        return jax.jit(mapped, compiler_options=parallel.compiler_options(self.mesh))


def _concatenated(batches: Iterable[PyTree]) -> PyTree:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def cached_features(
    folder: pathlib.Path, num_images: int, num_scales: int, compute: Callable[[int], Iterable]
) -> Features:
    """Reads images' features from a folder, after computing the missing ones.

    One process at a time fills the folder. `compute(n)` yields batches of features, of all images
    after the first n.
    """
    failures: list[OSError] = []  # To read images, not to store features.

    def computed(done: int) -> Iterable:
        try:
            yield from compute(done)
        except OSError as error:
            failures.append(error)
            raise

    try:
        table = None
        while table is None:  # A damaged table is computed again.
            cache = ArrayCache(folder, num_images)
            if not cache.is_complete():
                with cache.filling(locked(folder, "embedding images")) as done:
                    for batch in computed(done):
                        cache.append(batch)
            table = cache.table(np.float32)
        return table[0].reshape(num_images, num_scales, -1)
    except OSError as error:
        if failures:
            raise
        console.warn(f"features cannot be stored in {folder} ({error.strerror})")
        return _concatenated(compute(0))
