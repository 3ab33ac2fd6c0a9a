"""A server on this machine that plays the Hugging Face hub for one folder of datasets."""

import base64
import contextlib
import functools
import hashlib
import http.server
import json
import threading
import urllib.parse

import pytest


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers for the repositories OWNER/NAME below a folder, which commits change."""

    def __init__(self, root, *args):
        self.root = root
        super().__init__(*args)

    def log_message(self, *args):
        """Prints nothing."""

    def answer(self, body, status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_GET(self):  # noqa: N802
        words = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).split("/")[1:]
        api = words[0] == "api"
        kind, owner, name, action, _, *rest = *words[api:], "", "", "", ""
        repository = self.root / owner / name
        if kind != "datasets" or not repository.is_dir():
            return self.answer({}, 404, X_Error_Code="RepoNotFound")
        files = sorted(p for p in repository.rglob("*") if p.is_file())
        names = [file.relative_to(repository).as_posix() for file in files]
        commit = hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()
        if not api:
            file = repository / "/".join(part for part in rest if part)
            if not file.is_file():
                return self.answer({}, 404, X_Error_Code="EntryNotFound")
            content = file.read_bytes()
            tag = f'"{hash(content)}"'
            return self.answer(content, ETag=tag, X_Repo_Commit=commit)
        if action == "tree":
            sizes = [file.stat().st_size for file in files]
            listing = [
                {"type": "file", "oid": n, "path": n, "size": s}
                for n, s in zip(names, sizes, strict=True)
            ]
            return self.answer(listing)
        siblings = [{"rfilename": n} for n in names]
        return self.answer({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/validate-yaml"):
            return self.answer({"errors": [], "warnings": []})
        if self.path.endswith("/repos/create"):
            made = json.loads(body)
            assert made["type"] == "dataset"
            (self.root / made["organization"] / made["name"]).mkdir(parents=True, exist_ok=True)
            host = self.headers["Host"]
            name = f"{made['organization']}/{made['name']}"
            return self.answer({"url": f"http://{host}/datasets/{name}"})
        owner, name = self.path.split("/")[3:5]
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                (self.root / owner / name / line["value"]["path"]).write_bytes(content)
        url = f"http://{self.headers['Host']}/datasets/{owner}/{name}/commit/{40 * 'a'}"
        return self.answer({"commitOid": 40 * "a", "commitUrl": url, "success": True})


@contextlib.contextmanager
def serving(root, cache):
    """Makes this process ask a server for the datasets of a folder; yields the server."""
    import huggingface_hub
    from huggingface_hub import constants, hf_api

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, root))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(hf_api.api, "endpoint", address)
        patch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
        yield server
    server.shutdown()
    server.server_close()
