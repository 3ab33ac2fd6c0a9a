"""Embeds images or texts with a trained run, a released model or another library's encoder."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from hypjax import command
from hypjax.catalogue import DatasetName, Engine
from hypjax.errors import UserError, counted, on_one_line


def main(
    *,
    workdir: str | None = None,
    external: command.EncoderFlags,
    images: str | None = None,
    exclude: list[str] | None = None,
    dataset: DatasetName | None = None,
    texts: str | None = None,
    template: list[str] | None = None,
    tokenizer: str | None = None,
    engine: Engine = "auto",
    data_dir: str | None = None,
    output: Annotated[pathlib.Path, command.ends_in(".npz")],
    embedding: str = "head",
    batch_size: command.Positive | None = None,
    export: list[str] | None = None,
    append: bool = False,
) -> None:
    """Embeds the images, or the texts, and writes the embeddings.

    Args:
        workdir: Folder of a trained run, or its URL; or weights of images and texts: a file, its
            folder or URL, hf://OWNER/NAME.
        external: An encoder instead of a run.
        images: A folder (its sub-folders are classes), a pattern such as 'photos/*.jpg', a .txt
            file with a path, or a path and a class, per line, a .csv or .parquet table (its columns
            may be named, as in 't.csv?path=file&label=kind'), a .zip or .tar.gz file of a folder, a
            dataset in Parquet, Arrow or tar files, hf://OWNER/NAME, or https://IMAGE.
        exclude: With --images: files and folders to leave out: a name such as thumbs, or an end of
            paths such as '*_small.jpg'; repeat the flag for several.
        dataset: A prepared dataset, instead of --images.
        texts: Instead of --images, with a model of images and texts: a file with a text in each
            line, or a .csv or .parquet table (its column may be named: 't.csv?caption=title').
        template: With --texts: a prompt such as 'a photo of a {}.'; repeat the flag to average
            several.
        tokenizer: With --texts: file or folder of the tokenizer. Default: in the weights' folder.
        data_dir: With --dataset: folder of prepared datasets. Default: ~/tensorflow_datasets.
        output: File to write, such as gallery.npz.
        embedding: With --workdir: head, encoder, or a scored prefix (head@16).
        batch_size: Number of images at once. Default: the run's, or 64.
        export: Another program's format to write as well, such as ann, faiss or parquet, or a
            URL, such as hf://OWNER/NAME or qdrant://host:6333/name; repeat the flag.
        append: Add the images to those in --output; only new and changed ones are embedded.
        engine: What runs an encoder of hypjax on a CPU; auto is OpenVINO where installed.

    Example:
        python -m hypjax.embed --workdir=runs/glyphs-hyp --images=letters/test
        --output=gallery.npz
    """
    command.require_one(images=images, dataset=dataset, texts=texts)
    command.require_one(workdir=workdir, encoder=external.encoder)
    from hypjax.data.opening import open_prepared
    from hypjax.data.photos import find_images
    from hypjax.data.texts import read_texts
    from hypjax.system.caches import keep_compiled_programs

    exports = _find_exports([name for value in export or () for name in value.split(",")])
    if texts:
        if append:
            raise UserError("--append is for images; embed all texts again")
        listed = read_texts(texts)
        model = external.open(workdir, embedding, batch_size, tokenizer=tokenizer, engine=engine)
        embeddings = model.embed_texts(listed, template or ())
        _save_texts(embeddings, output)
        return _export_and_report(output, embeddings, exports, existed=False)
    splits = dataset and open_prepared(dataset, data_dir)
    table = splits.images() if splits else find_images(str(images), exclude or ())
    keep_compiled_programs()
    model = external.open(workdir, embedding, batch_size, engine=engine)
    existed = output.exists() and not append
    embeddings = model.embed_to(output, table, append=append)
    _export_and_report(output, embeddings, exports, existed)


def _save_texts(embeddings: Any, output: pathlib.Path) -> None:
    """Writes embedded texts, unless the file holds other embeddings."""
    from hypjax.galleries.embeddings import Embeddings

    earlier = Embeddings.load(output) if output.exists() else embeddings
    origins = {(x.fingerprint, x.images_fingerprint) for x in (earlier, embeddings)}
    if len(origins) > 1:
        advice = "name another file, or remove it"
        raise UserError(f"{output} exists already and holds other embeddings; {advice}")
    embeddings.save(output)


def _find_exports(names: Sequence[str]) -> dict[str, Callable]:
    """Finds the functions that write exports, by name; refuses two names for one file."""
    from hypjax.galleries.embeddings import find_export

    programs = [name.partition(":")[0] for name in names if "://" not in name]
    if len(programs) > len(set(programs)):
        raise UserError(f"--export={','.join(names)} writes one file twice; export them apart")
    return {name: find_export(name) for name in names}


def _export_and_report(
    output: pathlib.Path, embeddings: Any, exports: dict[str, Any], existed: bool
) -> None:
    """Writes the exports; prints the files and the images that could not be read."""
    from hypjax.monitoring.health import warn_if_collapsed

    consequence = "searches find rounding errors; train again with a lower optim.learning_rate"
    warn_if_collapsed(embeddings.vectors, consequence)
    images = f"the embeddings of {counted(len(embeddings), embeddings.noun)}"
    done = f"{output} already holds {images}, so nothing was embedded"
    print(done if existed else f"wrote {images} to {output}")
    for name, export in exports.items():
        path = output.with_suffix(f".{name.partition(':')[0]}")
        print(f"exported them to {export(embeddings, path)}")
    if num_unreadable := len(embeddings.unreadable):
        print(f"could not read {counted(num_unreadable, 'image')}, also listed in the file:")
    for path, reason in embeddings.unreadable.items():
        print(f"  {on_one_line(path)} ({on_one_line(reason)})")


if __name__ == "__main__":
    command.run(main, resumes=True)
