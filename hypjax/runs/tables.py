"""Results as text: tables of scores, notes, learned scalars and the best step."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypjax.types import Recalls


def noted(notes: Sequence[str], repeats: Sequence[str] = ()) -> dict[str, list[str]]:
    """Returns the fields "notes" and "repeats" of results, without empty lists.

    Remarks on repeated images have their own field, since runs with such remarks are still
    compared with published results.
    """
    fields = {"notes": list(notes), "repeats": list(repeats)}
    return {name: texts for name, texts in fields.items() if texts}


def print_notes(results: Mapping[str, Any]) -> None:
    """Prints the notes in results, one per line, and the learned scalars."""
    for note in (*results.get("notes", ()), *results.get("repeats", ())):
        print(f"note: {note}")
    if learned := results.get("learned"):
        print(f"learned: {format_learned(learned)}")


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
    texts = []
    for part, scores in recalls.items():
        name, value = next(iter(scores.items()))
        texts.append(f"{part} {name} {value:.4f}")
    return ", ".join(texts)


def selection_metric(scores: Mapping[str, float]) -> str:
    """The metric that chooses among models: recall at the smallest K, or the first "medium/…"."""
    if recalls := [name for name in scores if name.startswith("recall@")]:
        return min(recalls, key=lambda name: int(name[7:]))
    return next((name for name in scores if "medium/" in name), next(iter(scores)))


def format_results(results: Mapping[str, Recalls]) -> str:
    """Formats a table with a row for each state and part; scores with ground truth come below."""
    by_class: dict[tuple[str, ...], dict[str, float]] = {}
    by_ground_truth: dict[tuple[str, ...], dict[str, float]] = {}
    for state, parts in results.items():
        for part, scores in parts.items():
            for name, value in scores.items():
                benchmark, _, metric = name.rpartition("/")
                if benchmark:  # Such as "roxford5k/easy".
                    label = state, part, *benchmark.split("/")
                    by_ground_truth.setdefault(label, {})[metric] = value
                else:
                    by_class.setdefault((state, part), {})[metric] = value
    return "\n".join(_table(rows) for rows in (by_class, by_ground_truth) if rows)


def _table(rows: Mapping[tuple[str, ...], Mapping[str, float]]) -> str:
    num_labels, metrics = len(next(iter(rows))), next(iter(rows.values()))
    head = ["", " " * 9, "", ""][:num_labels] + [f"{name:>11}" for name in metrics]
    cells = [[*label, *map("{:>11.4f}".format, row.values())] for label, row in rows.items()]
    return aligned([head, *cells], left=num_labels)


def aligned(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """Joins cells into lines of text; the first `left` columns are aligned left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
