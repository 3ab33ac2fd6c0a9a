"""Groups of parameters, and the learning rate."""

import numpy as np

from hypjax.config.groups import GROUPS
from hypjax.training import optim


def test_split_and_merge_are_inverse():
    params = {
        "model": {
            "encoder": {"patch_embed": {"kernel": 1.0}, "norm": {"scale": 2.0}},
            "head": {"bias": 3.0},
        },
        "objective": {},
    }
    for frozen in ([], ["patch_projection"], ["encoder", "head"], list(GROUPS)):
        trained, held = optim.split_frozen(params, frozen)
        assert optim.merge(trained, held) == params
    trained, held = optim.split_frozen(params, ["patch_projection"])
    assert held == {"model": {"encoder": {"patch_embed": {"kernel": 1.0}}}}
    assert "patch_embed" not in trained["model"]["encoder"]


def test_learning_rate_rises_and_then_falls_or_stays(load_glyphs):
    def rates(schedule):
        overrides = ["train.total_steps=10", "optim.warmup_steps=4", "optim.learning_rate=1"]
        rate = optim.learning_rate(load_glyphs(*overrides, f"optim.schedule={schedule}").optim, 10)
        return [float(rate(step)) for step in range(11)]

    rise = [0, 0.25, 0.5, 0.75]
    np.testing.assert_allclose(rates("constant"), rise + [1] * 7)
    cosine = [(1 + np.cos(np.pi * i / 6)) / 2 for i in range(7)]
    np.testing.assert_allclose(rates("cosine"), rise + cosine, atol=1e-6)
