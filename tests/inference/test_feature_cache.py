"""The feature cache: what is kept, and what happens when it cannot be."""

import numpy as np
import pytest

from hypjax.inference import embedding

FEATURES = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)  # Two scales.


def compute(done, computed=None):
    """Yields the features of the images that are not done, two at a time."""
    for first in range(done, 5, 2):
        if computed is not None:
            computed.append(first)
        yield FEATURES[first : first + 2]


def never(done):
    assert done == 5, "the features are there"
    return iter(())


def check(folder, compute):
    np.testing.assert_array_equal(embedding.cached_features(folder, 5, 2, compute), FEATURES)


def test_features_are_computed_once_resumed_after_a_kill_and_damaged_ones_again(tmp_path, capsys):
    folder, computed = tmp_path / "features" / "key", []

    def killed(done):
        yield from list(compute(done))[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedding.cached_features(folder, 5, 2, killed)
    with (folder / "arrays").open("ab") as file:
        file.write(b"torn")
    check(folder, lambda done: compute(done, computed))
    assert computed == [4]
    check(folder, never)
    for name in ("arrays", "index"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
        check(folder, compute)
        assert "is damaged" in capsys.readouterr().err
        check(folder, never)
