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

    def do_GET(self):  # noqa: N802
        name, headers, body = self.path.split("/")[-1], {}, b"<html>Log in</html>"
        if self.fault == "dropped":
            return
        if self.fault != "portal" and self.path.startswith("/api/"):
            files = [{"type": "file", "oid": n, "path": n, "size": len(FILES[n])} for n in FILES]
            siblings = [{"rfilename": name} for name in FILES]
            about = {"id": "me/a", "sha": 40 * "a", "siblings": siblings}
            body = json.dumps(files if "/tree/" in self.path else about).encode()
        elif self.fault != "portal":
            body = FILES[name]
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": 40 * "a"}
        self.send_response(200)
        for header, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            cut = self.fault == "cut" and name == "model.safetensors"
            self.wfile.write(body[:1000] if cut else body)

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
    assert "hf-hub:OWNER/NAME" in ask("", "name")
    assert ask("", "model") == "['hypjax.json', 'model.safetensors']"
    assert ask("", "weights") == "2048"
    ask.server.shutdown()
    ask.server.server_close()
    assert ask("", "model") == "['hypjax.json', 'model.safetensors']"  # From the cache.
    assert ask("", "weights") == "2048"
