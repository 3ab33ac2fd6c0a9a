"""Results as text: tables of scores, notes, learned scalars and the best step."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypjax.types import Recalls


def noted(notes: Sequence[str], repeats: Sequence[str] = ()) -> dict[str, list[str]]:
    """Returns the fields "notes" and "repeats" of results, without empty lists.

    "repeats" holds remarks on repeated images. Runs with "notes" are not compared with published
    results, but runs with only "repeats" are.
    """
    fields = {"notes": list(notes), "repeats": list(repeats)}
    return {name: remarks for name, remarks in fields.items() if remarks}


def beside_published(results: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Lists the published results of a run's experiment, see `papers.published.compare`.

    `fields` are the run's configuration by dotted name.

    The papers' tables lie beside the package, in a clone; without them, the list is empty.
    """
    try:
        from papers.published import compare
    except ImportError:
        return ""
    return compare(results, fields)


def print_notes(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Prints the notes in results, one per line, and the learned scalars; returns the results."""
    for note in (*results.get("notes", ()), *results.get("repeats", ())):
        print(f"note: {note}")
    if learned := results.get("learned"):
        print(f"learned: {format_learned(learned)}")
    return results


def format_learned(learned: Mapping[str, Mapping[str, float]]) -> str:
    """Formats learned scalars, by state of the model: 'c = 0.1 untrained, 0.3125 final'."""
    texts = []
    for name in dict.fromkeys(name for scalars in learned.values() for name in scalars):
        values = [f"{scalars[name]:.4g} {state}" for state, scalars in learned.items()]
        texts.append(f"{name} = {', '.join(values)}")
    return "; ".join(texts)


def format_best_step(results: Mapping[str, Any]) -> str:
    """Formats the step of the best model, and how many steps tied."""
    step, tied = results["best_step"], results.get("tied_steps", ())
    if tied:
        count = f"{len(tied)} steps from {tied[0]} to {step}"
        return f"step {step}; {count} tie on the validation images, the last is taken"
    before = "" if step else ", the model before training"
    return f"step {step}{before}, chosen on the validation images"


def format_recalls(recalls: Recalls) -> str:
    """Formats the first score of each part: 'head recall@1 0.7012, encoder recall@1 0.6543'."""
    firsts = {part: next(iter(scores.items())) for part, scores in recalls.items()}
    return ", ".join(f"{part} {name} {value:.4f}" for part, (name, value) in firsts.items())


def selection_metric(scores: Mapping[str, Any]) -> str:
    """The metric that chooses models: recall at the smallest K, else "medium/…", else the first.

    With captions, it is the mean average precision of images that texts search.
    """
    if "text_to_image/map" in scores:
        return "text_to_image/map"
    recalls = [name for name in scores if name.startswith("recall@")]
    if recalls:
        return min(recalls, key=lambda name: int(name.removeprefix("recall@")))
    return next((name for name in scores if "medium/" in name), next(iter(scores)))


def format_results(results: Mapping[str, Recalls]) -> str:
    """Formats a table with a row for each state and part; scores with ground truth come below."""
    # Scores by metric, by the row's label.
    rows_by_class: dict[tuple[str, ...], dict[str, float]] = {}
    rows_by_ground_truth: dict[tuple[str, ...], dict[str, float]] = {}
    for state, parts in results.items():
        for part, scores in parts.items():
            for name, value in scores.items():
                *benchmark, metric = name.split("/")  # Such as roxford5k/easy/map.
                rows = rows_by_ground_truth if benchmark else rows_by_class
                rows.setdefault((state, part, *benchmark), {})[metric] = value
    return "\n".join(_table(rows) for rows in (rows_by_class, rows_by_ground_truth) if rows)


def _table(scores_by_label: Mapping[tuple[str, ...], Mapping[str, float]]) -> str:
    first_label = next(iter(scores_by_label))
    metrics = dict.fromkeys(name for scores in scores_by_label.values() for name in scores)
    no_labels = ["", " " * 9, "", ""][: len(first_label)]  # All tables give 9 characters to parts.
    rows = [[*no_labels, *map("{:>11}".format, metrics)]]
    for label, scores in scores_by_label.items():
        cells = (f"{scores[x]:>11.4f}" if x in scores else "" for x in metrics)
        rows.append([*label, *cells])
    return aligned(rows, left=len(first_label))


def aligned(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """Joins cells into lines of text; the first `left` columns are aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in rows)
