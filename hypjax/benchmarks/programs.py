"""Memory, collectives and matrix-product precision of compiled programs, also for absent TPUs.

XLA's compiler for TPUs is part of the package libtpu and needs no TPU; a slice is named by its
topology, such as v5e:2x4. Nothing is run.
"""

import collections
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.benchmarks import measure
from hypjax.config import default_config
from hypjax.errors import UserError
from hypjax.objectives import Spec
from hypjax.system import console
from hypjax.training.learner import Learner, build_learner
from hypjax.training.step import create_state, jit_train_step, make_train_step
from hypjax.types import Batch

# Batch size, image size, microbatch and remat.
STEPS = (
    (900, 224, 0, False),
    (900, 224, 300, False),
    (900, 224, 100, False),
    (1600, 224, 0, False),
    (1600, 224, 800, False),
    (900, 384, 300, False),
    (900, 384, 300, True),
)

_INSTRUCTION = re.compile(r"%(?P<name>[\w.-]+) = (?P<type>\w+)\[(?P<rest>[^\n]*)")
_PRODUCT = re.compile(r" (?:convolution|dot)\(%(?P<left>[\w.-]+), %(?P<right>[\w.-]+)\)")
_COLLECTIVE = re.compile(
    r"= (?P<types>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\("
    r".*channel_id=(?P<channel>\d+)"
)
_TYPE = re.compile(r"(\w+)\[")


class Program(NamedTuple):
    """A compiled program: bytes on each device, and what it computes and exchanges."""

    arguments: int
    temporary: int
    collectives: list[str]  # Exchanges between devices by kind and dtype: 'all-reduce f32'.
    rounded: list[str]  # HLO of products outside the encoder without the highest precision.
    products: dict[str, int]  # Number of products in the encoder for each pair of dtypes.


def rows(options: measure.Options) -> measure.Rows:
    """Compiles the train step of ViT-S/16 in bfloat16 for several batches; if quick, a tiny one.

    Returns one row per batch: its settings and the fields of its `Program`, or why it does not fit.
    """
    chosen = devices_of(options.target)
    mesh = parallel.create_mesh((options.devices or len(chosen), 1), chosen)
    rows = []
    for batch, side, microbatch, remat in STEPS[:1] if options.quick else STEPS:
        console.say(f"batch {batch}, {side} pixels, microbatch {microbatch or 'none'}")
        case = {"batch": batch, "image_size": side, "microbatch": microbatch, "remat": remat}
        case["devices"] = mesh.size
        encoder = "vit" if options.quick else "vit_small_patch16_224"
        config = step_config(encoder, side, batch, samples=2)
        config.run.microbatch, config.run.remat = microbatch, remat
        try:
            program = compiled_step(config, mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            used = re.search(r"Used (\S+) of (\S+) hbm", str(error))
            case["does_not_fit"] = f"{used[1]}B of {used[2]}B" if used else ""
        else:
            case |= program._asdict() | {"rounded": len(program.rounded)}
        rows.append(case)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a Markdown table with one row per batch."""
    titles = ("batch", "image size", "microbatch", "remat", "devices")
    lines = []
    for row in rows:
        cells = [str(row["batch"]), f"{row['image_size']} pixels", str(row["microbatch"] or "–")]
        cells += ["yes" if row["remat"] else "–", str(row["devices"])]
        if "does_not_fit" in row:
            cells += [f"does not fit: {row['does_not_fit']}", "–"]
        else:
            cells += [f"{row[kind] / 1e9:.2f} GB" for kind in ("temporary", "arguments")]
        lines.append(cells)
    return measure.markdown((*titles, "temporary memory", "arguments"), lines)


def devices_of(target: str | None) -> Sequence[jax.Device]:
    """Returns the devices to compile for: those of a TPU slice, or of this machine for None.

    Raises UserError if the slice is unknown, or libtpu is not installed.
    """
    if target is None:
        return jax.devices()
    from jax.experimental import topologies

    # Keeps libtpu from asking for a TPU's metadata, and from locking the chips.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=target).devices
    except Exception as error:  # libtpu raises errors of several types.
        reason = str(error).splitlines()[0]
        raise UserError(
            f"cannot compile for {target} ({reason}); it must be a slice such as v5e:2x4, and "
            "libtpu must be installed (pip install libtpu)"
        ) from error


def step_config(encoder: str, side: int, batch: int, samples: int) -> ConfigDict:
    """The default configuration with an encoder, of which 'vit' is a tiny one, in bfloat16.

    Images have `side` pixels on each side, and a batch holds `samples` of each of its classes.
    """
    config = default_config()
    with config.unlocked():
        config.model.architecture, config.model.precision = encoder, "bfloat16"
        config.data.image_size = config.data.resize = side
        config.train.batch_size, config.train.samples_per_class = batch, samples
        if encoder == "vit":
            config.model.update(patch_size=16, width=128, depth=2, num_heads=2)
    return config


def learner_and_spec(config: ConfigDict, mesh: Mesh) -> tuple[Learner, Spec]:
    """What a run of this configuration trains, as if on the images of one batch."""
    learner, train = build_learner(config, mesh), config.train
    spec = Spec(
        classes=train.batch_size // train.samples_per_class,
        samples_per_class=train.samples_per_class,
        encoder_dim=learner.model.encoder.dim,
        head_dim=config.model.head_dim,
        training_images=train.batch_size,
        batch_size=train.batch_size,
    )
    return learner, spec


def compiled_step(config: ConfigDict, mesh: Mesh) -> Program:
    """Compiles the train step of a configuration, as `train_and_evaluate` runs it."""
    learner, spec = learner_and_spec(config, mesh)
    state = jax.eval_shape(lambda: create_state(learner, spec))
    shardings = parallel.parameter_shardings(mesh, state)
    state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)
    size, side = config.train.batch_size, config.data.image_size
    rows = parallel.slices(size, mesh, config.run.microbatch).rows
    shape = (rows, side, side, config.data.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=parallel.sharded(mesh))
    numbers = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=parallel.replicated(mesh))
    flips = jax.ShapeDtypeStruct((rows,), jnp.bool, sharding=parallel.sharded(mesh))
    step = jit_train_step(make_train_step(learner), mesh, state)
    return describe(step.lower(state, Batch(images, numbers, numbers, flips)))


def describe(lowered: jax.stages.Lowered) -> Program:
    """Compiles a program and analyses it."""
    program = lowered.compile()
    text, memory = program.as_text(), program.memory_analysis()
    types = {found["name"]: found["type"] for found in _INSTRUCTION.finditer(text)}
    rounded, products = [], collections.Counter()
    for line in text.splitlines():
        if not (product := _PRODUCT.search(line)):
            continue
        if "/encoder/" in line:
            products[" × ".join(sorted(types[product[side]] for side in ("left", "right")))] += 1
        elif "{highest,highest}" not in line:
            rounded.append(line.strip())
    exchanges = {}
    for found in _COLLECTIVE.finditer(text):  # Each channel may occur several times.
        dtypes = "+".join(sorted(set(_TYPE.findall(found["types"]))))
        exchanges[found["channel"]] = f"{found['kind']} {dtypes}"
    return Program(
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        collectives=sorted(exchanges.values()),
        rounded=rounded,
        products=dict(products),
    )
