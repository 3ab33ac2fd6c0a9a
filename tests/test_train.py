"""The train step: what it changes, what it compiles to, and the loop around it."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hypjax import parallel, train
from hypjax.config import load_config
from hypjax.config.groups import GROUPS
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.geometry import PoincareBall, Sphere
from hypjax.inference.embedding import embed_function
from hypjax.monitoring import stopwatch
from hypjax.monitoring.telemetry import Telemetry
from hypjax.objectives import Spec
from hypjax.retrieval import galleries, neighbors, ranks
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.runs.workdir import Workdir
from hypjax.training import optim, states
from hypjax.training.learner import build_learner
from hypjax.training.step import create_state, jit_train_step, make_train_step
from hypjax.types import Batch
from tests.helpers import small_runs


@pytest.fixture
def load(repository, data_dir):
    """Loads configs/glyphs.py at a size for tests."""

    def load(*overrides, variant="hyp"):
        spec = str(repository / f"configs/glyphs.py:{variant}")
        return load_config(spec, [*small_runs.SHORT_GLYPHS, f"run.data_dir={data_dir}", *overrides])

    return load


def learner_of(config):
    return build_learner(config, parallel.create_mesh((1, 1)))


def start(config):
    learner = learner_of(config)
    state = create_state(learner, Spec(12, 2, config.model.width, config.model.head_dim, 100))
    state = parallel.place(state, parallel.parameter_shardings(learner.mesh, state))
    return state, jit_train_step(make_train_step(learner), learner.mesh, state)


def random_batch(seed=0, size=24):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(size // 2, dtype=np.int32), 2)
    pixels = rng.integers(0, 256, (size, 32, 32, 1), dtype=np.uint8)
    ids = np.arange(size, dtype=np.int32)
    return jax.device_put(Batch(pixels, labels, ids, np.zeros(size, bool)))


def leaves(tree):
    return {
        jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_frozen_groups_stay_bit_identical_and_all_else_moves(load):
    state, step = start(
        load(
            "optim.frozen=patch_projection,head", "optim.schedule=constant", "optim.warmup_steps=0"
        )
    )
    before = leaves(state.params)
    for i in range(3):
        state, _ = step(state, random_batch(i))
    for name, after in leaves(state.params).items():
        held = "patch_embed" in name or "'head'" in name
        assert held == np.array_equal(after, before[name]), name


def test_an_update_is_adamw_on_the_clipped_gradient_of_the_trained_parameters(load):
    """One step beside AdamW written out: clip by the global norm, decay everything, decoupled."""
    clip, decay, rate, eps = 0.01, 0.3, 0.01, 1e-4
    config = load(
        *("optim.schedule=constant", "optim.warmup_steps=0", "optim.frozen=patch_projection"),
        *(f"optim.clip_norm={clip}", f"optim.weight_decay={decay}"),
        *(f"optim.learning_rate={rate}", f"optim.eps={eps}"),
    )
    state, step = start(config)
    learner = learner_of(config)
    batch = random_batch()

    def loss_of(params):
        images = (batch.images / 255 - config.data.mean[0]) / config.data.std[0]
        outputs = learner.model.apply({"params": params["model"]}, images)
        return learner.objective.loss({}, {}, outputs, None, batch, jax.random.key(0))[0]

    gradient = jax.jit(jax.grad(loss_of))(state.params)["model"]
    before = leaves(jax.device_get(state.params["model"]))
    everything = optax.tree.norm(gradient)
    del gradient["encoder"]["patch_embed"]
    norm = optax.tree.norm(gradient)
    assert everything > 1.002 * norm > 100 * clip
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    after = leaves(state.params["model"])
    moments = leaves(optax.tree.get(state.opt_state, "mu")["model"])
    assert moments.keys() == leaves(gradient).keys()
    for name, g in leaves(gradient).items():
        clipped = g * clip / norm
        np.testing.assert_allclose(moments[name], 0.1 * clipped, rtol=1e-3, atol=1e-8)
        moved = rate * (clipped / (np.abs(clipped) + eps) + decay * before[name])
        np.testing.assert_allclose(after[name], before[name] - moved, rtol=1e-4, atol=1e-5)


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


def test_learning_rate_rises_and_then_falls_or_stays(load):
    def rates(schedule):
        overrides = ["train.total_steps=10", "optim.warmup_steps=4", "optim.learning_rate=1"]
        rate = optim.learning_rate(load(*overrides, f"optim.schedule={schedule}").optim, 10)
        return [float(rate(step)) for step in range(11)]

    rise = [0, 0.25, 0.5, 0.75]
    np.testing.assert_allclose(rates("constant"), rise + [1] * 7)
    cosine = [(1 + np.cos(np.pi * i / 6)) / 2 for i in range(7)]
    np.testing.assert_allclose(rates("cosine"), rise + cosine, atol=1e-6)


def test_the_step_compiles_once_and_reuses_its_state(load):
    state, step = start(load())
    kernel, batch = state.params["model"]["head"]["kernel"], random_batch()
    state, _ = step(state, batch)
    assert kernel.is_deleted()
    with jax.transfer_guard_host_to_device("disallow"):
        for _ in range(3):
            state, _ = step(state, batch)
    assert step._cache_size() == 1


def test_a_restored_state_does_not_compile_the_step_again(load, tmp_path):
    state, step = start(load())
    state, _ = step(state, random_batch())
    checkpoints = SharedCheckpoints(lambda: Checkpoints(tmp_path))
    recalls = states.Measured(untrained={"test": {"head": {"recall@1": 0.5}}})
    states.save(checkpoints, state, recalls)
    checkpoints.close()
    fresh, step = start(load())
    saved = SharedCheckpoints(lambda: Checkpoints(tmp_path))
    restored, remembered = states.restore(saved, fresh)
    assert remembered == recalls
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    for i in range(3):
        restored, _ = step(restored, random_batch(i))
    assert step._cache_size() == 1


def test_a_checkpoint_of_other_devices_can_be_restored(tmp_path):
    """Saved on the second of two devices, read where there is one."""
    program = (
        "import jax, pathlib, sys; from hypjax.runs.checkpoints import Checkpoints;"
        "c = Checkpoints(pathlib.Path(sys.argv[1]));"
        "x = jax.device_put(jax.numpy.arange(3.0), jax.devices()[1]);"
        "c.save(1, record={}, model={'x': x});"
        "c.close()"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, env=os.environ | flags, check=True, capture_output=True)
    shapes = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    ((model,),) = [Checkpoints(tmp_path).restore_latest(model=shapes).trees]
    np.testing.assert_array_equal(model["x"], [0, 1, 2])


_PRODUCT = r"stablehlo\.(dot_general|convolution)\b"


def float32_products(lowered):
    """The precision of each product with a float32 factor in a lowered program.

    Attention's own products of bfloat16 queries, keys and values ask for bfloat16 by name, also
    where their gradients arrive in float32; they belong to the encoder and are left out.
    """
    text = lowered.as_text()
    products = [line for line in text.splitlines() if re.search(_PRODUCT, line)]
    single = [line for line in products if "f32" in re.search(r": \(([^)]*)\)", line)[1]]
    attention = ("batching_dims = [0, 1]", "lhs_precision_type = bf16")
    others = [line for line in single if not all(mark in line for mark in attention)]
    return [re.search(r"precision = \[(\w+), (\w+)\]", line) or line for line in others]


def lower(function, *args, **kwargs):
    """Lowers for an accelerator, where precision matters."""
    return jax.jit(function).trace(*args, **kwargs).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("variant", ["hyp", "sph"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_float32_product_is_rounded(load, variant, precision):
    config = load(f"model.precision={precision}", variant=variant)
    learner = learner_of(config)
    state, _ = start(config)
    step = make_train_step(learner)
    spaces = {"head": learner.objective.score_space, "encoder": Sphere()}
    embed = embed_function(learner.model, learner.pixel_scaling, spaces)
    programs = {
        "train": lower(step, state, random_batch()),
        "embed": lower(embed, state.params["model"], random_batch().images),
    }
    for name, program in programs.items():
        found = float32_products(program)
        assert found, name
        for product in found:
            assert isinstance(product, re.Match), f"{name}: {product}"
            assert product.groups() == ("HIGHEST", "HIGHEST"), f"{name}: {product.string}"


@pytest.mark.parametrize("space", [PoincareBall(), Sphere()])
def test_no_product_of_the_search_is_rounded(space):
    x, mesh = np.asarray(space.embed(jnp.ones((64, 8)))), ranks.Mesh(jax.local_devices(), "tiles")
    points = ranks._sort_by_class(space, x, np.zeros(64, np.int32))
    tiles = ranks._distribute(mesh, np.zeros((1, 2), np.int32))
    nearest = ranks._Nearest(points.offset, points.ids)
    chunk = next(galleries.as_gallery(x).chunks(space, 64))
    programs = [
        ranks._nearest_matches(mesh, True).trace(points, points, tiles),
        ranks._ranks(mesh, True).trace(points, points, nearest, tiles, tiles),
        jax.jit(neighbors._multiply).trace(jnp.zeros((64, 64)), points.query, chunk),
    ]
    for program in programs:
        found = float32_products(program.lower(lowering_platforms=("tpu",)))
        assert found and all(product.groups() == ("HIGHEST", "HIGHEST") for product in found)


def test_a_run_leaves_results_metrics_and_a_model(load, tmp_path, capsys):
    config = load()
    results = train.train_and_evaluate(config, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    for recalls in (results["untrained"], results["final"], results["validation"]["final"]):
        assert recalls.keys() == {"head", "encoder"}
        for values in recalls.values():
            assert list(values) == ["recall@1", "recall@2", "recall@4", "recall@8"]
            assert all(0 < value < 1 for value in values.values())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [2, 3, 4, 6]
    assert {"loss", "gradient_norm", "learning_rate", "images_per_second"} <= lines[1].keys()
    assert [line["step"] for line in lines if "validation" in line] == [0, 3, 6]
    told = capsys.readouterr().err
    times = json.loads((tmp_path / "times.json").read_text())
    seconds = times["seconds"]
    total = seconds.pop("total")
    assert tuple(seconds) == stopwatch.PARTS
    assert sum(seconds.values()) == pytest.approx(total, abs=0.01)
    assert all(seconds[part] > 0 for part in ("compile", "steps", "evaluation", "saving"))
    assert " s in all: " in told and times["steps"] == 6
    assert times["host_memory_peak"] > 50e6

    best = {"final": results["final"], "best": results["best"]}
    assert evaluate(config, tmp_path) == best
    changed = load("eval.ks=1,100", "eval.metrics=recall,precision,map@r", "seed=5")
    other = evaluate(changed, tmp_path)["final"]["head"]
    assert list(other) == ["recall@1", "recall@100", "precision@1", "precision@100", "map@r"]
    assert other["recall@1"] == other["precision@1"] > other["map@r"]
    with pytest.raises(UserError, match="config.eval.ks holds 9999, but for precision there are"):
        evaluate(load("eval.ks=1,9999", "eval.metrics=recall,precision"), tmp_path)
    assert other["recall@1"] == results["final"]["head"]["recall@1"] < other["recall@100"]
    assert train.train_and_evaluate(config, tmp_path) == results
    assert "already" in capsys.readouterr().out


def test_an_interrupted_run_ends_as_an_undisturbed_one(load, tmp_path, monkeypatch, capsys):
    config = load("run.checkpoint_every=3", "eval.every=6")
    undisturbed = train.train_and_evaluate(config, tmp_path / "whole")
    write = Telemetry.write

    def interrupted(self, step, values):
        write(self, step, values)
        if step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Telemetry, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.train_and_evaluate(config, tmp_path / "parts")
    halfway = evaluate(config, tmp_path / "parts")
    assert halfway.keys() == {"step 3"} and halfway["step 3"] != undisturbed["final"]
    assert train.train_and_evaluate(config, tmp_path / "parts") == undisturbed
    assert "continuing after step 3" in capsys.readouterr().err

    def losses(folder):
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").open()]
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    assert losses("parts") == losses("whole")


def begin(config, path):
    with Workdir(path, config).claimed({}):
        pass


def test_a_folder_of_another_run_is_refused(load, tmp_path):
    begin(load(), tmp_path)
    with pytest.raises(UserError, match=r"another configuration \(seed: 0 -> 1\)"):
        train.train_and_evaluate(load("seed=1"), tmp_path)
    Workdir(tmp_path, load("run.workers=1"))


def test_a_model_of_another_shape_is_not_evaluated(load, tmp_path):
    begin(load(), tmp_path)
    with pytest.raises(UserError, match=r"another configuration \(model.depth: 1 -> 2\)"):
        evaluate(load("model.depth=2"), tmp_path)


def test_the_default_run_can_be_resumed(repository):
    config = load_config(str(repository / "configs/glyphs.py"))
    assert config.run.checkpoint_every < config.train.total_steps / 2


def test_a_folder_without_a_checkpoint_cannot_be_evaluated(load, tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint; train first, or name a run's folder"):
        evaluate(load(), tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_a_batch_of_more_classes_than_there_are_is_refused(load, tmp_path):
    with pytest.raises(UserError, match="1000 classes with 2 images each, but there are 848"):
        train.train_and_evaluate(load("train.batch_size=2000"), tmp_path)
    with pytest.raises(UserError, match="947 of 948 classes, but two must remain"):
        train.train_and_evaluate(load("data.validation_classes=947"), tmp_path)
