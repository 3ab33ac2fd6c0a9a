"""The hub, played by a server on this machine that fails in many ways."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from tests.helpers import small_runs

FILES = {"hypjax.json": b"{}", "model.safetensors": bytes(range(256)) * 8}
# Calls the function that each line of its input names.
PROGRAM = """
import sys, time
import huggingface_hub
from hypjax.errors import UserError
from hypjax.models import weight_files
from hypjax.system import hub
time.sleep = lambda seconds: None  # Between attempts.
sizes = lambda path: {str(i): i for i in range(path.stat().st_size)}
weight_files._READERS[".safetensors"] = sizes
patterns = ["*.json", "*.safetensors"]
calls = {
    "model": lambda: sorted(path.name for path in hub.download("hf://me/a", patterns).iterdir()),
    "weights": lambda: len(weight_files.read_state_dict("vit_tiny_patch16_224.dino")),
    "name": lambda: weight_files.read_state_dict("hf-hub:../a"),
}
for line in sys.stdin:
    try:
        print(calls[line.strip()](), flush=True)
    except UserError as error:
        print(f"error: {error}", flush=True)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for every repository, unless a fault is set."""

    fault = ""

    def log_message(self, *args):
        """Prints nothing."""

    def answer(self, body, **headers):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def do_GET(self):  # noqa: N802
        if self.fault == "portal":
            return self.answer(b"<html>Log in</html>", Content_Type="text/html")
        if self.fault == "dropped":
            return None
        if self.path.startswith("/api/"):
            files = [
                {"type": "file", "oid": name, "path": name, "size": len(FILES[name])}
                for name in FILES
            ]
            siblings = [{"rfilename": name} for name in FILES]
            about = {"id": "me/a", "sha": 40 * "a", "siblings": siblings}
            return self.answer(json.dumps(files if "/tree/" in self.path else about).encode())
        name = self.path.split("/")[-1]
        if (self.fault, self.command, name) == ("cut", "GET", "model.safetensors"):
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILES[name])))
            self.end_headers()
            return self.wfile.write(FILES[name][:1000])
        return self.answer(FILES[name], ETag=f'"{name}"', X_Repo_Commit=40 * "a")

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def ask(tmp_path):
    """Returns a function that sets the server's fault and calls a function in another process."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(small_runs.REPOSITORY),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def call(fault, name):
        Hub.fault = fault
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    call.server = server
    yield call
    process.communicate()


def test_downloads_that_fail_are_one_sentence_and_leave_nothing_to_use(ask):
    for fault in ("portal", "dropped", "cut", "portal", "dropped"):
        assert ask(fault, "model").startswith("error: cannot read the repository me/a"), fault
        assert ask(fault, "weights").startswith("error: they are not in "), fault
    assert ask("", "name") == "error: neither a file nor a name on the hub"
    assert ask("", "model") == "['hypjax.json', 'model.safetensors']"
    assert ask("", "weights") == "2048"
    ask.server.shutdown()
    ask.server.server_close()
    assert ask("", "model") == "['hypjax.json', 'model.safetensors']"  # From the cache.
    assert ask("", "weights") == "2048"
