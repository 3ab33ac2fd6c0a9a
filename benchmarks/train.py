"""Training steps and embedding of images, compared with PyTorch and timm."""

import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from benchmarks import measure, peers
from benchmarks.programs import learner_and_spec, step_config
from hypjax import parallel
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.models.layers import compute_dtype, pooled_tokens
from hypjax.system import console
from hypjax.training.step import create_state, jit_train_step, make_train_step, shard_batch
from hypjax.types import Batch

_PATCH16, _PATCH8 = "vit_small_patch16_224", "vit_small_patch8_224"
_NAMES = {_PATCH16: "ViT-S/16", _PATCH8: "ViT-S/8", "vit": "tiny ViT"}


class Case(NamedTuple):
    """An encoder as in `config.model.architecture`, a batch of images, and steps to measure."""

    architecture: str
    side: int  # Of an image, in pixels.
    batch: int
    samples: int
    steps: int


_ON_ACCELERATORS = (
    Case(_PATCH16, 224, 900, 2, 5),
    Case(_PATCH16, 224, 900, 9, 5),
    Case(_PATCH8, 224, 120, 2, 5),
)
_ON_CPUS = (Case(_PATCH16, 224, 24, 2, 1),)
_QUICK = (Case("vit", 64, 24, 2, 2),)


def tasks(options: measure.Options) -> Iterator[measure.Task]:
    """Training steps of the published recipe, and embedding of images.

    On CPUs with smaller batches and in float32; with a tiny encoder if quick.
    """
    on_cpu = jax.default_backend() == "cpu"
    small = on_cpu or options.quick
    side, dtype = 1024 if small else 8192, compute_dtype("auto").name
    rate = measure.product_rate(side, side, dtype, count=20)
    copies = copy_rate(2**28 if small else 2**31)
    console.say(f"products: {rate / 1e12:.3g} TFLOP/s; copies: {copies / 1e9:.3g} GB/s")
    for case in _QUICK if options.quick else _ON_CPUS if on_cpu else _ON_ACCELERATORS:
        config = step_config(*case[:4])
        config.model.precision = dtype
        trainer, what = Trainer(config), _NAMES[case.architecture]
        steps = f"training steps ({case.batch // case.samples} × {case.samples})"
        count, images = case.steps, case.steps * case.batch
        for act, words in (("train", steps), ("embed", "embeddings")):
            flops = operations(config, trainer.encoder, training=act == "train")
            program = trainer.programs[act]
            memory = program.memory_analysis()
            for peer, name in _peers(config):
                yield measure.Task(
                    f"{count} {words}, {what}, {case.batch} images",
                    functools.partial(getattr(trainer, act), count),
                    peer and functools.partial(getattr(peer, act), count),
                    name,
                    limit=flops * images / rate,
                    items=images,
                    moving=count * program.cost_analysis()["bytes accessed"] / copies,
                    memory=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
                )


def _peers(config: ConfigDict) -> Iterator[tuple[Any, str]]:
    """Yields PyTorch eager and then compiled, with names; or None and what is missing."""
    module, name = peers.torch_or_missing("torch and timm (pip install torch timm)", "timm")
    preallocated = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") not in ("false", "0")
    if module and module.device().type == "cuda" and preallocated:
        module, name = None, "memory for torch: set XLA_PYTHON_CLIENT_PREALLOCATE=false"
    if not module:
        yield None, name
        return
    for compiled in (False, True):
        peer = module.TorchTrainer(config, compiled)
        yield peer, peer.name
        del peer
        module.torch.cuda.empty_cache()


class Trainer:
    """hypjax's train step and embedding, on a batch of noise on the device."""

    def __init__(self, config: ConfigDict) -> None:
        learner, spec = learner_and_spec(config, parallel.create_mesh((1, 1)))
        self.encoder, mesh = learner.model.encoder, learner.mesh
        state = create_state(learner, spec)
        self._state = parallel.place(state, parallel.parameter_shardings(mesh, state))
        self._batch = shard_batch(mesh, _noise(config))
        step = jit_train_step(make_train_step(learner), mesh, self._state)
        spaces = functools.partial(scored_spaces, config)
        function = embed_function(learner.model, learner.pixel_scaling, spaces)
        embed, params = parallel.map_images(function, mesh), self._state.params["model"]
        self.programs = {
            "train": step.lower(self._state, self._batch).compile(),
            "embed": jax.jit(embed).lower(params, self._batch.images).compile(),
        }

    def train(self, count: int) -> None:
        """Runs the given number of steps."""
        for _ in range(count):
            self._state, metrics = self.programs["train"](self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def embed(self, count: int) -> None:
        """Embeds the batch the given number of times, as evaluation does."""
        params, images = self._state.params["model"], self._batch.images
        jax.block_until_ready([self.programs["embed"](params, images) for _ in range(count)])


def _noise(config: ConfigDict) -> Batch:
    size, side = config.train.batch_size, config.data.image_size
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (size, side, side, 3), dtype=np.uint8)
    numbers = np.arange(size, dtype=np.int32)
    labels = numbers // config.train.samples_per_class
    return Batch(images, labels, numbers, rng.random(size) < 0.5)


def operations(config: ConfigDict, encoder: Any, training: bool) -> int:
    """Counts the operations of a Vision Transformer's matrix products per image.

    Additions and multiplications count separately. The last block computes keys and values of all
    tokens, and the rest only for those that are pooled. The backward pass takes twice the
    operations of the forward pass, but needs no gradient of the pixels nor of a frozen patch
    projection.
    """
    tokens, width = (config.data.image_size // encoder.patch_size) ** 2, encoder.width
    patches = 2 * tokens * encoder.patch_size**2 * 3 * width
    tokens += encoder.num_prefix_tokens
    keys_and_values = 4 * tokens * width**2
    by_output = 2 * width**2 * (2 + 2 * encoder.mlp_ratio) + 4 * tokens * width
    outputs = (encoder.depth - 1) * tokens + (pooled_tokens(encoder.pooling) or tokens)
    blocks = encoder.depth * keys_and_values + outputs * by_output
    if training:
        patches *= 1 if "patch_projection" in config.optim.frozen else 2
        blocks *= 3
    return int(patches + blocks)


def copy_rate(size: int) -> float:
    """Measures bytes per second that the device reads and writes, from copies of so many bytes."""
    x, count = jnp.zeros(size // 4, jnp.float32), 10
    add = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, x: x + 1, x))
    # The loop starts with a copy.
    return (count + 1) * 2 * size / measure.min_seconds(lambda: add(x))
