"""The progress of a run."""

import io
import sys

from hypjax.system import console

VALUES = {"loss": 10.7147, "chance_loss": 11.08, "batch_recall@1": 0.5321, "learning_rate": 1.6e-3}


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch):
    """Its rate and remaining time leave out the first step, which compiles."""
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    progress = console.Progress(0, 25_000, 256)
    for step, seconds in enumerate([600] + 40 * [0.5]):
        now[0] += seconds
        progress.advance()
        if step == 15:
            progress.show(VALUES)
    progress.close()
    shown = "  3:28:09 left  loss 10.71 (chance 11.1)  R@1 0.532  512 img/s  lr 1.6e-03"
    lines = ["training until step 25000", "step 1/25000", f"step 21/25000{shown}"]
    assert stream.getvalue().splitlines()[:3] == lines
