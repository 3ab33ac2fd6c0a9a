"""Comparison of losses and of training with PyTorch transcriptions of the recipes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.assemble import assemble_learner
from hypjax.config import default_config, validate
from hypjax.config.defaults import HYP_VIT
from hypjax.config.model_settings import model_settings
from hypjax.models import create_embedder
from hypjax.models.pretrained import convert_timm
from hypjax.objectives import ProblemSizes
from hypjax.training import optim
from hypjax.training.step import TrainState, make_train_step
from hypjax.types import IMAGES, Batch

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
stereographic = pytest.importorskip(
    "geoopt.manifolds.stereographic.math", reason="needs the parity extra: geoopt"
)

TINY = {"patch_size": 8, "width": 48, "depth": 3, "num_heads": 4, "head_dim": 6}
SIDE, STEPS = 32, 30

# The recipe as in the paper, independent of hypjax's defaults, so that these are compared too.
C, RADIUS, TEMPERATURE = 0.1, 2.3, 0.2
SPHERE_TEMPERATURE, BALL_TEMPERATURE, BALL_WEIGHT = 0.05, 0.2, 3  # HypMix.
MARGIN, KOLEO_WEIGHT, MEMORY = 0.5, 0.7, 100  # IRT, whose memory ends in the middle of a batch.
TUPLE_MARGIN, TUPLE_KOLEO_WEIGHT = 1.2, 0.02  # Tuples, which Adam trains.
CLIP_NORM, WEIGHT_DECAY, BETAS, EPSILON = 3.0, 0.01, (0.9, 0.999), 1e-8

# More noise keeps the loss away from 0, where its relative rounding errors are large. With the
# least noise, some gradients are too short to be clipped.
CASES = {
    "ball-12x2": dict(space="poincare", classes=12, samples=2, noise=15),
    "mix-12x2": dict(space="mix", classes=12, samples=2, noise=40),
    "irt-12x2": dict(space="irt", classes=12, samples=2, noise=10, learning_rate=3e-4),
    "irt-tuples-6x5": dict(space="tuples", classes=6, samples=5, noise=20, learning_rate=3e-4),
}


class Trajectory(NamedTuple):
    """Training of one of the two implementations."""

    losses: np.ndarray
    norms: np.ndarray  # Of the gradient at each step, before clipping.
    clipped: np.ndarray  # Share of clipped features at each step.
    pooled: np.ndarray  # Encoder embeddings of held-out images after the last step.
    projected: np.ndarray  # And head outputs.


def compare(classes, samples, *, space, noise, learning_rate=1e-3):
    """Trains hypjax and the transcription from the same weights on the same batches.

    Parameters are not compared: attention ignores the bias of the keys, so that its gradient is
    rounding noise, which Adam scales to full steps.
    """
    *batches, held_out = make_batches(classes, samples, noise, space == "tuples")
    config = make_config(classes, samples, space, learning_rate)
    encoder, head = make_peer()
    params = convert_parameters(encoder, head, create_embedder(model_settings(config)))
    ours = run_hypjax(config, params, batches, held_out)
    return ours, run_peer(encoder, head, space, samples, learning_rate, batches, held_out)


def make_batches(classes, samples, noise, tuples):
    """Noisy images of coarse patterns, one pattern per class, which a few steps can learn.

    Each batch draws its classes from twice as many. Of tuples, the first two images are of one
    class, the others of different ones, and `classes` is the number of tuples.
    """
    rng = np.random.default_rng(0)
    patterns = rng.uniform(60, 196, (2 * classes, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    batches = []
    for _ in range(STEPS + 1):
        if tuples:
            drawn = [rng.choice(len(patterns), samples - 1, replace=False) for _ in range(classes)]
            labels = np.concatenate([[each[0], *each] for each in drawn])
        else:
            labels = rng.choice(len(patterns), classes, replace=False).repeat(samples)
        pixels = patterns[labels] + rng.normal(0, noise, (len(labels), SIDE, SIDE, 3))
        pixels = np.clip(pixels, 0, 255).astype(np.uint8)
        flips = rng.random(len(labels)) < 0.5
        labels = labels.astype(np.int32)
        batches.append(Batch({IMAGES: pixels}, labels, np.arange(len(labels)), flips))
    return batches


def make_config(classes, samples, space, learning_rate=1e-3):
    """The defaults of hypjax, except for sizes, space and learning rate."""
    objectives = {"mix": "hypmix", "irt": "contrastive", "tuples": "tuple_contrastive"}
    config = default_config(objectives.get(space, HYP_VIT))
    config.model.update(TINY, architecture="vit", precision="float32")
    config.data.image_size = config.data.resize = SIDE
    config.objective.space = {"mix": "poincare", "irt": "sphere", "tuples": "sphere"}.get(
        space, space
    )
    if space == "irt":
        config.objective.memory, config.objective.koleo_weight = float(MEMORY), KOLEO_WEIGHT
    if space == "tuples":
        config.objective.margin, config.objective.koleo_weight = TUPLE_MARGIN, TUPLE_KOLEO_WEIGHT
        config.train.sampling, config.train.tuples.negatives = "tuples", samples - 2
        config.optim.name = "adam"
    config.optim.learning_rate = learning_rate
    config.train.update(total_steps=STEPS, samples_per_class=samples, batch_size=classes * samples)
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


def run_hypjax(config, params, batches, held_out):
    learner = assemble_learner(config)
    model = learner.model
    trained, _ = optim.split_frozen(params, learner.frozen)
    size, samples = config.train.batch_size, config.train.samples_per_class
    spec = ProblemSizes(size // samples, samples, model.encoder.dim, model.head_dim, MEMORY, size)
    _, of_loss = learner.objective.init(jax.random.key(0), spec)
    state = TrainState(jnp.int32(0), params, learner.optimizer.init(trained), of_loss, jnp.int32(0))
    step, rows = jax.jit(make_train_step(learner), donate_argnums=0), []
    for batch in batches:
        state, metrics = step(state, jax.device_put(batch))
        rows.append([float(metrics[k]) for k in ("loss", "gradient_norm", "clipped_share")])
    images = held_out.inputs[IMAGES].astype(np.float32) / 127.5 - 1
    outputs = jax.jit(model.apply)({"params": state.params["model"]}, images)
    return Trajectory(*np.array(rows).T, np.array(outputs.pooled), np.array(outputs.projected))


def run_peer(encoder, head, space, samples, learning_rate, batches, held_out):
    encoder.patch_embed.proj.requires_grad_(False)
    trained = [p for p in (*encoder.parameters(), *head.parameters()) if p.requires_grad]
    kind = torch.optim.Adam if space == "tuples" else torch.optim.AdamW
    optimizer = kind(trained, lr=learning_rate, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    rows, memory = [], []
    for batch in batches:
        features = head(encoder(prepare(batch.inputs[IMAGES], batch.flips)))
        loss = transcribed(features, space, samples, torch.tensor(batch.labels), memory)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        clipped = features.norm(dim=-1) > RADIUS if space == "poincare" else torch.zeros(1)
        rows.append([float(x.detach()) for x in (loss, norm, clipped.float().mean())])
    with torch.no_grad():
        pooled = encoder(prepare(held_out.inputs[IMAGES]))
        projected = head(pooled)
    return Trajectory(*np.array(rows).T, pooled.numpy(), projected.numpy())


def prepare(images, flips=None):
    """Prepares pixels for PyTorch: channels first, mirrored, normalised with mean and std 0.5."""
    images = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    if flips is not None:
        pairs = zip(images, flips, strict=True)
        images = torch.stack([image.flip(-1) if flip else image for image, flip in pairs])
    return (images - 0.5) / 0.5


def transcribed(features, space, samples, labels, memory):
    """The loss of a batch; the memory is a list that IRT's loss appends to."""
    if space == "irt":
        return irt_loss(features, labels, memory)
    if space == "tuples":
        return tuple_loss(features, samples)
    return recipe_loss(features, space, samples)


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


def irt_loss(features, labels, memory):
    """Contrastive loss of the batch and of the latest images, this batch included, and KoLeo."""
    points = torch.nn.functional.normalize(features, dim=-1)
    memory.extend(zip(points.detach(), labels, strict=True))
    del memory[:-MEMORY]
    others, classes = (torch.stack(column) for column in zip(*memory, strict=True))

    def contrastive(others, classes):
        cosines, same = points @ others.T, labels[:, None] == classes
        return (same * (1 - cosines) + ~same * (cosines - MARGIN).clamp(min=0)).sum() / len(points)

    own = contrastive(points, labels)
    return own + contrastive(others, classes) + KOLEO_WEIGHT * entropy_loss(points)


def entropy_loss(points):
    """KoLeo."""
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.masked_fill(torch.eye(len(points), dtype=torch.bool), torch.inf).amin(dim=1)
    return -nearest.log().mean()


def tuple_loss(features, size):
    """Contrastive loss of anchors with the rest of their tuples, and KoLeo of the batch."""
    points = torch.nn.functional.normalize(features, dim=-1)
    total = 0
    for anchor, positive, *negatives in points.split(size):
        total = total + (anchor - positive).square().sum() / 2
        for negative in negatives:
            distance = (anchor - negative).norm()
            total = total + (TUPLE_MARGIN - distance).clamp(min=0).square() / 2
    return total / (len(points) // size) + TUPLE_KOLEO_WEIGHT * entropy_loss(points)


@pytest.mark.parametrize("case", CASES)
def test_trajectories_agree(case):
    ours, peer = compare(**CASES[case])
    np.testing.assert_allclose(ours.losses, peer.losses, rtol=1e-4 if case == "irt-12x2" else 1e-3)
    np.testing.assert_allclose(ours.norms, peer.norms, rtol=1e-3)
    # An image may be at the clip radius.
    np.testing.assert_allclose(ours.clipped, peer.clipped, atol=0.05)
    # Ten times the observed difference, and less than the effect of weight decay, even on biases.
    for found, expected in ((ours.pooled, peer.pooled), (ours.projected, peer.projected)):
        assert np.linalg.norm(found - expected) < 3e-4 * np.linalg.norm(expected)
    # Training is long enough to distinguish recipes.
    assert peer.losses[-5:].mean() < 0.5 * peer.losses[0]
    assert peer.norms.max() > CLIP_NORM
    if case == "ball-12x2":
        assert peer.norms.min() < CLIP_NORM
    if "ball" in case:
        assert 0 < peer.clipped.mean() < 1
