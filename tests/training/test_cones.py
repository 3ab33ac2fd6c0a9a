"""Runs that draw images into the cones of their coarse classes."""

import numpy as np
import pytest

from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.training.setup import build
from tests.helpers import small_runs

CONFIG = str(small_runs.REPOSITORY / "configs/features.py:hyp")
FIELDS = [*small_runs.SHORT_FEATURES, "model.head_dim=4", "optim.schedule=constant"]
FIELDS += ["objective.name=cones+pairwise_cross_entropy", "objective.cone_weight=1"]


def load(folder, **columns):
    """The configuration of a run on features of twelve classes, with more columns of the file."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(12), 4)
    features = rng.normal(size=(12, 16))[labels] + rng.normal(size=(48, 16))
    columns |= {"features": features.astype(np.float32), "labels": labels}
    np.savez(folder / "features.npz", **columns)
    return load_config(CONFIG, [*FIELDS, f"data.path={folder / 'features.npz'}"])


def test_a_run_has_the_groups_of_its_training_classes_or_is_refused(tmp_path):
    groups = np.repeat(["b", "a", "c"], 16)
    built = build(load(tmp_path, superlabels=groups))
    images = built.splits.train
    named = images.groups
    coarse = np.array(built.spec.coarse_classes)
    assert len(coarse) == built.spec.classes == images.num_classes
    np.testing.assert_array_equal(np.unique(named)[coarse[images.labels]], named)
    with pytest.raises(UserError, match="the data set has none; list superlabels"):
        build(load(tmp_path))
