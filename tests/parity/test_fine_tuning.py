"""Fine-tuning beside timm and PyTorch: LoRA, layer-wise rates, a probe first, an average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from hypjax.config.settings import model_settings
from hypjax.models import create_embedder, create_encoder
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import name_in_timm
from hypjax.training import optim
from hypjax.training.step import (
    evaluated_model,
    trained_model,
)
from hypjax.types import IMAGES

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
timm_optim = pytest.importorskip("timm.optim", reason="needs the parity extra: timm")
timm_utils = pytest.importorskip("timm.utils", reason="needs the parity extra: timm")
recipe = pytest.importorskip("tests.parity.test_trajectory", reason="needs the parity extra")

RANK, ALPHA, LAYER_DECAY, EMA_DECAY, HEAD_WARMUP_STEPS, STEPS = 4, 10.0, 0.7, 0.8, 5, 20
RATE = 3e-3
PARTS = {"attn.qkv": ("attention", "qkv"), "attn.proj": ("attention", "proj")}
PARTS |= {"mlp.fc1": ("fc_1",), "mlp.fc2": ("fc_2",)}


RATED = ("resnet50", "convnext_tiny", "tf_efficientnet_lite0", "vit_small_patch14_reg4_dinov2")
RATED += ("vit_base_patch16_siglip_224", "vit_base_patch16_clip_224", "eva02_small_patch14_224")
RATED += ("vit_small_patch16_dinov3",)
PLAIN = ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224")
RATED = [(name, True) for name in (*PLAIN, *RATED)] + [(name, False) for name in PLAIN]


@pytest.mark.parametrize(("name", "head"), RATED)
def test_rates_of_layers_are_those_of_timm(name, head):
    with torch.device("meta"):
        peer = timm.create_model(name, num_classes=8 if head else 0)
    encoder = create_encoder(name)
    rate = optim.layer_rates(encoder.layers, 0.8, head)
    groups = timm_optim.param_groups_layer_decay(peer, layer_decay=0.8)
    expected = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    expected = {key: expected[id(parameter)] for key, parameter in peer.named_parameters()}
    paths = flatten_dict(encoder_shapes(encoder))
    found = {name_in_timm(encoder, path): rate(("model", "encoder", *path)) for path in paths}
    found = {key: value for key, value in found.items() if "running" not in key}
    classifier = {key for key in expected if key.rpartition(".")[0] in encoder.classifiers}
    assert all(expected.pop(key) == 1 for key in classifier) and bool(classifier) == head
    assert found == pytest.approx(expected)
    assert rate(("model", "head", "kernel")) == rate(("objective", "proxies")) == 1


class Adapted(torch.nn.Module):
    """A frozen linear layer with an adapter, as PEFT's `lora.Linear` computes."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.empty(RANK, linear.in_features))
        self.b = torch.nn.Parameter(torch.zeros(linear.out_features, RANK))
        torch.nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x):
        return self.linear(x) + ALPHA / RANK * (x @ self.a.T @ self.b.T)


def with_adapters(encoder):
    """Gives the linear layers of a peer's blocks adapters; returns these by path."""
    adapters = {}
    for i, block in enumerate(encoder.requires_grad_(False).blocks):
        for name, path in PARTS.items():
            parent, _, last = name.partition(".")
            parent = getattr(block, parent)
            own = Adapted(getattr(parent, last))
            setattr(parent, last, own)
            adapters["encoder", f"block_{i}", *path, "lora"] = own
    return adapters


def train_peer(model, batches):
    """The transcription: the head alone for some steps, then the adapters beside it."""
    groups = timm_optim.param_groups_layer_decay(
        model, recipe.WEIGHT_DECAY, weight_decay_exclude_1d=False, layer_decay=LAYER_DECAY
    )
    groups = [{**group, "lr": RATE * group["lr_scale"]} for group in groups]
    for_head = [group for group in groups if any(p is model.head.weight for p in group["params"])]
    optimizer = torch.optim.AdamW(for_head, betas=recipe.BETAS, eps=recipe.EPSILON)
    average = timm_utils.ModelEmaV3(model, decay=EMA_DECAY, use_warmup=True)
    losses, norms = [], []
    for number, batch in enumerate(batches):
        if number == HEAD_WARMUP_STEPS:
            for group in groups:
                if group is not for_head[0]:
                    optimizer.add_param_group(group)
        features = model(recipe.prepare(batch.inputs[IMAGES], batch.flips))
        loss = recipe.recipe_loss(features, "poincare", 2)
        model.zero_grad()
        loss.backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(trained, recipe.CLIP_NORM).item())
        optimizer.step()
        average.update(model, step=number + 1)
        losses.append(loss.item())
    return losses, norms, average.module


def test_all_options_at_once_follow_a_transcription():
    """LoRA as PEFT's, layer-wise rates and average of timm's, and a head that is trained first."""
    *batches, held_out = recipe.make_batches(15)[-STEPS - 1 :]
    config = recipe.make_config("poincare", RATE)
    config.train.update(lora_rank=RANK, lora_alpha=ALPHA, head_warmup_steps=HEAD_WARMUP_STEPS)
    config.train.ema_decay, config.optim.layer_decay = EMA_DECAY, LAYER_DECAY
    encoder, head = recipe.make_peer()
    params = recipe.convert_parameters(encoder, head, create_embedder(model_settings(config)))
    encoder.head = head
    adapters = with_adapters(encoder)
    flat = flatten_dict(params, keep_empty_nodes=True)
    for path, own in adapters.items():
        for name, value in (("a", own.a), ("b", own.b)):
            flat["model", *path, name] = jnp.array(value.detach().numpy().T.copy())
    params = unflatten_dict(flat)
    (losses, norms, _), learner, state = recipe.train_hypjax(config, params, batches)
    head.requires_grad_(True)
    their_losses, their_norms, average = train_peer(encoder, batches)
    np.testing.assert_allclose(losses, their_losses, rtol=1e-4)
    np.testing.assert_allclose(norms, their_norms, rtol=1e-3)
    assert min(losses[-3:]) < 0.7 * losses[0]

    images = held_out.inputs[IMAGES].astype(np.float32) / 127.5 - 1
    embed = jax.jit(learner.model.apply)
    for ours, theirs in ((trained_model, encoder), (evaluated_model, average)):
        found = embed({"params": ours(learner, state)}, images).projected
        with torch.no_grad():
            expected = theirs(recipe.prepare(held_out.inputs[IMAGES])).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    trained = flatten_dict(state.params["model"])
    for path, own in adapters.items():
        for name, value in (("a", own.a), ("b", own.b)):
            expected = value.detach().numpy().T
            np.testing.assert_allclose(trained[*path, name], expected, atol=1e-4)
