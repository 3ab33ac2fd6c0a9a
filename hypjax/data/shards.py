"""Datasets in files of many images: Parquet, Arrow and tar files, here or on the Hugging Face hub.

A few rows are in memory at a time, and of a Parquet file what its reader buffers of a row group.
What the columns of a Parquet or Arrow file mean is read from the types that `datasets` stores with
them, or else from their Arrow types and their names. A tar file is one of WebDataset's: members
that share a name up to its first dot are a row, and the rest of the name is the column.
"""

import fnmatch
import glob
import json
import os
import pathlib
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from hypjax.data.pixels import LARGEST_FILE, read_bytes
from hypjax.errors import UserError
from hypjax.system import hub

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SUFFIXES = (".parquet", ".arrow", ".tar")
LABELS = ("label", "labels", "class", "target", "fine_label")  # Usual names of a column.
_SUPERLABELS = ("superlabel", "coarse_label")
_OPTIONS = ("image", "label", "superlabel", "split", "subset")
_CARD = "README.md"
_ROWS = 16  # That are read at once; they hold images.
# Words in the names of files and their folders, as `datasets` understands them.
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **{"query": "query", "gallery": "gallery"},
}


class Row(NamedTuple):
    """An image of a dataset."""

    name: str  # Name of its file below the dataset's root, and its number or key there.
    image: bytes  # Encoded; empty if it is missing.
    label: str  # Name of its class; '' if unknown.
    split: str | None
    superlabel: str | None


class Shard(NamedTuple):
    """A file of a dataset."""

    path: pathlib.Path
    name: str  # Its path below the dataset's root, with '/'.
    split: str | None  # As its name, or the dataset's card, says.


class ShardedDataset(NamedTuple):
    """Files of one dataset, and which of their columns and splits are meant."""

    where: str  # As the user named it.
    root: str  # What names of images begin with: a folder, or hf://OWNER/NAME.
    shards: list[Shard]
    options: Mapping[str, str]

    def rows(self) -> Iterator[Row]:
        """Reads all images in order; raises a UserError if a file is damaged or lacks a column."""
        # A dataset that was downloaded must not name files of this machine.
        folder = None if hub.is_repository(self.root) else pathlib.Path(self.root)
        for shard in self.shards:
            if shard.path.suffix == ".tar":
                rows = _tar_rows(shard, self.options)
            else:
                rows = _table_rows(shard, self.options, folder)
            try:
                for row in rows:
                    if len(row.image) > LARGEST_FILE:
                        raise UserError(f"{row.name} is larger than {LARGEST_FILE} bytes")
                    yield row
            except UserError:
                raise
            except Exception as error:  # pyarrow raises almost anything on damaged files.
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise UserError(
                    f"cannot read {shard.path} ({reason.splitlines()[0]}); fetch it again"
                ) from error

    def chosen(self, splits: Iterable[str | None]) -> set[str | None]:
        """The splits that `split=` names, or all; raises a UserError for an unknown one."""
        known = set(splits)
        if "split" not in self.options:
            return known
        wanted = {_SPLITS.get(name, name) for name in re.split(r"[+ ]", self.options["split"])}
        if unknown := sorted(wanted - known):
            raise UserError(
                f"{self.where}: there is no split {unknown[0]}; "
                f"the splits are {', '.join(sorted(known - {None})) or 'not known'}"
            )
        return wanted


def find_shards(where: str) -> ShardedDataset | None:
    """Finds the files of a dataset; None if the location is something else, such as a table.

    A location is hf://OWNER/NAME, or hf://OWNER/NAME@TAG; a .parquet, .arrow or .tar file; a folder
    of such files, as `datasets` saves one, without image files, unless its card lists the others;
    or a pattern, data/*.parquet or photos-{000..007}.tar, if no file has this name.
    Options may follow, as in hf://OWNER/NAME?label=species&split=train: the columns `image`,
    `label` and `superlabel`; the `split`, or several, as in train+test, which count as one; and the
    `subset` of a repository. Raises a UserError if there are no such files.
    """
    location, options = _options(where)
    path, root, shards = pathlib.Path(location).expanduser(), location, []
    if hub.is_repository(location):
        shards = _shards_below(_download(location, options), options, downloaded=True)
        if not shards:
            raise UserError(
                f"{location} has no Parquet, Arrow or tar files; the hub may have converted it: "
                f"try {location}@refs/convert/parquet"
            )
    elif path.is_dir():
        root, shards = str(path.absolute()), _shards_below(path, options)
    elif path.suffix in SUFFIXES and not _is_table(path, options):
        files = _expanded(str(path))
        root = os.path.commonpath([file.parent for file in files])
        shards = [_shard(pathlib.Path(root), os.path.relpath(file, root)) for file in files]
    if shards:
        found = ShardedDataset(where, root, shards, options)
        if any(shard.split for shard in shards):  # Or else a column may tell.
            splits = found.chosen(shard.split for shard in shards)
            shards = [shard for shard in shards if shard.split in splits]
        return found._replace(shards=shards)
    if options:
        raise UserError(f"{location} is no dataset of Parquet, Arrow or tar files; leave out the ?")
    return None


def _options(where: str) -> tuple[str, dict[str, str]]:
    """Separates a location and the options that follow it; names of files may have a '?', too."""
    if os.path.exists(os.path.expanduser(where)):
        return where, {}
    location, _, given = where.rpartition("?")
    pairs = [pair.partition("=") for pair in given.split("&")]
    if not location or not all(re.fullmatch(r"[a-z_]+", name) and mark for name, mark, _ in pairs):
        return where, {}
    if unknown := [name for name, *_ in pairs if name not in _OPTIONS]:
        raise UserError(
            f"{location} has no option {unknown[0]}; the options are {', '.join(_OPTIONS)}"
        )
    return location, {name: value for name, _, value in pairs}


def _download(location: str, options: Mapping[str, str]) -> pathlib.Path:
    """Downloads the files of a dataset's subset, unless the hub's cache has them."""
    card = _read_card(hub.download(location, [_CARD], repo_type="dataset"), options)
    patterns = [pattern for _, pattern in card] or [f"*{suffix}" for suffix in SUFFIXES]
    pictures = [f"*{suffix}" for suffix in IMAGES]  # Which are no shards.
    how = {"repo_type": "dataset", "ignore_patterns": pictures}
    return hub.download(location, [_CARD, *patterns], **how)


def _read_card(root: pathlib.Path, options: Mapping[str, str]) -> list[tuple[str | None, str]]:
    """Splits and patterns of files of a dataset's subset, as far as its card tells them."""
    import huggingface_hub

    try:
        subsets = huggingface_hub.metadata_load(root / _CARD)["configs"]
        subsets = {str(subset["config_name"]): subset for subset in subsets}
    except Exception:  # There may be no card, or it says anything.
        subsets = {}
    if not subsets:
        return [(None, f"{options['subset']}/*")] if "subset" in options else []
    defaults = [name for name, subset in subsets.items() if subset.get("default")]
    name = options.get("subset") or next(iter([*defaults, *subsets]))
    if name not in subsets or (len(subsets) > 1 and not ("subset" in options or defaults)):
        raise UserError(f"the dataset has the subsets {', '.join(subsets)}; name one by ?subset=")
    folder, files = (subsets[name].get(key) for key in ("data_dir", "data_files"))
    if not files:
        return [(None, f"{folder}/*")] if folder else []
    try:
        listed = [
            (None if file.get("split") is None else str(file["split"]), path)
            for file in map(_with_path, _listed(files))
            for path in map(_pattern, _listed(file["path"]))
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{root / _CARD} lists the data_files of {name} in a form that `datasets` does not "
            "know; correct it, or name the files themselves"
        ) from error
    return [(split, f"{folder}/{path}" if folder else path) for split, path in listed]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _with_path(file: Any) -> dict[str, Any]:
    return {"path": file} if isinstance(file, str) else file


def _pattern(path: str) -> str:
    """The pattern of fnmatch, whose stars match any number of folders."""
    return path.removeprefix("./").replace("**/", "*")


def files_below(root: pathlib.Path) -> Iterator[str]:
    """Names of visible files at any depth of a folder, with '/'; follows links.

    Raises a UserError if a folder cannot be read.
    """
    visited = set()
    for parent, folders, files in os.walk(root, followlinks=True, onerror=_refuse):
        real = os.path.realpath(parent)
        if real in visited:  # A link to a parent folder would be followed without end.
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        folder = pathlib.Path(parent).relative_to(root)
        yield from (str(folder / name) for name in files if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise UserError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def _shards_below(
    root: pathlib.Path, options: Mapping[str, str], downloaded: bool = False
) -> list[Shard]:
    """Files below a folder, with their splits; none if it is a folder of images.

    It is one if there are images among the files that its card lists, or if it has any and no card.
    """
    if not root.exists():  # Nothing was downloaded.
        return []
    card = _read_card(root, options)
    found = []
    for name in files_below(root):
        splits = {split for split, pattern in card if fnmatch.fnmatchcase(name, pattern)}
        if card and not splits:
            continue
        stem, suffix = os.path.splitext(os.path.basename(name))
        if suffix.lower() in IMAGES and not downloaded:
            return []
        # Files that `datasets` caches beside those that it saved are named cache-….
        if suffix in SUFFIXES and not stem.startswith("cache-"):
            found += [(name, split) for split in splits or {None}]
    if downloaded and not card:
        _check_subsets(name for name, _ in found)
    order = [split for split, _ in card] or [None]
    found.sort(key=lambda file: (order.index(file[1]), file[0]))
    return [_shard(root, name, split) for name, split in found]


def _check_subsets(names: Iterable[str]) -> None:
    """Refuses to merge folders that may be subsets: several, and not of splits."""
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    if len(folders) > 1 and not any(_split_of(folder) for folder in folders):
        raise UserError(
            f"the dataset has the folders {', '.join(folders)}, and no card that says how they "
            "belong together; name one by ?subset=, or read all by ?subset=*"
        )


def _shard(root: pathlib.Path, name: str, split: str | None = None) -> Shard:
    split = _split_of(name) if split is None else split
    return Shard(root / name, name, _SPLITS.get(split, split))


def _split_of(name: str) -> str | None:
    """The last word in a file's or folder's name that names a split."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in _SPLITS]
    return words[-1] if words else None


def _expanded(pattern: str) -> list[pathlib.Path]:
    """Files of a pattern, in which braces are expanded as shells do; or the file of this name."""
    if os.path.isfile(pattern):
        return [pathlib.Path(os.path.abspath(pattern))]
    if braces := re.search(r"\{([^{}]*)\}", pattern):
        values = braces[1].split(",")
        if ends := re.fullmatch(r"(\d+)\.\.(\d+)", braces[1]):
            numbers = range(int(ends[1]), int(ends[2]) + 1)
            values = [str(number).zfill(len(ends[1])) for number in numbers]
        parts = [pattern[: braces.start()] + value + pattern[braces.end() :] for value in values]
        return [file for part in parts for file in _expanded(part)]
    if not (files := sorted(glob.glob(os.path.abspath(pattern), recursive=True))):
        raise UserError(f"there is no file {pattern}")
    return [pathlib.Path(file) for file in files]


def _is_table(path: pathlib.Path, options: Mapping[str, str]) -> bool:
    """Whether a .parquet file lists paths of images, or holds features, in place of images."""
    if path.suffix != ".parquet" or options or not path.is_file():
        return False
    try:
        schema = pyarrow.parquet.read_schema(path)
    except Exception:  # It is damaged; who reads it as a table says so.
        return True
    return bool({"path", "features"} & set(schema.names)) or not _images(schema, {})


def _features(schema: pyarrow.Schema) -> dict[str, Any]:
    """Types that `datasets` stores with the columns, by name."""
    try:
        return json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}


def _images(schema: pyarrow.Schema, features: Mapping[str, Any]) -> list[str]:
    """Names of the columns that may hold images."""
    if declared := [name for name, kind in features.items() if _kind(kind) == "Image"]:
        return declared

    def holds_bytes(kind: pyarrow.DataType) -> bool:
        if pyarrow.types.is_struct(kind):
            return any(part.name == "bytes" and holds_bytes(part.type) for part in kind)
        return _is_bytes(kind)

    return [field.name for field in schema if holds_bytes(field.type)]


def _kind(feature: Any) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _choose(
    option: str,
    options: Mapping[str, str],
    candidates: Sequence[str],
    names: Sequence[str],
    where: str,
) -> str | None:
    """The column that an option names, or the only candidate; None if there is none."""
    has = f"{where} has the columns {', '.join(names) or 'none'}"
    if (name := options.get(option)) is not None:
        if name not in names:
            raise UserError(f"{has}, and no {name} (?{option}={name})")
        return name
    if len(candidates) > 1:
        raise UserError(f"{has}; name one of {', '.join(candidates)} by ?{option}=")
    return candidates[0] if candidates else None


def _table_rows(
    shard: Shard, options: Mapping[str, str], root: pathlib.Path | None
) -> Iterator[Row]:
    """Reads the rows of a Parquet or Arrow file; images beside it lie below the root."""
    schema, read = (_open_arrow if shard.path.suffix == ".arrow" else _open_parquet)(shard.path)
    features, names = _features(schema), schema.names
    groups = [name for name in _SUPERLABELS if name in names]
    classes = [name for name in names if _kind(features.get(name)) == "ClassLabel"]
    candidates = {
        "image": _images(schema, features),
        "label": [name for name in LABELS if name in names] or sorted({*classes} - {*groups}),
        "superlabel": groups,
    }
    chosen = {
        option: _choose(option, options, found, names, str(shard.path))
        for option, found in candidates.items()
    }
    if (image := chosen["image"]) is None:
        raise UserError(f"{shard.path} has no column of images; its columns are {', '.join(names)}")
    if "split" in names:
        chosen["split"] = "split"
    shown = {
        column: _shown(schema.field(column).type, features.get(column), f"{shard.path}: {column}")
        for option, column in chosen.items()
        if option != "image" and column is not None
    }
    for number, row in enumerate(read([image, *shown])):
        value = {option: shown[c](row[c]) for option, c in chosen.items() if c in shown}
        split = value.get("split") or None
        yield Row(
            f"{shard.name}/{number}",
            _content(row[image], shard.path, root),
            value.get("label", ""),
            _SPLITS.get(split, split) if split else shard.split,
            value.get("superlabel") or None,
        )


def _shown(kind: pyarrow.DataType, feature: Any, where: str) -> Callable[[Any], str]:
    """Returns the function from a column's values to names; raises a UserError if there is none."""
    types = pyarrow.types
    if types.is_nested(kind) or _is_bytes(kind):
        raise UserError(f"{where} is {kind}; classes are names or whole numbers")
    if _kind(feature) != "ClassLabel" or not (types.is_integer(kind) or types.is_floating(kind)):
        return _text
    names = dict(enumerate(feature["names"]))

    def name_of(value: float | None) -> str:
        if value is None or value != value or value < 0:
            return ""
        if value not in names:
            raise UserError(f"{where} is {value} in a row, but names only {len(names)} classes")
        return names[value]

    return name_of


def _is_bytes(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _is_bytes(kind.value_type)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _content(value: Any, shard: pathlib.Path, root: pathlib.Path | None) -> bytes:
    """The encoded image of a column's value: bytes, or a structure of bytes and a path."""
    if not isinstance(value, dict):
        return value or b""
    content, path = value.get("bytes"), value.get("path")
    if content is not None or not path:
        return content or b""
    file = (shard.parent / path).resolve()
    if root is None or os.path.isabs(path) or not file.is_relative_to(root.resolve()):
        raise UserError(
            f"{shard} names the image {path} by a path that leads out of the dataset; store the "
            "image itself, as save_to_disk of datasets does"
        )
    return read_bytes(file)


_Reading = tuple[pyarrow.Schema, Callable[[list[str]], Iterator[dict[str, Any]]]]


def _open_parquet(path: pathlib.Path) -> _Reading:
    # Columns are read in parts; by default whole row groups are in memory.
    file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)

    def read(columns: list[str]) -> Iterator[dict[str, Any]]:
        for batch in file.iter_batches(_ROWS, columns=columns, use_threads=False):
            yield from batch.to_pylist()

    return file.schema_arrow, read


def _open_arrow(path: pathlib.Path) -> _Reading:
    mapped = pyarrow.memory_map(str(path))
    if mapped.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(mapped)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        mapped.seek(0)
        reader = batches = pyarrow.ipc.open_stream(mapped)

    def read(columns: list[str]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            for start in range(0, len(batch), _ROWS):
                yield from batch.select(columns).slice(start, _ROWS).to_pylist()

    return reader.schema, read


def _tar_rows(shard: Shard, options: Mapping[str, str]) -> Iterator[Row]:
    """Reads the rows of a tar file."""
    texts = {"cls", "txt", options.get("label"), options.get("superlabel")}
    named = {*texts, "json", options.get("image")}

    def matters(name: str) -> bool:
        return name in named or ("image" not in options and _is_image(name))

    for key, members in _samples(shard.path, matters):
        where, names = f"{shard.path}/{_text(key)}", list(members)
        images = [name for name in names if _is_image(name)]
        if (image := _choose("image", options, images, names, where)) is None:
            raise UserError(f"{where} has no image; its members are {', '.join(names)}")
        values = {name: members[name].decode().strip() for name in names if name in texts}
        values |= _json(members.get("json", b"{}"))
        labels = [name for name in ("cls", *LABELS, "txt") if name in values][:1]
        groups = [name for name in _SUPERLABELS if name in values]
        label = _choose("label", options, labels, list(values), where)
        group = _choose("superlabel", options, groups, list(values), where)
        yield Row(
            f"{shard.name}/{_text(key)}",
            members[image],
            _text(values.get(label)),
            shard.split,
            _text(values.get(group)) or None,
        )


def _json(content: bytes) -> dict[str, Any]:
    described = json.loads(content)
    return described if isinstance(described, dict) else {}


def _text(value: Any) -> str:
    """The name of a class, in UTF-8; '' if it is missing. A whole number has one name, 1 or 1.0."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():  # As pandas writes if some are missing.
        return str(int(value))
    return str(value).encode(errors="backslashreplace").decode()


def _is_image(name: str) -> bool:
    return f".{name.rpartition('.')[2]}" in IMAGES


def _samples(
    path: pathlib.Path, matters: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields the keys of a tar file's samples, with the contents of their members by suffix.

    The contents of members that do not matter are left out.
    """
    key, sample = None, {}
    # Names that are not UTF-8 stay different; `errors` must not be replaced by one character.
    with tarfile.open(path, "r|", encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            archive.members = []  # Or it keeps them all.
            folder, _, file = member.name.rpartition("/")
            stem, _, suffix = file.partition(".")
            if not member.isreg() or not suffix or file.startswith((".", "__")):
                continue
            name, suffix = f"{folder}/{stem}" if folder else stem, suffix.lower()
            if name != key and sample:
                yield key, sample
                sample = {}
            key = name
            where = f"{path}: {_text(member.name)}"
            if suffix in sample:
                raise UserError(f"{where} comes twice in a sample; write each member once")
            sample[suffix] = b""
            if not matters(suffix):
                continue
            if member.issparse():
                raise UserError(f"{where} is a sparse file; write it in full")
            if member.size + sum(map(len, sample.values())) > LARGEST_FILE:
                raise UserError(f"{where} is larger than {LARGEST_FILE} bytes, with its sample")
            sample[suffix] = archive.extractfile(member).read()
        # A complete file ends with blocks of zeros; tarfile does not ask for them.
        if path.stat().st_size - archive.offset < tarfile.BLOCKSIZE:
            raise UserError(f"{path} is cut off after {_text(key)}; fetch it again")
    if sample:
        yield key, sample
