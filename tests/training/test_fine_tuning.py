"""Ways to fine-tune: LoRA, the head first, rates by layer, and an average that is evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import hypjax
from hypjax import evaluate, train
from hypjax.assemble import saved_method
from hypjax.errors import UserError
from hypjax.experiment.trained import restore_best
from hypjax.models.pretrained import timm_state_dict
from hypjax.models.weight_files import read_state_dict
from hypjax.objectives import ProblemSizes
from hypjax.training import lora, optim
from hypjax.training.setup import check_paths
from tests.helpers import commands, small_runs
from tests.helpers.steps import learner_of, leaves

ALL = (
    "train.lora_rank=2",
    "train.ema_decay=0.9",
    "train.head_warmup_steps=2",
    "optim.layer_decay=0.5",
)
LORA = lora.Lora(3, 6.0, ("model/encoder/*block*",))


@pytest.fixture
def params():
    """Parameters of a block with a dense layer and a convolution, and others."""
    rng = np.random.default_rng(0)
    shapes = {"dense": (10, 4), "conv": (3, 3, 2, 5)}
    block = {name: {"kernel": rng.normal(size=s), "bias": 0.0} for name, s in shapes.items()}
    encoder = {"block_0": block, "patch_embed": {"kernel": rng.normal(size=(7, 10))}}
    model = {"encoder": encoder, "head": {"kernel": rng.normal(size=(4, 2))}}
    return {"model": jax.tree.map(jnp.float32, model), "objective": {}}


def test_adapters_stand_beside_kernels_and_are_added_to_them(params):
    adapted = lora.with_adapters(params, LORA, ["patch_projection"], jax.random.key(0))
    trained, frozen = optim.split_frozen(adapted, ["patch_projection"])
    below = ("model", "encoder", "block_0")
    expected = {("model", "head", "kernel"): (4, 2)}
    for name, (rows, columns) in {"dense": (10, 4), "conv": (18, 5)}.items():
        expected |= {
            (*below, name, "lora", "a"): (rows, 3),
            (*below, name, "lora", "b"): (3, columns),
        }
        a = flatten_dict(adapted)[*below, name, "lora", "a"]
        assert 0.7 < rows**0.5 * np.abs(a).max() <= 1  # Uniform up to 1/√n.
        assert np.all(flatten_dict(adapted)[*below, name, "lora", "b"] == 0)
    assert {path: leaf.shape for path, leaf in flatten_dict(trained).items()} == expected
    assert optim.merge(trained, frozen) == adapted
    for name, value in leaves(lora.merged(adapted["model"], LORA)).items():
        np.testing.assert_array_equal(value, leaves(params["model"])[name])  # B is 0 at first.
    filled = jax.tree.map(jnp.ones_like, adapted["model"])
    merged = lora.merged(filled, LORA)["encoder"]["block_0"]
    for name in ("dense", "conv"):
        np.testing.assert_array_equal(merged[name]["kernel"], 1 + 6.0 / 3 * 3)
    # Frozen parameters get none, and with the encoder frozen no adapter is trained.
    alone = lora.with_adapters(params, LORA, ["model/encoder/block_0/conv"], jax.random.key(0))
    assert [path[3] for path in flatten_dict(alone) if path[-1] == "a"] == ["dense"]
    assert optim.split_frozen(adapted, ["encoder"])[0]["model"].keys() == {"head"}
    with pytest.raises(UserError, match="lora_targets names model/encoder/layer_1, but this model"):
        missing = LORA._replace(targets=(*LORA.targets, "model/encoder/layer_1"))
        lora.with_adapters(params, missing, [], jax.random.key(0))


def test_a_path_without_parameters_is_refused_before_a_run_has_a_folder(load_glyphs):
    for field in ("optim.frozen=model/encoder/blok_0", "optim.groups=('model/hed*', 1, None, 0)"):
        config = load_glyphs(field)
        with pytest.raises(UserError, match=f"{field.partition('=')[0]} names model/.*, but this "):
            groups = [name for name, *_ in config.optim.groups]
            check_paths(learner_of(config), ProblemSizes(12, 2, 32, 8, 100, 24), groups)


@pytest.mark.slow
def test_a_run_with_all_options_is_read_by_the_commands(photos_folder, tmp_path, capsys):
    run = tmp_path / "run"
    config = small_runs.load(photos_folder, *ALL, "train.total_steps=6", "eval.every=5")
    results = train.train_and_evaluate(config, run)
    assert "training the encoder, too, from this step on" in capsys.readouterr().err
    again = evaluate.evaluate(config, run)
    assert again == {name: results[name] for name in again}
    trained = restore_best(run, saved_method(run))
    model, params = trained.model, trained.params
    converted = tmp_path / "model.safetensors"
    commands.call("convert", f"--workdir={run}", f"--output={converted}")
    state = read_state_dict(str(converted))
    for name, value in timm_state_dict(params["encoder"], model.encoder).items():
        np.testing.assert_array_equal(state[name], value)
    paths = sorted(photos_folder.glob("*/*.png"))[:3]
    assert np.isfinite(hypjax.load(run).embed(paths)).all()
