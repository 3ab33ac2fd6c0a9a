"""Tables of recalls, and the notes that go with them."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypjax.types import Recalls


def noted(notes: Sequence[str]) -> dict[str, list[str]]:
    """The part of the results that holds their notes: {"notes": [...]}, or {} without notes."""
    return {"notes": list(notes)} if notes else {}


def print_notes(results: Mapping[str, Any]) -> None:
    """Prints the notes of results, one per line."""
    for note in results.get("notes", ()):
        print(f"note: {note}")


def format_recalls(recalls: Recalls) -> str:
    """Returns one line: 'head recall@1 0.7012, encoder recall@1 0.6543'."""
    first = {part: next(iter(values.items())) for part, values in recalls.items()}
    return ", ".join(f"{part} {name} {value:.4f}" for part, (name, value) in first.items())


def selecting(scores: Mapping[str, float]) -> str:
    """Returns the name of the score that selects among models: the recall at the smallest K."""
    return min((n for n in scores if n.startswith("recall@")), key=lambda n: int(n[7:]))


def format_results(results: Mapping[str, Recalls]) -> str:
    """Returns a table with one row for each state of the model and each of its embeddings.

    Args:
        results: {"untrained": {"head": {"recall@1": ...}, "encoder": ...}, "final": ...}.
    """
    rows = [
        (state, part, values) for state, parts in results.items() for part, values in parts.items()
    ]
    names = list(rows[0][2])
    width = max(len(state) for state, _, _ in rows)
    part_width = max(8, *(len(part) for _, part, _ in rows))
    lines = [" " * (width + part_width + 3) + "".join(f"{name:>13}" for name in names)]
    for state, part, values in rows:
        lines.append(
            f"{state:<{width}}  {part:<{part_width}} "
            + "".join(f"{values[n]:>13.4f}" for n in names)
        )
    return "\n".join(lines)
