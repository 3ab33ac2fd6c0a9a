"""The progress of a run, as it fits a terminal."""

import contextlib
import fcntl
import io
import pty
import struct
import sys
import termios

import pytest

from hypjax.system import console

VALUES = {"loss": 10.7147, "chance_loss": 11.08, "batch_recall@1": 0.5321, "learning_rate": 1.6e-3}


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of the display; returns a function that advances it."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def train(monkeypatch, clock, stream):
    """Shows the steps of a run on a stream."""
    monkeypatch.setattr(sys, "stderr", stream)
    progress = console.Progress(0, 25_000, 256)
    clock(600)  # The first step compiles.
    progress.advance()
    for _ in range(10):
        clock(0.5)
        progress.advance()
    progress.show(VALUES)
    progress.close()


def written(monkeypatch, clock, columns):
    """Returns what a terminal of a number of columns shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w", encoding="utf-8") as stream:
        train(monkeypatch, clock, stream)
    text = b""
    with open(ours, "rb", buffering=0) as screen, contextlib.suppress(OSError):
        while part := screen.read(4096):  # An error follows the last part.
            text += part
    return text.decode().replace("\n", "\r").split("\r")


def test_what_matters_fits_in_80_columns(monkeypatch, clock):
    lines = written(monkeypatch, clock, columns=80)
    last = [line for line in lines if line.strip()][-1]
    assert len(last) <= 80 and last.startswith("11/25000 ")
    shown = "3:28:14 left  loss 10.71 (chance 11.1)  R@1 0.532  512 img/s"  # Without compilation.
    assert shown in last
    assert "training until step 25000" in lines


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch, clock):
    stream = io.StringIO()
    train(monkeypatch, clock, stream)
    assert stream.getvalue().splitlines() == ["training until step 25000", "step 1/25000"]
