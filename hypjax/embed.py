"""Embeds images with a trained run."""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = "python -m hypjax.embed --workdir=runs/glyphs-hyp --images=letters/test --output=test.npz"
FLAGS = flags.FlagValues()
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of a trained run, or its URL.", flag_values=FLAGS
)
_IMAGES = flags.DEFINE_string(
    "images",
    None,
    "A folder (its sub-folders are classes), a pattern such as 'photos/*.jpg', a .txt file with "
    "one path per line, or a .csv or .parquet table.",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "File to write, such as gallery.npz.", flag_values=FLAGS
)
_EMBEDDING = flags.DEFINE_enum(
    "embedding",
    "head",
    ["head", "encoder"],
    "Output of the trained head, or of the encoder.",
    flag_values=FLAGS,
)
_EXPORT = flags.DEFINE_multi_string(
    "export",
    [],
    "Additional format: usearch for an approximate search, faiss or parquet for other engines, or "
    "hyperview, a viewer.",
    flag_values=FLAGS,
)


def main(overrides: list[str]) -> None:
    """Embeds the images and writes the embeddings."""
    command.require(_WORKDIR, _IMAGES, _OUTPUT)
    command.refuse_overrides(overrides)
    output = pathlib.Path(_OUTPUT.value).expanduser()
    if output.suffix != ".npz":
        raise UserError(f"--output is {output}; its name must end in .npz")
    from hypjax.data.photos import find_photos
    from hypjax.inference.embedder import TrainedEmbedder
    from hypjax.monitoring.health import warn_if_collapsed
    from hypjax.retrieval.exports import EXPORTS
    from hypjax.system.caches import keep_compiled_programs

    exports = [kind for value in _EXPORT.value for kind in value.split(",")]
    for kind in exports:
        if kind not in EXPORTS:
            raise UserError(f"--export={kind} is unknown; it must be one of {', '.join(EXPORTS)}")
        EXPORTS[kind].require()
    keep_compiled_programs()
    photos = find_photos(_IMAGES.value)
    embedder = TrainedEmbedder(_WORKDIR.value, _EMBEDDING.value)
    embeddings = embedder.embed_to(output, photos)
    warn_if_collapsed(
        embeddings.vectors,
        "a search among them finds little but rounding; train again with a lower "
        "optim.learning_rate",
    )
    print(f"wrote the embeddings of {len(embeddings)} images to {output}")
    for kind in exports:
        print(f"exported them to {EXPORTS[kind].write(embeddings, output.with_suffix(f'.{kind}'))}")
    if embeddings.unreadable:
        print(f"{len(embeddings.unreadable)} images could not be read; the file lists them too:")
        for path, reason in embeddings.unreadable.items():
            print(f"  {path} ({reason})")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
