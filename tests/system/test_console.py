"""Progress on stderr and in logs, and commands that install extras."""

import threading

import pytest
import tqdm

from hypjax import errors
from hypjax.system import console


def test_no_thread_of_progress_bars_is_left_to_the_interpreter():
    def watching():
        return [thread for thread in threading.enumerate() if isinstance(thread, tqdm.TMonitor)]

    tqdm.tqdm(range(2), disable=True)
    assert watching()
    console.join_monitors()
    assert not watching()


def test_a_log_has_a_line_every_ten_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.ProgressLines("embedded", 100, 10)
    for now[0] in (4, 9, 11, 12, 20, 21, 22, 23, 40):
        lines.advance(10)
    assert capsys.readouterr().err.splitlines() == [
        "embedded 40/100 images",
        "embedded 70/100 images",
    ]


@pytest.mark.parametrize(
    ("clone", "inside", "command"),
    [
        (True, True, 'pip install -e ".[onnx]"'),
        (True, False, 'pip install -e "{}[onnx]"'),
        (False, False, 'pip install "hypjax[onnx]"'),
    ],
)
def test_an_extra_is_installed_from_the_clone(tmp_path, monkeypatch, clone, inside, command):
    if clone:
        (tmp_path / "setup.cfg").write_text("")
    monkeypatch.setattr(errors, "_CLONE", tmp_path)
    monkeypatch.chdir(tmp_path if inside else "/")
    with pytest.raises(errors.UserError) as error:
        errors.require_package("none_such", "this", "hypjax[onnx]")
    assert str(error.value) == f"this needs none_such: {command.format(tmp_path)}"
    assert errors.installation("wandb") == 'pip install "wandb"'


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(1, "class", "1 class"), (0, "class", "0 classes"), (1200, "image", "1,200 images")],
)
def test_numbers_agree_with_their_nouns(number, noun, text):
    assert errors.counted(number, noun) == text
