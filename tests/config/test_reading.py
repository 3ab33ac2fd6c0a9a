"""Configurations: names, overrides, identity, origins, and the errors for invalid ones."""

import importlib
import itertools
import re

import pytest

from hypjax.catalogue import PREPARED
from hypjax.config import (
    default_workdir,
    flatten,
    load_config,
    override,
    read_config,
    show_origins,
    validate,
    variants,
)
from hypjax.data.preparation.prepare import declared
from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field
from hypjax.objectives import OBJECTIVES, PairwiseCrossEntropy
from hypjax.objectives.base import Declaration
from hypjax.system import machine


def test_overrides_take_the_type_of_the_field():
    for text, value in (
        ("train.total_steps=1e3", 1000),
        ("optim.learning_rate=1", 1.0),
        ("objective.clip_radius=None", None),
        ("eval.ks=1", (1,)),
        ("optim.frozen=head,encoder", ("head", "encoder")),
        ("optim.frozen=()", ()),
        ("name=7", "7"),
        ("optim.groups=('head', 1e2, None, 3)", (("head", 100.0, None, 3),)),
    ):
        loaded = flatten(load_config("glyphs", [text]))[text.partition("=")[0]]
        assert loaded == value and type(loaded) is type(value)


PATH = ["data.path=photos"]
CACHED = "train.cached_features=True optim.frozen=encoder"
HIER = "objective.name=hier+proxy_anchor"
# A case for each kind of rule: overrides, and a keyword of the message.
INVALID = [
    ("train.total_stepz=7", "did you mean train.total_steps?"),
    ("train.seed=7", "did you mean seed?"),
    ("objective.temprature=0.2", "did you mean temperature?"),
    ("objective.margn=1", "the fields of pairwise_cross_entropy are c, c_bounds"),
    ("objective.margin=1", "a field of "),
    ("optim.lr=1", "did you mean optim.learning_rate?"),
    ("train.epochs=1", "did you mean train.total_steps (steps, not epochs)?"),
    ("seed", "needs a value"),
    ("train.batch_size=None", "a whole number"),
    ("optim.learning_rate=nan", "a finite number"),
    ("eval.ks=1,x", "a list"),
    ("seed=4294967296", "between 0 and"),  # JAX's keys drop further bits.
    ("objective.space=hyperbolic", "one of poincare"),
    ("optim.frozen=heed", "names from patch_projection"),
    ("train.batch_size=511", "multiple of train.samples_per_class"),
    (f"{HIER} objective.hier_proxies=20", "above objective.hier_neighbors"),
    ("model.architecture=resnet50", "sizes of its own"),
    ("model.num_heads=3", "multiple of model.num_heads"),
    (f"{CACHED} model.drop_path=0.1", "cached_features"),
    ("objective.space=sphere objective.learn_c=True", "has a curvature"),
    ("objective.learn=temperature,temperature", "each once"),
    (
        "objective.name=contrastive objective.memory=1 objective.learn_c=True",
        "config.objective.memory",
    ),
    ("data.name=folder", "a folder, a table"),
    ("data.resize=24", "data.image_size"),
]


def test_invalid_values_are_refused_in_one_sentence():
    for overrides, keyword in INVALID:
        with pytest.raises(UserError) as error:
            load_config("glyphs", overrides.split())
        assert keyword in str(error.value), overrides


def test_an_unknown_variant_is_refused_with_the_known_ones():
    for spec, keyword in (
        ("glyphs:hup", "one of hyp, sph.*did you mean hyp"),
        ("features:foo", "one of hyp, sph.*supcon, triplet$"),
        ("cub:hyp-dion", "unknown variant .hyp-dion.; did you mean hyp-dino.$"),
        ("cub:foo", "losses are hyp, .*, irt-r-resnet50$"),
        ("folder:hyp-scrach", "unknown variant .hyp-scrach.; did you mean hyp-scratch.$"),
        ("grocery:dinov", "did you mean dinov2.$"),
        ("grocery:foo", "or one of lite, dinov2"),
        ("cub:moco-resnet50", "that go together"),
        ("cub:hyp-dino,frosen", "with ,frozen or ,released or ,unlabelled"),
    ):
        with pytest.raises(UserError, match=keyword):
            load_config(spec)


def test_the_variant_for_own_images_is_chosen_by_the_machine_and_written_down(monkeypatch):
    for accelerator, variant in ((True, "hyp-dinov2"), (False, "hyp-lite,frozen")):
        monkeypatch.setattr(machine, "has_accelerator", lambda chosen=accelerator: chosen)
        for name, path in (("folder", ["data.path=photos"]), ("grocery", [])):
            config = load_config(name, path)
            assert config.variant == variant
            assert config == load_config(f"{name}:{variant}", path)


@pytest.mark.slow
def test_variants_are_valid_in_the_files_that_have_them():
    """Each file has every loss with every encoder in turn, with and without a suffix."""
    suffixes, count = ("", ",released", ",frozen", ",last"), 0
    files = "cars", "cub", "folder", "grocery", "inshop", "sop"
    combined = itertools.product(variants.OBJECTIVE_OF_LOSS, variants.ENCODERS, suffixes)
    for file, (loss, encoder, suffix) in zip(itertools.cycle(files), combined):  # noqa: B905
        try:
            load_config(f"{file}:{loss}-{encoder}{suffix}", PATH[file != "folder" :])
            count += 1
        except UserError as error:
            assert "unknown variant" in str(error)
    assert count > 250


def test_names_and_implementations_match():
    assert [getattr(declared(name), "name", name) for name in PREPARED] == [*PREPARED]
    for file in ("features", "glyphs", "omniglot", "scenes", "sfm"):
        for variant in importlib.import_module(f"configs.{file}").VARIANTS:
            validate(load_config(f"{file}:{variant}", PATH[file != "features" :]))


def test_an_objective_brings_its_own_fields(monkeypatch):
    """Its own default counts where another loss has a field of that name."""
    fields = {"margin": Field(0.5, ABOVE_0), "temperature": Field(1.0, ABOVE_0)}
    entry = Declaration(lambda config, space: PairwiseCrossEntropy(space, 0.2, 2), fields)
    monkeypatch.setitem(OBJECTIVES, "toy", entry)
    config = load_config("glyphs", ["objective.margin=2", "objective.c=0.3", "objective.name=toy"])
    assert (config.objective.name, config.objective.margin, config.objective.c) == ("toy", 2, 0.3)
    assert config.objective.temperature == 1 and "margin" not in load_config("glyphs").objective
    for name, margin in (("toy", "0.0"), ("pairwise_cross_entropy", "0.5")):
        with pytest.raises(UserError, match="config.objective.margin"):
            load_config("glyphs", [f"objective.name={name}", f"objective.margin={margin}"])


def test_a_users_file_is_preferred_and_its_errors_have_their_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec in ("glyphs:sph", "glyphs.py:sph", "configs/glyphs.py:sph"):
        config = load_config(spec)
        assert (config.name, config.variant) == ("glyphs", "sph")
    (tmp_path / "configs").mkdir()
    own = tmp_path / "configs" / "glyphs.py"
    own.write_text("from hypjax.config import default_config as get_config")
    assert load_config("glyphs").variant == ""
    for text, keyword in (
        ("x = 1", "no get_config"),
        ("def get_config():\n  return 1 / 0", "line 2: ZeroDivisionError"),
        (
            "from hypjax.config import default_config\ndef get_config():\n"
            "  default_config().train.total_stepz = 3",
            "line 3: unknown field total_stepz; did you mean total_steps.$",
        ),
        ("from ml_collections import ConfigDict as get_config", "is missing"),
    ):
        own.write_text(text)
        with pytest.raises(UserError, match=keyword):
            load_config("glyphs")
    with pytest.raises(UserError, match="no configuration file glyph; hypjax has .*glyphs"):
        load_config("glyph")


def test_the_default_workdir_names_the_file_the_variant_and_the_changes():
    plain = load_config("glyphs")

    def workdir(*overrides):
        return default_workdir(load_config("glyphs", overrides), unchanged=plain)

    assert workdir() == workdir("run.workers=2") == workdir("seed=0") == "runs/glyphs-hyp"
    changed = workdir("seed=1", "objective.c=0.5")
    assert changed == workdir("objective.c=.5", "seed=1") == "runs/glyphs-hyp-c=0.5+seed=1"
    for value in ("a+seed=1", "a=b", "a/b", "a" * 60):
        assert re.fullmatch("runs/glyphs-hyp-[0-9a-f]{8}", workdir(f"model.weights={value}"))


def test_each_field_has_its_value_and_origin():
    spec, overrides = "glyphs:sph", ("train.total_steps=70", "objective.temperature=0.3")
    config = override(read_config(spec), overrides)
    lines = show_origins(config, spec, read_config(spec), overrides).splitlines()
    found = {line.split()[0].removeprefix("config."): line.split()[1:] for line in lines}
    assert found.keys() == flatten(config).keys()
    assert found["train.total_steps"] == ["70", "command", "line"]
    assert found["data.image_size"] == ["32", spec] and found["optim.clip_norm"] == ["3.0"]
