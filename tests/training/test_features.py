"""A head that is trained on features in a file."""

import numpy as np
import pytest

from hypjax.assemble import assemble_training
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.geometry import Sphere
from hypjax.retrieval import graded_scores, recall_at_k
from hypjax.training.states import first_state
from tests.helpers import small_runs

CONFIG = str(small_runs.REPOSITORY / "configs/features.py")


def test_splits_of_a_file_are_kept_and_head_sizes_follow_the_features(tmp_path):
    file, path = small_runs.write_features(tmp_path / "features.npz"), tmp_path / "split.npz"
    given = dict(np.load(file))
    tested, coarse = given["labels"] >= 7, (given["labels"] < 5).astype(int)
    np.savez(path, **given, splits=np.where(tested, "test", "train"), coarse_labels=coarse)
    fields = [*small_runs.SHORT_FEATURES, "objective.name=cones+pairwise_cross_entropy"]
    built = assemble_training(load_config(CONFIG, [*fields, f"data.path={path}"]))
    assert built.learner.model.head_dim == built.learner.model.encoder.dim == 16
    assert tested[built.experiment.splits.test.positions].all()
    assert len(built.images) + len(built.experiment.splits.validation) == 42
    assert {*built.images.coarse_labels, *built.experiment.splits.test.coarse_labels} == {"0", "1"}
    images, of_classes = built.images, np.array(built.sizes.coarse_labels[0])
    assert len(of_classes) == built.sizes.classes == images.num_classes
    np.testing.assert_array_equal(of_classes[images.labels], images.coarse_labels.astype(int))
    with pytest.raises(UserError, match="needs coarse classes"):
        assemble_training(load_config(CONFIG, [*fields, f"data.path={file}"]))
    random = first_state(built.learner, built.sizes).params["model"]
    scores = built.experiment.test_scores(random)

    points = np.asarray(Sphere().embed(given["features"][tested]))
    levels = [given["labels"][tested].astype(str), coarse[tested].astype(str)]
    expected = recall_at_k(points, levels[0], ks=(1, 2), space=Sphere())
    graded = graded_scores(points, levels, space=Sphere())
    graded = {name: values.mean() for name, values in graded.items()}
    assert scores["encoder"] == {f"recall@{k}": x for k, x in expected.items()} | graded
    assert list(built.experiment.validation_scores(random)["head"]) == ["recall@1", "recall@2"]
