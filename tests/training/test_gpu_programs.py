"""Programs compiled for NVIDIA GPUs that need not exist."""

import functools
import re

import pytest

from benchmarks import programs
from hypjax import parallel
from hypjax.config import load_config
from hypjax.dry_run import dry_run
from hypjax.settings import TextSettings
from hypjax.system import targets

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs needs jax[cuda12]")

# ViT-S/16 with fewer blocks, which are alike but for the last one.
VIT = ["model.architecture=vit", "model.width=384", "model.num_heads=6", "model.patch_size=16"]
DTYPES = {"t4": "float32", "h100": "bfloat16"}


def mesh_of(target):
    return parallel.create_mesh((1, 1), targets.devices_of(target))


@functools.cache
def embedding(target, depth):
    fields = [*VIT, f"model.depth={depth}", "run.eval_batch_size=900"]
    return programs.compiled_embedding(load_config("sop.py:hyp-vit", fields), mesh_of(target))


def of_12_blocks(program, figure):
    """A figure of the program with 12 blocks, from those with two and three."""
    two, three = (figure(program(depth)) for depth in (2, 3))
    return two + 10 * (three - two)


def moved(program):
    return sum(kernel.moved for kernel in program.kernels if not kernel.product)


@pytest.mark.parametrize("recipe", ["glyphs.py", "glyphs.py:happier"])
@pytest.mark.parametrize("target", DTYPES)
def test_a_step_compiles_in_the_precision_of_the_gpu(target, recipe):
    program = programs.compiled_step(load_config(recipe), mesh_of(target))
    half = DTYPES[target] == "bfloat16"
    assert ("bf16[" in program.text) == half
    assert ("__cudnn$fmha" in program.text) == half
    assert program.products and program.rounded == []


def test_a_dry_run_says_whether_a_step_fits_into_absent_cards(capsys):
    def needed(*fields):
        config = programs.config_of(*programs.TINY, "train.batch_size=64", *fields)
        config.train.samples_per_class = 2
        dry_run(config, target="t4:8")
        found = capsys.readouterr().out
        assert "in all, which fits into the 14.75 GiB of Tesla T4" in found
        return float(re.search(r"device: (\S+) GiB for parameters", found)[1])

    large = "model.width=1024", "model.depth=2"
    whole, part = needed(*large), needed(*large, "run.sharding=fsdp")
    assert whole == pytest.approx(26e6 * 4 / 2**30, abs=0.02) and part < whole / 4


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("target", DTYPES)
def test_texts_compile_in_the_precision_of_the_gpu(target, kind):
    settings = TextSettings(width=512, depth=1, num_heads=8, kind=kind)
    half = DTYPES[target] == "bfloat16"
    for gradients in (False, True):
        program = programs.compiled_texts(settings, mesh_of(target), gradients=gradients)
        assert ("bf16[" in program.text) == half
        assert ("__cudnn$fmha" in program.text) == half
        assert program.products and program.rounded == []


def test_a_step_of_900_images_moves_what_it_must_on_an_h100():
    """118 GB besides products. Copies of their operands alone would be 60 GB more."""

    @functools.cache
    def program(depth):
        config = load_config("sop.py:hyp-vit", [*VIT, f"model.depth={depth}"])
        return programs.compiled_step(config, mesh_of("h100"))

    assert 100e9 < of_12_blocks(program, moved) < 122e9
    memory = of_12_blocks(program, lambda program: program.temporary)
    assert 20e9 < memory < 29.5e9
    assert program(2).rounded == []
    operations = of_12_blocks(program, lambda x: sum(kernel.operations for kernel in x.kernels))
    assert operations == pytest.approx(23.65e12, rel=0.01)


@pytest.mark.parametrize(("target", "most"), [("h100", 44e9), ("t4", 115e9)])
def test_an_embedding_copies_no_images_in_float32(target, most):
    program = functools.partial(embedding, target)
    assert 0.8 * most < of_12_blocks(program, moved) < most
    kernels = program(2).text.partition("\nENTRY")[2]
    assert "u8[900,224,224,3]" in kernels and "f32[900,224,224,3]" not in kernels
    assert program(2).rounded == []
