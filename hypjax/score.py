"""Scores embeddings of any model: Recall@K, MAP@R, R-precision, mAP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypjax import command
from hypjax.errors import UserError

if TYPE_CHECKING:  # They import JAX.
    from hypjax.geometry import Space
    from hypjax.inference.scoring import EmbeddedTask

EXAMPLE = "python -m hypjax.score --embeddings=gallery.npz"
FLAGS = command.Flags()
_EMBEDDINGS = FLAGS.string(
    "embeddings",
    None,
    "File of features or of embeddings: .npz, with the arrays features and labels; .npy, with "
    "--labels; .parquet; or one that python -m hypjax.embed wrote.",
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
_KS = FLAGS.words("ks", ["1", "2", "4", "8", "10", "100", "1000"], "The K of Recall@K.")
_METRICS = FLAGS.words(
    "metrics",
    [],
    "recall, precision and mp (each at --ks), mrr, map@r, r_precision, map. Default: recall, map@r "
    "and r_precision; with a ground truth map.",
)
_OUTPUT = FLAGS.string("output", None, "File to write the scores to, such as scores.json.")


def main(overrides: list[str]) -> None:
    """Prints the scores and their intervals, and writes them."""
    command.require(_EMBEDDINGS)
    command.refuse_overrides(overrides)
    output = command.output_file(_OUTPUT, ".json") if _OUTPUT.value else None
    if not all(k.isdecimal() and int(k) for k in _KS.value):
        raise UserError(f"--ks is {','.join(_KS.value)}; it must list whole numbers above 0")
    import numpy as np

    from hypjax.inference import scoring
    from hypjax.retrieval.embeddings import describe_space
    from hypjax.retrieval.metrics import metric_names
    from hypjax.runs.tables import aligned
    from hypjax.system import console

    task = _task()
    radii = np.einsum("nd,nd->n", task.queries.vectors, task.queries.vectors)
    if _SPACE.value == "ball" and radii.min() > (1 - 1e-5) * radii.max():
        console.say(
            f"all features are longer than --clip_radius={_CLIP_RADIUS.value:g}, so the ball ranks "
            "them as the sphere does"
        )
    items = len(task.gallery or task.queries) - (task.gallery is None)
    ks = [int(k) for k in _KS.value if int(k) < items] or [1]
    usual = ["recall", "map@r", "r_precision"] if task.judgements is None else ["map"]
    metrics = metric_names(_METRICS.value or usual, ks)
    found = scoring.summary(scoring.score(task, metrics))
    print(f"{task}, in {task.space}:")
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
            "space": describe_space(task.space),
        }
        command.write_numbers(output, numbers)


def _task() -> EmbeddedTask:
    from hypjax.data.ground_truth import read_ground_truth
    from hypjax.inference.scoring import task_of
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    judged = read_ground_truth(_GROUND_TRUTH.value) if _GROUND_TRUTH.value else None
    space, queries = _space(), None
    how = {"space": space, "keep_features": False}
    embeddings = Embeddings.load(_EMBEDDINGS.value, labels=_LABELS.value, **how)
    if _QUERIES.value:
        queries = Embeddings.load(_QUERIES.value, labels=_QUERY_LABELS.value, **how)
    return task_of(embeddings, queries, judged)


def _space() -> Space | None:
    from hypjax.geometry import PoincareBall, Sphere

    if _SPACE.value == "ball":
        return PoincareBall(_C.value, _CLIP_RADIUS.value or None)
    if _SPACE.value == "euclidean":  # The flat ball: distances are twice the Euclidean ones.
        return PoincareBall(0.0, None)
    return Sphere() if _SPACE.value else None


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
