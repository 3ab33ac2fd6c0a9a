"""Speed of training steps and of embedding images, compared with PyTorch and timm."""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import measure, peers
from benchmarks.measure import COLUMNS as COLUMNS
from benchmarks.programs import (
    TINY,
    compiled_embedding,
    compiled_step,
    config_of,
    learner_and_spec,
)
from hypjax import parallel
from hypjax.models.layers import compute_dtype
from hypjax.training.states import first_state
from hypjax.training.step import shard_batch
from hypjax.types import IMAGES, Batch

_PATCH8 = ("model.architecture=vit_small_patch8_224", "train.batch_size=120")
# Steps to measure, and fields of Hyp-ViT's recipe.
_ON_ACCELERATORS = {
    "ViT-S/16, 450 × 2": (5, ()),
    "ViT-S/16, 100 × 9": (5, ("train.samples_per_class=9",)),
    "ViT-S/8, 60 × 2": (5, _PATCH8),
}
_ON_CPUS = {"ViT-S/16, 12 × 2": (1, ("train.batch_size=24",))}
_QUICK = {"tiny ViT, 12 × 2": (2, (*TINY, "train.batch_size=24"))}


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times training steps of the published recipe, and embedding of images.

    On CPUs, batches are smaller and in float32; if quick, the encoder is tiny.
    """
    on_cpu = jax.default_backend() == "cpu"
    cases = _QUICK if options.quick else _ON_CPUS if on_cpu else _ON_ACCELERATORS
    return measure.measure(_tasks(cases), options)


def _tasks(cases: dict[str, tuple[int, Sequence[str]]]) -> Iterator[measure.Task]:
    for name, (count, fields) in cases.items():
        config = config_of(f"model.precision={compute_dtype('auto').name}", *fields)
        trainer, images = Trainer(config), count * config.train.batch_size
        for method, title in (("train", "training steps"), ("embed", "embeddings")):
            program = trainer.programs[method]
            for peer, peer_name in _peers(config):
                yield measure.Task(
                    f"{count} {title}, {name}",
                    functools.partial(getattr(trainer, method), count),
                    peer and functools.partial(getattr(peer, method), count),
                    peer_name,
                    items=images,
                    memory=program.arguments + program.temporary,
                )


def _peers(config: ConfigDict) -> Iterator[tuple[Any, str]]:
    """Yields PyTorch's trainers, eager and compiled, with names; or None and what is missing."""
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
        mesh = parallel.create_mesh((1, 1))
        self._state = first_state(*learner_and_spec(config, mesh))
        size, side = config.train.batch_size, config.data.image_size
        rng, ids = np.random.default_rng(0), np.arange(size, dtype=np.int32)
        inputs = {IMAGES: rng.integers(0, 256, (size, side, side, 3), dtype=np.uint8)}
        labels = ids // config.train.samples_per_class
        self._batch = shard_batch(mesh, Batch(inputs, labels, ids, rng.random(size) < 0.5))
        config.run.eval_batch_size = size
        self.programs = {
            "train": compiled_step(config, mesh),
            "embed": compiled_embedding(config, mesh),
        }

    def train(self, count: int) -> None:
        """Runs `count` steps."""
        for _ in range(count):
            self._state, metrics = self.programs["train"].run(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))

    def embed(self, count: int) -> None:
        """Embeds the batch `count` times, as evaluation does."""
        params, images = self._state.params["model"], self._batch.inputs[IMAGES]
        jax.block_until_ready([self.programs["embed"].run(params, images) for _ in range(count)])
