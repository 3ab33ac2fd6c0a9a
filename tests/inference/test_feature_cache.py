"""The feature cache: what is kept, and what happens when it cannot be."""

import numpy as np
import pytest

from hypjax.inference import embedding

FEATURES = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)  # Two scales.


def test_features_are_computed_once_resumed_after_a_kill_and_damaged_ones_again(tmp_path, capsys):
    folder, computed = tmp_path / "features" / "key", []

    def compute(done):
        """Yields the features of the images that are not done, two at a time."""
        for first in range(done, 5, 2):
            computed.append(first)
            yield FEATURES[first : first + 2]

    def check(*expected):
        computed.clear()
        found = embedding.cached_features(folder, 5, 2, compute)
        np.testing.assert_array_equal(found, FEATURES)
        assert computed == [*expected]

    def killed(done):
        yield from list(compute(done))[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedding.cached_features(folder, 5, 2, killed)
    with (folder / "arrays").open("ab") as file:
        file.write(b"torn")
    check(4)
    check()
    for name in ("arrays", "index"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
        check(0, 2, 4)
        assert "is damaged" in capsys.readouterr().err
        check()
