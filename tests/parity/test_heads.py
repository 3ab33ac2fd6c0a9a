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
C_RATE, C_BOUNDS = 20, (0.05, 0.15)
RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP_NORM = 1e-4, 0.01, (0.9, 0.999), 1e-8, 3.0
CLASSES, SAMPLES, STEPS, WARMUP_STEPS = 16, 4, 30, 3


def trained_by_torch(config):
    setup = assemble_training(config)
    vectors, rate = setup.images.vectors, config.optim.learning_rate
    start = pca_head(vectors, setup.learner.model.head_dim)
    features = torch.tensor(vectors)
    head = torch.nn.Linear(*start["kernel"].shape)
    head.weight.data, head.bias.data = torch.tensor(start["kernel"].T), torch.tensor(start["bias"])
    log_c, log_t = (torch.tensor(x).log().requires_grad_() for x in (C, TEMPERATURE))
    groups = [
        {"params": list(head.parameters()), "weight_decay": WEIGHT_DECAY},
        {"params": [log_c], "weight_decay": 0, "lr": rate * C_RATE},
        {"params": [log_t], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
    rows = []
    for step in range(STEPS):
        c, t = log_c.exp(), log_t.exp()
        outputs = head(features[setup.plans(step).ids])
        loss = recipe.recipe_loss(outputs, "poincare", SAMPLES, c, t)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*head.parameters(), log_c, log_t], CLIP_NORM)
        optimizer.step()
        schedule.step()
        log_c.data.clamp_(*map(math.log, C_BOUNDS))
        rows.append([float(x.detach()) for x in (loss, norm, c, t)])
    return np.array(rows), head.weight.detach().numpy().T, head.bias.detach().numpy()


def rate_factor(step):
    """Linear from 0, and then half a cosine to 0."""
    if step < WARMUP_STEPS:
        return step / WARMUP_STEPS
    return (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS))) / 2


def test_steps_agree_with_torch(tmp_path):
    """On features of 24 overlapping classes, of which the last 6 are for the test."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(24), 12)
    features = rng.normal(size=(24, 32))[labels] + rng.normal(size=(len(labels), 32))
    splits = np.where(labels < 18, "train", "test")
    np.savez(tmp_path / "f.npz", features=np.float32(features), labels=labels, splits=splits)
    rate = 30 * RATE  # A run of 30 steps goes as far as one of hundreds by the recipe.
    fields = [f"data.path={tmp_path}/f.npz", "data.validation_classes=0", "eval.ks=1"]
    fields += ["run.log_every=1", "run.report=False", f"train.batch_size={CLASSES * SAMPLES}"]
    fields += [f"train.samples_per_class={SAMPLES}", f"train.total_steps={STEPS}"]
    fields += ["model.head_dim=24", f"optim.learning_rate={rate}", "objective.learn_c=True"]
    fields += [f"objective.c_rate={C_RATE}", "objective.c_bounds={},{}".format(*C_BOUNDS)]
    config = load_config("features:hyp", [*fields, "objective.learn=temperature"])
    train.train_and_evaluate(config, run := tmp_path / "run")
    rows = [row for _, row in sorted(small_runs.step_metrics(run).items())]
    head = restore_best(run, saved_method(run)).params["head"]
    their_rows, *theirs = trained_by_torch(config)
    # At most a tenth was observed; without weight decay, kernels would differ by 1e-4.
    np.testing.assert_allclose(rows, their_rows, rtol=3e-5)
    for found, expected in zip((head["kernel"], head["bias"]), theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    losses, _, curvatures, temperatures = their_rows.T
    assert losses[-5:].mean() < 0.7 * losses[0]
    assert 5 < np.sum(curvatures < 0.999 * C_BOUNDS[1]) < STEPS - 5
    assert abs(np.log(temperatures[-1] / TEMPERATURE)) > 0.01
