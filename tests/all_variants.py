"""Train steps of all variants of all configurations, lowered without data and weights.

As this takes an hour, pytest does not collect it by itself; some variants, by file and loss:
pytest tests/all_variants.py -k inshop-hier
"""

import itertools
import runpy

import jax
import pytest

from hypjax.config import flatten, load_config, variants
from hypjax.config.reading import PACKAGED
from hypjax.config.rules import FITTED
from hypjax.errors import UserError
from hypjax.training.dry_run import assumed_sizes, lower_step
from hypjax.training.learner import build_learner
from hypjax.training.step import create_state

_SUFFIXES = ("", ",released", ",frozen", ",last", ",unlabelled", ",hyp-vit")
_PATH = {name: [f"data.path={name}"] for name in ("folder", "features")}


def _groups():
    """Files with their listed variants, or with candidates for each loss, some of which exist."""
    for file in sorted(path.stem for path in PACKAGED.glob("*.py")):
        if listed := runpy.run_path(str(PACKAGED / f"{file}.py")).get("VARIANTS"):
            yield pytest.param(file, [*listed], id=file)
            continue
        for loss in variants.OBJECTIVE_OF_LOSS:
            ends = itertools.product(variants.ENCODERS, _SUFFIXES)
            names = [f"{loss}-{encoder}{suffix}" for encoder, suffix in ends]
            irt = [name for name in variants.IRT_VARIANTS if name.startswith(loss)]
            yield pytest.param(file, [*names, f"{loss}-scratch", *irt], id=f"{file}-{loss}")


def _lower(config):
    """Lowers a step on images; of cached features, it only builds the state."""
    unset = [field for field, value in flatten(config).items() if value is None]
    sizes = {field: 2 if "samples" in field else 8 for field in unset if field in FITTED}
    config.update_from_flattened_dict(sizes)
    learner = build_learner(config)
    sizes = assumed_sizes(config, learner)
    if config.train.cached_features:
        jax.eval_shape(lambda: create_state(learner, sizes))
    else:
        lower_step(learner, sizes)


@pytest.mark.parametrize(("file", "candidates"), _groups())
def test_every_variant_has_a_train_step(file, candidates):
    failed = {}
    for variant in candidates:
        try:
            _lower(load_config(f"{file}:{variant}", _PATH.get(file, ())))
        except Exception as error:  # The others follow.
            if not (isinstance(error, UserError) and "unknown variant" in str(error)):
                failed[variant] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{file}:{variant}: {why}" for variant, why in failed.items())
