"""Runs in cloud storage, to read models from: what that needs is copied to this machine."""

import contextlib
import pathlib
from collections.abc import Iterator

from hypjax.errors import UserError
from hypjax.runs.files import (
    CHECKPOINTS,
    CONFIG,
    RESULTS,
    local_folder,
    present,
    read_state,
    remove,
    steps,
    write_state,
)
from hypjax.system.cloud import CloudFolder, copying, is_url, reaching
from hypjax.system.locks import claimed

_ATTEMPTS = 5  # At a folder in which a run removes checkpoints meanwhile.


@contextlib.contextmanager
def reading(workdir: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A run's folder to read models from; what is read of one in the cloud is copied first.

    Args:
        workdir: A folder, or a URL.

    Yields:
        The folder, or the copy, which is no other process's during the body.

    Raises:
        UserError: The storage cannot be reached, or holds no run there.
    """
    if not is_url(workdir):
        yield pathlib.Path(workdir).expanduser()
        return
    folder = local_folder(workdir, "-read")
    with contextlib.ExitStack() as stack:
        with copying(workdir, folder):
            stack.enter_context(claimed(folder, f"reading {workdir}"))
            _update(folder, workdir)
        yield folder


def _update(folder: pathlib.Path, url: str) -> None:
    """Copies those files of a run that its models need, where they are not here already."""
    have = read_state(folder).get("versions", {})
    with reaching(url):
        cloud = CloudFolder(url)
    for attempt in range(_ATTEMPTS):
        with reaching(url):
            stored = {n: facts for n, facts in cloud.list().items() if _is_read(n)}
        if CONFIG not in stored:
            raise UserError(f"{url} holds no run; name the folder of one with --workdir")
        new = {n: facts for n, facts in stored.items() if have.get(n) != facts.version}
        try:
            cloud.get_all(new, folder)
            break
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
    for name in present(folder).keys() - stored.keys():
        remove(folder / name)
    for step in steps(folder) - {name.split("/")[1] for name in stored if "/" in name}:
        remove(folder / CHECKPOINTS / step)
    versions = {name: facts.version for name, facts in stored.items()}
    write_state(folder, {"url": url, "versions": versions})


def _is_read(name: str) -> bool:
    """Whether a file is read for a model: of a state, all but what only training needs."""
    if name.startswith(CHECKPOINTS):
        return name.split("/")[2:3] != ["training"]
    return name in (CONFIG, RESULTS)
