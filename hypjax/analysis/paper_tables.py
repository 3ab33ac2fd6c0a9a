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


class Cell(NamedTuple):
    """A published value, and ours; relative δ, or percent."""

    row: Row
    metric: str  # Without the dataset's name.
    published: float
    ours: float | None  # None before its run has finished.
    notes: tuple[str, ...]  # Why ours is of another experiment, such as a partial copy.

    @property
    def digits(self) -> int:
        """Decimals in the papers."""
        return 3 if self.metric == _DELTA else 1

    def __str__(self) -> str:
        """The values, as in '80.9, ours 80.5 (-0.4)'; an asterisk refers to notes."""
        published = f"{self.published:.{self.digits}f}"
        if self.ours is None:
            return published
        mark = "*" * bool(self.notes)
        return f"{published}, ours {self.ours:.{self.digits}f}{mark} ({self.difference})"

    @property
    def difference(self) -> str:
        """Ours minus the published value, with its sign."""
        return f"{round(self.ours - self.published, self.digits) + 0.0:+.{self.digits}f}"


def rows_of(table: str, chosen: Sequence[str]) -> dict[Row, Mapping[str, float]]:
    """The rows of a table with their published values; of these, the chosen ones, if any.

    A row is chosen by words that occur in its name, such as 'Hyp-DINO 384-d cub200'.
    """
    tables: dict[str, dict[Row, Mapping[str, float]]] = {}
    for row, scores in published_rows().items():
        tables.setdefault(f"{row.paper}-{row.table}", {})[row] = scores
    if table not in tables:
        raise UserError(f"no table is {table!r}: {', '.join(tables)}{nearest(table, tables)}")
    names = {row: f"{row.method} {row.dim}-d {row.dataset}" for row in tables[table]}
    for words in chosen:
        if not any(_has_words(name, words) for name in names.values()):
            methods = ", ".join(dict.fromkeys(row.method for row in names))
            raise UserError(f"no row of {table} is {words!r}; its methods are {methods}")
    return {
        row: scores
        for row, scores in tables[table].items()
        if not chosen or any(_has_words(names[row], words) for words in chosen)
    }


def _has_words(name: str, words: str) -> bool:
    return {*words.lower().split()} <= {*name.lower().split()}


class Command(NamedTuple):
    """A command, and the file in which it leaves its scores."""

    module: str
    flags: tuple[str, ...]
    output: pathlib.Path

    def __str__(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["python", "-m", self.module, *self.flags])


def commands(row: Row, metrics: Mapping[str, float], overrides: Sequence[str]) -> list[Command]:
    """The commands of a row, of which the last one leaves its scores; fields are set in all.

    Fields of the evaluation, such as a PCA, are set for a trained run.
    """
    spec, fields = f"configs/{row.run}", row.fields.split()
    of_training = [field for field in fields if not field.startswith("eval.")]

    def workdir(fields: Sequence[str]) -> str:
        return default_workdir(load_config(spec, [*fields, *overrides]), read_config(spec))

    def flags(fields: Sequence[str]) -> tuple[str, ...]:
        return f"--config={spec}", *(f"--config.{field}" for field in (*fields, *overrides))

    kind = "delta" if _DELTA in metrics else row.state
    output = FOLDER / f"{pathlib.Path(workdir(fields)).name}-{kind}.json"
    scoring = *flags(fields), f"--output={output}"
    if kind == "delta":
        return [Command("hypjax.hyperbolicity", scoring, output)]
    evaluation = Command("hypjax.main", (*scoring, "--mode=evaluate"), output)
    if kind == "pretrained":
        return [evaluation]
    folder = workdir(of_training)
    training = Command("hypjax.main", flags(of_training), pathlib.Path(folder) / RESULTS)
    if of_training == fields:
        return [training]
    return [training, evaluation._replace(flags=(*evaluation.flags, f"--workdir={folder}"))]


def pending(rows: Mapping[Row, Mapping[str, float]], overrides: Sequence[str]) -> list[str]:
    """Lines for a shell, each once, that run what the rows lack."""
    lines = {}
    for row, metrics in rows.items():
        unfinished = [one for one in commands(row, metrics, overrides) if not one.output.exists()]
        lines[" && ".join(map(str, unfinished))] = None
    return [line for line in lines if line]


def cells(rows: Mapping[Row, Mapping[str, float]], overrides: Sequence[str]) -> Iterator[Cell]:
    """The published values of rows, with ours where their commands have finished."""
    for row, metrics in rows.items():
        results = read_object(commands(row, metrics, overrides)[-1].output) or {}
        state = results.get("best") or results.get("final") or results.get("pretrained") or {}
        ours: Mapping[str, Any] = {**results, **state.get(row.part, {})}
        notes = tuple(f"{row.dataset}: {note}" for note in results.get("notes", ()))
        for name, published in metrics.items():
            scale = 1 if name == _DELTA else 100
            value = ours[name] * scale if name in ours else None
            yield Cell(row, name.removeprefix(f"{row.dataset}/"), published * scale, value, notes)


def _by_dataset(table: Sequence[Cell]) -> dict[str, list[list[str]]]:
    """For each dataset, a header and lines of method, dimension and cells."""
    tables: dict[str, dict[Row, list[Cell]]] = {}
    for cell in table:
        tables.setdefault(cell.row.dataset, {}).setdefault(cell.row, []).append(cell)
    return {
        dataset: [
            ["", "", *(cell.metric.replace("recall", "R") for cell in next(iter(lines.values())))],
            *([row.method, f"{row.dim}-d", *map(str, line)] for row, line in lines.items()),
        ]
        for dataset, lines in tables.items()
    }


def as_text(table: Sequence[Cell]) -> str:
    """The table for a terminal, in a part for each dataset, and its notes."""
    parts = [f"{name}:\n{aligned(lines)}" for name, lines in _by_dataset(table).items()]
    return "\n\n".join([*parts, *(f"* {note}" for note in _notes(table))])


def as_markdown(table: Sequence[Cell]) -> str:
    """The same in Markdown."""
    parts = []
    for name, (header, *lines) in _by_dataset(table).items():
        rows = [header, ["---"] * len(header), *lines]
        parts.append(f"**{name}**\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *(f"\\* {note}" for note in _notes(table))]) + "\n"


def _notes(table: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(note for cell in table for note in cell.notes))


def as_csv(table: Sequence[Cell]) -> str:
    """A line for each cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("method", "part", "dim", "dataset")
    writer.writerow([*columns, "metric", "published", "ours", "difference", "notes"])
    for cell in table:
        values = [f"{cell.published:.{cell.digits}f}", "", "", " ".join(cell.notes)]
        if cell.ours is not None:
            values[1:3] = f"{cell.ours:.{cell.digits}f}", cell.difference
        writer.writerow([*(getattr(cell.row, name) for name in columns), cell.metric, *values])
    return text.getvalue()
