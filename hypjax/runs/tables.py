"""Tables of recalls, and the notes that go with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypjax.types import Recalls


def noted(notes: Sequence[str], repeats: Sequence[str] = ()) -> dict[str, list[str]]:
    """The fields "notes" and "repeats" of results, without empty ones.

    Repeated images are apart, since they do not prevent a comparison with published results.
    """
    fields = {"notes": list(notes), "repeats": list(repeats)}
    return {name: texts for name, texts in fields.items() if texts}


def print_notes(results: Mapping[str, Any]) -> None:
    """Prints the notes of results, one per line, and the learned scalars."""
    for note in (*results.get("notes", ()), *results.get("repeats", ())):
        print(f"note: {note}")
    if learned := results.get("learned"):
        print(f"learned: {format_learned(learned)}")


def format_learned(learned: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the learned scalars by state of a model: 'c = 0.1 untrained, 0.3125 final'."""
    names = dict.fromkeys(name for scalars in learned.values() for name in scalars)
    lists = {n: ", ".join(f"{x[n]:.4g} {state}" for state, x in learned.items()) for n in names}
    return "; ".join(f"{name} = {values}" for name, values in lists.items())


def format_best_step(results: Mapping[str, Any]) -> str:
    """Returns the step of the best model, and whether it was chosen or tied."""
    step, tied = results["best_step"], results.get("tied_steps", ())
    if tied:
        count = f"{len(tied)} steps from {tied[0]} to {step}"
        return f"step {step}; {count} tie on the validation images, the last is taken"
    before = "" if step else ", the model before training"
    return f"step {step}{before}, chosen on the validation images"


def format_recalls(recalls: Recalls) -> str:
    """Returns one line: 'head recall@1 0.7012, encoder recall@1 0.6543'."""
    first = [(part, *next(iter(values.items()))) for part, values in recalls.items()]
    return ", ".join(f"{part} {name} {value:.4f}" for part, name, value in first)


def selecting(scores: Mapping[str, float]) -> str:
    """The score that selects among models: recall at the smallest K, or the first "medium/..."."""
    if recalls := [name for name in scores if name.startswith("recall@")]:
        return min(recalls, key=lambda name: int(name[7:]))
    return next((name for name in scores if "medium/" in name), next(iter(scores)))


def format_results(results: Mapping[str, Recalls]) -> str:
    """Returns a table with a row for each state and part; datasets with ground truth come below."""
    rows: dict[bool, dict[tuple[str, ...], dict[str, float]]] = {False: {}, True: {}}
    for state, parts in results.items():
        for part, scores in parts.items():
            for name, value in scores.items():
                level, _, metric = name.rpartition("/")
                label = state, part, *(level.split("/") if level else ())
                rows[bool(level)].setdefault(label, {})[metric] = value
    return "\n".join(map(_table, filter(None, rows.values())))


def _table(rows: Mapping[tuple[str, ...], Mapping[str, float]]) -> str:
    labels, names = len(next(iter(rows))), next(iter(rows.values()))
    head = ["", " " * 9, "", ""][:labels] + [f"{name:>11}" for name in names]
    cells = [[*label, *map("{:>11.4f}".format, row.values())] for label, row in rows.items()]
    return aligned([head, *cells], left=labels)


def aligned(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """Aligns the first columns to the left, and the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    forms = [f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(forms).format(*row).rstrip() for row in rows)
