"""Memory, traffic, collectives and precision of compiled programs, which are not run.

XLA compiles also for absent devices: for a slice of TPUs, named by its topology such as v5e:2x4, if
the package libtpu is installed, and for the cards in `hypjax.system.targets` with jax[cuda12].
"""

import dataclasses
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree
from ml_collections import ConfigDict

from benchmarks import measure
from benchmarks.hlo import Program, describe
from hypjax import parallel
from hypjax.assemble import assemble_learner, assemble_method
from hypjax.config import load_config
from hypjax.errors import writing
from hypjax.experiment.embedding import embed_function
from hypjax.geometry import PoincareBall
from hypjax.models.embedder import create_embedder, model_shapes
from hypjax.objectives import ProblemSizes
from hypjax.retrieval import selection
from hypjax.retrieval.scores import Score
from hypjax.settings import ModelSettings, TextSettings
from hypjax.system import console
from hypjax.system.targets import devices_of, gpu_of, is_absent_gpu
from hypjax.training.learner import Learner
from hypjax.training.lowering import assumed_sizes, lower_step
from hypjax.types import View

_SOP = 59_551, 11_318  # Images and classes of the training split.
# Sizes of the search: queries in a block, points on each device, dimension, and neighbours.
SEARCHED = types.SimpleNamespace(queries=512, items=65_536, dim=128, k=12)
COLUMNS = {
    "program": "{program}",
    "images or queries": "{items}",
    "temporary memory": "{temporary_gb:.3g} GB",
    "fits": "{fits}",
    "arguments": "{arguments_gb:.3g} GB",
    "rounded products": "{rounded}",
    "kernels": "{kernels}",
    "moved outside products": "{moved_gb:.3g} GB",
    "products": "{tera_operations:.3g} TFLOP",
    "roofline time": "{roof_ms:.3g} ms",
    "at most": "{rate:,.0f}/s",
}
# A tiny encoder, for `config_of`.
TINY = ("model.architecture=vit", "model.patch_size=16", "model.width=128", "model.depth=2")
TINY += ("model.num_heads=2", "data.image_size=64", "data.resize=64")
_LARGE = ("data.image_size=384", "data.resize=384", "model.weights=None")
_PATCH8 = ("model.architecture=vit_small_patch8_224", "model.weights=None")
_BASE = ("model.architecture=vit_base_patch16_224", "model.weights=None", "run.eval_batch_size=768")
# Recipe and fields of train steps; "embedding" embeds a batch in evaluation.
_CASES = {
    "step-900": ("sop.py:hyp-vit", ()),
    "step-900-residual": ("sop.py:hyp-vit", ("model.residual=products",)),
    "step-900-microbatch": ("sop.py:hyp-vit", ("run.microbatch=100",)),
    "step-120-patch8": ("sop.py:hyp-dino", (*_PATCH8, "train.batch_size=120")),
    "step-hier": ("sop.py:hier-dino", ()),
    "step-hier-resnet50": ("sop.py:hier-resnet50", ()),
    "step-memory": ("sop.py:irt-r", ()),
    "embedding": ("sop.py:hyp-vit", ("run.eval_batch_size=900",)),
    "embedding-residual": (
        "sop.py:hyp-vit",
        ("run.eval_batch_size=900", "model.residual=products"),
    ),
    "embedding-base": ("sop.py:hyp-vit", _BASE),
}
_TEXTS = TextSettings(width=512, depth=12, num_heads=8)  # The tower beside a ViT-B.
_TEXTS_IN_BATCH = 768
_QUICK = {"step-glyphs": ("glyphs.py", ())}
_BATCHES = {  # Of ViT-S/16, for the suite `memory`.
    "900 images": (),
    "900 images, microbatch 300": ("run.microbatch=300",),
    "900 images, microbatch 100": ("run.microbatch=100",),
    "1600 images": ("train.batch_size=1600",),
    "1600 images, microbatch 800": ("train.batch_size=1600", "run.microbatch=800"),
    "900 images of 384 pixels, microbatch 300": (*_LARGE, "run.microbatch=300"),
    "the same, remat": (*_LARGE, "run.microbatch=300", "run.remat=True"),
}
_MEMORY = {name: ("sop.py:hyp-vit", fields) for name, fields in _BATCHES.items()}


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Compiles the programs of a suite, or the step of glyphs if quick, and describes each.

    A row holds the program's memory and, for a card, the bytes that kernels move outside
    products, the operations of all products, and the least time of the kernels.
    """
    console.say("figures are read from compiled programs, not measured")
    devices = devices_of(options.target) if options.target else jax.devices()
    mesh = parallel.create_mesh((options.devices or len(devices), 1), devices)
    for name, items, program in _programs(options, mesh):
        if options.hlo:
            path = pathlib.Path(options.hlo) / f"{options.target or 'here'}-{name}.txt"
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(program.text)
        row = dict.fromkeys(("fits", "kernels", "moved_gb", "tera_operations", "roof_ms", "rate"))
        row |= {"program": name, "items": items, "devices": mesh.size}
        row |= {"temporary_gb": program.temporary / 1e9, "arguments_gb": program.arguments / 1e9}
        row |= {"rounded": len(program.rounded), "collectives": program.collectives}
        if gpu := gpu_of(options.target or ""):
            row["fits"] = program.arguments + program.temporary < gpu.memory
            row["kernels"] = len(program.kernels)
            row["moved_gb"] = sum(k.moved for k in program.kernels if not k.product) / 1e9
            row["tera_operations"] = sum(k.operations for k in program.kernels) / 1e12
            seconds = sum(kernel.seconds(gpu) for kernel in program.kernels)
            row["roof_ms"], row["rate"] = 1e3 * seconds, items / seconds
        yield row


def _programs(options: measure.Options, mesh: Mesh) -> Iterator[tuple[str, int, Program]]:
    """Compiles programs; yields name, number of images or queries, and program."""
    cases = _MEMORY if options.suite == "memory" else _CASES
    for name, (recipe, fields) in (_QUICK if options.quick else cases).items():
        console.say(f"compiling {name}")
        config = load_config(recipe, fields)
        try:
            if name.startswith("embedding"):
                yield name, config.run.eval_batch_size, compiled_embedding(config, mesh)
            else:
                yield name, config.train.batch_size, compiled_step(config, mesh)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            console.warn(f"{name} does not fit into the memory of {options.target}")
    if options.suite == "programs":
        if not options.quick:
            console.say("compiling texts")
            yield "embedding-texts", _TEXTS_IN_BATCH, compiled_texts(_TEXTS, mesh)
            yield "gradients-texts", _TEXTS_IN_BATCH, compiled_texts(_TEXTS, mesh, gradients=True)
        console.say("compiling the search")
        for name, program in zip(("scores", "best"), compiled_search(mesh), strict=True):
            yield f"search-{name}", SEARCHED.queries, program


def config_of(*fields: str) -> ConfigDict:
    """Hyp-ViT's recipe for SOP, with random weights and these fields."""
    return load_config("sop.py:hyp-vit", ["model.weights=None", *fields])


def learner_and_spec(config: ConfigDict, mesh: Mesh) -> tuple[Learner, ProblemSizes]:
    """The learner of a configuration, and the sizes of its problem: SOP's, or assumed sizes."""
    learner, train = assemble_learner(config, mesh), config.train
    sizes = assumed_sizes(learner, train.batch_size, train.samples_per_class)
    if config.data.name == "sop":
        sizes = sizes._replace(training_images=_SOP[0], classes=_SOP[1])
    return learner, sizes


def compiled_step(config: ConfigDict, mesh: Mesh) -> Program:
    """Compiles the train step of a configuration, as `train_and_evaluate` runs it."""
    lowered = lower_step(*learner_and_spec(_for_devices(config, mesh), mesh))
    return describe(lowered.compile(compiler_options=parallel.compiler_options(mesh)))


def compiled_embedding(config: ConfigDict, mesh: Mesh) -> Program:
    """Compiles the embedding of a batch in evaluation."""
    config = _for_devices(config, mesh)
    method = assemble_method(config, device=mesh.devices.flat[0])
    model, view = method.model, method.pixels.view
    embed = embed_function(model, method.pixels, method.spaces({}))
    rows = parallel.slices(method.embedding.batch_size, mesh).rows
    shape = (rows, view.side, view.side, view.channels)
    images = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=parallel.sharded(mesh))
    params = jax.tree.map(
        lambda x: x.update(sharding=parallel.replicated(mesh)), model_shapes(model, view)
    )
    return compiled(jax.jit(parallel.map_images(embed, mesh)), mesh, params, images)


def compiled_texts(settings: TextSettings, mesh: Mesh, *, gradients: bool = False) -> Program:
    """Compiles the embedding of 768 texts by a tower with a head, or the gradients of its sum."""
    device = mesh.devices.flat[0]
    if is_absent_gpu(device):
        settings = dataclasses.replace(settings, attention="cudnn")
    model = create_embedder(ModelSettings(settings, "linear", settings.width), device)

    def embed(params: PyTree, ids: jax.Array) -> jax.Array:
        return model.apply({"params": params}, ids).projected

    gradient = jax.grad(lambda params, ids: embed(params, ids).sum())
    params = jax.tree.map(
        lambda x: x.update(sharding=parallel.replicated(mesh)), model_shapes(model, View(0, 0, 3))
    )
    shape = (_TEXTS_IN_BATCH, settings.context)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=parallel.sharded(mesh))
    return compiled(jax.jit(gradient if gradients else embed), mesh, params, ids)


def compiled_search(mesh: Mesh) -> list[Program]:
    """Compiles both programs of an exact search in the ball: all scores, and the top k."""
    mesh, space = Mesh(mesh.devices.reshape(-1), selection.AXIS), PoincareBall(0.1)
    point = np.zeros((1, SEARCHED.dim), np.float32)
    width = Score.around(space, point).factors(point).query[0].shape[1]

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
    """Compiles a jitted function for the mesh's devices, which may be absent, and describes it."""
    options = parallel.compiler_options(mesh)
    return describe(function.lower(*arguments).compile(compiler_options=options))


def _for_devices(config: ConfigDict, mesh: Mesh) -> ConfigDict:
    """The configuration with cuDNN's attention for a GPU that is not JAX's first device."""
    config = config.copy_and_resolve_references()
    if config.run.attention == "auto" and is_absent_gpu(mesh.devices.flat[0]):
        config.run.attention = "cudnn"
    return config
