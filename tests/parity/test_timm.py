"""The Vision Transformer beside timm's, with timm's random weights."""

import functools

import jax
import numpy as np
import pytest

from hypjax.models import VisionTransformer

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")


@functools.cache
def peer():
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=0
    )
    for parameter in model.parameters():  # Biases and norms too, which start at 0 and 1.
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def converted(model):
    """Weights of timm's model under Flax's names."""
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def dense(name):
        return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}

    def norm(name):
        return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}

    patch = weights["patch_embed.proj.weight"]
    params = {
        "cls_token": weights["cls_token"],
        "pos_embed": weights["pos_embed"],
        "norm": norm("norm"),
        "patch_embed": {
            "kernel": patch.transpose(2, 3, 1, 0).reshape(-1, patch.shape[0]),
            "bias": weights["patch_embed.proj.bias"],
        },
    }
    for i in range(len(model.blocks)):
        params[f"block_{i}"] = {
            "norm_1": norm(f"blocks.{i}.norm1"),
            "norm_2": norm(f"blocks.{i}.norm2"),
            "attention": {
                "qkv": dense(f"blocks.{i}.attn.qkv"),
                "proj": dense(f"blocks.{i}.attn.proj"),
            },
            "fc_1": dense(f"blocks.{i}.mlp.fc1"),
            "fc_2": dense(f"blocks.{i}.mlp.fc2"),
        }
    return params


def setup():
    encoder = VisionTransformer(patch_size=8, width=48, depth=3, num_heads=4)
    images = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype(np.float32)
    return encoder, converted(peer()), images


def test_all_tokens_agree():
    encoder, params, images = setup()
    with torch.no_grad():
        expected = peer().forward_features(torch.tensor(images.transpose(0, 3, 1, 2))).numpy()
    tokens = encoder.apply({"params": params}, images, return_tokens=True)
    np.testing.assert_allclose(tokens, expected, atol=2e-5)


def test_gradients_agree():
    encoder, params, images = setup()
    weights = np.random.default_rng(1).normal(size=(4, 17, 48)).astype(np.float32)

    def value(params):
        return (weights * encoder.apply({"params": params}, images, return_tokens=True)).sum()

    gradient = jax.grad(value)(params)
    model = peer()
    model.zero_grad()
    tokens = model.forward_features(torch.tensor(images.transpose(0, 3, 1, 2)))
    (torch.tensor(weights) * tokens).sum().backward()
    for block, name in (("block_0", "blocks.0"), ("block_2", "blocks.2")):
        qkv = model.get_submodule(f"{name}.attn.qkv").weight.grad.numpy().T
        got = gradient[block]["attention"]["qkv"]["kernel"]
        assert np.linalg.norm(got - qkv) < 1e-4 * np.linalg.norm(qkv)
    cls = model.cls_token.grad.numpy()
    assert np.linalg.norm(gradient["cls_token"] - cls) < 1e-4 * np.linalg.norm(cls)
