"""Columns of tables, arrays of files: their usual names, and options such as ?label=species."""

import os
import re
from collections.abc import Collection, Mapping, Sequence

from hypjax.errors import UserError

Options = Mapping[str, str]
_FILES = "paths filepath filepaths filename filenames file files"
_IMAGES = "image imagepath imagefile imagefilename imagename img imgpath imgfile imgname"
_CLASSES = "class classname classid classlabel category categoryname categoryid target targets y"
# Usual names, without case, spaces, _ and -. The first text of a role with one of a file's names
# counts, and several names of one text are ambiguous.
_USUAL_NAMES = {
    "path": ("path", "ids", f"{_FILES} {_IMAGES}", "id"),
    "features": ("features", "feature feats embeddings embedding embs emb x"),
    "label": ("label", "labels", _CLASSES, "finelabel", "cls", "txt"),
    "split": ("split", "splits"),
    "coarse_label": ("coarselabel", "coarselabels"),
    "caption": ("caption", "captions", "text texts sentence title description", "txt"),
    "box": ("box",),
}


def split_options(where: str) -> tuple[str, dict[str, str]]:
    """Splits options from a location, as in photos.csv?path=file&label=species.

    They name columns or arrays, parts of a dataset (`split`, `subset`), or the `encoding` of an
    archive. A file that has the whole as its name has no options.
    """
    location, _, text = where.rpartition("?")
    options = dict(re.findall(r"([a-z_]+)=([^&]*)", text))
    if not location or not options or os.path.exists(os.path.expanduser(where)):
        return where, {}
    return location, options


def require_options(options: Options, known: Sequence[str], location: object) -> None:
    """Raises a `UserError` if options are not among those of a kind of location."""
    if unknown := sorted(options.keys() - set(known)):
        listed = ", ".join(known) or "that it has"
        raise UserError(f"{location}: ?{unknown[0]} is none of the options {listed}")


def find_column(columns: Collection[str], role: str, options: Options, where: object) -> str | None:
    """Finds the column of a role: the one that the option names, or else one with a usual name.

    The last part of a name is enough, such as `label` for json.label or train/label. Raises a
    `UserError` if the option names no column, or if several columns may be meant.
    """
    chosen = options.get(role)
    if chosen in columns:
        return chosen
    for names in [_plain(chosen)] if chosen else _USUAL_NAMES.get(role, ()):
        matches = [x for x in columns if _plain(x) in names.split()]
        # A last part of one letter is a coordinate, as in box.y.
        last_parts = {x: _plain(re.split(r"[./]", x)[-1]) for x in columns}
        matches = matches or [x for x, y in last_parts.items() if len(y) > 1 and y in names.split()]
        if len(matches) > 1:
            named = f"name its {role} by ?{role}=COLUMN"
            raise UserError(f"{where} has the columns {' and '.join(matches)}; {named}")
        if matches:
            return matches[0]
    if chosen:
        raise UserError(f"{where} has no column {chosen}; its columns are {', '.join(columns)}")
    return None


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
