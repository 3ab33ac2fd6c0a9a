"""Dry runs of all variants of the configurations, on small copies of the datasets.

Encoders have few narrow blocks. A variant that exists in several files is loaded from each and
rehearsed in one; neighbouring losses, encoders and suffixes take different files. As this takes an
hour, pytest does not collect it by itself; some variants: pytest tests/all_variants.py -k hier-dino
"""

import runpy
from unittest import mock

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from hypjax.config import flatten, load_config, variants
from hypjax.config.model_settings import model_settings
from hypjax.config.reading import PACKAGED
from hypjax.data.preparation import fonts, scenes
from hypjax.data.preparation.prepare import prepare
from hypjax.data.records import VERSION, write_records
from hypjax.dry_run import dry_run
from hypjax.errors import UserError
from hypjax.models import ResNet, VisionTransformer, architectures, create_embedder
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import timm_state_dict
from tests.helpers import object_files, official_files, small_runs

_SUFFIXES = ("", ",released", ",frozen", ",last")
_CLASSES = 3  # In a batch.
# Fields that whole datasets and models need, if a configuration has them.
_FIELDS = {
    **{"run.workers": 0, "run.eval_batch_size": 8, "eval.ks": "1,2"},
    **{"objective.hier_proxies": 8, "objective.hier_neighbors": 3, "objective.hier_triplets": 2},
}
_OF_FILES = {
    **dict.fromkeys(("glyphs", "omniglot", "grocery", "scenes"), {"data.validation_classes": 0}),
    "sfm": {"eval.benchmarks": "roxford5k"},
}


@pytest.fixture(scope="module")
def datasets(made_once, data_dir):
    """A data folder with small copies of all datasets."""

    def make(root):
        writers = {
            "cub200": lambda raw: official_files.write_cub(raw, (1, 2, 3, 4, 101, 102, 103)),
            "cars196": lambda raw: official_files.write_cars(raw, (1, 2, 3, 4, 99, 100, 101)),
            "sop": official_files.write_sop,
            "inshop": official_files.write_inshop,
            "omniglot": official_files.write_omniglot,
            "grocery": official_files.write_grocery,
            "sfm120k": object_files.write_sfm,
            "roxford5k": object_files.write_roxford,
        }
        for name, write in writers.items():
            write(root / f"raw-{name}")
            folders = {"manual_dir": str(root / f"raw-{name}"), "data_dir": str(root)}
            prepare(name, allow_partial=True, **folders)
        objects = scenes.choose_objects(fonts.glyph_classes())
        few = {part: chosen[:8] for part, chosen in objects.items()}
        (root / "scenes").mkdir()
        with mock.patch.object(scenes, "choose_objects", lambda classes: few):
            write_records(root / "scenes" / VERSION, "scenes", scenes.contents(), None)
        (root / "glyphs").symlink_to(data_dir / "glyphs")
        small_runs.write_features(root / "features.npz")

    return made_once("all_datasets", make)


def _small(family):
    members = {}
    for name, options in family.members.items():
        if family.encoder is VisionTransformer:
            small = {"width": 32, "depth": 11 if "dinov2" in name else 2, "num_heads": 2}
            pooled = {"attention_pool"} & {*options, *family.options}
            small |= dict.fromkeys(pooled, 2)
        elif family.encoder is ResNet:
            small = {"depths": (1, 1, 1, 1), "width": 4}
        else:
            small = {"width_factor": 0.25} if "lite" in name else {}
        members[name] = {**options, **small}
    return family._replace(members=members)


@pytest.fixture
def small_encoders(monkeypatch):
    known = architectures._FAMILY_OF
    families = {family.title: _small(family) for family in known.values()}
    small = {name: families[family.title] for name, family in known.items()}
    monkeypatch.setattr(architectures, "_FAMILY_OF", small)


_VARIANTS = {
    path.stem: runpy.run_path(str(path)).get("VARIANTS") for path in sorted(PACKAGED.glob("*.py"))
}


def _groups():
    """Variants by loss and encoder, some of which exist in some files, and a number for each."""
    for i, loss in enumerate(variants.OBJECTIVE_OF_LOSS):
        for j, encoder in enumerate(variants.ENCODERS):
            names = [f"{loss}-{encoder}{suffix}" for suffix in _SUFFIXES]
            yield pytest.param(names, i + j, id=names[0])
        further = [name for name in variants.IRT_VARIANTS if name.startswith(loss)]
        yield pytest.param([f"{loss}-scratch", *further], i, id=f"{loss}-scratch")


def _is_variant(spec):
    try:
        load_config(spec)
    except UserError as error:
        if "unknown variant" in str(error):
            return False
        if "data.path" not in str(error):
            raise
    return True


def _config(file, variant, datasets, photos):
    """The variant's configuration for the small copies."""
    paths = {"folder": photos, "features": datasets / "features.npz"}
    path = [f"data.path={paths[file]}"] if file in paths else []
    whole = load_config(f"{file}:{variant}", path)
    fields = _FIELDS | {"run.data_dir": datasets} | _OF_FILES.get(file, {})
    if file != "features":
        side = 28 if "dinov2" in whole.model.architecture else 32
        fields |= {"data.image_size": side, "data.resize": side}
    if whole.train.sampling == "tuples":
        tuples = {"pairs": 8, "negatives": 2, "pool": 8}
        fields |= {f"train.tuples.{name}": value for name, value in tuples.items()}
        fields["train.batch_size"] = 8
    elif whole.train.batch_size is not None:
        samples_per_class = whole.train.samples_per_class
        if whole.objective.get("memory"):  # It holds all images, which must be more than a batch.
            fields["objective.memory"], samples_per_class = 1.0, 2
            fields["train.samples_per_class"] = samples_per_class
        fields["train.batch_size"] = _CLASSES * samples_per_class
    if variant.startswith("irt-o") and file == "sfm":
        fields["eval.benchmarks"] = ()
    known = flatten(whole)
    overrides = [f"{name}={value}" for name, value in fields.items() if name in known]
    config = load_config(f"{file}:{variant}", path + overrides)
    if config.model.weights is not None:
        config.model.weights = str(_random_weights(config, datasets))
    return config


def _random_weights(config, folder):
    """A file of weights for the encoder of a configuration."""
    architecture, channels = config.model.architecture, config.data.channels
    path = folder / f"{architecture}-{config.data.image_size}-{channels}.safetensors"
    if not path.exists():
        encoder, draw = create_embedder(model_settings(config)).encoder, np.random.default_rng(0)
        shapes = encoder_shapes(encoder, channels)
        params = jax.tree.map(lambda x: np.float32(draw.uniform(0.01, 0.02, x.shape)), shapes)
        save_file(timm_state_dict(params, encoder), path)
    return path


def _rehearse(file, variant, datasets, photos):
    try:
        dry_run(_config(file, variant, datasets, photos))
    except Exception as error:
        raise AssertionError(f"{file}:{variant} cannot be rehearsed") from error


@pytest.mark.parametrize(("names", "number"), _groups())
def test_a_variant_is_valid_in_all_its_files_and_can_be_rehearsed_in_one(
    names, number, datasets, photos_folder, small_encoders
):
    for i, name in enumerate(names):
        files = [x for x, listed in _VARIANTS.items() if not listed and _is_variant(f"{x}:{name}")]
        if files:
            _rehearse(files[(number + i) % len(files)], name, datasets, photos_folder)


@pytest.mark.parametrize(
    ("file", "variant"), [(x, name) for x, listed in _VARIANTS.items() for name in listed or ()]
)
def test_a_listed_variant_can_be_rehearsed(file, variant, datasets, photos_folder, small_encoders):
    _rehearse(file, variant, datasets, photos_folder)
