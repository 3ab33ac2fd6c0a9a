"""Datasets, encoders and losses of one's own, in Python and by the registries."""

import dataclasses
import functools
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax import objectives
from hypjax.assemble import choose_dataset, open_splits, saved_method
from hypjax.config import custom, flatten, validate
from hypjax.config.settings import model_settings
from hypjax.errors import UserError
from hypjax.geometry import SPACES, Fused, PoincareBall, Sphere
from hypjax.models import create_embedder
from hypjax.models.custom import CUSTOM_ENCODERS
from hypjax.objectives import OBJECTIVES, Objective
from hypjax.runs.workdir import Workdir, saved_config
from hypjax.types import Batch, Outputs
from tests.helpers import small_runs
from tests.helpers.losses import objective_of
from tests.helpers.manual import read_page

BALL = PoincareBall(c=0.1, clip_radius=2.3)
SHORT = ("train.total_steps=2", "eval.every=0", "data.validation_classes=0", "optim.warmup_steps=0")


class Net(nn.Module):
    """A user's encoder; timm has parameters of the names mask_token and head."""

    width: int = 8

    @nn.compact
    def __call__(self, x):
        x = x + self.param("mask_token", nn.initializers.zeros, (x.shape[-1],))
        x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
        return nn.Dense(6, name="head")(x)


def forget():
    """Leaves the registries as in a process that has not seen the user's code."""
    for name in [name for name in OBJECTIVES if name.startswith("own:")]:
        del OBJECTIVES[name]
    CUSTOM_ENCODERS.clear()


@pytest.fixture(autouse=True)
def registries():
    saved = [(table, dict(table)) for table in (OBJECTIVES, SPACES)]
    yield
    forget()
    for table, before in saved:
        table.clear()
        table.update(before)


@pytest.fixture(scope="module")
def pictures(photos_folder):
    """Images and their labels."""
    paths = sorted(photos_folder.glob("*/*.png"))
    return [Image.open(path).copy() for path in paths], [path.parent.name for path in paths]


@pytest.fixture(scope="module")
def shown():
    """The names that the code of docs/python.md defines, and what it trains with."""
    page = read_page("python.md")
    block = re.search(r"```python\n(import flax.linen.*?)```", page, re.DOTALL)[1]
    names = {"images": "images", "labels": "labels", "__name__": "shown"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(small_runs.REPOSITORY)
        train = "hypjax.train_and_evaluate"
        patch.setattr(train, lambda *_, **options: names.update(passed=options))
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def run(shown, pictures, tmp_path_factory):
    """The run of docs/python.md, and the embeddings of its first images."""
    workdir, passed = tmp_path_factory.mktemp("own") / "run", shown["passed"]
    assert passed["dataset"] == ("images", "labels") and passed["encoder"] == shown["Net"]()
    passed |= {"dataset": pictures, "encoder": shown["Net"](16)}
    passed["objective"] = functools.partial(passed["objective"], margin=2.0)
    results = hypjax.train_and_evaluate(small_runs.load("unused", *SHORT), workdir, **passed)
    points = hypjax.load(workdir, encoder=passed["encoder"]).embed(pictures[0][:5])
    return workdir, results, points


def test_a_run_of_ones_own_loads_again_with_its_encoder(run, shown, pictures):
    (workdir, results, points), net = run, shown["Net"]
    assert results["final"]["head"].keys() == {"recall@1", "recall@2"} and points.shape == (5, 8)
    fields = json.loads((workdir / "config.json").read_text())["all"]
    assert fields["objective.margin"] == 2 and fields["data.name"] == "own"
    names = fields["model.architecture"], fields["objective.name"]
    assert names == ("own:Net(width=16)", "own:attraction")
    with pytest.raises(UserError, match="encoder="):
        hypjax.load(workdir)
    model = hypjax.load(workdir, encoder=net(16))
    assert np.array_equal(model.embed(pictures[0][:5]), points) and model.space == BALL
    with pytest.raises(UserError, match=r"Net\(width=16\)"):
        hypjax.load(workdir, encoder=net(17))
    with custom.registered_encoder(names[0], net(16)):
        config = saved_config(workdir)
        with pytest.raises(UserError, match="own:attraction is not registered"):
            hypjax.train_and_evaluate(config, workdir.parent / "other", dataset=pictures)


def test_a_finished_run_refuses_other_images_and_notices_other_code(run, shown, pictures, capsys):
    workdir, results, _ = run

    def attraction(embeddings, labels, *, space, margin=1.0):
        return jnp.mean(space.distance_matrix(embeddings, embeddings)) - margin

    def train(dataset, loss):
        passed = {"encoder": shown["Net"](16), "objective": functools.partial(loss, margin=2.0)}
        config = small_runs.load("unused", *SHORT)
        return hypjax.train_and_evaluate(config, workdir, dataset=dataset, **passed)

    with pytest.raises(UserError, match="images have changed"):
        train((pictures[0][::-1], pictures[1]), shown["attraction"])
    assert train(pictures, attraction) == results
    assert "the code of the loss has changed" in capsys.readouterr().err


class SpaceLoss(Objective):
    """A loss whose name does not tell its space."""

    def __init__(self, space):
        self.space = space


def test_a_saved_run_is_scored_in_the_space_that_it_was_saved_with(tmp_path):
    hypjax.register_space("half", HalfSphere)
    spaces = [BALL, Sphere(), *(Fused(((HalfSphere(tilt), 1.0),)) for tilt in (0.5, 0.25))]
    for i, space in enumerate(spaces):
        config = small_runs.load("unused")
        with (
            custom.choosing(config, objective=SpaceLoss(space)),
            Workdir(tmp_path / str(i), flatten(config)).locked({}, space=space),
        ):
            assert saved_method(tmp_path / str(i)).objective.score_space == space
    for i, space in enumerate(spaces):  # Where the loss is unknown.
        assert saved_method(tmp_path / str(i)).objective.score_space == space


def test_a_loss_that_learns_its_curvature_takes_its_space_from_the_configuration():
    def spread(embeddings, space):
        return -space.distance(embeddings[0], embeddings[1])

    config = small_runs.load("unused", "objective.learn_c=True")
    with custom.choosing(config, objective=spread):
        validate(config)
        for objective in (objective_of(config), objectives.SavedObjective(BALL)):
            assert objective.with_scalars({"c": 0.5}).score_space == PoincareBall(0.5, 2.3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", "head"])
def test_a_model_trained_elsewhere_is_saved_and_loaded(tmp_path, kind):
    net = Net(16)
    if kind == "head":
        # Of a learned curvature, too, the space that is passed is the one that is saved.
        fields = "model.pooling=avg", "model.eval_pooling=avg", "objective.learn_c=True"
        net = create_embedder(model_settings(small_runs.load("unused", *fields)))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    scaled = (pixels / np.float32(255) - 0.25) / 0.5
    params = net.init(jax.random.key(0), scaled)["params"]
    arguments = {"encoder": net, "image_size": 16, "mean": [0.25] * 3, "std": [0.5] * 3}
    hypjax.save(params, BALL, tmp_path / "model", **arguments)
    output = net.apply({"params": params}, scaled)
    forget()
    model = hypjax.load(tmp_path / "model", **({"encoder": net} if kind == "module" else {}))
    expected = BALL.embed(output if kind == "module" else output.projected)
    np.testing.assert_allclose(model.embed(list(pixels)), expected, atol=1e-6)


def test_every_form_of_a_dataset_holds_the_pixels_of_its_files(pictures, photos_folder):
    images, names = pictures[0][:8], ["cat", "cat", "dog", "dog", "owl", "owl", "yak", "yak"]
    arrays = [np.asarray(image) for image in images]
    config = small_runs.load(photos_folder, *SHORT, "data.test_classes=2")
    view = model_settings(config).encoder.view
    expected = open_splits(config).train.test_view(0, view)
    pairs = zip(arrays, names, strict=True)
    for form in ((images, names), (arrays, names), [*zip(images, names, strict=True)], pairs):
        splits = open_splits(config, choose_dataset(config, form))
        cats = next(part for part in splits[::2] if "cat" in part.class_names)
        full = {"positions": np.arange(8), "sizes": np.zeros((8, 2), np.int32)}
        assert np.array_equal(dataclasses.replace(cats, **full).test_view(0, view), expected)
    halves = {"train": (images[:4], names[:4]), "test": (images[4:], names[4:])}
    splits = open_splits(config, choose_dataset(config, halves))
    assert len(splits.train) == len(splits.test) == 4 and splits.test.class_name(0) == "owl"


def test_what_is_no_dataset_and_no_encoder_is_refused():
    config = small_runs.load("unused", *SHORT)
    for module, keyword in [(nn.Dense(3), "16, 3"), (len, "Flax")]:
        with pytest.raises(UserError, match=keyword), custom.choosing(config, encoder=module):
            create_embedder(model_settings(config))
    for dataset, keyword in [
        (([1], [1, 2]), "2 labels"),
        ({"pilot": (np.zeros((2, 8, 8, 3), np.uint8), [0, 1])}, "pilot"),
        ((np.zeros((4, 8, 8, 3)), [0, 0, 1, 1]), "float64"),
    ]:
        with pytest.raises(UserError, match=keyword):
            open_splits(config, choose_dataset(config, dataset))


def test_a_function_gets_what_it_names():
    def registered(function):
        config = small_runs.load("unused")
        with custom.choosing(config, objective=function):
            return objective_of(config)

    def loss(labels, features, ids, embeddings, space, key, samples_per_class, power=2):
        return jnp.sum(embeddings**power), {"n": len(labels) + ids[0] + samples_per_class}

    objective = registered(functools.partial(loss, power=4))
    features = np.random.default_rng(0).normal(size=(4, 3)).astype("f")
    batch = Batch(None, jnp.array([0, 0, 1, 1]), jnp.arange(4) + 7, None)
    call = jax.jit(objectives.loss_function(objective))
    value, (_, metrics) = call({}, {}, Outputs(None, features), None, batch, None)
    np.testing.assert_allclose(value, np.sum(BALL.embed(features) ** 4), rtol=1e-5)
    assert metrics["n"] == 4 + 7 + 2 and {"embedding_norm", "batch_recall@1"} < metrics.keys()

    wrong = registered(lambda embeddings: embeddings[:, 0])
    with pytest.raises(UserError, match=r"\(4,\)"):
        objectives.loss_function(wrong)({}, {}, Outputs(None, features), None, batch, None)
    with pytest.raises(UserError, match="requires proxies"):
        registered(lambda embeddings, proxies: 0)


@dataclasses.dataclass(frozen=True)
class HalfSphere(Sphere):
    """A user's space, with a field of its own."""

    tilt: float = 0.5


def test_names_are_registered_for_configurations_and_hypjaxs_own_are_taken():
    def scaled(embeddings, *, weight=0.5):
        return weight * jnp.sum(embeddings)

    hypjax.register_space("half", HalfSphere)
    hypjax.register_objective("mine", scaled)
    hypjax.register_encoder("net", Net())
    sizes = (f"model.{size}=0" for size in ("patch_size", "width", "depth", "num_heads"))
    named = ("objective.name=mine", "objective.weight=2", "model.architecture=net", *sizes)
    config = small_runs.load("unused", *named, "objective.space=half")
    objective = objective_of(config)
    assert objective.space == HalfSphere() and objective.function.keywords == {"weight": 2.0}
    assert create_embedder(model_settings(config)).encoder.dim == 6
    with pytest.raises(ValueError, match="supcon of its own"):
        hypjax.register_objective("supcon", scaled)
    with pytest.raises(ValueError, match="lacks .*embed"):
        hypjax.register_space("net", Net)
    with pytest.raises(ValueError, match="is not a dataclass"):
        hypjax.register_space("ball", BALL)
