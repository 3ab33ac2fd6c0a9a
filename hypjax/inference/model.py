"""A trained model in one line of Python: `hypjax.load`."""

import os
import pathlib
from collections.abc import Sequence

import flax.linen as nn
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from hypjax.data.photos import Given, given_photos
from hypjax.errors import UserError, require_package
from hypjax.geometry import Space
from hypjax.inference.embedder import Part, TrainedEmbedder
from hypjax.inference.hits import Hits, find_hits
from hypjax.inference.model_folder import describe
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.galleries import Gallery
from hypjax.retrieval.gallery_files import is_gallery, open_gallery
from hypjax.retrieval.refinement import Refinement
from hypjax.system import console, hub, integrations
from hypjax.system.caches import keep_compiled_programs

AnyImages = Given | Sequence[Given]


class Model:
    """A trained model, which embeds images and searches among them.

    Attributes:
        source: Where it was loaded from.
        config: The configuration of its run.
        space: Space of its embeddings.
        fingerprint: Hash of everything that embeddings depend on besides the images.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        part: Part = "head",
        batch_size: int | None = None,
        *,
        encoder: nn.Module | None = None,
    ) -> None:
        source = _located(source)
        keep_compiled_programs()
        self._embedder = TrainedEmbedder(source, part, batch_size, encoder)
        self.source, self.part = str(source), part
        self.config: ConfigDict = self._embedder.config
        self.space: Space = self._embedder.space
        self.fingerprint: str = self._embedder.fingerprint

    def embed(self, images: AnyImages) -> Float[np.ndarray, "images d"]:
        """Embeds images.

        Args:
            images: A path, an image of Pillow's, an array of pixels, or a sequence of these; see
                `hypjax.data.photos.given_photos`. A folder or a pattern stands for its images.

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
        return self._embedder.embed(given_photos(images))

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
            if not (self._embedder.takes_pixels or gallery.fingerprint == self.fingerprint):
                gallery = self.gallery(path)  # A file of features, which stand for images.
        elif not isinstance(gallery, Gallery):
            gallery = self.gallery(gallery)
        return find_hits(self._embedder, given_photos(query), gallery, k, refinement)

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
            require_package(package, "an ONNX file", "hypjax[onnx]")
        write = integrations.find("convert", "onnx")
        return str(write(self._embedder, pathlib.Path(path).expanduser(), precision))

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
    part: Part = "head",
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
    return Model(source, part, batch_size, encoder=encoder)
