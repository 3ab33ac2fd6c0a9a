"""Files of models of images and texts: learned scalars, pixels, activations, refusals."""

import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, Sphere
from hypjax.models.language_image import read_language_image
from hypjax.system.files import write_safetensors
from hypjax.types import TEXTS

BLOCK = {"attn.in_proj_weight": (192, 64), "attn.in_proj_bias": (192,), "attn.out_proj.bias": (64,)}
BLOCK |= {"attn.out_proj.weight": (64, 64), "mlp.c_fc.weight": (256, 64), "mlp.c_fc.bias": (256,)}
BLOCK |= {"mlp.c_proj.weight": (64, 256), "mlp.c_proj.bias": (64,)}
BLOCK |= {f"ln_{i}.{leaf}": (64,) for i in (1, 2) for leaf in ("weight", "bias")}
TIMM = {"attn.in_proj_": "attn.qkv.", "attn.out_proj": "attn.proj", "c_fc": "fc1", "c_proj": "fc2"}


def timm_block(name):
    for theirs, timm in (*TIMM.items(), ("ln_", "norm")):
        name = name.replace(theirs, timm)
    return name


MERU = {f"textual.resblocks.0.{name}": shape for name, shape in BLOCK.items()}
MERU |= {f"visual.blocks.0.{timm_block(name)}": shape for name, shape in BLOCK.items()}
MERU |= {"textual.token_embed.weight": (50, 64), "textual.posit_embed": (9, 64)}
MERU |= {"visual.cls_token": (1, 1, 64), "visual.pos_embed": (1, 5, 64)}
MERU |= {"visual.patch_embed.proj.weight": (64, 3, 8, 8), "visual.patch_embed.proj.bias": (64,)}
MERU |= {
    f"{name}.{x}": (64,) for name in ("visual.norm", "textual.ln_final") for x in ("weight", "bias")
}
MERU |= {"visual_proj.weight": (4, 64), "textual_proj.weight": (4, 64)}
MERU |= {"pixel_mean": (3, 1, 1), "pixel_std": (3, 1, 1)}
SCALARS = {"logit_scale": 3.0, "curv": 0.5, "visual_alpha": -2.0, "textual_alpha": -1.0}
SCALARS = {name: np.float32(x) for name, x in SCALARS.items()}


def write(path, shapes, changes=()):
    """Writes random arrays of some shapes, and the changes; None leaves an array out."""
    rng = np.random.default_rng(0)
    arrays = {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    arrays |= {
        name: np.float32(x) for name, x in SCALARS.items() if "textual.posit_embed" in shapes
    }
    arrays |= dict(changes)
    write_safetensors(path, {name: x for name, x in arrays.items() if x is not None})
    return arrays


def test_learned_scalars_are_within_the_bounds_of_training(tmp_path):
    for scalars, c, scale, alphas in (
        (SCALARS, np.exp(0.5), np.exp(3), (np.exp(-2), np.exp(-1))),
        ({"curv": 3.0, "logit_scale": 5.0, "visual_alpha": 0.5}, 10, 100, (1, np.exp(-1))),
        ({"curv": -3.0, "textual_alpha": 0.1}, 0.1, np.exp(3), (np.exp(-2), 1)),
    ):
        changes = {name: np.float32(x) for name, x in scalars.items()}
        arrays = write(tmp_path / "meru.safetensors", MERU, SCALARS | changes)
        found = read_language_image(tmp_path / "meru.safetensors")
        assert found.kind == "MERU"
        assert found.space == Lorentz(found.space.c, clip_radius=None, feature_scale=0.5)
        assert found.space.c == pytest.approx(c)
        assert (found.scale, found.bias) == (pytest.approx(scale), 0)
        heads = found.params["head"], found.params[f"towers_{TEXTS}"]["head"]
        for tower, alpha, head in zip(("visual", "textual"), alphas, heads, strict=True):
            expected = alpha * arrays[f"{tower}_proj.weight"].T
            np.testing.assert_allclose(head["kernel"], expected, rtol=1e-6)


def test_pixels_are_scaled_by_the_numbers_in_the_file(tmp_path):
    """In HyCoCLIP's files, the mean is the deviation."""
    std = (0.229, 0.224, 0.225)
    array = np.float32(std).reshape(3, 1, 1)
    write(
        tmp_path / "hycoclip.safetensors", MERU, SCALARS | {"pixel_mean": array, "pixel_std": array}
    )
    pixels = read_language_image(tmp_path / "hycoclip.safetensors").pixels
    assert (pixels.mean, pixels.std, pixels.view) == (std, std, (16, 16, 3, "centre_crop"))


def test_successors_and_the_baseline(tmp_path):
    scales = {f"{x}logit_scale": np.float32(2) for x in ("global_", "local_", "global_local_")}
    write(tmp_path / "uncha.safetensors", MERU, SCALARS | scales)
    assert read_language_image(tmp_path / "uncha.safetensors").scale == pytest.approx(np.exp(2))
    without = dict.fromkeys(SCALARS.keys() - {"logit_scale"})
    write(tmp_path / "clip.safetensors", MERU, SCALARS | without)
    found = read_language_image(tmp_path / "clip.safetensors")
    assert (found.kind, found.space) == ("MERU's CLIP", Sphere())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curv": None}, "they lack curv"),
        ({"textual.posit_embed": None}, "pos_embed"),
        ({"textual.ln_final.bias": None}, "textual tower: they lack norm.bias"),
        ({"visual_proj.weight": None}, "they lack visual_proj"),
        ({"visual_proj.weight": np.zeros((5, 64), "f")}, "visual tower: the head"),
        ({"curvs.0": np.float32(1)}, "they contain curvs.0"),
        ({"visual.blocks.0.extra": np.zeros(3, "f")}, "visual tower.*contain blocks.0.extra"),
        ({"visual.norm.bias": np.zeros(3, "f")}, "visual tower: norm.bias is 3, not 64"),
        ({"visual.pos_embed": np.zeros((1, 16, 64), "f")}, "a model of images that are not square"),
        ({"visual.pos_embed": np.zeros((1, 7, 64), "f")}, "a model of images that are not square"),
        ({"visual.patch_embed.proj.weight": np.zeros((64, 192), "f")}, "a NaFlex model"),
    ],
)
def test_other_arrays_are_refused(changes, message, tmp_path):
    write(tmp_path / "other.safetensors", MERU, SCALARS | changes)
    with pytest.raises(UserError, match=f"other.safetensors.*{message}"):
        read_language_image(tmp_path / "other.safetensors")


def test_a_program_is_refused_with_the_remedy(tmp_path):
    with zipfile.ZipFile(tmp_path / "ViT-B-32.pt", "w") as archive:
        archive.writestr("ViT-B-32/constants.pkl", b"")
    with pytest.raises(UserError, match="TorchScript; save its weights once: torch.save"):
        read_language_image(tmp_path / "ViT-B-32.pt")


def test_other_models_are_not_of_images_and_texts(tmp_path):
    assert read_language_image(tmp_path) is None
    assert read_language_image(tmp_path / "absent.pth") is None
    write(tmp_path / "model.safetensors", {"head.weight": (3, 4), "cls_token": (1, 1, 4)})
    assert read_language_image(tmp_path) is None


CLIP = {f"transformer.resblocks.0.{name}": shape for name, shape in BLOCK.items()}
CLIP |= {f"visual.{name}": shape for name, shape in CLIP.items()}
CLIP |= {"visual.conv1.weight": (64, 3, 8, 8), "visual.class_embedding": (64,)}
CLIP |= {"visual.positional_embedding": (5, 64), "visual.proj": (64, 8)}
CLIP |= {"token_embedding.weight": (50, 64), "positional_embedding": (9, 64)}
CLIP |= {"text_projection": (64, 8), "logit_scale": (), "context_length": ()}
for norm in ("visual.ln_pre", "visual.ln_post", "ln_final"):
    CLIP |= {f"{norm}.weight": (64,), f"{norm}.bias": (64,)}


def test_the_activation_of_a_clip_is_what_files_beside_it_say_or_openai_s(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    half = np.float32(np.float16(np.full((64, 3, 8, 8), 0.1)))
    for kernel, beside, quick in (
        (half, None, True),
        (half.astype(jnp.bfloat16), None, False),
        (half + np.float32(1e-6), None, False),
        (half, {"quick_gelu": False}, False),
        (half + np.float32(1e-6), {"quick_gelu": True}, True),
    ):
        write(path, CLIP, {"visual.conv1.weight": kernel})
        if beside is not None:
            content = json.dumps({"model_cfg": beside})
            (tmp_path / "open_clip_config.json").write_text(content)
        found = read_language_image(path)
        assert (found.kind, found.space) == ("CLIP", Sphere())
        encoder, expected = found.settings.encoder, "quick_gelu" if quick else "gelu"
        assert (encoder.architecture, encoder.activation) == ("vit_clip", expected)
        assert found.settings.towers[TEXTS].encoder.activation == expected
        assert found.pixels.mean[0] == 0.48145466
        said = capsys.readouterr()
        assert ("half precision" in said.out + said.err) == (beside is None)
    content = json.dumps({"model_cfg": {"vision_cfg": {"image_size": [16, 32]}}})
    (tmp_path / "open_clip_config.json").write_text(content)
    with pytest.raises(UserError, match="not square"):
        read_language_image(path)
    content = json.dumps({"preprocess_cfg": {"resize_mode": "squash"}})
    (tmp_path / "open_clip_config.json").write_text(content)
    assert read_language_image(path).pixels.view == (16, 16, 3, "squash")


SIGLIP = {f"text.{name}": shape for name, shape in CLIP.items() if name.startswith("transformer.")}
SIGLIP |= {
    f"visual.trunk.{name}": MERU[f"visual.{name}"]
    for name in map(
        timm_block,
        (
            *(f"blocks.0.{x}" for x in BLOCK),
            "norm.weight",
            "norm.bias",
            "patch_embed.proj.weight",
            "patch_embed.proj.bias",
        ),
    )
}
SIGLIP |= {"visual.trunk.pos_embed": (1, 4, 64), "text.token_embedding.weight": (50, 64)}
SIGLIP |= {"text.positional_embedding": (9, 64), "text.text_projection.weight": (64, 64)}
SIGLIP |= {f"text.ln_final.{x}": (64,) for x in ("weight", "bias")}
SIGLIP |= {"text.text_projection.bias": (64,), "logit_scale": (1,), "logit_bias": (1,)}
POOL = {"latent": (1, 1, 64), "q.weight": (64, 64), "kv.weight": (128, 64), "kv.bias": (128,)}
POOL |= {f"{x}.bias": (64,) for x in ("q", "proj", "norm", "mlp.fc2")} | {"mlp.fc1.bias": (256,)}
POOL |= {"proj.weight": (64, 64), "norm.weight": (64,), "mlp.fc1.weight": (256, 64)}
POOL |= {"mlp.fc2.weight": (64, 256)}
SIGLIP |= {f"visual.trunk.attn_pool.{name}": shape for name, shape in POOL.items()}


def halves(arrays, dtype):
    return {name: x.astype(dtype) for name, x in arrays.items()}


def averaged(arrays):
    """A model beside its average over training, and what optimisers keep of it."""
    other = {f"model.{name}": 2 * x for name, x in arrays.items()}
    moments = {f"optimizer.exp_avg.{name}": x for name, x in arrays.items()}
    return other | moments | {f"model_ema.{name}": x for name, x in arrays.items()}


def beside_average(arrays):
    counts = {"ema.n_averaged": np.float32(3)}
    return {name: 2 * x for name, x in arrays.items()} | counts | prefixed(arrays, "ema.")


def prefixed(arrays, prefix):
    return {f"{prefix}{name}": x for name, x in arrays.items()}


AWKWARD = {
    "as it is": (dict, 0),
    "a prefix": (lambda arrays: prefixed(arrays, "module."), 0),
    "entries": (lambda arrays: prefixed(arrays, "state_dict.module."), 0),
    "bfloat16": (lambda arrays: halves(arrays, jnp.bfloat16), 1e-2),
    "half precision": (lambda arrays: halves(arrays, np.float16), 1e-3),
    "averages": (averaged, 0),
    "averages beside it": (beside_average, 0),
}


@pytest.mark.parametrize("change", AWKWARD)
@pytest.mark.parametrize("shapes", [CLIP, SIGLIP], ids=["CLIP", "SigLIP"])
def test_awkward_files_are_read(shapes, change, tmp_path):
    path = tmp_path / "open_clip_model.safetensors"
    arrays = write(path, shapes)
    quick = {"open_clip_config.json": {"model_cfg": {"quick_gelu": False}}}
    for name, content in quick.items():
        (tmp_path / name).write_text(json.dumps(content))
    expected = read_language_image(path)
    form, error = AWKWARD[change]
    write_safetensors(path, form(arrays))
    found = read_language_image(tmp_path)
    assert (found.kind, found.settings) == (expected.kind, expected.settings)
    ours, theirs = jax.tree.leaves(found.params), jax.tree.leaves(expected.params)
    for leaf, other in zip(ours, theirs, strict=True):
        assert leaf.dtype == np.float32
        np.testing.assert_allclose(leaf, other, rtol=error, atol=error)
    assert (found.scale, found.bias) == pytest.approx((expected.scale, expected.bias), rel=error)


def test_weights_in_several_parts_without_a_bias_and_of_another_context(tmp_path):
    arrays = write(tmp_path / "whole.safetensors", SIGLIP, {"logit_bias": None})
    arrays = {name: x for name, x in arrays.items() if x is not None}
    arrays["text.positional_embedding"] = np.ones((16, 64), np.float32)
    (tmp_path / "whole.safetensors").unlink()
    parts = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(arrays))}
    for part in set(parts.values()):
        write_safetensors(tmp_path / part, {x: arrays[x] for x in arrays if parts[x] == part})
    index = json.dumps({"weight_map": parts})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    found = read_language_image(tmp_path)
    assert (found.kind, found.bias) == ("SigLIP", 0)
    assert found.settings.towers[TEXTS].encoder.context == 16
    (tmp_path / parts["logit_scale"]).unlink()
    with pytest.raises(UserError, match="missing beside"):
        read_language_image(tmp_path)


def test_heads_of_odd_widths_are_asked_for(tmp_path):
    narrow = {name: tuple(48 if x == 64 else x for x in shape) for name, shape in MERU.items()}
    narrow = {name: tuple(144 if x == 192 else x for x in shape) for name, shape in narrow.items()}
    write(tmp_path / "meru.safetensors", narrow, SCALARS)
    with pytest.raises(UserError, match="tells the heads of width 48"):
        read_language_image(tmp_path / "meru.safetensors")
