"""Reads and writes repositories of the Hugging Face hub."""

import fnmatch
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypjax.errors import UserError, explained, reason
from hypjax.system import console

SCHEME = "hf://"
_PLAIN = {".gitattributes", "LICENSE", "README.md"}  # Files of a new repository.


class UnreachableError(Exception):
    """The hub cannot be reached or gives no valid answer; the message is the reason."""


def is_repository(location: str | pathlib.Path) -> bool:
    """Whether a location is hf://OWNER/NAME[@TAG]; raises a UserError for any other hf://."""
    if not isinstance(location, str) or not location.startswith(SCHEME):
        return False
    if not is_name(split(location)[0]):
        raise UserError(f"{location} names no repository; write {SCHEME}OWNER/NAME[@TAG]")
    return True


def split(location: str) -> tuple[str, str | None]:
    """Splits hf://OWNER/NAME[@REVISION] into name and revision (branch, tag, commit or None)."""
    name, _, revision = location.removeprefix(SCHEME).partition("@")
    return name, revision or None


def is_name(text: str) -> bool:
    """Whether a text has the form OWNER/NAME of a repository's name."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text, re.ASCII) is not None


def download(location: str, files: Sequence[str]) -> pathlib.Path:
    """Downloads files that match patterns; returns the repository's folder in the hub's cache."""
    import huggingface_hub
    from huggingface_hub import errors

    name, revision = split(location)
    download = huggingface_hub.snapshot_download
    try:
        return fetch(download, name, revision=revision, allow_patterns=list(files))
    except errors.RevisionNotFoundError as error:
        raise UserError(f"the repository {name} has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"there is no repository {name} on the hub that you may read") from error
    except UnreachableError as error:
        problem = f"cannot read the repository {name} from the hub ({error})"
        raise UserError(f"{problem}; HF_HUB_OFFLINE=1 reads only the cache") from error


def fetch(download: Callable[..., Any], *args: Any, **options: Any) -> pathlib.Path:
    """Calls a download function of huggingface_hub, which falls back to its cache.

    Raises `UnreachableError` unless the hub says that the repository, revision or file is missing.
    """
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    absent = errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError
    logging.set_verbosity_error()  # Otherwise huggingface_hub reports every attempt.
    console.say(f"asking the Hugging Face hub for {args[0]}")
    try:
        return pathlib.Path(download(*args, **options))
    except errors.LocalEntryNotFoundError as error:  # Neither the hub nor the cache has the file.
        raise UnreachableError(reason(error.__cause__ or error)) from error
    except absent:
        raise
    except Exception as error:  # Lost connections and captive portals raise many types.
        raise UnreachableError(reason(error)) from error


def upload(
    folder: pathlib.Path,
    files: Sequence[str],
    name: str,
    *,
    private: bool,
    owned: Sequence[str] = (),
    repo_type: str = "model",
    marker: str | None = None,
) -> str:
    """Uploads files in one commit to a repository, new if necessary; returns the commit's URL.

    The commit deletes files that match patterns of `owned` and are not uploaded again. If `marker`
    is given, a repository that has files, but not the marker, raises a UserError.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if not get_token():
        raise UserError("there is no token for the hub (hf auth login, or HF_TOKEN)")
    with explained(f"cannot write to {name} on the hub"):
        api = HfApi()
        api.create_repo(name, private=private, exist_ok=True, repo_type=repo_type)
        present = api.list_repo_files(name, repo_type=repo_type)
        if marker and marker not in present and not set(present) <= _PLAIN:
            raise UserError(f"the repository {name} holds other files; name another")
        matching = {file for pattern in owned for file in fnmatch.filter(present, pattern)}
        removed = [CommitOperationDelete(file) for file in sorted(matching - {*files})]
        added = [CommitOperationAdd(file, str(folder / file)) for file in files]
        message = f"Upload a hypjax {repo_type}"
        commit = api.create_commit(
            name, [*removed, *added], commit_message=message, repo_type=repo_type
        )
    return str(commit.commit_url)
