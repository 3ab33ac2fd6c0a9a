"""Writes files atomically, locks folders, and reads tables and arrays without running code."""

import collections
import contextlib
import csv
import errno
import functools
import glob
import hashlib
import json
import os
import pathlib
import pickle
import shutil
import socket
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hypjax.errors import UserError, require_package, writing
from hypjax.system import console
from hypjax.types import class_names

if TYPE_CHECKING:
    import pyarrow

_CHECKSUM = "checksum"  # Field of a JSON object: hash of all other fields.
_ABANDONED_AGE = 86400  # Age in seconds at which a temporary file must be a killed process's.


def real_paths(paths: Iterable[str]) -> list[str]:
    """Resolves symbolic links in paths, as `os.path.realpath`, but each folder only once."""
    resolve_folder = functools.cache(os.path.realpath)
    joined = [os.path.join(resolve_folder(x), name) for x, name in map(os.path.split, paths)]
    return [os.path.realpath(path) if os.path.islink(path) else path for path in joined]


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a checksum for `check_json` to a JSON object."""
    text = json.dumps(fields, sort_keys=True)
    return {**fields, _CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def check_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Removes and compares the checksum of a JSON object; raises ValueError if it is wrong."""
    if fields.pop(_CHECKSUM, None) != with_checksum(fields)[_CHECKSUM]:
        raise ValueError("its checksum is wrong")
    return fields


def check_files(folder: pathlib.Path, expected: Mapping[str, str]) -> None:
    """Raises ValueError if the `sha256` of a file in a folder is not the expected one."""
    for name, value in expected.items():
        if sha256(folder / name) != value:
            raise ValueError(f"the checksum of {name} is wrong")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file atomically: other processes see it complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path; the file or folder that the body writes there replaces `path`.

    A file is always there, with the old content or the new. A folder that is replaced is missing
    for a moment; a kill in that moment leaves the old folder beside it, which `missing` names.
    """
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.unfinished"):
        with contextlib.suppress(OSError):
            if time.time() - abandoned.stat().st_mtime > _ABANDONED_AGE:
                remove(abandoned)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.unfinished")
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            sync(written)
        previous = path.with_name(f".{path.name}.previous")
        if temporary.is_dir() and path.is_dir():
            # No system can rename a folder to one that is not empty.
            remove(previous)
            path.rename(previous)
        temporary.replace(path)
        remove(previous)
        sync(path.parent)
    finally:
        remove(temporary)


def missing(path: pathlib.Path) -> str:
    """Says that nothing is at a path, and where a killed process left what was there."""
    left = path.with_name(f".{path.name}.previous")
    remedy = f"; a killed process left it as {left}: rename that" if left.exists() else ""
    return f"{path} does not exist{remedy}"


def remove(path: pathlib.Path) -> None:
    """Removes a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def absolute(path: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path without '..'; resolves links only up to the last '..'."""
    path = path.absolute()
    if ".." not in path.parts:
        return path
    after_dots = len(path.parts) - path.parts[::-1].index("..")
    return pathlib.Path(*path.parts[:after_dots]).resolve().joinpath(*path.parts[after_dots:])


def checksum(content: bytes | memoryview) -> int:
    """Returns 64 bits of the SHA-256 of some bytes, as a signed integer."""
    # CRC-32 collides on PNG files, which hold CRCs themselves: for 14 pairs among 17,527 letters.
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def sha256(path: pathlib.Path) -> str:
    """Returns the SHA-256 hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contiguous(array: ArrayLike) -> np.ndarray:
    """Copies an array, if necessary, to the layout that every file format can hold.

    The result is on the host, in C order and native byte order; bfloat16 becomes float32. Writers
    such as safetensors copy memory without a look at its strides, so they write other numbers.
    """
    array = np.asarray(array)
    is_bfloat16 = array.dtype.kind == "V" and array.dtype.names is None
    dtype = np.dtype(np.float32) if is_bfloat16 else array.dtype.newbyteorder("=")
    return np.asarray(array, dtype, order="C")  # `np.ascontiguousarray` makes scalars vectors.


def write_safetensors(
    path: pathlib.Path, arrays: Mapping[str, ArrayLike], metadata: dict[str, str] | None = None
) -> None:
    """Writes arrays to a .safetensors file; raises `OSError` if this fails."""
    from safetensors.numpy import save

    path.write_bytes(save({name: contiguous(x) for name, x in arrays.items()}, metadata))


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk; Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some systems cannot sync folders.
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(
    path: pathlib.Path,
    purpose: str = "",
    remedy: str = "name another folder with --workdir",
    *,
    beside: bool = False,
) -> Iterator[None]:
    """Creates and locks a folder or, by a file `beside` it, a path that is being written.

    If it is in use, waits and prints the purpose. Without a purpose, a path in use raises a
    UserError, whose sentence ends with the remedy. The system frees locks of killed processes.
    """
    import filelock  # The core works without it.

    lock_file = path.with_name(f".{path.name}.lock") if beside else path / ".lock"
    owner_file = lock_file.with_name(f"{lock_file.name}-owner")  # Windows locks the lock's content.
    # Where the file system has no locks, filelock would use a file that stays when a machine dies,
    # so that no other machine could continue its work.
    lock = filelock.FileLock(lock_file, thread_local=False, fallback_to_soft=False)
    with contextlib.ExitStack() as stack:
        with contextlib.nullcontext() if purpose else writing(path):
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock.acquire(blocking=False))
            except filelock.Timeout:
                owner = "another process"
                with contextlib.suppress(OSError):
                    owner = owner_file.read_text()
                if not purpose:
                    message = f"{path} is in use by {owner}; wait for it to end, or {remedy}"
                    raise UserError(message) from None
                console.say(f"waiting for {owner} ({purpose})")
                stack.enter_context(lock.acquire())
            except OSError:
                lock_file.touch()  # Raises an error where no file can be written.
                console.warn(f"{path} cannot be locked; let no other process write to it")
            owner_file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            for file in (owner_file, lock_file) if beside else ():
                with contextlib.suppress(OSError):  # Processes that wait notice that it is gone.
                    file.unlink()


def read_csv(path: pathlib.Path) -> tuple[list[str], list[list[str]]]:
    """Reads a CSV table: its column names in lower case, and its rows."""
    delimiter, _ = csv_header(path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
        try:
            header, *rows = [row for row in reader if row] or [[]]
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}; mend its double quotes") from error
    for row_number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            counts = f"the header has {len(header)} columns, and row {row_number} has {len(row)}"
            raise ValueError(f"{counts}; quote cells that contain {delimiter!r}")
    return column_names(header), rows


def read_rows(path: pathlib.Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Reads a CSV or Parquet table: its column names in lower case, and its rows by column."""
    if path.suffix.lower() == ".parquet":
        content = read_parquet(path)
        return content.column_names, content.to_pylist()
    columns, rows = read_csv(path)
    return columns, [dict(zip(columns, row, strict=True)) for row in rows]


def csv_header(path: pathlib.Path) -> tuple[str, list[str]]:
    """Reads a CSV table's delimiter (, ; | tab or space), and the cells of its first line."""
    with path.open(encoding="utf-8-sig") as file:
        line = file.readline().strip()
    delimiter = max(",;|\t", key=line.count)
    delimiter = " " if delimiter not in line and " " in line else delimiter
    return delimiter, next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])


def read_parquet(path: pathlib.Path) -> "pyarrow.Table":
    """Reads a Parquet table, with column names in lower case, and class names for numbers."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    metadata = table.schema.metadata or {}  # The library `datasets` stores class names there.
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    for i, column in enumerate(table.column_names):
        feature = features.get(column)
        if isinstance(feature, dict) and (names := feature.get("names")):
            table = table.set_column(i, column, [class_names(table[column].to_pylist(), names)])
    return table.rename_columns(column_names(table.column_names))


def column_names(names: Sequence[str]) -> list[str]:
    """Strips column names and converts them to lower case; rejects names that occur twice."""
    columns = [name.strip().lower() for name in names]
    if repeated := [name for name in columns if name and columns.count(name) > 1]:
        raise ValueError(f"it has two columns {repeated[0]}")
    return columns


def read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an .npz file, without executing code that it may hold.

    Compares all bytes with their checksums, unlike `np.load`: where a damaged header describes a
    shorter array, such as strings of 7 characters instead of 8, it leaves the rest unread.
    """
    arrays = {}
    name = ""  # Of the array that is being read.
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                with archive.open(member) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
                    if file.read(1):  # At the end of the bytes, zipfile compares their checksum.
                        raise ValueError("bytes follow the array")
        return arrays
    except OSError:
        raise
    except Exception as error:  # NumPy and zipfile raise almost anything.
        _reject_objects(error, name)
        raise ValueError("damaged, or not an .npz file of plain arrays") from error


def read_npy(path: pathlib.Path, name: str, *, mapped: bool = False) -> np.ndarray:
    """Reads an .npy file, without executing code that it may hold; `name` is for messages."""
    try:
        return np.load(path, mmap_mode="r" if mapped else None)
    except ValueError as error:
        _reject_objects(error, name)
        raise


def _reject_objects(error: Exception, name: str) -> None:
    """Raises a `ValueError` with the remedy if NumPy refused an array because of dtype object."""
    if "Object arrays" in str(error) or "Python objects" in str(error):
        dtype = "'float32'" if name == "features" else "str"
        rows = ", without rows whose label is None or NaN" if name == "labels" else ""
        remedy = f"save it with {name}.astype({dtype}){rows}"
        raise ValueError(f"{name} has dtype object; {remedy}") from error


class _Ignored:
    """Stands for classes and functions that a PyTorch file names; each object is an empty dict."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        ignored: Any = collections.Counter()  # The only dict here that can have `__setstate__`.
        ignored.__setstate__ = lambda state: None
        return ignored


def read_torch(path: pathlib.Path, *, ignore_objects: bool = False) -> Any:
    """Reads a PyTorch file of tensors, numbers and strings, perhaps in lists and dicts.

    Nothing in the file is executed: objects of other classes, such as NumPy's, are an error, or,
    with `ignore_objects`, become dicts.
    """
    require_package("torch", f"reading a {path.suffix} file", "torch")
    import torch

    # Earlier versions can be made to run code despite weights_only (CVE-2025-32434).
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise UserError(f"torch {torch.__version__} may run code in {path}; install 2.6 or later")
    names: Iterable[str] = ()
    try:
        if ignore_objects and zipfile.is_zipfile(path):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        elif ignore_objects:  # Before PyTorch 1.6, the fourth pickle of a file held its objects.
            with path.open("rb") as file:
                *_, names = map(torch._weights_only_unpickler.get_globals_in_pkl, 4 * [file])
        ignored: list[Any] = [(_Ignored, name) for name in names]
        with torch.serialization.safe_globals([collections.Counter, *ignored]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # PyTorch's message advises to allow running code.
        problem = "damaged, or more than tensors, numbers and strings"
        raise ValueError(f"{problem}; save tensors: torch.from_numpy(array)") from error


def to_numpy(value: Any) -> np.ndarray:
    """Converts a tensor, of floats to float32, since NumPy has no bfloat16; or what NumPy can."""
    if hasattr(value, "detach"):
        value = value.detach().float() if value.is_floating_point() else value.detach()
    return np.asarray(value)
