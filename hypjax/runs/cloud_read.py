"""Reading models from a run in cloud storage, through a copy of the necessary files."""

import contextlib
import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from hypjax.errors import UserError, redacted
from hypjax.runs.files import (
    CHECKPOINTS,
    CONFIG,
    HASHED,
    MATCHES,
    METRICS,
    PROJECTIONS,
    PUBLISHED,
    RESULTS,
    TIMES,
    local_folder,
    present,
    read_state,
    remove,
    steps,
    write_state,
)
from hypjax.runs.workdir import saved_config
from hypjax.system import hub
from hypjax.system.cloud import CloudFolder, copying, is_url, reaching
from hypjax.system.locks import claimed

_PUBLISHED = (CONFIG, PUBLISHED, *HASHED, f"{PROJECTIONS}*")  # Files of a published model.
_ATTEMPTS = 5  # A run that is being trained may remove checkpoints during the download.


@contextlib.contextmanager
def reading(workdir: str | pathlib.Path, *, training: bool = False) -> Iterator[pathlib.Path]:
    """Opens a run for reading its models; what lies elsewhere is downloaded first.

    Args:
        workdir: A folder, a URL, or a published model on the hub, hf://OWNER/NAME.
        training: Whether to read what only training needs, too, such as the objective's parameters.

    Yields:
        The local folder. A downloaded copy is locked for this process during the body.

    Raises:
        UserError: The storage cannot be reached, or the URL holds no run.
    """
    if hub.is_repository(workdir):
        folder = hub.download(workdir, _PUBLISHED)
        if not (folder / PUBLISHED).exists():
            raise UserError(f"{workdir} holds no model of hypjax (there is no {PUBLISHED})")
        yield folder
        return
    if not is_url(workdir):
        yield pathlib.Path(workdir).expanduser()
        return
    folder = local_folder(workdir, "-read")
    with contextlib.ExitStack() as stack:
        with copying(workdir, folder):
            stack.enter_context(claimed(folder, f"reading {workdir}"))
            _update(folder, workdir, training)
        yield folder


def read_run_config(workdir: str | pathlib.Path) -> ConfigDict:
    """Reads the configuration of a run in a folder, at a URL or on the hub.

    Raises:
        UserError: There is no run.
    """
    with reading(workdir) as folder:
        return saved_config(folder)


def _update(folder: pathlib.Path, url: str, training: bool) -> None:
    """Downloads the necessary files that are new or changed; removes all others."""
    versions = read_state(folder).get("versions", {})
    with reaching(url):
        cloud = CloudFolder(url)
    for attempt in range(_ATTEMPTS):
        with reaching(url):
            stored = {n: info for n, info in cloud.list().items() if _is_needed(n, training)}
        if CONFIG not in stored:
            raise UserError(f"{url} holds no run; name the folder of one with --workdir")
        new = {n: info for n, info in stored.items() if versions.get(n) != info.version}
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
    versions = {name: info.version for name, info in stored.items()}
    write_state(folder, {"url": redacted(url), "versions": versions})


def _is_needed(name: str, training: bool) -> bool:
    """Whether a file is needed to read models; what only training needs is not, unless asked."""
    if name.startswith(CHECKPOINTS):
        return training or name.split("/")[2:3] != ["training"]
    return name in (CONFIG, RESULTS, MATCHES, METRICS, TIMES) or name.startswith(PROJECTIONS)
