"""The optimiser against PyTorch's: groups, schedules and clipping, 30 steps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from hypjax.config import default_config, load_config
from hypjax.training import optim

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")

STEPS = 30
SHAPES = {
    ("model", "encoder", "patch_embed", "kernel"): (4, 3),
    ("model", "encoder", "norm", "scale"): (3,),
    ("model", "head", "kernel"): (3, 2),
    ("objective", "proxies"): (5, 2),
}
RATES = {"patch_projection": 0.5, "encoder": 0.1, "head": 100.0, "objective": 50.0}
DECAYS = {"patch_projection": 0.3, "encoder": None, "head": 0.0, "objective": 0.02}
GROUP_OF = dict(zip(SHAPES, RATES, strict=True))


def start_and_targets():
    rng = np.random.default_rng(0)
    start, *targets = (
        {path: rng.normal(size=shape) for path, shape in SHAPES.items()} for _ in range(STEPS + 1)
    )
    return start, targets


def fields(starts=None, **changes):
    """Fields of an optimiser with four groups, of which some start at later steps."""
    config = default_config().optim
    config.learning_rate, config.weight_decay, config.clip_norm = 1e-3, 0.1, None
    starts = starts or {}
    config.groups = tuple((name, RATES[name], DECAYS[name], starts.get(name, 0)) for name in RATES)
    config.update(changes)
    return config


def ours(config):
    """Losses of each step, and the last parameters."""
    start, targets = start_and_targets()
    optimizer = optim.configured_optimizer(config, optim.learning_rate(config, STEPS))

    def loss_of(params, target):
        return sum(
            jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum((x - y) ** 4), params, target))
        )

    @jax.jit
    def step(params, state, target):
        loss, gradient = jax.value_and_grad(loss_of)(params, target)
        updates, state = optimizer.update(gradient, state, params)
        return loss, optax.apply_updates(params, updates), state

    params = unflatten_dict(start)
    state, losses = optimizer.init(params), []
    for target in targets:
        loss, params, state = step(params, state, unflatten_dict(target))
        losses.append(float(loss))
    return losses, flatten_dict(params)


def theirs(config, kind=torch.optim.AdamW, schedule=None, clip=lambda parameters: None):
    start, targets = start_and_targets()
    params = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in start.items()}
    groups = []
    for path, parameter in params.items():
        name = GROUP_OF[path]
        decay = DECAYS[name]
        decay = config.weight_decay if decay is None else decay
        rate = config.learning_rate * RATES[name]
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    optimizer = kind(groups, betas=(config.b1, config.b2), eps=config.eps)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for target in targets:
        optimizer.zero_grad()
        loss = sum(((params[path] - torch.tensor(y)) ** 4).sum() for path, y in target.items())
        loss.backward()
        clip(list(params.values()))
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, {path: parameter.detach().numpy() for path, parameter in params.items()}


def warm_up(step):
    return step / 10 if step < 10 else 0.5 ** ((step - 10) // 5)


STARTS = {"encoder": 10, "head": 20}


def started(optimizer):
    """A rate of 0 until a step: moments accumulate before it."""
    starts = [STARTS.get(name, 0) for name in RATES]
    rates = [lambda step, start=start: float(step >= start) for start in starts]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)


# Fields, and what is the same in PyTorch.
CASES = {
    "adam": ({"name": "adam"}, {"kind": torch.optim.Adam}),
    "exponential": (
        {"schedule": "exponential", "decay_every": 1, "decay_factor": 0.9},
        {"schedule": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)},
    ),
    "cosine": (
        {"schedule": "cosine"},
        {"schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS)},
    ),
    "warm-up": (
        {"schedule": "step", "decay_every": 5, "decay_factor": 0.5, "warmup_steps": 10},
        {"schedule": lambda o: torch.optim.lr_scheduler.LambdaLR(o, warm_up)},
    ),
    "norm": ({"clip_norm": 2.0}, {"clip": lambda p: torch.nn.utils.clip_grad_norm_(p, 2.0)}),
    "starts": ({"starts": STARTS}, {"schedule": started}),
    "value": ({"clip_value": 0.5}, {"clip": lambda p: torch.nn.utils.clip_grad_value_(p, 0.5)}),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_schedules_and_clipping(case):
    changes, peer = CASES[case]
    config = fields(**changes)
    with jax.enable_x64(True):
        losses, params = ours(config)
    expected, their_params = theirs(config, **peer)
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-7)
    for path, value in their_params.items():
        np.testing.assert_allclose(params[path], value, rtol=1e-6, atol=1e-7)


def test_steps_of_tuples_are_those_of_the_sum_of_five_losses(float64):
    """Radenović et al. sum the losses of five tuples and add 1e-6 of each parameter (IRT)."""
    config = load_config("configs/sfm.py").optim
    config.eps = 1e-20  # Compared with gradients as small as the weight decay.
    rng, rate = np.random.default_rng(0), config.learning_rate
    start, targets = rng.normal(size=7), rng.normal(size=(4, 5, 7))
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.Adam([parameter], lr=rate, weight_decay=1e-6, eps=config.eps)
    for target in torch.tensor(targets):
        optimizer.zero_grad()
        (1e-6 * (parameter - target) ** 2).sum().backward()
        optimizer.step()

    params = {"model": {"x": jnp.asarray(start)}}
    optimizer = optim.configured_optimizer(config, optax.constant_schedule(rate))
    state = optimizer.init(params)
    loss_of = lambda params, y: jnp.mean(jnp.sum(1e-6 * (params["model"]["x"] - y) ** 2, 1))  # noqa: E731
    for target in targets:
        updates, state = optimizer.update(jax.grad(loss_of)(params, target), state, params)
        params = optax.apply_updates(params, updates)
    moved = parameter.detach().numpy() - start
    np.testing.assert_allclose(params["model"]["x"] - start, moved, rtol=1e-6)
