"""The papers' tables with our values beside the published values, and commands to compute ours.

A table is named by the first two columns of `published.csv`, as in `hyp-vit-3`.
"""

import csv
import io
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hypjax.config import default_workdir, load_config, read_config
from hypjax.errors import UserError, similar
from hypjax.runs.files import RESULTS, read_object
from hypjax.runs.tables import aligned
from papers.published import Row, published_rows

FOLDER = pathlib.Path("runs/papers")  # Scores of evaluations, which write none to a run's folder.
_DELTA = "relative_delta"

Scores = Mapping[str, float]
Rows = Mapping[Row, Scores]


class Cell(NamedTuple):
    """A published value and ours, in percent except for the relative δ."""

    row: Row
    metric: str  # Without the dataset's name.
    published: float
    ours: float | None  # None until the run has finished.
    notes: tuple[str, ...]  # Why ours is another experiment, such as a partial copy of a dataset.

    def numbers(self) -> list[str]:
        """The published value, ours and the signed difference; without ours, these two are ''."""
        digits = 3 if self.metric == _DELTA else 1  # As in the papers.
        if self.ours is None:
            return [f"{self.published:.{digits}f}", "", ""]
        difference = round(self.ours - self.published, digits) + 0.0  # No -0.0.
        values = [f"{value:.{digits}f}" for value in (self.published, self.ours)]
        return [*values, f"{difference:+.{digits}f}"]

    def __str__(self) -> str:
        """The values, as in '80.9, ours 80.5 (-0.4)'; an asterisk refers to notes."""
        published, ours, difference = self.numbers()
        mark = "*" if self.notes else ""
        return f"{published}, ours {ours}{mark} ({difference})" if ours else published


def rows_of(table: str, names: Sequence[str]) -> Rows:
    """The named rows of a table with their published values; by default all rows.

    A name selects the rows whose name or dataset has all its words: 'Hyp-DINO 384-d cub200'.
    """
    tables: dict[str, dict[Row, Scores]] = {}
    for row, scores in published_rows().items():
        tables.setdefault(f"{row.paper}-{row.table}", {})[row] = scores
    if table not in tables:
        raise UserError(f"no table is {table!r}: {', '.join(tables)}{similar(table, tables)}")
    rows = tables[table]
    if not names:
        return rows

    def words(name: str) -> set[str]:
        return {*name.lower().replace(",", " ").split()}

    chosen = set()
    for name in names:
        matching = {row for row in rows if words(name) <= words(f"{row.name} {row.dataset}")}
        if not matching:
            methods = ", ".join(dict.fromkeys(row.method for row in rows))
            raise UserError(f"no row of {table} is {name!r}; its methods are {methods}")
        chosen |= matching
    return {row: scores for row, scores in rows.items() if row in chosen}


def commands(row: Row, metrics: Scores, overrides: Sequence[str]) -> dict[str, pathlib.Path]:
    """Returns the commands that compute a row's scores, each with its output file.

    The last file holds the row's values. A PCA, and other fields of the evaluation, are set only
    when the trained run is evaluated.
    """
    spec, fields = f"configs/{row.run}", row.fields.split()
    training_fields = [field for field in fields if not field.startswith("eval.")]

    def workdir(fields: Sequence[str]) -> str:
        return default_workdir(load_config(spec, [*fields, *overrides]), read_config(spec))

    def command(module: str, fields: Sequence[str], *flags: str) -> str:
        settings = (f"--config.{field}" for field in (*fields, *overrides))
        arguments = ["python", "-m", f"hypjax.{module}", f"--config={spec}", *settings, *flags]
        return shlex.join(arguments)

    kind = "delta" if _DELTA in metrics else row.state
    output = FOLDER / f"{pathlib.Path(workdir(fields)).name}-{kind}.json"
    if kind == "delta":
        return {command("hyperbolicity", fields, f"--output={output}"): output}
    evaluate_flags = f"--output={output}", "--mode=evaluate"
    if kind == "pretrained":
        return {command("main", fields, *evaluate_flags): output}
    folder = workdir(training_fields)
    outputs = {command("main", training_fields): pathlib.Path(folder) / RESULTS}
    if training_fields != fields:
        outputs[command("main", fields, *evaluate_flags, f"--workdir={folder}")] = output
    return outputs


def pending(rows: Rows, overrides: Sequence[str]) -> list[str]:
    """Shell lines, each once, that compute the missing scores of rows."""
    lines = []
    for row, metrics in rows.items():
        outputs = commands(row, metrics, overrides)
        lines.append(" && ".join(x for x, output in outputs.items() if not output.exists()))
    return [line for line in dict.fromkeys(lines) if line]


def cells(rows: Rows, overrides: Sequence[str]) -> Iterator[Cell]:
    """Yields the published values of rows, with ours if their commands have finished."""
    for row, metrics in rows.items():
        *_, output = commands(row, metrics, overrides).values()
        results = read_object(output) or {}
        state = results.get("best") or results.get("final") or results.get("pretrained") or {}
        ours: Mapping[str, Any] = {**results, **state.get(row.part, {})}
        notes = tuple(f"{row.dataset}: {note}" for note in results.get("notes", ()))
        for name, published in metrics.items():
            scale = 1 if name == _DELTA else 100
            value = ours[name] * scale if name in ours else None
            yield Cell(row, name.removeprefix(f"{row.dataset}/"), published * scale, value, notes)


def _by_dataset(table: Sequence[Cell]) -> dict[str, list[list[str]]]:
    """Splits a table by dataset: a header, then lines with a row's name and cells."""
    by_dataset: dict[str, dict[Row, list[Cell]]] = {}
    for cell in table:
        by_dataset.setdefault(cell.row.dataset, {}).setdefault(cell.row, []).append(cell)
    tables = {}
    for dataset, rows in by_dataset.items():
        first_row = next(iter(rows.values()))
        header = ["", *(cell.metric.replace("recall", "R") for cell in first_row)]
        tables[dataset] = [header, *([row.name, *map(str, cells)] for row, cells in rows.items())]
    return tables


def as_text(table: Sequence[Cell]) -> str:
    """Formats a table for a terminal, one part per dataset, and its notes."""
    parts = [f"{name}:\n{aligned(lines, left=1)}" for name, lines in _by_dataset(table).items()]
    notes = dict.fromkeys(f"* {note}" for cell in table for note in cell.notes)
    return "\n\n".join([*parts, *notes])


def as_markdown(table: Sequence[Cell]) -> str:
    """Formats a table in Markdown, one part per dataset, and its notes."""
    parts = []
    for name, (header, *lines) in _by_dataset(table).items():
        rows = [header, ["---"] * len(header), *lines]
        parts.append(f"**{name}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    notes = dict.fromkeys(f"\\* {note}" for cell in table for note in cell.notes)
    return "\n\n".join([*parts, *notes]) + "\n"


def as_csv(table: Sequence[Cell]) -> str:
    """Formats a table as CSV, one line per cell."""
    columns = ("method", "part", "dim", "dataset")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "metric", "published", "ours", "difference", "notes"])
    for cell in table:
        values = [getattr(cell.row, name) for name in columns]
        writer.writerow([*values, cell.metric, *cell.numbers(), " ".join(cell.notes)])
    return text.getvalue()
