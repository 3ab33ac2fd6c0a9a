"""Embeds images with a trained run, or with an encoder of another library."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from hypjax import command
from hypjax.errors import UserError, on_one_line

if TYPE_CHECKING:  # It imports JAX.
    from hypjax.retrieval.embeddings import Embeddings

EXAMPLE = "python -m hypjax.embed --workdir=runs/glyphs-hyp --images=letters/test --output=test.npz"
FLAGS = command.Flags()
_WORKDIR = FLAGS.string("workdir", None, "Folder of a trained run, or its URL.")
_ENCODER = FLAGS.encoders()
_IMAGES = FLAGS.string(
    "images",
    None,
    "A folder (its sub-folders are classes), a pattern such as 'photos/*.jpg', a .txt file with "
    "one path per line, a .csv or .parquet table, a dataset in Parquet, Arrow or tar files, or "
    "hf://OWNER/NAME.",
)
_DATASET = FLAGS.string(
    "dataset", None, "A prepared dataset, such as cub200 or glyphs, instead of --images."
)
_DATA_DIR = FLAGS.string("data_dir", None, "Folder of prepared datasets. Default: that of TFDS.")
_OUTPUT = FLAGS.string("output", None, "File to write, such as gallery.npz.")
_EMBEDDING = FLAGS.string(
    "embedding",
    "head",
    "Output of the run's trained head, of its encoder, or of a prefix that it scores (head@16).",
)
_BATCH_SIZE = FLAGS.integer(
    "batch_size", None, "Number of images at once. Default: the run's, or 64.", lower_bound=1
)
_EXPORT = FLAGS.strings(
    "export",
    [],
    "Additional format: usearch, qdrant, qdrant://host:6333/name or faiss:hnsw for an approximate "
    "search, faiss or parquet for other engines, dataset or hf://OWNER/NAME for a dataset of the "
    "Hugging Face hub, or hyperview, a viewer.",
)
_SHARD = FLAGS.string(
    "shard",
    None,
    "Part of the images to embed, such as 3/16, into a file of its own; then --merge.",
)
_MERGE = FLAGS.boolean("merge", False, "Join the parts of --shard, which needs no model.")


def main() -> None:
    """Embeds the images and writes the embeddings."""
    command.require(_OUTPUT)
    command.require_one(_IMAGES, _DATASET)
    if not _MERGE.value:
        command.require_one(_WORKDIR, _ENCODER.encoder)
    output = command.output_file(_OUTPUT, ".npz")
    if _MERGE.value and _SHARD.value:
        raise UserError("--merge joins all parts; leave out --shard")
    from hypjax.monitoring.health import warn_if_collapsed
    from hypjax.retrieval.gallery_files import find_export

    names = [name for value in _EXPORT.value for name in value.split(",")]
    exports = {name: find_export(name) for name in names}
    programs = [name.partition(":")[0] for name in names if "://" not in name]
    if len(programs) > len(set(programs)):
        raise UserError(f"--export={','.join(names)} writes one file twice; export them apart")
    output, embeddings = _embed(output)
    warn_if_collapsed(
        embeddings.vectors,
        "a search among them finds little but rounding; train again with a lower "
        "optim.learning_rate",
    )
    print(f"wrote the embeddings of {len(embeddings)} images to {output}")
    for name, export in exports.items():
        path = output.with_suffix(f".{name.partition(':')[0]}")
        print(f"exported them to {export(embeddings, path)}")
    if embeddings.unreadable:
        print(
            f"could not read {len(embeddings.unreadable)} of the images; the file lists them too:"
        )
        for path, reason in embeddings.unreadable.items():
            print(f"  {on_one_line(path)} ({on_one_line(reason)})")


def _embed(output: pathlib.Path) -> tuple[pathlib.Path, Embeddings]:
    """Embeds the images, or a part of them, or joins the parts; returns the file, too."""
    from hypjax.data.image_set import open_images
    from hypjax.inference.model import Model
    from hypjax.inference.partial_gallery import Shard, merge
    from hypjax.system.caches import keep_compiled_programs

    shard = Shard.parse(_SHARD.value) if _SHARD.value else None
    images = open_images(_IMAGES.value, _DATASET.value, _DATA_DIR.value)
    if _MERGE.value:
        return output, merge(output, images)
    keep_compiled_programs()
    if _WORKDIR.value:
        embedder = Model(_WORKDIR.value, _EMBEDDING.value, _BATCH_SIZE.value)
    else:
        embedder = _ENCODER.open(batch_size=_BATCH_SIZE.value)
    if shard:
        images, output = shard.of(images, embedder.batch_size), shard.path(output)
    return output, embedder.embed_to(output, images)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, resumes=True)
