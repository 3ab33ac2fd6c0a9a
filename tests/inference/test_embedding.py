"""Points of prefixes and at other scales, and the cache of features."""

import jax
import numpy as np
import pytest

from hypjax.assemble import assemble_method
from hypjax.config import default_config, validate
from hypjax.experiment import embedding
from hypjax.experiment.embedding import part_of, to_points
from hypjax.geometry import PoincareBall, Sphere
from hypjax.models import ResNet, VisionTransformer
from hypjax.models.embedder import scaled_side


def test_sides_are_whole_patches():
    vit = VisionTransformer(image_size=32, patch_size=4, width=24, depth=1, num_heads=2)
    cases = (224, 16, 0.7071, 160), (224, 16, 0.5, 112), (32, 8, 0.01, 8), (32, 8, 1.0, 32)
    for size, patch, scale, side in (*cases, (40, 8, 0.5, 24)):  # 2.5 patches are rounded up.
        assert scaled_side(vit.clone(image_size=size, patch_size=patch), scale) == side
        assert scaled_side(ResNet(image_size=size), scale) == max(round(size * scale), 1)


@pytest.mark.slow
def test_prefixes_are_embedded_by_themselves_in_each_space_of_the_head():
    config = default_config("matryoshka+supcon")
    config.eval.prefixes, config.objective.dims = (3, 9), (9, 20)
    config.eval.spaces.head = ("objective", "sphere")
    validate(config)
    method = assemble_method(config)
    model = method.model
    pooled = 3 * jax.random.normal(jax.random.key(0), (5, 2, 384))  # At two scales.
    shapes = jax.eval_shape(
        lambda key, x: model.init(key, x, method="project"), jax.random.key(1), pooled[:, 0]
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / 20), shapes)["params"]
    features = np.array(model.apply({"params": params}, pooled[:, 0], method="project").projected)
    spaces = method.spaces(params)
    first, second, mean = (
        to_points(model, params, spaces, pooled[:, x]) for x in ([0], [1], [0, 1])
    )
    actual, ball = dict(first), PoincareBall(0.1, 2.3)
    assert (np.linalg.norm(features[:, :9], axis=1) < np.linalg.norm(features, axis=1)).all()
    for dim in (3, 9, 20):
        for name, space in ((f"head@{dim}", ball), (f"head@{dim}:sphere", Sphere())):
            assert part_of(name) == "head"
            np.testing.assert_array_equal(actual.pop(name), space.embed(features[:, :dim]))
    assert list(actual) == ["head", "head:sphere", "encoder"]
    np.testing.assert_array_equal(actual["head"], ball.embed(features))
    for name, space in spaces.items():
        expected = space.mean(np.stack([first[name], second[name]], axis=-2))
        np.testing.assert_allclose(mean[name], expected, atol=1e-6)


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
        np.testing.assert_array_equal(embedding.cached_features(folder, 5, 2, compute), FEATURES)
        assert computed == [*expected]

    def killed(done):
        yield from list(compute(done))[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedding.cached_features(folder, 5, 2, killed)

    def unreadable(done):
        yield FEATURES[done : done + 2]
        raise OSError("no such image")

    with pytest.raises(OSError, match="no such image"):  # The features could be stored.
        embedding.cached_features(tmp_path / "other", 5, 2, unreadable)
    assert "cannot be stored" not in capsys.readouterr().err
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
