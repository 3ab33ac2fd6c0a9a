"""Tables of the manual that are made from the code (fields, losses, encoders) or from CSV files."""

import csv
import inspect
import json
import pathlib
import re

from hypjax.config import default_config
from hypjax.config import defaults as defaults_module
from hypjax.config.defaults import fields_of
from hypjax.config.variants import OBJECTIVE_OF_LOSS
from hypjax.fields import ANY, Field
from hypjax.models import create_encoder
from hypjax.models.architectures import FAMILIES, Weights
from hypjax.objectives.pair_losses import MEMORY, PAIR_LOSSES
from hypjax.objectives.pairwise import PAIRWISE_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES

ROOT = pathlib.Path(__file__).parents[1]
HEAD = "| field | default | values | meaning |\n|---|---|---|---|\n"
_TYPES = {bool: "`True`, `False`", int: "a whole number", float: "a number", str: "text"}


def expand_fields(markdown: str) -> str:
    """Puts a table of fields in the place of each `<!-- fields of GROUP -->`."""
    return re.sub(r"<!-- fields of (\w+) -->", lambda match: field_table(match[1]), markdown)


def expand_files(markdown: str) -> str:
    """Puts the table of a CSV file in the place of each `<!-- table of PATH -->`."""
    pattern = r"<!-- table of ([\w/-]+\.csv) -->"
    return re.sub(pattern, lambda match: file_table(ROOT / match[1]), markdown)


def file_table(path: pathlib.Path) -> str:
    """The rows of a CSV file, under the names of its columns.

    A column `anchor` is not shown: it has the names by which pages and messages link to rows.
    """
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    columns = [name for name in rows[0] if name != "anchor"]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = [row[name] for name in columns]
        if "anchor" in row:
            cells[0] = f'<a id="{row["anchor"]}"></a>{cells[0]}'
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def field_table(group: str) -> str:
    """The fields of a group, such as `data` (`top`: without one), in the order of the declarations.

    Their meanings are those in `docs/fields.csv`, or else the comments of the declarations.
    """
    fields, meanings = fields_of(default_config().objective.name), declared_comments()
    with open(ROOT / "docs/fields.csv", newline="") as file:
        meanings |= {row["field"]: row["meaning"] for row in csv.DictReader(file)}
    rows = []
    for name, field in fields.items():
        if (name.partition(".")[0] if "." in name else "top") == group:
            cells = (
                f"`{name}`",
                f"`{_literal(field.default)}`",
                values(field),
                meanings.get(name, ""),
            )
            rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows)


def declared_comments() -> dict[str, str]:
    """Comments behind the declarations of `hypjax/config/defaults.py`, by name of the field."""
    source = inspect.getsource(defaults_module)
    comments = dict(re.findall(r'^ +"([\w.]+)": .*?,  # (.+?)\.?$', source, re.MULTILINE))
    shared = {f"objective.{name}": text for name, text in comments.items() if "." not in name}
    return {**shared, **comments}


def values(field: Field) -> str:
    """Which values a field takes, in words."""
    kind = field.kind or type(field.default)
    words = field.rule.words if field.rule is not ANY else _TYPES.get(kind, "several values")
    words = re.sub(r"^between (\d+) and \d{4,}$", r"\1 or more", words)  # A bound beyond any run.
    names = re.match(r"(.*\bof )((?:[\w@.:]+, )*[\w@.:]+)(?=,|$)(.*)", words)
    if names:
        quoted = ", ".join(f"`{name}`" for name in names[2].split(", "))
        words = f"{names[1].removeprefix('one of ')}{quoted}{names[3]}"
    return f"{words}, or `None`" if field.optional else words


def loss_rows() -> str:
    """Rows of the table of losses: papers, name, fields with their defaults, and variant."""
    rows = []
    for name, loss in (PAIRWISE_LOSSES | PAIR_LOSSES | PROXY_LOSSES).items():
        # A row of the page has the fields that losses of pairs share.
        shared = (*MEMORY, "koleo_weight") if "memory" in loss.fields else ()
        own = [(field, rule.default) for field, rule in loss.fields.items() if field not in shared]
        fields = ", ".join(f"`{field}={_literal(default)}`" for field, default in own)
        named = [v for v, of in OBJECTIVE_OF_LOSS.items() if of == name and not v.startswith("irt")]
        title = loss.reference or loss.function.__doc__.partition("\n")[0].rstrip(".")
        rows.append(f"| {title} | `{name}` | {fields} | {', '.join(f'`{v}`' for v in named)} |")
    return "\n".join(rows)


def encoder_table() -> str:
    """Encoders by family: timm's names, sides, pooling, pixel scaling and licences."""
    columns = "family", "`model.architecture`", "pixels", "pooling", "scaling", "licences"
    rows = [columns, ("---",) * len(columns)]
    for family in FAMILIES:
        sides = sorted({create_encoder(name).image_size for name in family.members})
        scalings = [_scaling(weights) for weights in family.weights]
        licences = [weights.licence for weights in family.weights]
        names = [f"`{name}`" for name in family.members]
        lists = (", ".join(dict.fromkeys(map(str, x))) for x in (names, sides, scalings, licences))
        names, sides, scalings, licences = lists
        rows.append((family.title, names, sides, f"`{family.pooling}`", scalings, licences))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _scaling(weights: Weights) -> str:
    names = {0.5: "half", 0.485: "ImageNet", 0.48145466: "CLIP"}
    return names.get(weights.mean[0], "satellite")


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
