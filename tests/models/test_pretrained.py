"""Weights under timm's names: conversion, files, and errors."""

import functools
import math
import pathlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.evaluate import evaluate_pretrained, pretrained_features
from hypjax.inference.pretrained import pretrained_encoder, warn_of_known_classes
from hypjax.inference.run import Run
from hypjax.models import (
    ConvNeXt,
    EfficientNetLite,
    ResNet,
    VisionTransformer,
    create_embedder,
    create_encoder,
)
from hypjax.models.architectures import encoder_shapes
from hypjax.models.embedder import Embedder
from hypjax.models.layers import pool_tokens
from hypjax.models.pretrained import (
    convert_timm,
    load_timm,
    pools_as_timm,
    timm_classifier,
    timm_config,
    timm_constructor,
    timm_state_dict,
)
from hypjax.runs.files import read_object
from hypjax.runs.workdir import saved_config, saved_fingerprint
from hypjax.system import hub
from hypjax.training import optim
from tests.helpers import commands, small_runs

SMALL = VisionTransformer(image_size=16, patch_size=8, width=24, depth=2, num_heads=2)
DISTILLED = SMALL.clone(class_tokens=2, pooling="cls_dist_mean")
RESNET = ResNet(image_size=32, depths=(1, 2), width=4)
ENCODERS = {
    "vit": SMALL,
    "distilled": DISTILLED,
    "learned gem": SMALL.clone(pooling="gem", learn_gem=True),
    "resnet": RESNET,
    "convnext": ConvNeXt(image_size=16, depths=(1, 2), widths=(4, 6)),
    "lite": EfficientNetLite(image_size=16, width_factor=0.25),
}


shapes_of = functools.cache(encoder_shapes)


def weights_of(encoder, seed=0):
    rng = np.random.default_rng(seed)
    shapes = shapes_of(encoder)
    return jax.tree.map(lambda leaf: rng.uniform(0.1, 1, leaf.shape).astype(np.float32), shapes)


def assert_equal(first, second):
    first, second = flatten_dict(first), flatten_dict(second)
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=str(path))


@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
def test_round_trip_through_timm_names_is_exact(encoder):
    params = weights_of(encoder)
    state = timm_state_dict(params, encoder)
    head = {"kernel": np.ones((encoder.dim, 3)), "bias": np.zeros(3)}
    assert_equal(convert_timm(state | timm_classifier(head, encoder), encoder), params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blocks.1.attn.qkv.bias"), "they lack blocks.1.attn.qkv.bias"),
        (lambda s: s.update(extra=np.ones(2)), "unlike the encoder, they contain extra"),
        (lambda s: s.update({"patch_embed.proj.weight": np.ones((24, 1, 8, 8))}), "24×1×8×8"),
        (lambda s: s.update({"norm.bias": np.zeros(24, np.int8)}), "int8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message, tmp_path):
    state = timm_state_dict(weights_of(SMALL), SMALL)
    path = str(tmp_path / "w.safetensors")
    save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, path)
    assert_equal(load_timm(path, SMALL), weights_of(SMALL))
    change(state)
    save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, path)
    with pytest.raises(UserError, match=message):
        load_timm(path, SMALL)


def test_the_papers_names_are_those_of_timm(tmp_path):
    """As HIER saves a ResNet, which lists its layers twice, from several processes."""
    state = timm_state_dict(weights_of(RESNET), RESNET)
    again = {
        re.sub(r"layer(\d)", lambda layer: f"layer_blocks.{int(layer[1]) - 1}", name): value
        for name, value in state.items()
        if name.startswith("layer")
    }
    head = {"module.last_layer.1.weight": np.ones((3, RESNET.dim), np.float32)}
    names = {"module.body.model.": state, "module.body.": again, "": head}
    released = {prefix + name: x for prefix, part in names.items() for name, x in part.items()}
    save_file(released, tmp_path / "w.safetensors")
    assert_equal(load_timm(str(tmp_path / "w.safetensors"), RESNET), weights_of(RESNET))


def test_unknown_names_and_unsupported_options_are_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("damaged.safetensors").write_bytes(b"\x10\x00\x00")
    unreachable = mock.Mock(side_effect=hub.UnreachableError("no network"))
    monkeypatch.setattr(hub, "fetch", unreachable)
    for name, message in (
        ("damaged.safetensors", "is damaged"),
        ("vit_smal_patch16_224.dino", "which begins with vit_small_patch16_224, "),
        ("vit_small_patch16_224.dino", "download https://.*small_patch16_224.dino.*weights="),
    ):
        with pytest.raises(UserError, match=message):
            load_timm(name, SMALL)
    with pytest.raises(UserError, match="image_size is 250; .* a multiple of 16"):
        create_encoder("vit_small_patch16_224", image_size=250)


def test_poolings_equal_values_computed_by_hand():
    tokens = np.array([[[1.0, 5], [3, -1], [1, 2], [2, -4]]], np.float32)
    for pooling, expected in {
        "cls": [1, 5],
        "cls_dist_mean": [2, 2],
        "avg": [1.5, -1],
        "max": [2, 2],
        "avg_max": [3.5, 1],
        "gem": [4.5 ** (1 / 3), 4 ** (1 / 3)],
    }.items():
        np.testing.assert_allclose(pool_tokens(tokens, 2, pooling)[0], expected, rtol=1e-6)


def test_the_exponent_of_gem_is_a_setting_or_a_parameter_that_other_weights_lack():
    plain, fixed = SMALL.clone(pooling="gem"), SMALL.clone(pooling="gem", gem_exponent=2.0)
    learned = fixed.clone(learn_gem=True)
    images = np.random.default_rng(0).normal(size=(2, *SMALL.sides, 3)).astype(np.float32)
    weights = plain.init(jax.random.key(0), images)["params"]
    params = convert_timm(timm_state_dict(weights, plain), learned)
    assert params.pop("gem_exponent") == 2.0 and params.keys() == weights.keys()

    def embed(exponent):
        return learned.apply({"params": {**params, "gem_exponent": exponent}}, images)

    patches = np.maximum(fixed.apply({"params": params}, images, return_tokens=True)[:, 1:], 1e-6)
    np.testing.assert_allclose(embed(2.0), np.sqrt(np.mean(patches**2, axis=1)), rtol=1e-5)
    slope = jax.grad(lambda x: jnp.sum(embed(x)))(2.0)
    np.testing.assert_allclose(slope, np.sum(embed(2.01) - embed(1.99)) / 0.02, rtol=1e-2)


def test_regional_maxima_equal_those_of_the_paper():
    """Tolias et al.: at scale l, squares of 2/(l + 1) of the side, spread evenly."""
    grid = np.random.default_rng(0).normal(size=(7, 7, 5)).astype(np.float32)
    starts = {7: [0], 4: [0, 3], 3: [0, 2, 4]}
    regions = [grid[y : y + n, x : x + n] for n, at in starts.items() for y in at for x in at]
    maxima = np.array([region.max(axis=(0, 1)) for region in [grid, *regions]])
    expected = (maxima / np.linalg.norm(maxima, axis=1, keepdims=True)).sum(axis=0)
    actual = pool_tokens(grid.reshape(1, 49, 5), 0, "rmac")[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert np.isfinite(pool_tokens(grid[:1, :1].reshape(1, 1, 5), 0, "rmac")).all()


def test_batch_norm_statistics_are_not_trained():
    params = {"model": {"encoder": weights_of(RESNET)}, "objective": {}}
    trained, frozen = optim.split_frozen(params, ())
    paths = flatten_dict(frozen).keys()
    assert paths and all("statistics" in path for path in paths)
    assert not any("statistics" in path for path in flatten_dict(trained))
    assert_equal(optim.merge(trained, frozen), params)


def test_training_starts_from_pretrained_weights(run):
    config, results = saved_config(run), read_object(run / "results.json")
    _, model, params, _ = Run.saved(run).restore_best(run)
    before, after = load_timm(config.model.weights, model.encoder), flatten_dict(params["encoder"])
    for path, value in flatten_dict(before).items():
        assert np.array_equal(value, after[path]) == (path[0] == "patch_embed"), path
        assert np.abs(after[path] - value).max() < 0.3, path
    encoder_alone = evaluate_pretrained(config)
    assert encoder_alone["pretrained"]["encoder"] == results["untrained"]["encoder"]


def test_weights_of_another_run_are_used_if_its_encoder_is_the_same(run, photos_folder, capsys):
    """The number of heads does not show in the shapes of parameters."""
    config = small_runs.load(photos_folder, f"model.weights={run}")
    actual = pretrained_encoder(config, create_embedder(config).encoder)
    assert_equal(actual, Run.saved(run).restore_best(run).params["encoder"])
    for seed, warned in ((0, 0), (5, 1)):
        config.data.split_seed = seed
        warn_of_known_classes(config, saved_fingerprint(run))
        assert capsys.readouterr().err.count("recall is too high") == warned
    config.model.num_heads = 4
    with pytest.raises(UserError, match="has a different architecture or size"):
        pretrained_encoder(config, create_embedder(config).encoder)


def test_hyperbolicity_is_that_of_unnormalised_features_of_one_scale(run):
    config = saved_config(run)
    points, _ = pretrained_features(config)
    assert np.linalg.norm(points, axis=1).std() > 0
    config.eval.scales = (1.0, 0.5)
    np.testing.assert_array_equal(pretrained_features(config)[0], points)


def test_convert_command_writes_timm_names(run, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    for words, remedy in ((["x.onnx"], "onnx"), (["x.safetensors", "--format=onnx"], "timm")):
        with pytest.raises(UserError, match=f"set --format={remedy}"):
            commands.call(
                "convert", f"--workdir={run}", f"--output={tmp_path}/{words[0]}", *words[1:]
            )
    commands.call("convert", f"--workdir={run}", f"--output={path}")
    constructor = "timm.models.VisionTransformer(num_classes=8, img_size=16, patch_size=8, "
    assert constructor in capsys.readouterr().out
    _, model, params, _ = Run.saved(run).restore_best(run)
    assert_equal(load_timm(str(path), model.encoder), params["encoder"])
    np.testing.assert_array_equal(load_file(path)["head.weight"].T, params["head"]["kernel"])


def test_constructor_line_for_timm():
    config = load_config("cub:hyp-deit", ["data.image_size=384", "data.resize=384"])
    model = create_embedder(config, evaluating=True)
    params = {"encoder": encoder_shapes(model.encoder)}
    name = "deit_small_distilled_patch16_224"
    line = f'timm.create_model("{name}", num_classes=128, img_size=384)'
    assert timm_constructor(params, model) == line and pools_as_timm(model.encoder)
    assert not pools_as_timm(create_embedder(config).encoder)
    grey = {"encoder": encoder_shapes(model.encoder, channels=1)}
    assert "in_chans=1" in timm_constructor(grey, model)


@pytest.mark.parametrize(("side", "resize"), [(224, 256), (224, 354), (224, 891), (8, 93)])
def test_timm_resizes_to_the_same_length(side, resize):
    config = load_config("cub:hyp-deit", [f"data.image_size={side}", f"data.resize={resize}"])
    model = Embedder(SMALL.clone(image_size=side), head_dim=8)
    params = {"encoder": encoder_shapes(model.encoder)}
    share = timm_config(params, model, config.data)["pretrained_cfg"]["crop_pct"]
    assert math.floor(side / share) == resize
