"""Configurations: names, overrides, identity, origins, and the errors for invalid ones."""

import re
import shutil

import pytest

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
from hypjax.data.preparation.registry import BUILDERS
from hypjax.data.views import TEST_VIEWS, TRAIN_VIEWS
from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field
from hypjax.objectives import OBJECTIVES, PairwiseCrossEntropy
from hypjax.objectives.create import Entry
from hypjax.runs.workdir import Workdir, saved_config
from hypjax.system import machine


def test_variants_differ_in_their_space():
    hyp, sph = load_config("glyphs:hyp"), load_config("glyphs:sph")
    assert identity(load_config("glyphs")) == identity(hyp)
    changes = ["objective.space: poincare -> sphere", "variant: hyp -> sph"]
    assert differences(identity(hyp), identity(sph)) == changes


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("train.total_steps=70", "train.total_steps", 70),
        ("train.total_steps=1e3", "train.total_steps", 1000),
        ("optim.learning_rate=1", "optim.learning_rate", 1.0),
        ("objective.clip_radius=None", "objective.clip_radius", None),
        ("run.data_dir=/a/b", "run.data_dir", "/a/b"),
        ("eval.ks=1,10", "eval.ks", (1, 10)),
        ("eval.ks=1", "eval.ks", (1,)),
        ("optim.frozen=head,encoder", "optim.frozen", ("head", "encoder")),
        ("optim.frozen=()", "optim.frozen", ()),
        ("name=7", "name", "7"),
        ("seed=4294967295", "seed", 2**32 - 1),
        ("optim.groups=('head', 1e2, None, 3)", "optim.groups", (("head", 100.0, None, 3),)),
    ],
)
def test_overrides_take_the_type_of_the_field(override, field, value):
    found = flatten(load_config("glyphs", [override]))[field]
    assert found == value and type(found) is type(value)


CACHED = "train.cached_features=True optim.frozen=encoder"
SIZES = "model.patch_size=0 model.width=0 model.depth=0 model.num_heads=0"
RESNET = f"model.architecture=resnet50 {SIZES}"
HIER = "objective.name=hier+proxy_anchor"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.total_stepz=7", "config.train.total_stepz; did you mean train.total_steps?"),
        ("train.bs=64", "unknown field config.train.bs; did you mean train.batch_size?"),
        ("train=7", "config.train is a group of fields, such as config.train."),
        ("seed", "config.seed needs a value: --config.seed=VALUE"),
        # JAX's keys drop further bits: this would repeat the run of seed 0.
        ("seed=4294967296", "seed is 4294967296; it must be between 0 and 4294967295"),
        ("train.total_steps=abc", "config.train.total_steps is 'abc'; it must be a whole number"),
        ("train.total_steps=-1", "is -1; it must be between 0 and 2147483647"),
        ("optim.learning_rate=nan", "must be a finite number"),
        ("eval.ks=1,x", "must be a list whose items are each a whole number"),
        ("eval.ks=()", "must be one or more numbers, each at least 1"),
        ("data.crop_area=0.5", "two ascending numbers above 0 and up to 1"),
        (
            "objective.space=hyperbolic",
            "must be one of poincare, lorentz, sphere, or a space that hypjax",
        ),
        ("objective.c=-0.1", "config.objective.c is -0.1; it must be at least 0"),
        (
            "optim.frozen=heed",
            "must be names from patch_projection, encoder, head, space, objective",
        ),
        ("optim.groups=('head',-1,None,0)", "must be a list of (parameters, factor of the rate"),
        ("optim.rates.head=3", "now: write --config.optim.groups=\"('head'"),
        ("train.batch_size=None", "config.train.batch_size is None; it must be a whole number"),
        ("train.batch_size=511", "a multiple of train.samples_per_class (2), and at least 4"),
        ("model.weights=", "must be a name, a file or a folder, or None"),
        ("model.depth=0", "must be at least 1 if model.architecture is vit"),
        ("model.architecture=resnet50", "0 if an architecture with sizes of its own is named"),
        ("data.resize=24", "must be at least data.image_size (32)"),
        ("data.train_view=squash", "must be one of area_crop, resize_crop"),
        ("eval.scales=1,0", "must be one to ten numbers, each above 0"),
        ("model.num_heads=3", "model.width is 128; it must be a multiple of model.num_heads"),
        ("data.mean=0.5,0.5,0.5", "must be one number per channel (1)"),
        ("data.validation_classes=1.5", "a number of classes, or a fraction of them below 1"),
        ("data.path=photos", "must be None if data.name is glyphs"),
        ("data.name=folder", "config.data.path is None; it must be images: a folder, a table, a"),
        ("optim.warmup_steps=100000", "must be at most train.total_steps"),
        ("eval.pca.head=0", "must be between 1 and 16384, or None"),
        ("eval.whiten=True", "must be False unless eval.pca.head or eval.pca.encoder is set"),
        ("objective.name=proxy", "config.objective.name is 'proxy'; it must be one of pairwise"),
        ("eval.pca.head=129", "must be at most model.head_dim (128)"),
        ("eval.expansion_alpha=3", "must be 0 unless eval.expansion is set"),
        ("model.head=none optim.frozen=encoder", "config.model.head is 'none'; it must be another"),
        ("model.head=none model.weights=a model.load_head=True", "False if model.head is none"),
        ("model.load_head=True", "must be False unless model.weights names a run"),
        (
            "train.cached_features=True",
            "False unless optim.frozen names the encoder, or its lowest",
        ),
        (
            f"{CACHED} train.lora_rank=4",
            "rank is 4; it must be 0 if optim.frozen names the encoder",
        ),
        ("train.lora_targets=head", "must be encoder, or paths such as model/encoder/block_*"),
        ("train.probe_steps=300 train.total_steps=300", "must be below train.total_steps (300)"),
        ("train.probe_steps=3 model.head=none", "must be 0 if model.head is none"),
        ("train.ema_decay=1", "must be at least 0 and below 1"),
        ("optim.layer_decay=0", "must be above 0 and at most 1"),
        (f"{CACHED} run.cache=device", "none or host if train.cached_features is set"),
        (f"{CACHED} model.drop_path=0.1", "0 if train.cached_features is set"),
        (f"{RESNET} model.drop_path=0.1", "0 unless the architecture is a Transformer"),
        (f"{HIER} objective.hier_proxies=20", "is 20; it must be above objective.hier_neighbors"),
        (f"{HIER} train.batch_size=20", "is 20; it must be above objective.hier_neighbors (20)"),
    ],
)
def test_invalid_values_are_refused_in_one_sentence(override, message):
    with pytest.raises(UserError) as error:
        load_config("glyphs", override.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_variant_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="unknown variant 'hup'; did you mean hyp?"):
        load_config("glyphs:hup")
    with pytest.raises(UserError) as error:
        load_config("scenes:ms-dino")
    assert str(error.value).startswith("unknown variant 'ms-dino'; choose one of irt-o, irt-l")
    added = str(error.value).rpartition(" --config.")[2]
    config = load_config("folder:hyp-scratch", [added, "data.path=photos"])
    assert config.objective.name == "multi_similarity"


def test_an_architecture_with_sizes_of_its_own_is_refused_beside_others():
    override = "model.architecture=vit_tiny_patch16_224"
    with pytest.raises(UserError) as error:
        load_config("glyphs", [override])
    added = str(error.value).split(" --config.")[1:]
    assert load_config("glyphs", [override, *added]).model.width == 0
    with pytest.raises(UserError, match="must be vit_tiny_patch16_224, .*, or vit with sizes of"):
        load_config("glyphs", ["model.architecture=vit_tinny_patch16_224"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no get_config"),
        ("def get_config():\n  return 1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("def get_config(", "SyntaxError"),
        ("def get_config():\n  return {}", "returned {}, not a ConfigDict"),
        ("def get_config():\n  raise SystemExit(3)", "line 2: SystemExit: 3"),
        (
            "from hypjax.config import default_config\n"
            "def get_config():\n  default_config().train.total_stepz = 1",
            'line 3: AttributeError: .*Did you mean "total_steps"',
        ),
        (
            "import ml_collections\n"
            "def get_config():\n  return ml_collections.ConfigDict({'seed': 0})",
            "is missing; start from hypjax.config.default_config",
        ),
    ],
)
def test_errors_in_a_users_file_are_reported_with_their_line(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
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
    assert workdir("eval.ks=1,10", "train.sampling=drawn_classes").endswith("=drawn_classes")
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
    for spec, nearest in (("glyph", "glyphs"), ("configs/glyph.py", "configs/glyphs.py")):
        with pytest.raises(UserError, match=f"configuration file {spec}; did you mean {nearest}?"):
            load_config(spec)
    with pytest.raises(UserError, match="no configuration file other/glyphs.py"):
        load_config("other/glyphs.py")


@pytest.fixture
def toy(monkeypatch):
    """An objective with two fields of its own, one of which pairwise cross-entropy has, too."""
    fields = {"margin": Field(0.5, ABOVE_0), "temperature": Field(1.0, ABOVE_0)}
    entry = Entry(lambda config, space: PairwiseCrossEntropy(space, 0.2, 2), fields, by_class=False)
    monkeypatch.setitem(OBJECTIVES, "toy", entry)


def test_an_objective_brings_its_own_fields(toy):
    config = load_config("glyphs", ["objective.margin=2", "objective.c=0.3", "objective.name=toy"])
    assert (config.objective.name, config.objective.margin, config.objective.c) == ("toy", 2, 0.3)
    assert config.objective.temperature == 1 and "margin" not in load_config("glyphs").objective
    assert {"objective.margin", "objective.space"} <= identity(config).keys()
    with pytest.raises(UserError, match="objective.margin is 0.0; it must be above 0"):
        load_config("glyphs", ["objective.name=toy", "objective.margin=0.0"])
    with pytest.raises(UserError, match="unknown field config.objective.margin"):
        load_config("glyphs", ["objective.margin=0.5"])
    with pytest.raises(UserError, match="objective.margin is 'x'; it must be a finite number"):
        load_config("glyphs", ["objective.name=toy", "objective.margin=x"])


def test_a_file_may_choose_another_objective(toy, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from hypjax.config import choose_objective, default_config\n"
        "def get_config():\n"
        "  config = default_config()\n"
        "  config.objective.c = 0.7\n"
        "  choose_objective(config, 'toy')\n"
        "  config.objective.margin = 3.0\n"
        "  config.train.sampling = 'shuffled'\n"
        "  return config\n"
    )
    config = load_config(str(own))
    assert (config.objective.c, config.objective.margin) == (0.7, 3.0)
    with pytest.raises(UserError, match="this objective compares images of one class"):
        load_config("glyphs", ["train.sampling=shuffled"])


def test_a_run_of_another_objective_is_read_with_its_fields(toy, tmp_path):
    config = load_config("glyphs", ["objective.name=toy", "objective.margin=2"])
    with Workdir(tmp_path, config).claimed({}):
        pass
    assert saved_config(tmp_path).objective.margin == 2
    Workdir(tmp_path, config)
    changed = load_config("glyphs", ["objective.name=toy"])
    with pytest.raises(UserError, match=r"\(objective.margin: 2.0 -> 0.5\)"):
        Workdir(tmp_path, changed)


def rows(spec, *overrides):
    config = override(read_config(spec), overrides)
    lines = show_origins(config, spec, read_config(spec), overrides).splitlines()
    assert len(lines) == len(flatten(config))
    return {line.split()[0]: line for line in lines}


def test_each_field_has_its_value_and_origin():
    spec = "glyphs:sph"
    found = rows(spec, "train.total_steps=70", "objective.temperature=0.3")
    assert found["config.train.total_steps"].split()[1:] == ["70", "command", "line"]
    assert found["config.objective.temperature"].split()[1:] == ["0.3", "command", "line"]
    assert found["config.data.image_size"].split()[1:] == ["32", spec]
    assert found["config.optim.clip_norm"].endswith("3.0")  # A default.
    assert "'sphere'" in found["config.objective.space"]
    found = rows("glyphs:hyp", "objective.name=triplet")
    assert found["config.objective.name"].endswith("command line")
    assert "config.objective.temperature" not in found


def test_names_and_implementations_match():
    assert {*choices.DATASETS, choices.DISTRACTORS} == {*choices.USERS, *BUILDERS}
    assert {*choices.BENCHMARKS} < {*choices.DATASETS}
    assert choices.TRAIN_VIEWS == tuple(TRAIN_VIEWS)
    assert choices.TEST_VIEWS == tuple(TEST_VIEWS)


@pytest.mark.parametrize(
    ("accelerator", "variant"), [(True, "hyp-dinov2"), (False, "hyp-lite,frozen")]
)
def test_the_variant_for_own_images_is_chosen_by_the_machine_and_written_down(
    accelerator, variant, monkeypatch
):
    monkeypatch.setattr(machine, "has_accelerator", lambda: accelerator)
    for name, path in (("folder", ["data.path=photos"]), ("grocery", [])):
        config = load_config(name, path)
        assert config.variant == variant
        assert config == load_config(f"{name}:{variant}", path)


def test_older_names_of_variants_mean_what_they_meant():
    for old in ("hyp", "sph"):
        fields = flatten(load_config(f"folder:{old}", ["data.path=photos"]))
        new = flatten(load_config(f"folder:{old}-scratch", ["data.path=photos"]))
        assert fields.pop("variant") == old and new.pop("variant") == f"{old}-scratch"
        assert fields == new


def test_an_accelerator_is_one_that_jax_has_a_plugin_for(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(machine, "_ACCELERATORS", (tmp_path / "nvidiactl",))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for plugin, platforms, found in (
        ("jax", "", True),
        ("jax", "cuda", True),
        ("jax", "cpu", False),
        ("no_such_plugin", "", False),
    ):
        monkeypatch.setattr(machine, "_PLUGINS", (plugin,))
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        assert machine.has_accelerator() is found
