"""The Hugging Face hub, played by a server on this machine that keeps repositories in memory."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import types
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api

_REPOSITORY = r"((?:models/|datasets/)?[^/]+/[^/]+)"  # Part of an address.


class Commit(NamedTuple):
    """One revision of a repository."""

    oid: str
    files: dict[str, bytes]


class FakeHub(http.server.ThreadingHTTPServer):
    """Answers what huggingface_hub asks to read repositories, and stands for what fills them.

    Attributes:
        token: The token of a user, which is not checked.
        commits: Of each repository, the oldest first. Its last one is the branch main. Names of
            datasets begin with datasets/, as in the hub's addresses.
        private: Names of the private repositories.
    """

    token = "secret"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.commits: dict[str, list[Commit]] = {}
        self.private: set[str] = set()

    def close(self) -> None:
        """Ends the server, as if the network were gone."""
        self.shutdown()
        self.server_close()

    def put(self, name: str, folder: pathlib.Path) -> None:
        """Makes the files below a folder a new commit of a repository."""
        files = filter(pathlib.Path.is_file, folder.rglob("*"))
        self._add(name, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files})

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool, repo_type: str) -> None:
        """Stands for `HfApi.create_repo`."""
        name = _full_name(repo_id, repo_type)
        if private and name not in self.commits:
            self.private.add(name)
        assert exist_ok and self.commits.setdefault(name, [Commit(40 * "0", {})])

    def create_commit(
        self, repo_id: str, operations: Iterable, *, commit_message: str, repo_type: str
    ) -> types.SimpleNamespace:
        """Stands for `HfApi.create_commit`."""
        name = _full_name(repo_id, repo_type)
        files = dict(self.commits[name][-1].files)
        for operation in operations:
            if isinstance(operation, huggingface_hub.CommitOperationDelete):
                del files[operation.path_in_repo]
            else:
                content = pathlib.Path(operation.path_or_fileobj).read_bytes()
                files[operation.path_in_repo] = content
        commit = self._add(name, files)
        return types.SimpleNamespace(commit_url=f"{self.address}/{name}/commit/{commit.oid}")

    def _add(self, name: str, files: dict[str, bytes]) -> Commit:
        oid = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(name, []).append(Commit(oid, files))
        return self.commits[name][-1]


def _full_name(repo_id: str, repo_type: str) -> str:
    return f"datasets/{repo_id}" if repo_type == "dataset" else repo_id


def _listed(commit: Commit, folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Describes the files and folders below a folder of a commit."""
    paths = {path for file in map(pathlib.PurePath, commit.files) for path in (file, *file.parents)}
    listed = []
    for path in sorted(paths):
        if path.parent == pathlib.PurePath(folder) or (recursive and path.is_relative_to(folder)):
            kind = {"type": "directory"}
            if (name := str(path)) in commit.files:
                kind = {"type": "file", "size": len(commit.files[name])}
            listed.append({"oid": commit.oid, "path": str(path), **kind})
    return listed


class _Answers(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *args):
        """Prints nothing."""

    def _answer(self, body=b"", status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, code, status):
        self._answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def _commit(self, name, revision):
        """The commit of a revision; answers if there is none."""
        commits = self.server.commits.get(name, [])
        found = [each for each in commits if each.oid == revision]
        if found or (commits and revision == "main"):
            return (found or commits)[-1]
        self._error("RevisionNotFound" if commits else "RepoNotFound", 404)
        return None

    def do_GET(self):  # noqa: N802
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if found := re.fullmatch(rf"/api/{_REPOSITORY}(?:/(tree|revision)/([^/]+)(/.*)?)?", path):
            name, what, revision = found[1].removeprefix("models/"), found[2], found[3] or "main"
            if not (commit := self._commit(name, revision)):
                return
            files = _listed(commit, (found[4] or "/")[1:], "recursive=false" not in self.path)
            siblings = [{"rfilename": file} for file in commit.files]
            about = {"id": name, "sha": commit.oid, "siblings": siblings, "private": False}
            return self._answer(files if what == "tree" else about)
        if found := re.fullmatch(rf"/{_REPOSITORY}/resolve/([^/]+)/(.+)", path):
            name, revision, file = found.groups()
            if commit := self._commit(name, revision):
                self._send_file(commit, file)
            return
        self._error("EntryNotFound", 404)

    do_HEAD = do_GET  # noqa: N815

    def _send_file(self, commit, file):
        if file not in commit.files:
            return self._error("EntryNotFound", 404)
        data = commit.files[file]
        tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": commit.oid}
        return self._answer(data, **tag)


@contextlib.contextmanager
def serving(cache: pathlib.Path, token: str | None = FakeHub.token) -> Iterator[FakeHub]:
    """Makes huggingface_hub ask a new hub in this process, with a cache and a token of its own."""
    hub = FakeHub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", "/dev/null")
        patch.setattr(hf_api.api, "endpoint", hub.address)
        for name in ("create_repo", "create_commit"):
            patch.setattr(huggingface_hub.HfApi, name, staticmethod(getattr(hub, name)))
        patch.delenv("HF_TOKEN", raising=False)
        if token:
            patch.setenv("HF_TOKEN", token)
        yield hub
    hub.close()
