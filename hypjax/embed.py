"""Embeds images with a trained run.

python -m hypjax.embed --workdir=runs/a --images=photos/ --output=gallery.npz
"""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a trained run, or its URL.")
_IMAGES = flags.DEFINE_string(
    "images",
    None,
    "A folder (its sub-folders are classes), a pattern such as 'photos/*.jpg', a .txt file with a "
    "path a line, or a .csv or .parquet table.",
)
_OUTPUT = flags.DEFINE_string("output", None, "File to write, such as gallery.npz.")
_EMBEDDING = flags.DEFINE_enum(
    "embedding", "head", ["head", "encoder"], "What the loss trained, or the encoder's output."
)
_EXPORT = flags.DEFINE_multi_string(
    "export", [], "Another form to write beside it, for other search engines: faiss, or parquet."
)


def main(overrides: list[str]) -> None:
    """Embeds the images."""
    command.require("workdir", "images", "output")
    command.refuse_overrides(overrides)
    output = pathlib.Path(_OUTPUT.value).expanduser()
    if output.suffix != ".npz":
        raise UserError(f"--output is {output}; its name must end in .npz")
    from hypjax.data.photos import find_photos
    from hypjax.inference.embedder import TrainedEmbedder
    from hypjax.retrieval.embeddings import EXPORTS, require_faiss
    from hypjax.system.caches import keep_compiled_programs

    exports = [kind for value in _EXPORT.value for kind in value.split(",")]
    for kind in exports:
        if kind not in EXPORTS:
            raise UserError(f"--export={kind} is unknown; there are {', '.join(EXPORTS)}")
    if "faiss" in exports:
        require_faiss()
    keep_compiled_programs()
    photos = find_photos(_IMAGES.value)
    embedder = TrainedEmbedder(_WORKDIR.value, _EMBEDDING.value)
    embeddings = embedder.embed_to(output, photos)
    print(f"{len(embeddings)} images are in {output}")
    for kind in exports:
        path = output.with_suffix(f".{kind}")
        EXPORTS[kind](embeddings, path)
        print(f"and, for other engines, in {path}")
    if embeddings.unreadable:
        print(f"{len(embeddings.unreadable)} could not be read, and are listed in the file:")
        for path, reason in embeddings.unreadable.items():
            print(f"  {path} ({reason})")


if __name__ == "__main__":
    command.run(main)
