"""The feature cache: what is kept, and what happens when it cannot be."""

import errno
import threading

import numpy as np

from hypjax.inference import feature_cache

FEATURES = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 5), np.float32)]


def never():
    raise AssertionError("the features are there")


def check(found):
    assert len(found) == len(FEATURES)
    assert all(map(np.array_equal, found, FEATURES))


def test_features_are_computed_once_and_a_damaged_file_again(tmp_path, capsys):
    folder = tmp_path / "features" / "key"
    check(feature_cache.shared(folder, lambda: FEATURES))
    check(feature_cache.shared(folder, never))
    (file,) = folder.glob("*.npz")
    for damage in (lambda x: x[:-30], lambda x: x[:200] + bytes([x[200] ^ 1]) + x[201:]):
        file.write_bytes(damage(file.read_bytes()))
        check(feature_cache.shared(folder, lambda: FEATURES))
        assert "is damaged" in capsys.readouterr().err
        check(feature_cache.shared(folder, never))


def test_a_writer_that_fails_leaves_nothing_and_a_full_disk_only_warns(
    tmp_path, monkeypatch, capsys
):
    def killed():
        raise KeyboardInterrupt

    folder = tmp_path / "features"
    try:
        feature_cache.shared(folder, killed)
    except KeyboardInterrupt:
        assert not list(folder.glob("*.npz"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        check(feature_cache.shared(folder, lambda: FEATURES))
    assert "No space left on device" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    check(feature_cache.shared(tmp_path / "file", lambda: FEATURES))
    assert "features cannot be kept in" in capsys.readouterr().err
    check(feature_cache.shared(folder, lambda: FEATURES))
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "features.npz"]


def test_a_second_process_waits_for_the_first(tmp_path):
    computing, go_on, found = threading.Event(), threading.Event(), []

    def compute():
        computing.set()
        go_on.wait(10)
        return FEATURES

    def second():
        found.append(feature_cache.shared(tmp_path, never))

    first = threading.Thread(target=feature_cache.shared, args=(tmp_path, compute))
    first.start()
    computing.wait(10)
    waiting = threading.Thread(target=second)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    go_on.set()
    waiting.join(10)
    check(found[0])


def test_the_key_changes_with_every_fact_and_parameter():
    params = {"kernel": np.ones((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    other = {**params, "bias": np.array([0, 1e-30], np.float32)}
    facts = ["images", (224, 256), [0, 1]]
    keys = {
        feature_cache.key(facts, params),
        feature_cache.key(facts, other),
        feature_cache.key([*facts[:2], [0, 2]], params),
        feature_cache.key([facts[0], (224, 224), facts[2]], params),
    }
    assert len(keys) == 4
    assert feature_cache.key(facts, dict(params)) in keys
