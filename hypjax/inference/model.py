"""Trained models in Python: `hypjax.load`."""

import contextlib
import copy
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Float, PyTree

from hypjax import parallel
from hypjax.assemble import saved_method
from hypjax.catalogue import ENGINES, Engine
from hypjax.config import Config, config_of
from hypjax.config.choices import CUSTOM
from hypjax.config.custom import custom_name, registered_encoder
from hypjax.data.dataset import Dataset, fingerprint_of
from hypjax.data.photos import ImageLike, given_images
from hypjax.data.texts import given_texts, table_of_texts
from hypjax.errors import TryAgainError, UserError, at_the_call, redacted
from hypjax.experiment import engines
from hypjax.experiment.embedding import DatasetEmbedder
from hypjax.experiment.trained import TrainedModel, restore_best
from hypjax.galleries.embeddings import Embeddings, is_gallery, open_gallery
from hypjax.galleries.search import Gallery
from hypjax.geometry import PoincareBall, Space
from hypjax.inference.hits import Hits, find_hits
from hypjax.inference.image_embedder import Embedded, ImageEmbedder, columns_of_features
from hypjax.inference.pretrained import is_encoder, pretrained_model
from hypjax.inference.released import find_released, read_released
from hypjax.inference.save import describe
from hypjax.inference.text_embedder import SentenceEmbedder, TextEmbedder, TowerEmbedder
from hypjax.models.architectures import ARCHITECTURES, UNSIZED
from hypjax.models.custom import is_custom
from hypjax.models.text import TextTransformer
from hypjax.models.tokens import find_tokenizer, open_tokenizer
from hypjax.retrieval.postprocessing import NO_POSTPROCESSING, Postprocessing
from hypjax.retrieval.projection import Projection
from hypjax.runs import files
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import saved_fields, saved_text_encoder
from hypjax.system import console, hub, machine
from hypjax.system.caches import cache_folder, keep_compiled_programs
from hypjax.system.files import missing
from hypjax.types import TEXTS, View

AnyImages = ImageLike | Sequence[ImageLike]
_BATCH_SIZE = "the batch size (--batch_size, or run.eval_batch_size)"


@dataclasses.dataclass(frozen=True, eq=False)
class _Opened:
    """A trained model, what comes with one of its embeddings, and the folder of its files."""

    trained: TrainedModel
    folder: pathlib.Path
    fingerprint: str
    projection: Projection | None = None
    text_encoder: str | None = None  # The hash of the encoder of texts that it was trained on.


class Model(ImageEmbedder):
    """A trained model, which embeds images, and perhaps texts, and searches among them.

    The parameters are the best on the run's validation images if there are any, else the last.

    Attributes:
        source: Folder, file, URL or repository from which the model was loaded.
        part: The embedding: "head", "encoder", or a prefix like "head@16" (see `Method.spaces`).
        method: What was trained, assembled from the configuration.
        module: The encoder and the head, a Flax module.
        params: The parameters of `module`.
        space: The space of the embeddings.
        projection: The projection of `eval.pca`, if any.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        part: str = "head",
        batch_size: int | None = None,
        *,
        encoder: nn.Module | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        engine: Engine = "auto",
    ) -> None:
        """Loads a model; `load` describes the arguments."""
        if engine not in ENGINES:
            raise UserError(f"engine is {engine!r}; it must be {', '.join(ENGINES)}")
        self.engine = engine
        mesh = parallel.create_mesh(devices=jax.local_devices()[:1])
        self._engine = engines.choose(engine, mesh)  # Which runs on a single CPU.
        self.source, self.part = str(source), part
        self.name = f"{redacted(self.source)} ({part})"
        keep_compiled_programs()
        opened = self._open(part, encoder)
        trained, self.method = opened.trained, opened.trained.method
        self.projection, self.fingerprint = opened.projection, opened.fingerprint
        self.module, self.params, self.space = trained.model, trained.params, trained.spaces[part]
        self.batch_size = batch_size or self.method.embedding.batch_size
        self._tokenizer, self._text_encoder = find_tokenizer(opened.folder), opened.text_encoder
        if tokenizer is not None:
            self._tokenizer = pathlib.Path(tokenizer).expanduser()
            if not self._tokenizer.exists():
                raise UserError(missing(self._tokenizer))
        # By the number of devices.
        self._embedders: dict[int, tuple[DatasetEmbedder, PyTree]] = {}

    @at_the_call
    def embed(self, images: AnyImages) -> Float[np.ndarray, "images d"]:
        """Embeds images as points of the model's space, float32.

        `images` is a path, folder, pattern, Pillow image or array of pixels, or several of these.
        Raises a `UserError` for an unreadable image.
        """
        embeddings = self.gallery(images)
        for name, reason in embeddings.unreadable.items():
            raise UserError(f"cannot read {name} ({reason})")
        return embeddings.vectors

    @at_the_call
    def gallery(self, images: AnyImages) -> Embeddings:
        """Embeds images to search among, with their paths and classes.

        `images` is as for `embed`; sub-folders are classes. Unreadable images are left out, and
        listed in the result. `hypjax.search` can read the result once it is saved.
        """
        return self.embed_images(given_images(images), few=True)

    @at_the_call
    def embed_texts(self, texts: str | Sequence[str], templates: Sequence[str] = ()) -> Embeddings:
        """Embeds texts as points of the space of the model's images, to search for or among them.

        Args:
            texts: One or several texts, which become the names of the points.
            templates: Prompts such as "a photo of a {}."; {} stands for the text, and the features
                of a text's prompts are averaged before the map into the space.

        Raises:
            UserError: The model has no texts, or its tokenizer is missing.
        """
        given, prompts = given_texts(texts), given_texts(templates) if templates else []
        points = self._text_embedder.points(given, prompts)
        columns = np.array(given, str), np.full(len(given), ""), self.space, self.fingerprint
        origin = fingerprint_of([given, prompts])
        embeddings = Embeddings(points, *columns, origin, model=self.name, noun="text")
        embeddings.check()
        return embeddings

    @functools.cached_property
    def _text_embedder(self) -> TextEmbedder:
        """The tower of texts, ready to embed."""
        if not self._has_texts:
            advice = "load the head of a model of images and texts (docs/texts.md)"
            raise UserError(f"{self.name} embeds no texts; {advice}")
        tower, params = self.module.towers[TEXTS], self.params[f"towers_{TEXTS}"]
        if not isinstance(tower.encoder, TextTransformer):
            if (name := self.method.fields["model.text.encoder"]) is None:
                advice = "train with --config.model.text.encoder to search by words"
                raise UserError(f"{self.source} was trained on vectors of texts; {advice}")
            return SentenceEmbedder(tower, params, self.space, name, self._text_encoder)
        if self._tokenizer is None:
            files_of = "tokenizer.json, vocab.json and merges.txt, or bpe_simple_vocab_16e6.txt.gz"
            advice = f"put {files_of} into the folder of its weights"
            raise UserError(f"{self.source} has no tokenizer; {advice}, or pass --tokenizer=FILE")
        tokenizer = open_tokenizer(self._tokenizer, tower.encoder.settings)
        return TowerEmbedder(tower, params, self.space, tokenizer, self._engine)

    @at_the_call
    def search(
        self,
        gallery: Gallery | AnyImages,
        query: AnyImages | None = None,
        k: int = 10,
        postprocessing: Postprocessing = NO_POSTPROCESSING,
        *,
        text: str | Sequence[str] | None = None,
        templates: Sequence[str] = (),
    ) -> list[Hits]:
        """Finds the k nearest images of a gallery to each query, or all if there are fewer.

        `print(hits[0])` shows the first query's hits, nearest first. A file does not find itself.

        Args:
            gallery: A result of `gallery` or `embed_texts`, a path or URL as for `hypjax.search`,
                or images.
            query: One or several images, as for `embed`.
            k: Number of hits of each query.
            postprocessing: Query expansion and re-ranking.
            text: One or several texts to search for, instead of images.
            templates: Prompts of the texts, as for `embed_texts`.
        """
        if (query is None) == (text is None):
            raise UserError("a search is for images or for texts: pass query= or text=")
        if isinstance(gallery, str | os.PathLike) and is_gallery(gallery):
            opened: Gallery = open_gallery(gallery)
            if not self.takes_pixels and opened.fingerprint != self.fingerprint:
                opened = self.gallery(gallery)  # The file holds features, this model's input.
        else:
            opened = gallery if isinstance(gallery, Gallery) else self.gallery(gallery)
        if text is not None:
            texts = given_texts(text)
            queries, table = self.embed_texts(texts, templates), table_of_texts(texts)
        elif query is not None:
            table = given_images(query)
            queries = self.embed_images(table, few=True)
        return find_hits(queries, table, opened, k, postprocessing)

    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields points of images in order; pads batches to full, or if `few` to a power of two."""
        encoder, vectors = self.module.encoder, dataset.vectors
        if encoder.takes_pixels and vectors is not None:
            raise UserError("this run embeds images, not features; pixels are uint8")
        if not encoder.takes_pixels and (vectors is None or vectors.shape[1] != encoder.dim):
            problem = f"this run embeds features of another model, not {dataset.name(0)}"
            raise UserError(f"{problem}; pass a file of such features, of dimension {encoder.dim}")
        total = len(dataset)
        size = self.batch_size
        if few:
            size = min(size, 1 << (total - 1).bit_length())
        num_devices = min(1 if self._engine else jax.local_device_count(), -(-total // size))
        embedder, params = self._on_devices(num_devices)
        spaces = {self.part: self._space_of_rows}
        batches = embedder.point_batches(params, dataset, spaces, size * num_devices)
        with contextlib.closing(batches), machine.memory_explained(_BATCH_SIZE):
            for points_by_part, broken in batches:
                points = points_by_part[self.part]
                for start in range(0, len(points), size):
                    batch = points[start : start + size]
                    if self.projection is not None:
                        batch = self.projection.apply(batch)
                    yield batch, {i: broken[start + i] for i in range(size) if start + i in broken}

    def _open(self, part: str, encoder: nn.Module | None) -> _Opened:
        return _open(self.source, part, encoder)

    @property
    def _space_of_rows(self) -> Space:
        """The space of the rows of `batches`."""
        return self.space

    @property
    def config(self) -> Config:
        """The configuration of the model's run."""
        return config_of(self.method.fields)

    def squashing(self) -> "Model":
        """This model for images squashed to squares, as in papers' scores of images and texts."""
        pixels, view = self.method.pixels, self.method.pixels.view
        squashed = View(view.side, view.side, view.channels, "squash")
        other = copy.copy(self)
        pixels = dataclasses.replace(pixels, view=squashed)
        other.method = dataclasses.replace(self.method, pixels=pixels)
        other.fingerprint = other.method.fingerprint(self.params, self.part)
        other._embedders = {}
        return other

    @property
    def takes_pixels(self) -> bool:
        """Whether the model embeds images, not features of another model."""
        return self.module.encoder.takes_pixels

    @property
    def takes_texts(self) -> bool:
        """Whether this embedding of the model has texts beside images, and their tokenizer."""
        if not self._has_texts:
            return False
        has_encoder = self.method.fields["model.text.encoder"] is not None
        return has_encoder or self._tokenizer is not None

    @property
    def _has_texts(self) -> bool:
        return TEXTS in self.module.towers and self.part == "head"

    def _on_devices(self, count: int) -> tuple[DatasetEmbedder, PyTree]:
        """An embedder on `count` devices, and the parameters there."""
        # Each device has a full batch: a program of fewer rows would round differently, and a
        # gallery must not depend on the number of devices, or on where embedding was resumed.
        if count not in self._embedders:
            mesh = parallel.create_mesh(devices=jax.local_devices()[:count])
            params = parallel.place(self.params, parallel.replicated(mesh))
            options = dataclasses.replace(self.method.embedding, engine=self.engine)
            programs = None if is_custom(self.module.encoder) else cache_folder() / "programs"
            embedder = DatasetEmbedder(
                self.module, self.method.pixels, mesh, options, programs=programs, is_final=True
            )
            self._embedders[count] = embedder, params
        return self._embedders[count]

    def __repr__(self) -> str:
        return f"{self.source}\n{describe(self.method)}\n{self.part} in {self.space}"


class EncoderModel(Model):
    """A pretrained encoder without a head; galleries also hold its features."""

    def __init__(
        self,
        spec: str,
        space: Space | None = None,
        batch_size: int | None = None,
        *,
        engine: Engine = "auto",
    ) -> None:
        """Reads an encoder as `pretrained_model` does; by default, the space is the sphere."""
        super().__init__(spec, "encoder", batch_size, engine=engine)
        self.name, self.space = spec, space or self.space

    _space_of_rows = PoincareBall(0.0, None)  # Which leaves features as they are.

    def _open(self, part: str, encoder: nn.Module | None) -> _Opened:
        trained = pretrained_model(self.source)
        return _Opened(trained, pathlib.Path(), trained.method.fingerprint(trained.params, part))

    def __repr__(self) -> str:
        view = self.method.pixels.view
        architecture = self.method.fields["model.architecture"]
        return f"{self.name}: {architecture}, {view.side} × {view.side} pixels, in {self.space}"

    def columns(self, rows: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n k"]]:
        """Converts features to points of the space; also keeps the features."""
        return columns_of_features(rows.astype(np.float32), self.space)


def _open(source: str, part: str, encoder: nn.Module | None) -> _Opened:
    """Opens a run's folder or URL, a published model, or a released one's file or folder."""
    if (path := find_released(source)) is not None:
        trained = read_released(path)
        _require_part(part, trained)
        folder = path if path.is_dir() else path.parent
        return _Opened(trained, folder, trained.method.fingerprint(trained.params, part))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(reading(source))
        published = files.read_object(folder / files.PUBLISHED)
        name = saved_fields(folder).get("model.architecture")
        if encoder is not None and name is not None:  # Without a name, reading reports the error.
            is_other_module = name.startswith(CUSTOM) and custom_name(encoder) != name
            if is_other_module or name in ("features", *UNSIZED, *ARCHITECTURES):
                problem = f"the encoder of this model is {name.removeprefix(CUSTOM)}"
                advice = "pass that module as encoder=, or no encoder if it is hypjax's"
                raise UserError(f"{problem}; {advice}")
            stack.enter_context(registered_encoder(name, encoder))
        trained = restore_best(folder, saved_method(folder))
        _require_part(part, trained)
        projection, fingerprint = trained.projection(folder, part)
        if not (published or (folder / files.RESULTS).exists()):
            console.say(f"{redacted(source)} is not finished; its model so far is used")
        if files.read_object(folder / files.PUBLISHED) != published:
            raise TryAgainError(f"{source} was replaced meanwhile; load it again")
        return _Opened(trained, folder, fingerprint, projection, saved_text_encoder(folder))


def _require_part(part: str, trained: TrainedModel) -> None:
    if part not in trained.spaces:
        names = " or ".join(trained.spaces)
        raise UserError(f"{part!r} is no embedding of this model; it must be {names}")


def _path_or_url(source: str | os.PathLike[str]) -> str | pathlib.Path:
    """The path or URL of a source; adds hf:// to OWNER/NAME if there is no folder OWNER."""
    if isinstance(source, os.PathLike):
        return pathlib.Path(source)
    if not isinstance(source, str):
        raise UserError(f"a run is named by its folder or URL, not by {source!r:.40}")
    path = pathlib.Path(source).expanduser()
    may_be_repository = "://" not in source and hub.is_name(hub.split(source)[0])
    if not may_be_repository or path.exists() or path.parent.exists():
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
    tokenizer: str | os.PathLike[str] | None = None,
    engine: Engine = "auto",
) -> Model:
    """Loads a trained model.

    Args:
        source: Folder of a run, its URL, a folder that `push` wrote, or a repository on the Hugging
            Face hub: 'hf://OWNER/NAME', or with a tag, branch or commit, 'hf://OWNER/NAME@v1'.
            'hf://' may be left out if there is no folder OWNER here. Or a model of images and texts
            by its authors (see `hypjax.models.language_image`): a file, its folder, its URL,
            'hf://OWNER/NAME' or 'hf://OWNER/NAME/FILE'. Or a pretrained encoder, compared by
            cosine: 'lite', 'dinov2', or timm's name of weights (docs/encoders.md).
        part: The embedding: "head", which the loss trained, "encoder", or a prefix like "head@16".
        batch_size: Largest number of images that are embedded at once; roundings may depend on this
            number. Default: the batch size of the run's evaluation.
        encoder: The module of a custom encoder.
        tokenizer: File or folder of the texts' tokenizer; by default the one in the weights'
            folder.
        engine: What embeds images on a CPU: "openvino" or "onnxruntime", faster than "jax"; "auto"
            is OpenVINO where it is installed. "jax:bfloat16" and "openvino:bfloat16" are faster on
            processors that multiply bfloat16.
    """
    is_name = isinstance(source, str) and is_encoder(source) and not os.path.exists(source)
    if is_name and encoder is None:
        if part not in ("head", "encoder") or tokenizer is not None:
            raise UserError(f"{source} is an encoder of images; give neither part= nor tokenizer=")
        return EncoderModel(str(source), batch_size=batch_size, engine=engine)
    path = _path_or_url(source)
    return Model(path, part, batch_size, encoder=encoder, tokenizer=tokenizer, engine=engine)
