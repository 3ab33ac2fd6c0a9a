"""Training the head on the frozen encoder's embeddings, which are computed once."""

import contextlib
import functools
import shutil

import jax
import numpy as np
import pytest

from hypjax.assemble import assemble_training
from hypjax.config.choices import freezes_encoder
from hypjax.errors import UserError
from hypjax.training.input import open_input
from hypjax.training.states import first_state
from hypjax.training.step import make_train_step, shard_batch
from tests.helpers import small_runs
from tests.helpers.pictures import write_squares

FROZEN = ("optim.frozen=encoder", "eval.every=0")
CACHED = (*FROZEN, "train.cached_features=True")


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """Photos of 20 × 20 pixels, whose crops can be their test views."""
    return write_squares(tmp_path_factory.mktemp("squares"), 20)


# A crop of the whole image without flips is the test view of a square image.
VIEWS = ("data.crop_area=0.999999,1", "data.crop_ratio=1,1", "data.flip=0")


# Of two blocks, the lower one is frozen, and what precedes it.
LOWER = (
    "model.depth=2",
    "optim.frozen=model/encoder/patch_embed,model/encoder/*_token,model/encoder/pos_embed,"
    "model/encoder/block_0",
)


def first_step(config):
    """Gradient norm and model after one step."""
    built = assemble_training(config)
    learner, state = built.learner, first_state(built.learner, built.sizes)
    source = open_input(built, range(1), state.params["model"])
    with contextlib.closing(source.batches(range(1), built.plans)) as batches:
        batch = shard_batch(learner.mesh, next(batches))
    state, metrics = jax.jit(make_train_step(learner))(state, batch)
    return metrics["gradient_norm"], state.params["model"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [LOWER, (*FROZEN, "run.microbatch=5")], ids=["lower", "encoder"])
def test_training_on_cached_activations_is_that_of_the_same_views(squares, fields):
    """Batches of 8 images are padded for slices of 5."""
    one = (*fields, "run.mesh=1,1", "optim.warmup_steps=0")
    cached = first_step(small_runs.load(squares, *one, "train.cached_features=True"))
    computed = first_step(small_runs.load(squares, *one, *VIEWS))
    # Biases of keys have no gradient but rounding, which Adam scales up.
    alike = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-5)
    jax.tree.map(alike, cached, computed)


def test_activations_can_be_cached_below_the_lowest_trained_layer_alone(squares):
    cached = "train.cached_features=True"
    built = assemble_training(small_runs.load(squares, *LOWER, cached))
    assert built.learner.cached_block == "block_0"
    for whole in ("encoder", "model/encoder", "model/encoder/*"):
        frozen = small_runs.load(squares, *CACHED, f"optim.frozen={whole}")
        built = assemble_training(frozen)
        assert built.learner.cached_block is None and built.experiment.embedder.cached
    assert not freezes_encoder(("model/encoder/*/*", "head"))  # The class token is trained.
    with pytest.raises(UserError, match="its lowest layers: at least model/encoder/cls_token,"):
        assemble_training(small_runs.load(squares, "optim.frozen=model/encoder/block_0", cached))


def test_classes_with_one_image_are_left_out(squares, tmp_path, capsys):
    for name in "abcdefghijkl":
        split = "train" if name < "i" else "test"
        shutil.copytree(squares / name, tmp_path / "photos" / split / name)
    for i in range(1, 4):
        (tmp_path / "photos" / "train" / "a" / f"{i}.png").unlink()
    fields = ("data.validation_classes=0", "data.test_classes=0")
    built = assemble_training(small_runs.load(tmp_path / "photos", *CACHED, *fields))
    assert built.images.num_classes == 7
    assert "single image: 1 of 8; they are left out" in capsys.readouterr().err
