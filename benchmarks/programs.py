"""What compiled programs need: memory, traffic, exchanges between devices, and precision.

XLA compiles for devices that are not there: for a slice of TPUs, named by its topology such as
v5e:2x4, if the package libtpu is installed, and for the cards in `benchmarks.gpus` with
jax[cuda12]. Nothing is run.
"""

import collections
import functools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from benchmarks import measure
from benchmarks.gpus import GPUS, Gpu
from benchmarks.kernels import Kernel, kernels_of
from hypjax import parallel
from hypjax.config import default_config, load_config
from hypjax.errors import UserError, writing
from hypjax.geometry import PoincareBall
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.models import create_embedder
from hypjax.models.embedder import model_shapes
from hypjax.objectives import Spec
from hypjax.retrieval import selection
from hypjax.retrieval.scores import Score
from hypjax.system import console
from hypjax.training.learner import Learner, build_learner
from hypjax.training.step import create_state, jit_train_step, make_train_step
from hypjax.types import Batch, View

_INSTRUCTION = re.compile(r"%(?P<name>[\w.-]+) = (?P<type>\w+)\[(?P<rest>[^\n]*)")
_PRODUCT = re.compile(
    r" (?:convolution|dot)\(%([\w.-]+), %([\w.-]+)\)"
    r'| custom-call\(%([\w.-]+), %([\w.-]+).*custom_call_target="__(?:cublas|cudnn\$conv)'
)
_FULL = ("{highest,highest}", '["HIGHEST","HIGHEST"]')  # Precisions of true float32 products.
_COLLECTIVE = re.compile(
    r"= (?P<types>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\("
    r".*channel_id=(?P<channel>\d+)"
)
_TYPE = re.compile(r"(\w+)\[")


# Images and classes of training splits.
_TRAINING = {"cub200": (5864, 100), "sop": (59_551, 11_318)}


class Searched(NamedTuple):
    """The sizes of a search: a block of queries, and the points on each device."""

    queries: int
    items: int
    dim: int
    k: int


SEARCHED = Searched(queries=512, items=65_536, dim=128, k=12)


class Program(NamedTuple):
    """A compiled program: bytes on each device, and what it computes and exchanges."""

    arguments: int
    temporary: int
    text: str  # Its HLO.
    kernels: list[Kernel]  # Of a GPU.
    collectives: list[str]  # Exchanges between devices by kind and dtype: 'all-reduce f32'.
    rounded: list[str]  # HLO of products outside the encoder without the highest precision.
    products: dict[str, int]  # Number of products in the encoder for each pair of dtypes.


class Case(NamedTuple):
    """A program of a recipe: its train step, or its embedding of a batch in evaluation."""

    name: str  # With which files begin.
    recipe: str
    fields: tuple[str, ...] = ()  # Of the configuration that differ from the recipe.
    evaluating: bool = False

    def program(self, mesh: Mesh) -> tuple["Program", int]:
        """Compiles it for the devices of a mesh; returns it and the images of a batch."""
        config = load_config(self.recipe, self.fields)
        if self.evaluating:
            return compiled_embedding(config, mesh), config.run.eval_batch_size
        return compiled_step(config, mesh), config.train.batch_size


_PATCH8 = ("model.architecture=vit_small_patch8_224", "model.weights=None")
CASES = (
    Case("step-900", "sop.py:hyp-vit"),
    Case("step-900-microbatch", "sop.py:hyp-vit", ("run.microbatch=100",)),
    Case("step-120-patch8", "sop.py:hyp-dino", (*_PATCH8, "train.batch_size=120")),
    Case("step-hier", "sop.py:hier-dino"),
    Case("step-hier-resnet50", "sop.py:hier-resnet50"),
    Case("step-memory", "sop.py:irt-r"),
    Case("embedding", "sop.py:hyp-vit", ("run.eval_batch_size=900",), evaluating=True),
)
_QUICK = (Case("step-glyphs", "glyphs.py"),)


def rows(options: measure.Options) -> measure.Rows:
    """Compiles the programs of `CASES`, or glyphs alone if quick, and those of an exact search."""
    rows, (mesh, gpu) = compiled_rows(CASES, options), _target(options)
    console.say("compiling the search")
    for name, program in zip(("search-scores", "search-best"), compiled_search(mesh), strict=True):
        _keep(name, program, options)
        rows.append(_row(name, program, SEARCHED.queries, mesh, gpu))
    return rows


def compiled_rows(cases: Sequence[Case], options: measure.Options) -> measure.Rows:
    """Compiles programs, or that of glyphs alone if quick.

    Returns for each what it needs and, for one of `GPUS`, the bytes that its kernels move besides
    matrix products, all operations of products, and the least time that its kernels take.
    """
    rows, (mesh, gpu) = [], _target(options)
    for case in _QUICK if options.quick else cases:
        console.say(f"compiling {case.name}")
        try:
            program, images = case.program(mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            console.warn(f"{case.name} does not fit into the memory of {options.target}")
        else:
            _keep(case.name, program, options)
            rows.append(_row(case.name, program, images, mesh, gpu))
    return rows


def _target(options: measure.Options) -> tuple[Mesh, Gpu | None]:
    chosen = devices_of(options.target)
    mesh = parallel.create_mesh((options.devices or len(chosen), 1), chosen)
    return mesh, GPUS.get((options.target or "").lower())


def _keep(name: str, program: Program, options: measure.Options) -> None:
    """Writes a program's text where the user asked for it."""
    if options.hlo:
        path = pathlib.Path(options.hlo) / f"{options.target or 'here'}-{name}.txt"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(program.text)


def _row(name: str, program: Program, items: int, mesh: Mesh, gpu: Gpu | None) -> dict[str, Any]:
    row = {"program": name, "items": items, "devices": mesh.size}
    row |= {kind: getattr(program, kind) for kind in ("arguments", "temporary", "collectives")}
    row["rounded"] = len(program.rounded)
    if gpu:
        row["fits"] = program.arguments + program.temporary < gpu.memory
        row["kernels"] = len(program.kernels)
        row["moved"] = sum(kernel.moved for kernel in program.kernels if not kernel.product)
        row["operations"] = sum(kernel.operations for kernel in program.kernels)
        row["roof"] = sum(kernel.seconds(gpu) for kernel in program.kernels)
    return row


def table(rows: measure.Rows) -> str:
    """Formats a Markdown table with one row per program."""
    on_gpu = "roof" in rows[0]
    titles = ["program", "images or queries", "temporary memory", "arguments", "rounded products"]
    if on_gpu:
        titles += ["kernels", "moved besides products", "products", "roofline time", "at most"]
    lines = []
    for row in rows:
        cells = [row["program"], str(row["items"])]
        cells += [f"{row[kind] / 1e9:.3g} GB" for kind in ("temporary", "arguments")]
        cells.append(str(row["rounded"]))
        if on_gpu:
            cells[2] += "" if row["fits"] else " (does not fit)"
            cells += [str(row["kernels"]), f"{row['moved'] / 1e9:.3g} GB"]
            cells += [f"{row['operations'] / 1e12:.3g} TFLOP", f"{1e3 * row['roof']:.3g} ms"]
            cells.append(f"{row['items'] / row['roof']:,.0f}/s")
        lines.append(cells)
    return "Read from compiled programs, not measured:\n\n" + measure.markdown(tuple(titles), lines)


def devices_of(target: str | None) -> Sequence[jax.Device]:
    """Returns the devices to compile for: those of a target, or of this machine for None.

    A target is a slice of TPUs or one of `GPUS`. Raises UserError if it is unknown, or a package is
    not installed.
    """
    if target is None:
        return jax.devices()
    from jax.experimental import topologies

    if target.lower() in GPUS:
        try:
            return topologies.get_topology_desc(
                platform="cuda",
                topology="1x1x1",
                target_config=GPUS[target.lower()].description(),
            ).devices
        except Exception as error:  # Without the plugin, or with one that does not fit.
            reason = str(error).splitlines()[0]
            raise UserError(
                f"compiling for {target} needs JAX's CUDA plugin (pip install "
                f'"hypjax[cuda12]"), and JAX_PLATFORMS=cpu where there is no GPU ({reason})'
            ) from error
    if ":" not in target:
        raise UserError(
            f"--target is {target!r}; it must be one of {', '.join(GPUS)}, or a slice of TPUs such "
            "as v5e:2x4"
        )

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
    """What a run of this configuration trains, with the sizes of its training split if known."""
    learner, train = build_learner(config, mesh), config.train
    batch = train.batch_size, train.batch_size // train.samples_per_class
    images, classes = _TRAINING.get(config.data.name, batch)
    spec = Spec(
        classes=classes,
        samples_per_class=train.samples_per_class,
        encoder_dim=learner.model.encoder.dim,
        head_dim=learner.model.head_dim,
        training_images=images,
        batch_size=train.batch_size,
    )
    return learner, spec


def compiled_step(config: ConfigDict, mesh: Mesh) -> Program:
    """Compiles the train step of a configuration, as `train_and_evaluate` runs it."""
    config = _for_devices(config, mesh)
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
    return compiled(step, mesh, state, Batch(images, numbers, numbers, flips))


def compiled_embedding(config: ConfigDict, mesh: Mesh) -> Program:
    """Compiles the embedding of a batch of evaluation."""
    config = _for_devices(config, mesh)
    model = create_embedder(config, evaluating=True, device=mesh.devices.flat[0])
    spaces = functools.partial(scored_spaces, config)
    embed = embed_function(model, (config.data.mean, config.data.std), spaces)
    view = View.of(config.data)
    rows = parallel.slices(config.run.eval_batch_size, mesh).rows
    shape = (rows, view.side, view.side, view.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=parallel.sharded(mesh))
    params = jax.tree.map(
        lambda x: x.update(sharding=parallel.replicated(mesh)), model_shapes(model, view)
    )
    return compiled(jax.jit(parallel.map_images(embed, mesh)), mesh, params, images)


def compiled_search(mesh: Mesh) -> list[Program]:
    """Compiles the two programs of an exact search in the ball: all scores, and the best ones."""
    mesh, space = Mesh(mesh.devices.reshape(-1), selection.AXIS), PoincareBall(0.1)
    one = np.zeros((1, SEARCHED.dim), np.float32)
    width = Score.around(space, one).factors(one).query[0].shape[1]

    def array(shape: tuple[int, ...], dtype: Any, *axes: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    axis, queries, items = selection.AXIS, SEARCHED.queries, mesh.size * SEARCHED.items
    chunk = selection.Chunk(
        (array((items, width), jnp.float32, axis),), array((mesh.size,), jnp.int32, axis)
    )
    scores = array((mesh.size * queries, SEARCHED.items), jnp.float32, axis)
    maxima = array((*scores.shape[:1], SEARCHED.items // selection.GROUP), jnp.float32, axis)
    multiply, select = selection.jitted_steps(mesh, SEARCHED.k)
    vectors = (array((queries, width), jnp.float32),)
    return [
        compiled(multiply, mesh, scores, space, vectors, chunk),
        compiled(select, mesh, scores, maxima, chunk),
    ]


def compiled(function: jax.stages.Wrapped, mesh: Mesh, *arguments: Any) -> Program:
    """Compiles a jitted function for the mesh's devices, which need not exist, and describes it."""
    device = mesh.devices.flat[0]
    options = {}
    if _is_absent_gpu(device):
        # Nothing is tuned there, and Triton's default tiles do not fit every product.
        options["xla_gpu_enable_triton_gemm"] = False
    return describe(function.lower(*arguments).compile(compiler_options=options))


def _for_devices(config: ConfigDict, mesh: Mesh) -> ConfigDict:
    """The configuration with cuDNN's attention for a GPU that is not JAX's first device."""
    config = config.copy_and_resolve_references()
    if config.run.attention == "auto" and _is_absent_gpu(mesh.devices.flat[0]):
        config.run.attention = "cudnn"
    return config


def _is_absent_gpu(device: jax.Device) -> bool:
    return device.platform in ("cuda", "gpu") and jax.default_backend() != "gpu"


def describe(program: jax.stages.Compiled) -> Program:
    """Analyses a compiled program."""
    text, memory = program.as_text(), program.memory_analysis()
    types = {found["name"]: found["type"] for found in _INSTRUCTION.finditer(text)}
    rounded, products = [], collections.Counter()
    for line in text.splitlines():
        if not (product := _PRODUCT.search(line)):
            continue
        factors = " × ".join(sorted(types.get(name, "?") for name in product.groups() if name))
        if "/encoder/" in line:
            products[factors] += 1
        elif not any(precision in line for precision in _FULL):
            rounded.append(line.strip())
    exchanges = {}
    for found in _COLLECTIVE.finditer(text):  # Each channel may occur several times.
        dtypes = "+".join(sorted(set(_TYPE.findall(found["types"]))))
        exchanges[found["channel"]] = f"{found['kind']} {dtypes}"
    return Program(
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        text=text,
        kernels=kernels_of(text),
        collectives=sorted(exchanges.values()),
        rounded=rounded,
        products=dict(products),
    )
