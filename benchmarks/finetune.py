"""Fine-tuning of a whole encoder by losses in the ball and on the sphere, with equal budgets.

All runs have the same images, batches, steps and learning rates, by one recipe; only the loss and
its space differ. Runs of one loss with different seeds share their compiled programs.
"""

import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from benchmarks import measure
from benchmarks.job import write_photos
from hypjax.config import read_config, validate
from hypjax.config.reading import override
from hypjax.config.recipes import choose_loss
from hypjax.errors import counted
from hypjax.runs.files import TIMES, read_object
from hypjax.runs.tables import aligned
from hypjax.system import console
from hypjax.train import train_and_evaluate

SCORES = ("recall@1", "map@r", "h_ap")
PARTS = ("head", "encoder")
COLUMNS = {
    **{name: f"{{{name}}}" for name in ("loss", "seed")},
    **{f"{part} {name}": f"{{{part} {name}:.4f}}" for part in PARTS for name in SCORES},
    "seconds": "{seconds:.1f}",
}
# Temperatures and margins' scales that were chosen on validation classes, with three trials each
# (docs/results/fine-tuning.md); `hier` has its recipe's.
_LOSSES = {
    "hyp": ("objective.temperature=0.2",),
    "sph": ("objective.temperature=0.1",),
    "mix": ("objective.sphere_temperature=0.2", "objective.ball_temperature=0.8"),
    "pa": ("objective.alpha=8.0",),
    "hier": ("objective.hier_proxies=128", "objective.hier_triplets=10"),
}
_SEEDS = 3
_USUAL_RATE = 1e-5  # Learning rate for which losses with proxies state how much faster these learn.
_FIELDS = ("data.validation_classes=0", "eval.metrics=recall,map@r", "eval.every=0")
_QUICK_FIELDS = (
    *("data.image_size=32", "data.resize=32", "model.width=32", "model.depth=1"),
    *("model.num_heads=2", "model.head_dim=16", "train.batch_size=24", "train.samples_per_class=2"),
    *("train.total_steps=2", "optim.warmup_steps=1", "run.workers=0"),
)


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Trains each loss with each seed, and yields the scores of each run on the test classes.

    With quick, a tiny encoder is trained from scratch on synthetic photos, with one seed.
    """
    with tempfile.TemporaryDirectory(prefix="hypjax-finetune-") as temporary:
        folder = pathlib.Path(temporary)
        recipe, fields, seeds = options.recipe, [*_FIELDS, f"run.cache={options.cache}"], _SEEDS
        if options.quick:
            for label in range(16):
                write_photos(folder / f"photos/{label}", 40, count=4, seed=[label])
            recipe, seeds = "folder.py:hyp-scratch", 1
            fields += [*_QUICK_FIELDS, f"data.path={folder / 'photos'}"]
        fields += options.overrides
        # Reports invalid fields before any work is done.
        configs = {
            (loss, seed): configured(recipe, loss, [*fields, f"seed={seed}"])
            for loss, seed in itertools.product(_LOSSES, range(seeds))
        }
        for (loss, seed), config in configs.items():
            console.say(f"{loss}, seed {seed}")
            results = train_and_evaluate(config, folder / f"{loss}-{seed}")
            times = read_object(folder / f"{loss}-{seed}" / TIMES) or {}
            scores = {
                f"{part} {name}": results["final"][part].get(name)
                for part in PARTS
                for name in SCORES
            }
            seconds = times.get("seconds", {}).get("total")
            yield {"loss": loss, "seed": seed, **scores, "seconds": seconds, "results": results}


def configured(recipe: str, loss: str, fields: list[str]) -> ConfigDict:
    """A recipe of the loss `hyp` with another loss, whose proxies learn as fast as in its paper."""
    config = read_config(recipe)
    faster = _USUAL_RATE / config.optim.learning_rate
    choose_loss(config, loss, proxy_rate=1e4 * faster)
    if "hier_rate" in config.objective:
        config.objective.hier_rate *= faster
    config.eval.spaces.head = ("objective",)  # Each loss is scored in its own space.
    config = override(config, [*_LOSSES[loss], *fields])
    validate(config)
    return config


def conclude(rows: measure.Rows, output: pathlib.Path) -> None:
    """Prints each loss's means over seeds, with the lowest and the highest value."""
    del output
    columns = (f"{part} {name}" for part in PARTS for name in SCORES)
    table = [["", "", *(name for name in columns if any(row[name] is not None for row in rows))]]
    for loss, group in itertools.groupby(rows, lambda row: row["loss"]):
        runs = list(group)
        cells = []
        for column in table[0][2:]:
            values = [run[column] for run in runs]
            cells.append(f"{statistics.mean(values):.4f} ({min(values):.4f}–{max(values):.4f})")
        table.append([loss, counted(len(runs), "seed"), *cells])
    print(aligned(table))
