"""Configurations: names, overrides, identity, origins, and the errors for invalid ones."""

import json
import re
import shutil

import pytest

from hypjax.catalogue import PREPARED
from hypjax.config import (
    choices,
    default_workdir,
    differences,
    flatten,
    identity,
    load_config,
    override,
    read_config,
    show_origins,
)
from hypjax.data.preparation.prepare import declared
from hypjax.data.views import TEST_VIEWS, TRAIN_VIEWS
from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field
from hypjax.objectives import OBJECTIVES, PairwiseCrossEntropy
from hypjax.objectives.base import Declaration
from hypjax.runs.workdir import Workdir, saved_config
from hypjax.system import machine


def test_variants_differ_in_their_space():
    hyp, sph = load_config("glyphs:hyp"), load_config("glyphs:sph")
    assert identity(load_config("glyphs")) == identity(hyp)
    changes = ["objective.space: poincare -> sphere", "variant: hyp -> sph"]
    assert differences(identity(hyp), identity(sph)) == changes


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


def test_the_name_of_a_loss_is_a_string(tmp_path):
    fields = flatten(load_config("glyphs"))
    for wrong in (None, 1, True):
        saved = {"identity": {}, "all": {**fields, "objective.name": wrong}}
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with pytest.raises(UserError, match="objective.name is .*; it must be one of"):
            saved_config(tmp_path)


CACHED = "train.cached_features=True optim.frozen=encoder"
HIER = "objective.name=hier+proxy_anchor"
# A case for each kind of rule: overrides, and a keyword of the message.
INVALID = [
    ("train.total_stepz=7", "did you mean train.total_steps?"),
    ("train=7", "group of fields"),
    ("seed", "needs a value"),
    ("train.batch_size=None", "a whole number"),
    ("optim.learning_rate=nan", "a finite number"),
    ("eval.ks=1,x", "a list"),
    ("optim.groups=('head',-1,None,0)", "factor of the rate"),
    ("seed=4294967296", "between 0 and"),  # JAX's keys drop further bits.
    ("data.crop_area=0.5", "two ascending numbers"),
    ("objective.space=hyperbolic", "one of poincare"),
    ("optim.frozen=heed", "names from patch_projection"),
    ("objective.name=proxy", "one of pairwise"),
    ("train.batch_size=511", "multiple of train.samples_per_class"),
    (f"{HIER} objective.hier_proxies=20", "above objective.hier_neighbors"),
    ("model.architecture=resnet50", "sizes of its own"),
    ("model.num_heads=3", "multiple of model.num_heads"),
    (f"{CACHED} model.drop_path=0.1", "cached_features"),
    ("objective.space=sphere objective.learn_c=True", "has a curvature"),
    ("objective.learn_c=True objective.c=20", "objective.c_bounds"),
    ("objective.learn=temperature,temperature", "each once"),
    (
        "objective.name=contrastive objective.memory=1 objective.learn_c=True",
        "config.objective.memory",
    ),
    ("eval.prefixes=8,256", "below model.head_dim"),
    ("data.name=folder", "a folder, a table"),
    ("data.resize=24", "data.image_size"),
    (f"{CACHED} run.cache=device", "none or host"),
    ("train.cached_features=True", "lowest layers"),
]


def test_invalid_values_are_refused_in_one_sentence():
    for overrides, keyword in INVALID:
        with pytest.raises(UserError) as error:
            load_config("glyphs", overrides.split())
        assert keyword in str(error.value), overrides


def test_an_unknown_variant_is_refused_with_the_known_ones():
    for spec, keyword in (
        ("glyphs:hup", "one of hyp, sph"),
        ("cub:hyp-dion", "losses are hyp, .*, encoders vit"),
        ("cub:sph-resnet50", "that go together"),
        ("cub:hyp-dino,frosen", "with ,frozen or ,released"),
    ):
        with pytest.raises(UserError, match=keyword):
            load_config(spec)


def test_an_architecture_with_sizes_of_its_own_is_refused_beside_others():
    with pytest.raises(UserError) as error:
        load_config("glyphs", ["model.architecture=vit_tiny_patch16_224"])
    added = str(error.value).split(" --config.")[1:]
    assert load_config("glyphs", ["model.architecture=vit_tiny_patch16_224", *added])
    with pytest.raises(UserError, match="vit_tiny_patch16_224"):
        load_config("glyphs", ["model.architecture=vit_tinny_patch16_224"])


def test_errors_in_a_users_file_are_reported_with_their_line(tmp_path):
    path = tmp_path / "mine.py"
    for text, keyword in (
        ("x = 1", "no get_config"),
        ("def get_config():\n  return 1 / 0", "line 2: ZeroDivisionError"),
        ("def get_config(", "SyntaxError"),
        ("def get_config():\n  return {}", "not a ConfigDict"),
        ("from ml_collections import ConfigDict as get_config", "is missing"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=keyword):
            load_config(str(path))


def test_the_default_workdir_names_the_file_the_variant_and_the_changes(repository, tmp_path):
    plain = load_config("glyphs")
    copied = load_config(str(shutil.copy(repository / "configs/glyphs.py", tmp_path / "mine.py")))
    assert default_workdir(copied, unchanged=copied) == "runs/mine-hyp"

    def workdir(*overrides):
        return default_workdir(load_config("glyphs", overrides), unchanged=plain)

    assert workdir() == workdir("run.workers=2") == workdir("seed=0") == "runs/glyphs-hyp"
    changed = workdir("seed=1", "objective.c=0.5")
    assert changed == "runs/glyphs-hyp-c=0.5+seed=1"
    assert changed == workdir("objective.c=.5", "seed=1", "run.workers=2")
    assert workdir("model.weights=a/b") != workdir("model.weights=a/c")
    for value in ("a+seed=1", "a=b", "a/b", "a" * 60, "a b"):
        assert re.fullmatch("runs/glyphs-hyp-[0-9a-f]{8}", workdir(f"model.weights={value}"))


def test_a_configuration_is_found_by_its_name_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec in ("glyphs:sph", "glyphs.py:sph", "configs/glyphs.py:sph"):
        config = load_config(spec)
        assert (config.name, config.variant) == ("glyphs", "sph")
    (tmp_path / "configs").mkdir()
    own = tmp_path / "configs" / "glyphs.py"
    own.write_text("from hypjax.config import default_config as get_config")
    assert load_config("glyphs").variant == ""
    for spec in ("glyph", "other/glyphs.py"):
        with pytest.raises(UserError, match=f"no configuration file {spec}; hypjax has .*glyphs"):
            load_config(spec)


@pytest.fixture
def toy(monkeypatch):
    """An objective with two fields of its own, one of which pairwise cross-entropy has, too."""
    fields = {"margin": Field(0.5, ABOVE_0), "temperature": Field(1.0, ABOVE_0)}
    entry = Declaration(lambda config, space: PairwiseCrossEntropy(space, 0.2, 2), fields)
    monkeypatch.setitem(OBJECTIVES, "toy", entry)


def test_an_objective_brings_its_own_fields(toy, tmp_path):
    config = load_config("glyphs", ["objective.margin=2", "objective.c=0.3", "objective.name=toy"])
    assert (config.objective.name, config.objective.margin, config.objective.c) == ("toy", 2, 0.3)
    assert config.objective.temperature == 1 and "margin" not in load_config("glyphs").objective
    for name, margin in (("toy", "0.0"), ("toy", "x"), ("pairwise_cross_entropy", "0.5")):
        with pytest.raises(UserError, match="config.objective.margin"):
            load_config("glyphs", [f"objective.name={name}", f"objective.margin={margin}"])
    with Workdir(tmp_path, config).locked({}):
        pass
    assert saved_config(tmp_path).objective.margin == 2
    with pytest.raises(UserError, match="objective.margin: 2.0 -> 0.5"):
        Workdir(tmp_path, load_config("glyphs", ["objective.c=0.3", "objective.name=toy"]))


def test_a_file_may_choose_another_objective(toy, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from hypjax.config import choose_objective, default_config\n"
        "def get_config():\n"
        "  config = default_config()\n"
        "  config.objective.c = 0.7\n"
        "  choose_objective(config, 'toy')\n"
        "  config.objective.margin = 3.0\n"
        "  return config\n"
    )
    config = load_config(str(own))
    assert (config.objective.c, config.objective.margin) == (0.7, 3.0)


def test_each_field_has_its_value_and_origin():
    spec, overrides = "glyphs:sph", ("train.total_steps=70", "objective.temperature=0.3")
    config = override(read_config(spec), overrides)
    lines = show_origins(config, spec, read_config(spec), overrides).splitlines()
    assert len(lines) == len(flatten(config))
    found = {line.split()[0].removeprefix("config."): line.split()[1:] for line in lines}
    assert found["train.total_steps"] == ["70", "command", "line"]
    assert found["objective.temperature"] == ["0.3", "command", "line"]
    assert found["data.image_size"] == ["32", spec] and found["optim.clip_norm"] == ["3.0"]


def test_names_and_implementations_match():
    assert [getattr(declared(name), "name", name) for name in PREPARED] == [*PREPARED]
    assert choices.TRAIN_VIEWS == tuple(TRAIN_VIEWS) and choices.TEST_VIEWS == tuple(TEST_VIEWS)


def test_the_variant_for_own_images_is_chosen_by_the_machine_and_written_down(monkeypatch):
    for accelerator, variant in ((True, "hyp-dinov2"), (False, "hyp-lite,frozen")):
        monkeypatch.setattr(machine, "has_accelerator", lambda chosen=accelerator: chosen)
        for name, path in (("folder", ["data.path=photos"]), ("grocery", [])):
            config = load_config(name, path)
            assert config.variant == variant
            assert config == load_config(f"{name}:{variant}", path)
