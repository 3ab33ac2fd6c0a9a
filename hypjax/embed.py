"""Embeds images with a trained run, or with an encoder of another library."""

import pathlib
from typing import Any

from hypjax import command
from hypjax.errors import UserError, on_one_line

EXAMPLE = "python -m hypjax.embed --workdir=runs/glyphs-hyp --images=letters/test --output=test.npz"
FLAGS = command.Flags(
    workdir=command.RUN,
    **command.ENCODER,
    images=command.string(
        "A folder (its sub-folders are classes), a pattern such as 'photos/*.jpg', a .txt file "
        "with one path per line, a .csv or .parquet table, a dataset in Parquet, Arrow or tar "
        "files, or hf://OWNER/NAME."
    ),
    dataset=command.string("A prepared dataset, such as cub200 or glyphs, instead of --images."),
    data_dir=command.DATA_DIR,
    output=command.string("File to write, such as gallery.npz."),
    embedding=command.string(
        "Output of the run's trained head, of its encoder, or of a prefix that it scores "
        "(head@16).",
        "head",
    ),
    batch_size=command.positive("Number of images at once. Default: the run's, or 64."),
    export=command.strings(
        "Additional format: usearch, qdrant, qdrant://host:6333/name or faiss:hnsw for an "
        "approximate search, faiss or parquet for other engines, dataset or hf://OWNER/NAME for a "
        "dataset of the Hugging Face hub, or hyperview, a viewer."
    ),
    shard=command.string(
        "Part of the images to embed, such as 3/16, into a file of its own; then --merge."
    ),
    merge=command.boolean("Join the parts of --shard, which needs no model."),
)


def main() -> None:
    """Embeds the images and writes the embeddings."""
    FLAGS.require("output")
    FLAGS.require_one("images", "dataset")
    if not FLAGS.merge:
        FLAGS.require_one("workdir", "encoder")
    elif FLAGS.shard:
        raise UserError("--merge joins all parts; leave out --shard")
    output = FLAGS.output_file("output", ".npz")
    from hypjax.monitoring.health import warn_if_collapsed
    from hypjax.retrieval.embeddings import find_export

    names = [name for value in FLAGS.export for name in value.split(",")]
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


def _embed(output: pathlib.Path) -> tuple[pathlib.Path, Any]:
    """Embeds the images, or a part of them, or joins parts; returns the file and `Embeddings`."""
    from hypjax.data.photos import find_images
    from hypjax.data.splits import open_prepared
    from hypjax.inference.image_embedder import Shard, merge
    from hypjax.system.caches import keep_compiled_programs

    shard = Shard.parse(FLAGS.shard) if FLAGS.shard else None
    dataset = FLAGS.dataset and open_prepared(FLAGS.dataset, FLAGS.data_dir)
    images = dataset.images() if dataset else find_images(FLAGS.images)
    if FLAGS.merge:
        return output, merge(output, images)
    keep_compiled_programs()
    embedder = FLAGS.open_embedder(batch_size=FLAGS.batch_size)
    if shard:
        images, output = shard.of(images, embedder.batch_size), shard.path(output)
    return output, embedder.embed_to(output, images)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, resumes=True)
