"""Progress on stderr and in logs."""

from hypjax.system import console


def test_a_log_has_a_line_every_ten_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.ProgressLines("embedded", 100, 10)
    for now[0] in (4, 9, 11, 12, 20, 21, 22, 23, 40):
        lines.advance(10)
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["embedded 40/100 images", "embedded 70/100 images"]
