"""Locks of folders and outputs, and systems that lack what Linux has."""

import errno
import fcntl
import subprocess
import sys

import pytest

from hypjax.errors import UserError
from hypjax.system.files import locked

# What Windows lacks: modules, calls and signals.
_WITHOUT = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("sync", "fork", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGHUP", "SIGUSR1", "SIGALRM", "SIGKILL", "SIGPIPE"):
    delattr(signal, name)
import pathlib
import hypjax
from hypjax import embed, evaluate, main, search, train
from hypjax.inference import image_embedder
from hypjax.system import machine
from hypjax.system.files import locked, write_json
machine.keep_freed_memory(), machine.free_host_memory(), machine.memory_peaks()
with locked(pathlib.Path("run")), locked(pathlib.Path("g.npz"), beside=True):
    write_json(pathlib.Path("run/a.json"), "ä")
"""


def test_a_lock_names_its_owner_and_ends_with_its_process(tmp_path):
    folder, output = tmp_path / "run", tmp_path / "g.npz"
    program = "import os, pathlib, sys; from hypjax.system.files import locked\n"
    program += "with locked(pathlib.Path('run')), locked(pathlib.Path('g.npz'), beside=True):\n"
    program += "    print(os.getpid(), flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, **pipes) as other:
        pid = int(other.stdout.readline())
        for path, beside in ((folder, False), (output, True)):
            with pytest.raises(UserError, match=f"{path} is in use by process {pid} on .*; wait"):
                with locked(path, beside=beside):
                    pass
        other.kill()
    with locked(folder), locked(output, beside=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys):
    def flock(*args):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):
        with locked(tmp_path / "run"):
            pass
        assert "cannot be locked; let no other process write" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"), locked(tmp_path / "file"):
        pass


def test_no_module_call_or_signal_is_needed_that_windows_lacks(tmp_path):
    command = [sys.executable, "-c", _WITHOUT]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (tmp_path / "run/a.json").exists()
