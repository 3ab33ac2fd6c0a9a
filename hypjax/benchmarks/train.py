"""Training steps and embedding of images, compared with PyTorch and timm."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.benchmarks import peers
from hypjax.benchmarks.measure import Task
from hypjax.config import default_config
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.objectives import Spec
from hypjax.system import console
from hypjax.training.setup import build_learner
from hypjax.training.step import create_state, jit_train_step, make_train_step, shard_batch
from hypjax.types import Batch

_INSTALL = "torch and timm (pip install torch timm)"
_FALSE = ("false", "0")
_PATCH16, _PATCH8 = "vit_small_patch16_224", "vit_small_patch8_224"


class Case(NamedTuple):
    """An encoder and a batch to train it on.

    Attributes:
        architecture: Encoder, as in `config.model.architecture`.
        batch: Number of images.
        samples: Images per class.
        steps: Steps per measurement.
    """

    architecture: str
    batch: int
    samples: int
    steps: int


_ON_ACCELERATORS = (
    Case(_PATCH16, 900, 2, 5),
    Case(_PATCH16, 900, 9, 5),
    Case(_PATCH8, 120, 2, 5),
)
_ON_CPUS = (Case(_PATCH16, 24, 2, 1),)
_QUICK = (Case("vit", 24, 2, 2),)


def tasks(quick: bool) -> Iterator[Task]:
    """Yields the tasks: training steps of the published recipe, and embedding of images.

    On CPUs with smaller batches and in float32; with a tiny encoder if quick.
    """
    on_cpu = jax.default_backend() == "cpu"
    cases = _QUICK if quick else _ON_CPUS if on_cpu else _ON_ACCELERATORS
    rate = matrix_rate(1024 if on_cpu or quick else 8192, "float32" if on_cpu else "bfloat16")
    copies = copy_rate(2**28 if on_cpu or quick else 2**31)
    console.say(f"products: {rate / 1e12:.3g} TFLOP/s; copies: {copies / 1e9:.3g} GB/s")
    for case in cases:
        config = _config(case, on_cpu)
        what = f"ViT-S/{16 if case.architecture == _PATCH16 else 8}"
        what = "tiny ViT" if quick else what
        trainer = Trainer(config)
        for act, count in (("train", case.steps), ("embed", 3 * case.steps)):
            classes = f" ({case.batch // case.samples} × {case.samples})"
            words = {"train": f"training steps{classes}", "embed": "embeddings"}[act]
            images = case.batch * count
            flops = operations(config, trainer.model.encoder, training=act == "train")
            for peer, name in _peers(config):
                yield Task(
                    f"{count} {words}, {what}, {case.batch} images",
                    functools.partial(getattr(trainer, act), count),
                    peer and functools.partial(getattr(peer, act), count),
                    name,
                    limit=flops * images / rate,
                    items=images,
                    moving=count * trainer.bytes_moved[act] / copies,
                    memory=trainer.memory[act],
                )


def _peers(config: ConfigDict) -> Iterator[tuple[Any, str]]:
    """Yields PyTorch eager and then compiled, with names; or None and what is missing."""
    if not peers.installed("torch") or peers.timm() is None:
        yield None, _INSTALL
        return
    import torch

    from hypjax.benchmarks import torch_peers

    device = torch_peers.device()
    if device is None:
        yield None, "torch for this device"
    elif device.type == "cuda" and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") not in _FALSE:
        yield None, "memory for torch: set XLA_PYTHON_CLIENT_PREALLOCATE=false"
    else:
        for compiled in (False, True):
            peer = torch_peers.TorchTrainer(config, compiled)
            yield peer, peer.name
            del peer
            torch.cuda.empty_cache()


def _config(case: Case, on_cpu: bool) -> ConfigDict:
    config = default_config()
    with config.unlocked():
        config.model.precision = "float32" if on_cpu else "bfloat16"
        config.model.architecture = case.architecture
        config.train.batch_size, config.train.samples_per_class = case.batch, case.samples
        config.data.image_size = config.data.resize = 224
        if case.architecture == "vit":
            config.model.update(patch_size=8, width=64, depth=2, num_heads=2)
            config.data.image_size = config.data.resize = 64
    return config


class Trainer:
    """hypjax's train step and embedding, on a batch of noise on the device.

    Attributes:
        model: The model that is trained.
        memory: Bytes of each program, "train" and "embed": arguments and temporary memory.
        bytes_moved: Bytes that each program reads and writes, as estimated by XLA.
    """

    def __init__(self, config: ConfigDict) -> None:
        """Initialises the state and compiles both programs."""
        learner = build_learner(config, parallel.create_mesh((1, 1)))
        self.model, mesh = learner.model, learner.mesh
        size, samples = config.train.batch_size, config.train.samples_per_class
        spec = Spec(
            size // samples, samples, self.model.encoder.dim, config.model.head_dim, size, size
        )
        state = create_state(learner, spec)
        state = parallel.place(state, parallel.parameter_shardings(mesh, state))
        self._batch = shard_batch(mesh, _noise(config))
        step = jit_train_step(make_train_step(learner), mesh, state)
        self._step = step.lower(state, self._batch).compile()
        function = embed_function(self.model, learner.pixel_scaling, scored_spaces(config))
        embed = parallel.map_images(function, mesh)
        params = state.params["model"]
        self._embed = jax.jit(embed).lower(params, self._batch.images).compile()
        self._state = state
        programs = {"train": self._step, "embed": self._embed}
        self.memory = {name: _memory(program) for name, program in programs.items()}
        self.bytes_moved = {name: _bytes_moved(program) for name, program in programs.items()}

    def train(self, count: int) -> None:
        """Runs the given number of steps."""
        for _ in range(count):
            self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def embed(self, count: int) -> None:
        """Embeds the batch the given number of times, as evaluation does."""
        points = [
            self._embed(self._state.params["model"], self._batch.images) for _ in range(count)
        ]
        jax.block_until_ready(points)


def _noise(config: ConfigDict) -> Batch:
    size, side = config.train.batch_size, config.data.image_size
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, side, side, 3), dtype=np.uint8)
    numbers = np.arange(size, dtype=np.int32)
    labels = numbers // config.train.samples_per_class
    return Batch(images, labels, numbers, rng.random(size) < 0.5)


def _memory(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def _bytes_moved(program: jax.stages.Compiled) -> float:
    return program.cost_analysis()["bytes accessed"]


def operations(config: ConfigDict, encoder: Any, training: bool) -> int:
    """Counts the operations of a Vision Transformer's matrix products per image.

    Additions and multiplications count separately. The backward pass takes twice the operations of
    the forward pass, but needs no gradient of the pixels nor of a frozen patch projection.
    """
    tokens = (config.data.image_size // encoder.patch_size) ** 2
    patches = 2 * tokens * encoder.patch_size**2 * 3 * encoder.width
    tokens += encoder.num_prefix_tokens
    dense = 2 * tokens * encoder.width**2 * (4 + 2 * encoder.mlp_ratio)
    attention = 4 * tokens**2 * encoder.width
    blocks = encoder.depth * (dense + attention)
    if training:
        patches *= 1 if "patch_projection" in config.optim.frozen else 2
        blocks *= 3
    return int(patches + blocks)


def matrix_rate(side: int, dtype: str) -> float:
    """Measures operations per second of a large matrix product in the precision of training."""
    x, count = (jax.random.normal(jax.random.key(0), (side, side)) / side**0.5).astype(dtype), 20
    precision = "highest" if dtype == "float32" else "default"
    multiply = jax.jit(
        lambda x: jax.lax.fori_loop(0, count, lambda _, y: jnp.matmul(x, y, precision=precision), x)
    )
    return count * 2 * side**3 / _min_seconds(lambda: multiply(x))


def copy_rate(size: int) -> float:
    """Measures bytes per second that the device reads and writes.

    Args:
        size: Number of bytes to copy.
    """
    x, count = jnp.zeros(size // 4, jnp.float32), 10
    add = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, x: x + 1, x))
    return (count + 1) * 2 * size / _min_seconds(lambda: add(x))  # The loop starts with a copy.


def _min_seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return min(seconds)
