"""Each command of the manual's table of all tables, figures and studies runs, on little data."""

import csv
import re
import shlex

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from hypjax import dry_run
from hypjax.config import default_workdir, load_config, read_config
from hypjax.config.settings import model_settings
from hypjax.errors import UserError
from hypjax.geometry import layout
from hypjax.models import create_embedder
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import timm_state_dict
from tests.helpers import commands
from tests.helpers.commands import REPOSITORY

SMALL = [
    *("data.name=glyphs", "data.channels=1", "data.image_size=32", "data.resize=32"),
    *("data.mean=(0.085,)", "data.std=(0.24,)", "data.grey=0.0"),
    *("eval.benchmarks=()", "eval.ks=(1,2)"),
    *("train.batch_size=48", "train.samples_per_class=2", "train.total_steps=1"),
    *("optim.warmup_steps=0", "run.report=False", "run.workers=0", "run.log_every=1"),
]
TINY = [
    *("model.architecture=vit", "model.width=32", "model.depth=1", "model.num_heads=2"),
    *("model.patch_size=8", "model.pooling=cls", "model.eval_pooling=cls", "model.head_dim=8"),
]
TUPLES = ["train.tuples.pairs=30", "train.tuples.pool=60", "train.batch_size=35"]
TOO_LARGE = {"eval.pca.encoder": 4, "train.batch_size": 24}  # For a model and data of this size.


def rows():
    """The commands in the table, by paper, with duplicates."""
    with open(REPOSITORY / "papers/studies.csv", newline="") as file:
        cells = [row["command"] for row in csv.DictReader(file)]
    listed = [re.findall(r"`([^`]+)`", cell) for cell in cells if not cell.startswith("none")]
    is_command = re.compile(r"python -m |launch/|\w+\.py:")
    return [command for cell in listed for command in cell if is_command.match(command)]


def small(spec, fields):
    """The documented fields, and those that make the run small."""
    is_resnet = "resnet" in f"{spec} {fields}"
    tuples = TUPLES if "sfm" in spec else []
    named = dict(field.split("=", 1) for field in fields)
    cut = [f"{name}={value}" for name, value in TOO_LARGE.items() if name in named]
    return [*SMALL, *([] if is_resnet else TINY), *tuples, *fields, *cut]


def run_main(spec, fields, flags, tmp_path):
    """Trains or evaluates into the default folder of the documented command."""
    spec = f"configs/{spec}"
    trained = [field for field in fields if not field.startswith("eval.")]
    workdir = default_workdir(load_config(spec, trained), read_config(spec))
    overrides = small(spec, fields)
    if "--mode=evaluate" in flags and not any(flag.startswith("--workdir") for flag in flags):
        overrides += ["train.total_steps=0" if "irt-o" in spec else "model.weights=None"]
        weights = write_weights(load_config(spec, [*overrides, "model.weights=None"]), tmp_path)
        overrides += [f"model.weights={weights}"]
    else:
        overrides += ["model.weights=None"]
        flags = [f"--workdir={workdir}", *(x for x in flags if not x.startswith("--workdir"))]
    settings = [f"--config.{field}" for field in overrides]
    commands.call("main", f"--config={spec}", *settings, *flags)


def write_weights(config, folder):
    encoder, rng = create_embedder(model_settings(config)).encoder, np.random.default_rng(3)
    shapes = encoder_shapes(encoder, config.data.channels)

    def draw(path, leaf):
        if path[-1].key == "variance":  # Of a BatchNorm.
            return np.ones(leaf.shape, np.float32)
        return rng.normal(0, 0.02, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    path = folder / "weights.safetensors"
    save_file(timm_state_dict(params, encoder), path)
    return path


def run_documented(line, tmp_path, capsys):
    """Runs a command of the table on little data; sweeps have two values."""
    words = shlex.split(line)
    flags = [word for word in words[1:] if not word.startswith("--config.")]
    fields = [x.removeprefix("--config.") for x in words if x.startswith("--config.")]
    if words[0] == "launch/sweep.sh":
        spec, field, *values = flags
        for value in values[:2]:
            fields_of_run = [*fields, f"{field}={value}"]
            run_main(spec.removeprefix("configs/"), fields_of_run, [], tmp_path)
    elif words[:3] == ["python", "-m", "hypjax.hyperbolicity"]:
        (spec,) = (word.removeprefix("--config=") for word in words[3:])
        config = load_config(spec, [*small(spec, []), "model.weights=None"])
        overrides = [*small(spec, []), f"model.weights={write_weights(config, tmp_path)}"]
        commands.call("hyperbolicity", *words[3:], *(f"--config.{field}" for field in overrides))
    elif words[0] == "python":
        flags = [word.replace("--images=4000", "--images=40") for word in words[3:]]
        commands.call(words[2].removeprefix("hypjax."), *flags)
    elif "--dry_run" in flags:  # Needs neither data nor weights.
        settings = [f"--config.{x}" for x in (*fields, f"run.data_dir={tmp_path / 'none'}")]
        capsys.readouterr()
        with pytest.raises(UserError):
            commands.call("main", f"--config=configs/{words[0]}", *settings, *flags)
        assert "million parameters" in capsys.readouterr().out
    else:
        run_main(words[0], fields, flags, tmp_path)


@pytest.mark.hygiene
def test_each_command_of_the_table_has_a_valid_configuration():
    """As documented: with the paper's encoders and sizes."""
    for line in dict.fromkeys(rows()):
        words = shlex.split(line)
        fields = [x.removeprefix("--config.") for x in words if x.startswith("--config.")]
        if words[0] == "launch/sweep.sh":
            _, spec, field, *values = [word for word in words if not word.startswith("--")]
            for value in values:
                load_config(spec, [*fields, f"{field}={value}"])
        elif words[0] != "python":
            load_config(f"configs/{words[0]}", fields)


@pytest.mark.by_hand
def test_each_command_of_the_table_runs(data_dir, folder, tmp_path, monkeypatch, capsys):
    # UMAP compiles for long, as does the step that `_print_gpu_hours` counts.
    by_umap = lambda *args, neighbours=15, **fields: layout.lay_out(*args, **fields)  # noqa: E731
    monkeypatch.setattr(layout, "lay_out_by_umap", by_umap)
    monkeypatch.setattr(layout, "_STEPS", 20)
    monkeypatch.setattr(dry_run, "_print_gpu_hours", lambda *arguments: None)
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    lines, failures = list(dict.fromkeys(rows())), {}
    assert len(lines) > 60
    for line in lines:
        try:
            run_documented(line, tmp_path, capsys)
        except (Exception, SystemExit) as error:
            failures[line] = repr(error)
    assert not failures
