"""Heads on cached features, beside a PyTorch transcription of their recipe.

Both start from the same principal components and see the same batches.
"""

import math

import numpy as np
import pytest

from hypjax import train
from hypjax.assemble import assemble_training, saved_method
from hypjax.config import load_config
from hypjax.experiment.trained import restore_best
from hypjax.training.states import pca_head
from tests.helpers import small_runs

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
recipe = pytest.importorskip("tests.parity.test_trajectory", reason="needs the parity extra")

# The recipe, independent of hypjax's defaults, so that these are compared too.
C, TEMPERATURE = 0.1, 0.1
C_RATE, C_BOUNDS = 20, (0.05, 0.15)  # Of a curvature that is learned.
RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP_NORM = 1e-4, 0.01, (0.9, 0.999), 1e-8, 3.0
CLASSES, SAMPLES, WARMUP_SHARE = 16, 4, 10  # The first tenth of the steps warms up.
STEPS = 30


def configured(path, variant, *overrides):
    fields = [
        *(f"data.path={path}", "data.validation_classes=0", "eval.ks=1", "run.log_every=1"),
        *(f"train.batch_size={CLASSES * SAMPLES}", f"train.samples_per_class={SAMPLES}"),
        *("run.report=False", *overrides),
    ]
    return load_config(f"{small_runs.REPOSITORY}/configs/features.py:{variant}", fields)


def trained_by_hypjax(config, folder):
    """Loss, gradient norm, curvature and temperature of each step, kernel and bias."""
    train.train_and_evaluate(config, folder)
    metrics = small_runs.step_metrics(folder)
    rows = np.array([(*metrics[step], C, TEMPERATURE)[:4] for step in sorted(metrics)])
    head = restore_best(folder, saved_method(folder)).params["head"]
    return rows, head["kernel"], head["bias"]


def trained_by_torch(config, space, rate=RATE, learned=False):
    setup = assemble_training(config)
    vectors, steps = setup.images.vectors, setup.schedule.total_steps
    start = pca_head(vectors, setup.learner.model.head_dim)
    features = torch.tensor(vectors)
    head = torch.nn.Linear(*start["kernel"].shape)
    head.weight.data, head.bias.data = torch.tensor(start["kernel"].T), torch.tensor(start["bias"])
    log_c, log_t = (torch.tensor(x).log().requires_grad_(learned) for x in (C, TEMPERATURE))
    groups = [{"params": list(head.parameters()), "weight_decay": WEIGHT_DECAY}]
    if learned:
        groups.append({"params": [log_c], "weight_decay": 0, "lr": rate * C_RATE})
        groups.append({"params": [log_t], "weight_decay": 0})
    trained = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    rows = []
    for step in range(steps):
        c, t = log_c.exp(), log_t.exp()
        outputs = head(features[setup.plans(step).ids])
        loss = recipe.recipe_loss(outputs, space, SAMPLES, c, t)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        schedule.step()
        log_c.data.clamp_(*map(math.log, C_BOUNDS))
        rows.append([float(x.detach()) for x in (loss, norm, c, t)])
    return np.array(rows), head.weight.detach().numpy().T, head.bias.detach().numpy()


def rate_factor(step, steps):
    """Linear from 0, and then half a cosine to 0."""
    warmup = steps // WARMUP_SHARE
    if step < warmup:
        return step / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """Features of 24 overlapping classes, of which the last 6 are for the test."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(24), 12)
    features = rng.normal(size=(24, 32))[labels] + rng.normal(size=(len(labels), 32))
    path = tmp_path_factory.mktemp("features") / "clustered.npz"
    splits = np.where(labels < 18, "train", "test")
    np.savez(path, features=features.astype(np.float32), labels=labels, splits=splits)
    return path


@pytest.mark.parametrize(
    ("variant", "space", "learned"),
    [("hyp", "poincare", False), ("sph", "sphere", False), ("hyp", "poincare", True)],
    ids=["hyp", "sph", "hyp-learned"],
)
def test_steps_agree_with_torch(variant, space, learned, clustered, tmp_path):
    rate = 30 * RATE  # A run of 30 steps goes as far as one of hundreds by the recipe.
    fields = [f"train.total_steps={STEPS}", "model.head_dim=24", f"optim.learning_rate={rate}"]
    fields += [f"objective.learn_c={learned}", f"objective.c_rate={C_RATE}"]
    fields += ["objective.c_bounds={},{}".format(*C_BOUNDS)]
    fields += ["objective.learn=temperature"] * learned
    config = configured(clustered, variant, *fields)
    rows, *ours = trained_by_hypjax(config, tmp_path / "run")
    their_rows, *theirs = trained_by_torch(config, space, rate, learned)
    # At most a tenth was observed; without weight decay, kernels would differ by 1e-4.
    np.testing.assert_allclose(rows, their_rows, rtol=3e-5)
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    losses, _, curvatures, temperatures = their_rows.T
    assert losses[-5:].mean() < 0.7 * losses[0]
    if learned:
        assert 5 < np.sum(curvatures < 0.999 * C_BOUNDS[1]) < STEPS - 5
        assert abs(np.log(temperatures[-1] / TEMPERATURE)) > 0.01
