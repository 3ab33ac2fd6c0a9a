"""Scores embeddings of any model, or encoders: Recall@K, MAP@R, R-precision, mAP."""

from typing import Any

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = "python -m hypjax.score --embeddings=gallery.npz"
FLAGS = command.Flags(
    embeddings=command.string(
        "File of features or of embeddings: .npz, with the arrays features and labels; .npy, with "
        "--labels; .parquet; or one that python -m hypjax.embed wrote. With --encoder, the file to "
        "write, or to resume."
    ),
    **command.ENCODER,
    images=command.string("Images to score --encoder on, as for python -m hypjax.embed."),
    dataset=command.string(
        "Prepared dataset, such as cub200 or roxford5k, to score --encoder on; or that of the "
        "images in --embeddings, which is needed if its queries are judged."
    ),
    data_dir=command.DATA_DIR,
    batch_size=command.positive("Number of images that --encoder embeds at once. Default: 64."),
    labels=command.string("File with their classes: .npy, or .txt with one on each line."),
    queries=command.string(
        "File of queries, which search --embeddings. Default: these search each other."
    ),
    query_labels=command.string("File with the classes of --queries."),
    ground_truth=command.string(
        "What each query should find, instead of its class: a file of Revisited Oxford or Paris, "
        "such as gnd_roxford5k.pkl."
    ),
    space=command.enum(
        "Space to compare features in: sphere is by cosine. Default: that of the file, or sphere.",
        enum_values=["sphere", "ball", "euclidean"],
    ),
    c=command.number("ball: the curvature is -c.", 0.1, lower_bound=0),
    clip_radius=command.number(
        "ball: norm to which features are clipped; 0 for none.", 2.3, lower_bound=0
    ),
    prefix=command.positive("Score the first N dimensions of the features alone."),
    ks=command.integer_list(
        "The K of Recall@K, below the number of items.", [1, 2, 4, 8, 10, 100, 1000]
    ),
    metrics=command.words(
        "recall, precision and mp (each at --ks), mrr, map@r, r_precision, map. Default: recall, "
        "map@r and r_precision; with a ground truth map."
    ),
    output=command.string("File to write the scores to, such as scores.json."),
)


def main() -> None:
    """Prints the scores and their intervals, and writes them."""
    _check_flags()
    output = FLAGS.output_file("output", ".json")
    from hypjax.geometry.registry import describe_space
    from hypjax.inference import scoring
    from hypjax.retrieval.metrics import metric_names
    from hypjax.runs.tables import aligned
    from hypjax.system import caches, console

    caches.keep_compiled_programs()
    task = _task()
    if FLAGS.prefix:
        queries, gallery = (part and part.prefix(FLAGS.prefix) for part in task[:2])
        task = task._replace(queries=queries, gallery=gallery)
    ks = [k for k in FLAGS.ks if k < task.num_items] or [1]
    usual = ["recall", "map@r", "r_precision"] if task.judgements is None else ["map"]
    metrics = metric_names(FLAGS.metrics or usual, ks)
    scores = scoring.score(task, metrics)
    if missing := max(len(part.unreadable) for part in task[:2] if part):
        console.say(f"{missing} of the images could not be read, and are left out")
    space = task.queries.space
    of = "" if task.judgements else f" of {len(set(task.queries.labels.tolist())):,} classes"
    among = "among themselves" if task.gallery is None else f"among {len(task.gallery):,}"
    where = "Euclidean space" if FLAGS.space == "euclidean" else space
    print(f"{len(task.queries):,} queries{of} {among}, in {where}:")
    rows = [
        (name, "", f"{score['mean']:.4f}", "{:.4f} to {:.4f}".format(*score["interval"]))
        for name, score in scores.items()
    ]
    print(aligned([("", "", "mean", "95% interval over queries"), *rows]))
    if output:
        numbers = {
            **{name: score["mean"] for name, score in scores.items()},
            "intervals": {name: score["interval"] for name, score in scores.items()},
            "queries": len(task.queries),
            "items": len(task.gallery or task.queries),
            "space": describe_space(space),
        }
        command.write_numbers(output, numbers)


def _check_flags() -> None:
    if not FLAGS.encoder:
        FLAGS.require("embeddings")
        if FLAGS.images:
            raise UserError("--images are embedded by --encoder; give that flag, too")
        if FLAGS.dataset and FLAGS.queries:
            raise UserError("the queries of --dataset are in --embeddings; leave out --queries")
        return
    FLAGS.require_one("images", "dataset")
    for flag in ("labels", "queries", "query_labels", "ground_truth"):
        if FLAGS[flag].value:
            raise UserError(f"--{flag} belongs to --embeddings; leave out --encoder")


def _task() -> Any:
    """The `Task` of the flags, with embeddings."""
    from hypjax.data.ground_truth import read_ground_truth
    from hypjax.data.splits import open_prepared
    from hypjax.inference.scoring import require_images, task_of
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.system import console

    truth = FLAGS.ground_truth and read_ground_truth(FLAGS.ground_truth)
    splits = FLAGS.dataset and open_prepared(FLAGS.dataset, FLAGS.data_dir)
    for note in splits.notes if splits else ():
        console.say(note)
    queries, space = None, _space()
    if FLAGS.encoder:
        embeddings = _embedded(splits, space)
    else:
        embeddings = Embeddings.load(FLAGS.embeddings, space, labels=FLAGS.labels)
        if splits:
            require_images(embeddings, splits)
    if FLAGS.queries:
        queries = Embeddings.load(FLAGS.queries, space, labels=FLAGS.query_labels)
    return task_of(embeddings, queries, truth, splits.judgements if splits else None)


def _embedded(splits: Any, space: Any) -> Any:
    """Embeds images with --encoder: all of them into a file, or only those that are scored."""
    from hypjax.data.photos import find_images
    from hypjax.retrieval.embeddings import Embeddings

    file = FLAGS.output_file("embeddings", ".npz")
    images = splits.images(scored=not file) if splits else find_images(FLAGS.images)
    embedder = FLAGS.open_embedder(None if file else space, FLAGS.batch_size)
    if not file:
        return embedder.embed_images(images)
    embedder.embed_to(file, images)
    return Embeddings.load(file, space)


def _space() -> Any:
    from hypjax.geometry import PoincareBall, Sphere

    spaces = {"sphere": Sphere(), "ball": PoincareBall(FLAGS.c, FLAGS.clip_radius or None)}
    # The flat ball: distances are twice the Euclidean ones.
    return (spaces | {"euclidean": PoincareBall(0.0, None)}).get(FLAGS.space)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
