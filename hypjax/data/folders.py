"""Lists the files below folders, and the files that match a pattern."""

import dataclasses
import fnmatch
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from hypjax.data.pixels import image_suffixes
from hypjax.errors import UserError, counted
from hypjax.system import console
from hypjax.types import composed

# Thumbnails, bins and notes that storage devices and systems keep beside photographs.
OF_SYSTEMS = re.compile(
    r"\._|\.Trash|(@eaDir|@tmp|@SynoResource|#recycle|#snapshot|@Recycle|@Recently-Snapshot"
    r"|\.@__thumb|__MACOSX|\.AppleDouble|Network Trash Folder|Temporary Items|\$RECYCLE\.BIN"
    r"|System Volume Information|(eh)?thumbs\.db|desktop\.ini|lost\+found)$",
    re.IGNORECASE,
)


def is_image_name(name: str | os.PathLike[str]) -> bool:
    """Whether a file has the suffix of an image."""
    return pathlib.PurePath(name).suffix.lower() in image_suffixes()


@dataclasses.dataclass
class FolderWalk:
    """Lists visible files, except what systems keep beside photographs."""

    exclude: Sequence[str] = ()  # Patterns of names, or of ends of paths, to leave out as well.
    skip_corrupt: bool = True  # Whether to leave out folders that cannot be read, with a warning.
    _left_out: dict[str, set[str]] = dataclasses.field(default_factory=dict)  # Paths by pattern.
    _unreadable: dict[str, str] = dataclasses.field(default_factory=dict)  # Reasons by folder.

    def folders(self, root: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
        """Yields a folder and the folders below it, each with the names of its files.

        Links are followed, except links to a folder that contains them, which would never end.
        """
        for parent, folders, files in os.walk(root, followlinks=True, onerror=self._note):
            paths = [pathlib.Path(parent, name) for name in self._kept(parent, sorted(folders))]
            folders[:] = [path.name for path in paths if not _leads_back(path)]
            yield pathlib.Path(parent), list(self._kept(parent, files))

    def files(self, root: pathlib.Path) -> Iterator[str]:
        """Yields the relative paths of files at any depth of a folder."""
        for folder, files in self.folders(root):
            yield from (os.path.join(folder.relative_to(root), name) for name in files)

    def matches(self, pattern: str) -> list[str]:
        """Finds the files that match a pattern, in which ** stands for folders at any depth.

        A part that is the name of a file or folder, such as 'Trip [2021]', stands for this one.
        """
        path = pathlib.PurePath(pattern)
        paths = {path.anchor}
        for part in path.parts[bool(path.anchor) :] + ("*",) * (path.name == "**"):
            paths = {match for parent in paths for match in self._matches(parent, part)}
        self.report(pattern)
        return sorted(path for path in paths if not os.path.isdir(path))

    def _matches(self, parent: str, part: str) -> list[str]:
        """Paths in a folder, '' for the current one, that match a part of a pattern."""
        # If a link leads to a folder that contains the link, `glob`'s own ** follows it 40 times.
        if part == "**":
            return [str(folder) for folder, _ in self.folders(pathlib.Path(parent))]
        if os.path.lexists(path := os.path.join(parent, part)):
            return [path]
        _, folders, files = next(os.walk(parent or ".", onerror=self._note), ("", [], []))
        names = [x for x in folders + files if fnmatch.fnmatch(composed(x), composed(part))]
        return [os.path.join(parent, x) for x in self._kept(parent, names, hidden=part[0] == ".")]

    def _kept(self, folder: str, names: Iterable[str], hidden: bool = False) -> Iterator[str]:
        """Yields the names in a folder that are not left out; `hidden` keeps those after a dot."""
        for name in names:
            path = pathlib.PurePath(composed(os.path.join(folder, name)) if self.exclude else "")
            patterns = [
                pattern
                for pattern in self.exclude
                for form in (composed(pattern), composed(pattern).replace("[", "[[]"))
                if path.match(form)  # Brackets may be those of a folder's name.
            ]
            if system := OF_SYSTEMS.match(name):
                patterns.append(system[0])
            if patterns:
                self._left_out.setdefault(patterns[0], set()).add(os.path.join(folder, name))
            elif hidden or name[0] != ".":
                yield name

    def _note(self, error: OSError) -> None:
        if not isinstance(error, NotADirectoryError):  # A file that matches part of a pattern.
            self._unreadable[error.filename] = str(error.strerror)

    def report(self, where: object) -> None:
        """Says what was left out, and rejects folders that cannot be read or warns of them."""
        if self._left_out:
            counts = ", ".join(f"{len(paths)} {name}" for name, paths in self._left_out.items())
            console.say(f"files and folders left out of {where} by their names: {counts}")
        if unused := {*self.exclude} - {*self._left_out}:
            console.warn(f"nothing in {where} matches the pattern {min(unused)} to exclude")
        if self._unreadable:
            reasons = [f"{folder} ({reason})" for folder, reason in self._unreadable.items()]
            problem = f"cannot read {counted(len(reasons), 'folder')}: {'; '.join(reasons[:5])}"
            if str(where) in self._unreadable or not self.skip_corrupt:
                remedy = "or leave out folders below another by --config.data.skip_corrupt=True"
                raise UserError(f"{problem}; get access, {remedy}")
            console.warn(f"{problem}; left out")


def _leads_back(folder: pathlib.Path) -> bool:
    """Whether a folder is a link to one that contains it, directly or through other links."""
    if not folder.is_symlink():
        return False
    target, *parents = map(os.path.realpath, (folder, *folder.absolute().parents))
    if leads_back := any(pathlib.Path(parent).is_relative_to(target) for parent in parents):
        console.say(f"{folder} is a link to {target}, which contains it; it is not followed")
    return leads_back
