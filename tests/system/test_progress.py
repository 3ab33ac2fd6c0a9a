"""Progress on stderr and in logs."""

from hypjax.system import progress


def test_a_log_has_a_line_every_ten_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.ProgressLines("embedded", 100, 10)
    for now[0] in (4, 9, 11, 12, 20, 21, 22, 23, 40):
        lines.advance(10)
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["embedded 40/100 images", "embedded 70/100 images"]


def test_bars_start_no_monitor_thread(monkeypatch):
    monkeypatch.setattr(progress.tqdm.tqdm, "monitor", None)  # Another library may have begun one.
    assert progress.Bar(range(1), disable=True).monitor is None
    assert progress.tqdm.tqdm.monitor_interval  # Other libraries' bars keep theirs.
