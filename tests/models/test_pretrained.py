"""Weights under timm's names: conversion, files, and errors."""

import argparse
import collections
import fractions
import functools
import itertools
import json
import math
import pathlib
import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save, save_file

from hypjax.assemble import assemble_method, saved_method
from hypjax.config import load_config
from hypjax.config.settings import model_settings
from hypjax.errors import UserError
from hypjax.evaluate import evaluate_pretrained, pretrained_features
from hypjax.experiment.trained import restore_best
from hypjax.inference.pretrained import pretrained_encoder, warn_of_known_classes
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
from hypjax.models.weight_names import check_names, find_encoder
from hypjax.runs.files import read_object
from hypjax.runs.workdir import saved_config, saved_fingerprint
from hypjax.settings import Pixels
from hypjax.system import hub
from hypjax.training import optim
from hypjax.types import View
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
        (
            lambda s: s.update({f"block.{i}": s.pop(f"blocks.0.norm{i}.bias") for i in (1, 2)}),
            "lack blocks.0.norm1.bias, blocks.0.norm2.bias; .* contain block.1, block.2: the wei",
        ),
        (lambda s: s.update({"patch_embed.proj.weight": np.ones((24, 2, 8, 8))}), "24×2×8×8"),
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


@pytest.mark.parametrize(
    ("prefix", "others"),
    [
        ("_orig_mod.module.", ()),
        ("model_state_dict.", ("optimizer_state_dict.state.0.exp_avg", "epoch")),
        ("net.encoder.", ("net.encoder.mask_token", "net.decoder.0.weight")),
        ("state_dict.model.backbone.", ("state_dict.criterion.proxies",)),
        ("teacher.backbone.", ("teacher.head.mlp.0.weight", "teacher.head.last_layer.weight_v")),
        ("state_dict.module.base_encoder.", ("state_dict.module.base_encoder.head.1.weight",)),
        ("visual.trunk.", ("visual.head.proj.weight", "transformer.resblocks.0.ln_1.weight")),
        ("", ("mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.weight")),
    ],
)
def test_an_encoder_is_found_under_any_prefix(prefix, others):
    names = timm_state_dict(weights_of(SMALL), SMALL).keys()
    found = find_encoder([*others, *(prefix + name for name in names)], names)
    assert {name: found.pop(name) for name in names} == {name: prefix + name for name in names}
    check_names((), found)


def test_of_several_encoders_in_a_file_the_average_counts_unless_one_is_named(tmp_path, capsys):
    first, second = weights_of(SMALL), weights_of(SMALL, seed=1)
    for names in (("state_dict", "state_dict_ema"), ("student.module", "teacher.backbone")):
        states = zip(names, (first, second), strict=True)
        states = [(x, timm_state_dict(params, SMALL)) for x, params in states]
        path = str(tmp_path / "w.safetensors")
        save_file({f"{x}.{name}": array for x, y in states for name, array in y.items()}, path)
        assert_equal(load_timm(path, SMALL), second)
        assert f"{names[1]} is read, not {names[0]}; " in capsys.readouterr().err
        assert_equal(load_timm(f"{path}?key={names[0].partition('.')[0]}", SMALL), first)
        assert not capsys.readouterr().err
    with pytest.raises(UserError, match="no entry teachr; .* student, teacher; did you mean"):
        load_timm(f"{path}?key=teachr", SMALL)


@pytest.mark.parametrize(
    "module",
    ["optimizer.exp_avg", "state.exp_avg_sq", "momentum_buffer", "optim_g.ema", "opt_state.0.mu"],
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_averages_of_optimisers_count_only_if_they_are_named(module, prefix, capsys):
    names = timm_state_dict(weights_of(SMALL), SMALL).keys()
    content = [f"{module}.{name}" for name in names] + [prefix + name for name in names]
    assert find_encoder(content, names) == {name: prefix + name for name in names}
    named = find_encoder(content, names, module)
    assert named == {name: f"{module}.{name}" for name in names} and not capsys.readouterr().err


def touch(path):
    path.touch()


class Touch:
    """Creates a file if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return touch, (self.path,)


@pytest.mark.parametrize("suffix", [".pth.tar", ".ckpt", ".weights", ""])
def test_other_objects_in_a_file_of_torch_are_passed_over_and_never_executed(suffix, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    params, path = weights_of(SMALL), tmp_path / f"model_best{suffix}"
    state = {x: torch.tensor(array) for x, array in timm_state_dict(params, SMALL).items()}
    others = [argparse.Namespace(lr=1), np.float64(0.5), np.arange(3), Touch(tmp_path / "run")]
    others += [collections.defaultdict(list, a=[1]), pathlib.Path("a"), SMALL.blocks]
    others += [np.random.default_rng(0), np.array([{}, None], object), fractions.Fraction(1, 2)]
    content = {"net": state, "others": others, "optimizer": {0: state["norm.bias"]}}
    torch.save(content, path, _use_new_zipfile_serialization=suffix != ".ckpt")
    assert_equal(load_timm(str(path), SMALL), params)
    assert not (tmp_path / "run").exists()
    torch.save({"model": SMALL.blocks}, path)
    with pytest.raises(UserError, match="holds no tensors with names; save model.state_dict()"):
        load_timm(str(path), SMALL)


def test_weights_in_parts_and_folders(tmp_path, photos_folder):
    config = small_runs.load(photos_folder, f"model.weights={tmp_path}")
    encoder = create_embedder(model_settings(config)).encoder
    params = weights_of(encoder)
    state = timm_state_dict(params, encoder)
    names = ["a-1-of-2.safetensors", "a-2-of-2.SAFETENSORS"]
    parts = dict(zip(state, itertools.cycle(names)))
    for part in names:
        save_file({x: y for x, y in state.items() if parts[x] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    assert_equal(load_timm(str(index), encoder), params)
    assert_equal(pretrained_encoder(assemble_method(config)), params)  # The folder is no run.
    index.unlink()
    shutil.copy(tmp_path / names[0], tmp_path / "b.safetensors")
    with pytest.raises(UserError, match="one file of weights, not a-1.*, b.safetensors; name"):
        load_timm(str(tmp_path), encoder)


def test_kernels_of_three_channels_are_summed_for_grey_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = "vit_small_patch16_224.dino"  # A file, though timm has weights of this name.
    grey = ("data.channels=1", "data.mean=(0.5,)", "data.std=(0.5,)", f"model.weights={path}")
    config = small_runs.load("unused", *grey)
    encoder = create_embedder(model_settings(config)).encoder
    state = timm_state_dict(weights_of(encoder), encoder)
    pathlib.Path(path).write_bytes(save(state))
    kernel = pretrained_encoder(assemble_method(config))["patch_embed"]["kernel"]
    expected = state["patch_embed.proj.weight"].sum(axis=1).reshape(len(kernel.T), -1).T
    np.testing.assert_allclose(kernel, expected, rtol=1e-6)
    assert "set --config.data.mean=0.449 --config.data.std=0.226" in capsys.readouterr().err


def test_the_norm_of_averages_needs_an_encoder_that_pools_first(tmp_path):
    encoder = SMALL.clone(pooling="avg", pool_first=True)
    save_file(timm_state_dict(weights_of(encoder), encoder), path := tmp_path / "w.safetensors")
    for pooling in ("avg", "cls"):
        with pytest.raises(UserError, match="set --config.model.pool_first=True --config.model.po"):
            load_timm(str(path), SMALL.clone(pooling=pooling))
    with pytest.raises(UserError, match="pool_first is True; it must be None, as for all ConvNets"):
        create_encoder("resnet50", pool_first=True)


def test_unknown_names_and_unsupported_options_are_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("damaged.safetensors").write_bytes(b"\x10\x00\x00")
    pathlib.Path("pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    pathlib.Path("parts.json").write_text('{"weight_map": {"norm.bias": "w-00002.bin"}}')
    unreachable = mock.Mock(side_effect=hub.UnreachableError("no network"))
    monkeypatch.setattr(hub, "fetch", unreachable)
    for name, message in (
        ("damaged.safetensors", "is damaged"),
        ("vit_smal_patch16_224.dino", "which begins with vit_small_patch16_224, "),
        ("dinov2_vits14", "which begins with vit_[a-z]+_patch14_dinov2, "),
        ("RESNET5O", "which begins with resnet50, resnet101 or another of "),
        ("damagd.safetensors", "did you mean damaged.safetensors"),
        ("pointer.safetensors", "is damaged, a pointer of Git LFS, or"),
        ("parts.json", "w-00002.bin is missing beside parts.json; download all parts"),
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
        np.testing.assert_allclose(
            pool_tokens(jnp.asarray(tokens), 2, pooling)[0], expected, rtol=1e-6
        )


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
    actual = pool_tokens(jnp.asarray(grid.reshape(1, 49, 5)), 0, "rmac")[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert np.isfinite(pool_tokens(jnp.asarray(grid[:1, :1].reshape(1, 1, 5)), 0, "rmac")).all()


def test_batch_norm_statistics_are_not_trained():
    params = {"model": {"encoder": weights_of(RESNET)}, "objective": {}}
    trained, frozen = optim.split_frozen(params, ())
    paths = flatten_dict(frozen).keys()
    assert paths and all("statistics" in path for path in paths)
    assert not any("statistics" in path for path in flatten_dict(trained))
    assert_equal(optim.merge(trained, frozen), params)


def test_training_starts_from_pretrained_weights(run):
    config, results = saved_config(run), read_object(run / "results.json")
    trained = restore_best(run, saved_method(run))
    model, params = trained.model, trained.params
    before, after = load_timm(config.model.weights, model.encoder), flatten_dict(params["encoder"])
    for path, value in flatten_dict(before).items():
        assert np.array_equal(value, after[path]) == (path[0] == "patch_embed"), path
        assert np.abs(after[path] - value).max() < 0.3, path
    encoder_alone = evaluate_pretrained(config)
    assert encoder_alone["pretrained"]["encoder"] == results["untrained"]["encoder"]


def test_weights_of_another_run_are_used_if_its_encoder_is_the_same(run, photos_folder, capsys):
    """The number of heads does not show in the shapes of parameters."""
    config = small_runs.load(photos_folder, f"model.weights={run}")
    actual = pretrained_encoder(assemble_method(config))
    assert_equal(actual, restore_best(run, saved_method(run)).params["encoder"])
    for seed, warned in ((0, 0), (5, 1)):
        config.data.split_seed = seed
        warn_of_known_classes(assemble_method(config), saved_fingerprint(run))
        assert capsys.readouterr().err.count("recall is too high") == warned
    config.model.num_heads = 4
    with pytest.raises(UserError, match="has a different architecture or size"):
        pretrained_encoder(assemble_method(config))


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
    trained = restore_best(run, saved_method(run))
    model, params = trained.model, trained.params
    assert_equal(load_timm(str(path), model.encoder), params["encoder"])
    np.testing.assert_array_equal(load_file(path)["head.weight"].T, params["head"]["kernel"])


def test_constructor_line_for_timm():
    config = load_config("cub:hyp-deit", ["data.image_size=384", "data.resize=384"])
    model = create_embedder(model_settings(config, evaluating=True))
    params = {"encoder": encoder_shapes(model.encoder)}
    name = "deit_small_distilled_patch16_224"
    line = f'timm.create_model("{name}", num_classes=128, img_size=384)'
    assert timm_constructor(params, model) == line and pools_as_timm(model.encoder)
    assert not pools_as_timm(create_embedder(model_settings(config)).encoder)
    first = model.clone(encoder=model.encoder.clone(pool_first=True))
    assert timm_constructor(params, first) == f"{line[:-1]}, fc_norm=True)"
    grey = {"encoder": encoder_shapes(model.encoder, channels=1)}
    assert "in_chans=1" in timm_constructor(grey, model)


@pytest.mark.parametrize(("side", "resize"), [(224, 256), (224, 354), (224, 891), (8, 93)])
def test_timm_resizes_to_the_same_length(side, resize):
    pixels = Pixels(View(side, resize, channels=3), mean=(0.5,) * 3, std=(0.5,) * 3)
    model = Embedder(SMALL.clone(image_size=side), head_dim=8)
    params = {"encoder": encoder_shapes(model.encoder)}
    share = timm_config(params, model, pixels)["pretrained_cfg"]["crop_pct"]
    assert math.floor(side / share) == resize
