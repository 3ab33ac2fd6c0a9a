"""Comparison of losses and of training with PyTorch transcriptions of the recipes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.assemble import assemble_learner
from hypjax.config import default_config, validate
from hypjax.config.defaults import HYP_VIT
from hypjax.config.settings import model_settings
from hypjax.models import create_embedder
from hypjax.models.pretrained import convert_timm
from hypjax.training import optim
from hypjax.training.step import TrainState, make_train_step, start_averages
from hypjax.types import IMAGES, Batch

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
stereographic = pytest.importorskip(
    "geoopt.manifolds.stereographic.math", reason="needs the parity extra: geoopt"
)

TINY = {"patch_size": 8, "width": 48, "depth": 3, "num_heads": 4, "head_dim": 6}
SIDE, STEPS, CLASSES, SAMPLES = 32, 30, 12, 2

# The recipe as in the paper, independent of hypjax's defaults, so that these are compared too.
C, RADIUS, TEMPERATURE = 0.1, 2.3, 0.2
SPHERE_TEMPERATURE, BALL_TEMPERATURE, BALL_WEIGHT = 0.05, 0.2, 3  # HypMix.
CLIP_NORM, WEIGHT_DECAY, BETAS, EPSILON = 3.0, 0.01, (0.9, 0.999), 1e-8
RATE = 1e-3


def make_batches(noise):
    """Noisy images of coarse patterns, one pattern per class, which a few steps can learn.

    Each batch draws its classes from twice as many. More noise keeps the loss away from 0, where
    its relative rounding errors are large. With less, some gradients are too short to be clipped.
    """
    rng = np.random.default_rng(0)
    patterns = rng.uniform(60, 196, (2 * CLASSES, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    batches = []
    for _ in range(STEPS + 1):
        labels = rng.choice(len(patterns), CLASSES, replace=False).repeat(SAMPLES)
        pixels = patterns[labels] + rng.normal(0, noise, (len(labels), SIDE, SIDE, 3))
        pixels = np.clip(pixels, 0, 255).astype(np.uint8)
        flips = rng.random(len(labels)) < 0.5
        batches.append(
            Batch({IMAGES: pixels}, labels.astype(np.int32), np.arange(len(labels)), flips)
        )
    return batches


def make_config(space, learning_rate=RATE):
    """The defaults of hypjax, except for sizes, space and learning rate."""
    config = default_config("hypmix" if space == "mix" else HYP_VIT)
    config.model.update(TINY, architecture="vit", precision="float32")
    config.data.image_size = config.data.resize = SIDE
    config.objective.space, config.optim.learning_rate = "poincare", learning_rate
    config.train.update(total_steps=STEPS, samples_per_class=SAMPLES, batch_size=CLASSES * SAMPLES)
    validate(config)
    return config


def make_peer():
    """A timm encoder with random weights, and a linear head."""
    torch.manual_seed(0)
    width = TINY["width"]
    sizes = {name: TINY[name] for name in ("patch_size", "depth", "num_heads")}
    encoder = timm.models.VisionTransformer(img_size=SIDE, embed_dim=width, num_classes=0, **sizes)
    # Biases and norms, which start at 0 and 1, change too. With timm's small weights alone, the
    # class token would hardly depend on the image.
    for parameter in encoder.parameters():
        parameter.data += 0.7 / width**0.5 * torch.randn_like(parameter)
    head = torch.nn.Linear(width, TINY["head_dim"])
    torch.nn.init.orthogonal_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return encoder, head


def convert_parameters(encoder, head, model):
    """Converts the peer's weights, copied because PyTorch's optimiser updates them in place."""
    state = {name: value.numpy().copy() for name, value in encoder.state_dict().items()}
    weight, bias = (head.state_dict()[name].numpy().copy() for name in ("weight", "bias"))
    model_params = {
        "encoder": convert_timm(state, model.encoder),
        "head": {"kernel": weight.T, "bias": bias},
    }
    return jax.device_put({"model": model_params, "objective": {}})


def train_hypjax(config, params, batches):
    """Loss, gradient norm and share of clipped features of each step; learner and last state."""
    learner, warmup_steps = assemble_learner(config), config.train.head_warmup_steps
    trained, _ = optim.split_frozen(params, learner.frozen)
    state = TrainState(jnp.int32(0), params, learner.optimizer.init(trained), {}, jnp.int32(0))
    state = state._replace(**start_averages(learner, params))
    steps, rows = [jax.jit(make_train_step(learner, head_only=x)) for x in (False, True)], []
    for number, batch in enumerate(batches):
        state, metrics = steps[number < warmup_steps](state, jax.device_put(batch))
        rows.append([float(metrics[k]) for k in ("loss", "gradient_norm", "clipped_share")])
    return np.transpose(rows), learner, state


def train_peer(encoder, head, space, batches):
    encoder.patch_embed.proj.requires_grad_(False)
    trained = [p for p in (*encoder.parameters(), *head.parameters()) if p.requires_grad]
    settings = {"lr": RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": WEIGHT_DECAY}
    optimizer, rows = torch.optim.AdamW(trained, **settings), []
    for batch in batches:
        features = head(encoder(prepare(batch.inputs[IMAGES], batch.flips)))
        loss = recipe_loss(features, space, SAMPLES)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        clipped = features.norm(dim=-1) > RADIUS if space == "poincare" else torch.zeros(1)
        rows.append([float(x.detach()) for x in (loss, norm, clipped.float().mean())])
    return np.transpose(rows)


def prepare(images, flips=None):
    """Prepares pixels for PyTorch: channels first, mirrored, normalised with mean and std 0.5."""
    images = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    if flips is not None:
        pairs = zip(images, flips, strict=True)
        images = torch.stack([image.flip(-1) if flip else image for image, flip in pairs])
    return (images - 0.5) / 0.5


def recipe_distances(features, space, c=C):
    """Distances of all pairs from the head's outputs (Eqs. 2 and 4; HypMix, Eqs. 9 and 10)."""
    if space == "mix":
        features = torch.nn.functional.normalize(features, dim=-1)
        spherical, hyperbolic = (recipe_distances(features, s) for s in ("sphere", "poincare"))
        mixed = spherical / (2 * SPHERE_TEMPERATURE) + BALL_WEIGHT * hyperbolic / BALL_TEMPERATURE
        return TEMPERATURE * mixed
    if space == "sphere":
        points = torch.nn.functional.normalize(features, dim=-1)
        return 2 - 2 * points @ points.T
    k = -torch.as_tensor(c, dtype=features.dtype)
    norms = features.norm(dim=-1, keepdim=True)
    points = stereographic.expmap0(features * (RADIUS / norms).clamp(max=1), k=k)
    return stereographic.dist(points[:, None], points[None], k=k)


def recipe_loss(features, space, samples, c=C, temperature=TEMPERATURE):
    """Eq. 5, one pair of subsets at a time; image i is sample i mod d of class i // d."""
    classes = len(features) // samples
    logits = -recipe_distances(features, space, c) / temperature
    logits = logits.reshape(classes, samples, classes, samples)
    same_image, positives = torch.eye(classes, dtype=torch.bool), torch.arange(classes)
    total = 0
    for i in range(samples):
        for j in range(samples):
            if i != j:
                within = logits[:, i, :, i].masked_fill(same_image, -torch.inf)
                candidates = torch.cat([logits[:, i, :, j], within], dim=1)
                total = total + torch.nn.functional.cross_entropy(candidates, positives)
    return total


@pytest.mark.parametrize(("space", "noise"), [("poincare", 15), ("mix", 40)])
def test_trajectories_agree(space, noise):
    """From the same weights on the same batches.

    Parameters are not compared: attention ignores the bias of the keys, so that its gradient is
    rounding noise, which Adam scales to full steps.
    """
    *batches, held_out = make_batches(noise)
    config = make_config(space)
    encoder, head = make_peer()
    params = convert_parameters(encoder, head, create_embedder(model_settings(config)))
    ours, learner, state = train_hypjax(config, params, batches)
    losses, norms, clipped = theirs = train_peer(encoder, head, space, batches)
    np.testing.assert_allclose(ours[:2], theirs[:2], rtol=1e-3)
    np.testing.assert_allclose(ours[2], clipped, atol=0.05)  # An image may be at the clip radius.
    images = held_out.inputs[IMAGES].astype(np.float32) / 127.5 - 1
    outputs = jax.jit(learner.model.apply)({"params": state.params["model"]}, images)
    with torch.no_grad():
        pooled = encoder(prepare(held_out.inputs[IMAGES]))
        expected = pooled.numpy(), head(pooled).numpy()
    # Ten times the observed difference, and less than the effect of weight decay, even on biases.
    for actual, theirs in zip((outputs.pooled, outputs.projected), expected, strict=True):
        assert np.linalg.norm(actual - theirs) < 3e-4 * np.linalg.norm(theirs)
    # Training is long enough to distinguish recipes.
    assert losses[-5:].mean() < 0.5 * losses[0] and norms.max() > CLIP_NORM
    if space == "poincare":
        assert norms.min() < CLIP_NORM and 0 < clipped.mean() < 1
