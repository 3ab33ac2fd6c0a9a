"""Small runs of configs/folder.py on `photos_folder`, of configs/glyphs.py and features.py."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from hypjax import train
from hypjax.assemble import assemble_training
from hypjax.config import load_config
from hypjax.config.settings import model_settings
from hypjax.models import create_embedder
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import timm_state_dict
from hypjax.monitoring.telemetry import Telemetry
from hypjax.runs.workdir import Workdir
from hypjax.training import states
from hypjax.training.step import create_state

REPOSITORY = pathlib.Path(__file__).parents[2]
CONFIG = str(REPOSITORY / "configs/folder.py:hyp-scratch")
SMALL = [
    *("model.width=16", "model.depth=1", "model.num_heads=2", "model.head_dim=8"),
    *("model.patch_size=8", "data.image_size=16", "data.resize=16"),
    *("train.total_steps=12", "train.batch_size=8", "train.samples_per_class=2"),
    *("optim.warmup_steps=2", "data.validation_classes=3", "data.test_classes=3"),
    *("eval.every=4", "eval.ks=1,2", "run.log_every=2", "run.checkpoint_every=3"),
    *("run.eval_batch_size=16", "run.report=False"),
]
# Further overrides of the run that tests share. Only the encoder's embeddings are projected.
SHARED = ["eval.pca.encoder=5", "optim.frozen=patch_projection"]
# Overrides for configs/glyphs.py.
SHORT_GLYPHS = [
    *("model.width=32", "model.depth=1", "model.num_heads=2", "model.head_dim=8"),
    *("train.total_steps=6", "train.batch_size=24", "optim.warmup_steps=2"),
    "data.validation_classes=20",
    *("eval.every=3", "run.log_every=2", "run.report=False"),
]
# Overrides for configs/features.py: batches, steps and evaluation; the features set the model.
SHORT_FEATURES = [
    *(field for field in SMALL if not field.startswith(("data.", "model."))),
    *("data.validation_classes=3", "data.test_classes=3", "optim.learning_rate=0.01"),
]


def write_features(path):
    """Writes features of 10 classes with 6 items each, and returns the path."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(10), 6)
    features = rng.normal(size=(10, 16))[labels] + rng.normal(size=(60, 16))
    np.savez(path, features=np.float32(features), labels=labels)
    return path


def load(path, *overrides):
    """Returns the configuration of a small run."""
    return load_config(CONFIG, [*SMALL, f"data.path={path}", *overrides])


def train_shared(photos, workdir):
    """Trains the run that tests share, from weights beside its folder; it is resumed once."""
    weights = workdir.with_name("weights.safetensors")
    config = load(photos, *SHARED, f"model.weights={weights}")
    encoder, rng = create_embedder(model_settings(config)).encoder, np.random.default_rng(3)

    def draw(path, leaf):
        return rng.normal(path[-1].key == "scale", 0.02, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, encoder_shapes(encoder))
    save_file(timm_state_dict(params, encoder), weights)
    with interrupted_after(8):
        train.train_and_evaluate(config, workdir)
    train.train_and_evaluate(config, workdir, profile=(8, 9))


def save_untrained(config, workdir):
    """Writes a run with random weights, at its best and its last step; returns the best state."""
    built, rng = assemble_training(config), np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: states.trees(built.learner, create_state(built.learner, built.sizes))
    )
    best, last = (
        jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), shapes)
        for _ in range(2)
    )
    experiment = built.experiment
    run, space = Workdir(workdir, experiment.method.fields), built.learner.objective.score_space
    with run.locked(experiment.provenance, space=space) as checkpoints:
        checkpoints.save(3, record={}, score=0.5, **best)
        checkpoints.save(6, record={}, score=0.25, **last)
    return best


def copy_with(run, folder, fields, removed=()):
    """Copies a run, and sets and removes fields of its configuration."""
    shutil.copytree(run, folder)
    saved = json.loads((folder / "config.json").read_text())
    values = saved["all"] | fields
    saved["all"] = {name: value for name, value in values.items() if name not in removed}
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


@contextlib.contextmanager
def interrupted_after(step):
    """Interrupts the run in its body once it has logged the loss of a step."""
    write = Telemetry.write

    def interrupted(self, logged, values):
        write(self, logged, values)
        if logged == step and "loss" in values:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Telemetry, "write", interrupted)
        yield


def command(path, workdir, *overrides, config=CONFIG):
    """Returns the command line of a small run; of another configuration, with `overrides` only."""
    fields = [*SMALL, f"data.path={path}", *overrides] if config == CONFIG else overrides
    return [
        *(sys.executable, "-m", "hypjax.main", f"--config={config}", f"--workdir={workdir}"),
        *(f"--config.{field}" for field in fields),
    ]


def start(path, workdir, *overrides, flags=(), env=os.environ, config=CONFIG, **options):
    """Starts the command."""
    return subprocess.Popen(
        [*command(path, workdir, *overrides, config=config), *flags],
        env=env | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def step_metrics(run):
    """Returns the logged loss and gradient norm of each step, and what is learned of c and τ."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "gradient_norm", "c", "temperature")
    steps = [line for line in lines if "loss" in line]
    return {line["step"]: [line[name] for name in names if name in line] for line in steps}


def flip_a_bit(folder):
    """Damages the largest file in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(bytes(content))
