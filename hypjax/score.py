"""Scores embeddings of any model, or encoders: Recall@K, MAP@R, R-precision, mAP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypjax import command
from hypjax.errors import UserError

if TYPE_CHECKING:  # They import JAX.
    from hypjax.data.parts import Splits, Task
    from hypjax.geometry import Space
    from hypjax.retrieval.embeddings import Embeddings

EXAMPLE = "python -m hypjax.score --embeddings=gallery.npz"
FLAGS = command.Flags()
_EMBEDDINGS = FLAGS.string(
    "embeddings",
    None,
    "File of features or of embeddings: .npz, with the arrays features and labels; .npy, with "
    "--labels; .parquet; or one that python -m hypjax.embed wrote. With --encoder, the file to "
    "write, or to resume.",
)
_ENCODER = FLAGS.encoders()
_IMAGES = FLAGS.string(
    "images", None, "Images to score --encoder on, as for python -m hypjax.embed."
)
_DATASET = FLAGS.string(
    "dataset",
    None,
    "Prepared dataset, such as cub200 or roxford5k, to score --encoder on; or that of the images "
    "in --embeddings, which is needed if its queries are judged.",
)
_DATA_DIR = FLAGS.string("data_dir", None, "Folder of prepared datasets. Default: that of TFDS.")
_BATCH_SIZE = FLAGS.integer(
    "batch_size",
    None,
    "Number of images that --encoder embeds at once. Default: 64.",
    lower_bound=1,
)
_LABELS = FLAGS.string(
    "labels", None, "File with their classes: .npy, or .txt with one on each line."
)
_QUERIES = FLAGS.string(
    "queries", None, "File of queries, which search --embeddings. Default: these search each other."
)
_QUERY_LABELS = FLAGS.string("query_labels", None, "File with the classes of --queries.")
_GROUND_TRUTH = FLAGS.string(
    "ground_truth",
    None,
    "What each query should find, instead of its class: a file of Revisited Oxford or Paris, such "
    "as gnd_roxford5k.pkl.",
)
_SPACE = FLAGS.enum(
    "space",
    None,
    ["sphere", "ball", "euclidean"],
    "Space to compare features in: sphere is by cosine. Default: that of the file, or sphere.",
)
_C = FLAGS.number("c", 0.1, "ball: the curvature is -c.", lower_bound=0)
_CLIP_RADIUS = FLAGS.number(
    "clip_radius", 2.3, "ball: norm to which features are clipped; 0 for none.", lower_bound=0
)
_PREFIX = FLAGS.integer(
    "prefix", None, "Score the first N dimensions of the features alone.", lower_bound=1
)
_KS = FLAGS.numbers(
    "ks", [1, 2, 4, 8, 10, 100, 1000], "The K of Recall@K, below the number of items.", int
)
_METRICS = FLAGS.words(
    "metrics",
    [],
    "recall, precision and mp (each at --ks), mrr, map@r, r_precision, map. Default: recall, map@r "
    "and r_precision; with a ground truth map.",
)
_OUTPUT = FLAGS.string("output", None, "File to write the scores to, such as scores.json.")


def main() -> None:
    """Prints the scores and their intervals, and writes them."""
    _check_flags()
    output = command.output_file(_OUTPUT, ".json") if _OUTPUT.value else None
    from hypjax.geometry.registry import describe_space
    from hypjax.inference import scoring
    from hypjax.retrieval.metrics import metric_names
    from hypjax.runs.tables import aligned
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    task = _task()
    if _PREFIX.value:
        short = [part and part.prefix(_PREFIX.value) for part in task[:2]]
        task = task._replace(queries=short[0], gallery=short[1])
    ks = [k for k in _KS.value if k < task.items] or [1]
    usual = ["recall", "map@r", "r_precision"] if task.judgements is None else ["map"]
    metrics = metric_names(_METRICS.value or usual, ks)
    found = scoring.summary(scoring.score(task, metrics))
    if missing := max(len(part.unreadable) for part in task[:2] if part):
        console.say(f"{missing} of the images could not be read, and are left out")
    space = task.queries.space
    of = "" if task.judgements else f" of {len(set(task.queries.labels.tolist())):,} classes"
    among = "among themselves" if task.gallery is None else f"among {len(task.gallery):,}"
    where = "Euclidean space" if _SPACE.value == "euclidean" else space
    print(f"{len(task.queries):,} queries{of} {among}, in {where}:")
    rows = [
        (name, "", f"{each['mean']:.4f}", "{:.4f} to {:.4f}".format(*each["interval"]))
        for name, each in found.items()
    ]
    print(aligned([("", "", "mean", "95% interval over queries"), *rows]))
    if output:
        numbers = {
            **{name: each["mean"] for name, each in found.items()},
            "intervals": {name: each["interval"] for name, each in found.items()},
            "queries": len(task.queries),
            "items": len(task.gallery or task.queries),
            "space": describe_space(space),
        }
        command.write_numbers(output, numbers)


def _check_flags() -> None:
    if not _ENCODER.encoder.value:
        command.require(_EMBEDDINGS)
        if _IMAGES.value:
            raise UserError("--images are embedded by --encoder; give that flag, too")
        if _DATASET.value and _QUERIES.value:
            raise UserError("the queries of --dataset are in --embeddings; leave out --queries")
        return
    command.require_one(_IMAGES, _DATASET)
    for flag in (_LABELS, _QUERIES, _QUERY_LABELS, _GROUND_TRUTH):
        if flag.value:
            raise UserError(f"--{flag.name} belongs to --embeddings; leave out --encoder")


def _task() -> Task[Embeddings]:
    from hypjax.data.ground_truth import read_ground_truth
    from hypjax.data.image_set import open_prepared
    from hypjax.inference.scoring import require_images, task_of
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.system import console

    truth = read_ground_truth(_GROUND_TRUTH.value) if _GROUND_TRUTH.value else None
    queries, space = None, _space()
    splits = open_prepared(_DATASET.value, _DATA_DIR.value) if _DATASET.value else None
    for note in splits.notes if splits else ():
        console.say(note)
    if _ENCODER.encoder.value:
        embeddings = _embedded(splits)
    else:
        embeddings = Embeddings.load(_EMBEDDINGS.value, space, labels=_LABELS.value)
        if splits:
            require_images(embeddings, splits)
    if _QUERIES.value:
        queries = Embeddings.load(_QUERIES.value, space, labels=_QUERY_LABELS.value)
    return task_of(embeddings, queries, truth, splits.judgements if splits else None)


def _embedded(splits: Splits | None) -> Embeddings:
    """What --encoder makes of the images: all of them in a file, or those that are scored."""
    from hypjax.data.image_set import images_of_splits, open_images
    from hypjax.retrieval.embeddings import Embeddings

    if not _EMBEDDINGS.value:
        images = images_of_splits(splits, scored=True) if splits else open_images(_IMAGES.value)
        return _ENCODER.open(_space(), _BATCH_SIZE.value).embed_images(images)
    file = command.output_file(_EMBEDDINGS, ".npz")
    images = images_of_splits(splits) if splits else open_images(_IMAGES.value)
    _ENCODER.open(batch_size=_BATCH_SIZE.value).embed_to(file, images)
    return Embeddings.load(file, _space())


def _space() -> Space | None:
    from hypjax.geometry import PoincareBall, Sphere

    if _SPACE.value == "ball":
        return PoincareBall(_C.value, _CLIP_RADIUS.value or None)
    if _SPACE.value == "euclidean":  # The flat ball: distances are twice the Euclidean ones.
        return PoincareBall(0.0, None)
    return Sphere() if _SPACE.value else None


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
