"""Tables of the papers with our values beside the published ones, and the commands that run them.

A table is named as in `hyp-vit-3`, by the first two columns of `hypjax/runs/published.csv`.
"""

import csv
import io
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hypjax.config import default_workdir, load_config, read_config
from hypjax.errors import UserError, nearest
from hypjax.runs.files import RESULTS, read_object
from hypjax.runs.published import Row, published_rows
from hypjax.runs.tables import aligned

FOLDER = pathlib.Path("runs/papers")  # Scores of evaluations, which leave none in a run's folder.
_DELTA = "relative_delta"

Scores = Mapping[str, float]
Rows = Mapping[Row, Scores]


class Cell(NamedTuple):
    """A published value, and ours; relative δ, or percent."""

    row: Row
    metric: str  # Without the dataset's name.
    published: float
    ours: float | None  # None before its run has finished.
    notes: tuple[str, ...]  # Why ours is another experiment, such as a partial copy.

    def numbers(self) -> list[str]:
        """The published value, ours, and the signed difference; '' before the run has finished."""
        digits = 3 if self.metric == _DELTA else 1  # As in the papers.
        if self.ours is None:
            return [f"{self.published:.{digits}f}", "", ""]
        difference = round(self.ours - self.published, digits) + 0.0  # No -0.0.
        values = [f"{value:.{digits}f}" for value in (self.published, self.ours)]
        return [*values, f"{difference:+.{digits}f}"]

    def __str__(self) -> str:
        """The values, as in '80.9, ours 80.5 (-0.4)'; an asterisk refers to notes."""
        published, ours, difference = self.numbers()
        mark = "*" * bool(self.notes)
        return f"{published}, ours {ours}{mark} ({difference})" if ours else published


def rows_of(table: str, names: Sequence[str]) -> Rows:
    """The named rows of a table with their published values; by default all rows.

    A name consists of words that a row's name or dataset has, such as 'Hyp-DINO 384-d cub200'.
    """
    tables: dict[str, dict[Row, Scores]] = {}
    for row, scores in published_rows().items():
        tables.setdefault(f"{row.paper}-{row.table}", {})[row] = scores
    if table not in tables:
        raise UserError(f"no table is {table!r}: {', '.join(tables)}{nearest(table, tables)}")
    chosen = set()
    for name in names:
        name_words = _words(name)
        matching = {x for x in tables[table] if name_words <= _words(f"{x.name} {x.dataset}")}
        if not matching:
            methods = ", ".join(dict.fromkeys(row.method for row in tables[table]))
            raise UserError(f"no row of {table} is {name!r}; its methods are {methods}")
        chosen |= matching
    return {row: scores for row, scores in tables[table].items() if not names or row in chosen}


def _words(name: str) -> set[str]:
    return {*name.lower().replace(",", " ").split()}


def commands(row: Row, metrics: Scores, overrides: Sequence[str]) -> dict[str, pathlib.Path]:
    """A row's command lines, each with the file in which it leaves its scores.

    The last file holds the row's values. A PCA, and other fields of the evaluation, are set only
    when the trained run is evaluated.
    """
    spec, fields = f"configs/{row.run}", row.fields.split()
    of_training = [field for field in fields if not field.startswith("eval.")]

    def workdir(fields: Sequence[str]) -> str:
        return default_workdir(load_config(spec, [*fields, *overrides]), read_config(spec))

    def line(module: str, fields: Sequence[str], *flags: str) -> str:
        changes = (f"--config.{field}" for field in (*fields, *overrides))
        command = ["python", "-m", f"hypjax.{module}", f"--config={spec}", *changes, *flags]
        return shlex.join(command)

    kind = "delta" if _DELTA in metrics else row.state
    output = FOLDER / f"{pathlib.Path(workdir(fields)).name}-{kind}.json"
    if kind == "delta":
        return {line("hyperbolicity", fields, f"--output={output}"): output}
    evaluating = f"--output={output}", "--mode=evaluate"
    if kind == "pretrained":
        return {line("main", fields, *evaluating): output}
    folder = workdir(of_training)
    lines = {line("main", of_training): pathlib.Path(folder) / RESULTS}
    if of_training != fields:
        lines[line("main", fields, *evaluating, f"--workdir={folder}")] = output
    return lines


def pending(rows: Rows, overrides: Sequence[str]) -> list[str]:
    """Lines for a shell, each once, that run what the rows lack."""
    of_rows = [commands(row, metrics, overrides).items() for row, metrics in rows.items()]
    lines = [" && ".join(line for line, output in x if not output.exists()) for x in of_rows]
    return list(dict.fromkeys(filter(None, lines)))


def cells(rows: Rows, overrides: Sequence[str]) -> Iterator[Cell]:
    """The published values of rows, with ours where their commands have finished."""
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
    """For each dataset, a header and lines of a row's name and cells."""
    tables: dict[str, dict[Row, list[Cell]]] = {}
    for cell in table:
        tables.setdefault(cell.row.dataset, {}).setdefault(cell.row, []).append(cell)
    return {
        dataset: [
            ["", *(cell.metric.replace("recall", "R") for cell in next(iter(lines.values())))],
            *([row.name, *map(str, line)] for row, line in lines.items()),
        ]
        for dataset, lines in tables.items()
    }


def as_text(table: Sequence[Cell]) -> str:
    """Formats the table for a terminal, in a part for each dataset, and its notes."""
    parts = [f"{name}:\n{aligned(lines, left=1)}" for name, lines in _by_dataset(table).items()]
    notes = dict.fromkeys(f"* {note}" for cell in table for note in cell.notes)
    return "\n\n".join([*parts, *notes])


def as_markdown(table: Sequence[Cell]) -> str:
    """Formats the same in Markdown."""
    parts = []
    for name, (header, *lines) in _by_dataset(table).items():
        rows = [header, ["---"] * len(header), *lines]
        parts.append(f"**{name}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    notes = dict.fromkeys(f"\\* {note}" for cell in table for note in cell.notes)
    return "\n\n".join([*parts, *notes]) + "\n"


def as_csv(table: Sequence[Cell]) -> str:
    """Formats a line for each cell."""
    text, columns = io.StringIO(), ("method", "part", "dim", "dataset")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "metric", "published", "ours", "difference", "notes"])
    for cell in table:
        names = [getattr(cell.row, name) for name in columns]
        writer.writerow([*names, cell.metric, *cell.numbers(), " ".join(cell.notes)])
    return text.getvalue()
