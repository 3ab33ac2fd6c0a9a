"""Exported ONNX models, by ONNX Runtime, beside hypjax."""

import http.client
import importlib
import json
import pathlib
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from PIL import Image

import hypjax
from hypjax.config import load_config
from hypjax.data import pixels, views
from hypjax.data.preparation import fonts, glyphs
from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.inference.embedding import embed_function
from hypjax.models import Embedder
from hypjax.models.architectures import FAMILIES
from hypjax.models.convnext import ConvNeXt
from hypjax.models.efficientnet import EfficientNetLite
from hypjax.models.resnet import ResNet
from hypjax.models.vit import VisionTransformer
from hypjax.types import View
from tests.helpers import commands, small_runs
from tests.helpers.small_runs import REPOSITORY

pytest.importorskip("onnx", reason="needs onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

onnx_file = importlib.import_module("hypjax.integrations.onnx")
onnx_model = importlib.import_module("hypjax.integrations.to_onnx").onnx_model

BALL = PoincareBall(0.1, 2.3)
SIDE, RESIZE = 32, 37
SIZES = {"image_size": SIDE, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2}


def transformers():
    """A small encoder of each design of Transformers' blocks, by the name of a member."""
    found = {}
    for family in FAMILIES:
        for name, own in family.members.items():
            if family.encoder is VisionTransformer:
                options = {**family.options, **own, **SIZES, "pooling": family.pooling}
                options["mlp_ratio"] = 2
                options |= {"attention_pool": 2} if options.get("attention_pool") else {}
                found.setdefault(VisionTransformer(**options), name)
    return {name: encoder for encoder, name in found.items()}


ENCODERS = transformers() | {
    "resnet": ResNet(SIDE, (1, 1), 8),
    "convnext": ConvNeXt(SIDE, (1, 1), (8, 16)),
    "efficientnet_lite": EfficientNetLite(SIDE, depth_factor=0.5),
    **{pooling: VisionTransformer(**SIZES, pooling=pooling) for pooling in ("gem", "rmac", "max")},
}


def randomised(model, channels=3):
    """Parameters in which all terms count."""
    images = jnp.zeros((1, SIDE, SIDE, channels))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.normal(0, 1, leaf.shape) * (2 / max(1, *leaf.shape[:-1], 1)) ** 0.5
        return np.float32(np.abs(values) + 0.5 if "variance" in str(path) else values)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def session_of(model):
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), settings)


def check(encoder, space=BALL, *, channels=3, head="dense", scales=(1.0,), atol=1e-5):
    """Converts a model and compares it with hypjax, for one image and for several."""
    model = Embedder(encoder, 8 if head != "none" else encoder.dim, head)
    params = randomised(model, channels)
    scaling = ((0.4,) * channels, (0.3,) * channels)
    embed = embed_function(model, scaling, lambda _: {"head": space}, scales)
    view = View(SIDE, RESIZE, channels)
    example = jax.ShapeDtypeStruct((SIDE, SIDE, channels), np.uint8)
    converted = onnx_model(
        lambda params, images: embed(params, images)["head"], params, example, view, {}
    )
    session, rng = session_of(converted), np.random.default_rng(1)
    images = rng.integers(0, 256, (3, RESIZE, RESIZE, channels), np.uint8)
    expected = jax.jit(embed)(params, images[:, 2:34, 2:34])["head"]
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    for number in (3, 1):
        (found,) = session.run(None, {"images": images[:number]})
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[:number], atol=atol)


@pytest.mark.parametrize("name", ENCODERS)
def test_each_encoder_gives_the_same_points(name):
    check(ENCODERS[name])


@pytest.mark.parametrize(
    "space",
    [Sphere(), Lorentz(0.1, 2.3), PoincareBall(0.0, None), Fused(((Sphere(), 1.0), (BALL, 0.5)))],
    ids=str,
)
def test_each_space_has_its_points(space):
    check(ENCODERS["convnext"], space, channels=1, head="norm_dense")


def test_a_model_without_head_at_two_scales():
    check(ENCODERS["gem"], Sphere(), head="none", scales=(1.0, 0.75))


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (90, 61), (20, 31), (37, 37), (300, 200)])
@pytest.mark.parametrize("test_view", ["centre_crop", "squash"])
def test_images_are_resized_and_cropped_as_by_hypjax(size, test_view):
    view = View(SIDE, RESIZE, 3, test_view)
    example = jax.ShapeDtypeStruct((SIDE, SIDE, 3), np.uint8)
    flat = lambda _, images: images.astype(jnp.float32).reshape(len(images), -1)  # noqa: E731
    session = session_of(onnx_model(flat, {}, example, view, {}))
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 7, 3), np.uint8))
    image = coarse.resize(size[::-1], Image.Resampling.BICUBIC)
    frame = views.TEST_VIEWS[test_view](*size, view)
    expected = pixels.show(image, frame, SIDE).astype(int)
    (found,) = session.run(None, {"images": np.asarray(image)[None]})
    differences = np.abs(found.reshape(expected.shape) - expected)
    # Pillow may take a tall image's rows before its columns, which matters where scales differ.
    level, share = (2, 0.2) if test_view == "squash" else (1, 0.001)
    assert differences.max() <= level and (differences > 0).mean() <= share


class Sorting(nn.Module):
    """An encoder of a user's; ONNX has no sort."""

    sorts: bool = False

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(images))
        x = nn.avg_pool(nn.max_pool(x, (2, 2), strides=(2, 2)), (2, 2))
        x = nn.LayerNorm()(x.reshape(len(images), -1))
        return nn.Dense(6)(nn.gelu(jnp.sort(x) if self.sorts else x))


def saved(folder, encoder, space=BALL, **options):
    params = encoder.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    hypjax.save(params, space, folder, encoder=encoder, image_size=16, **options)
    return hypjax.load(folder, encoder=encoder)


def test_encoders_of_ones_own_are_converted_if_they_can_be(tmp_path):
    model = saved(tmp_path / "own", Sorting())
    said = model.to_onnx(tmp_path / "own.onnx")
    assert "for 64 random patterns" in said and "100.0% of the 10 nearest" in said
    with pytest.raises(UserError, match="only the encoders of hypjax can be written in float16"):
        model.to_onnx(tmp_path / "half.onnx", "float16")
    with pytest.raises(UserError, match="^encoder.* computes sort, which hypjax does not convert"):
        saved(tmp_path / "sorting", Sorting(sorts=True)).to_onnx(tmp_path / "sorting.onnx")
    assert sorted(path.name for path in tmp_path.glob("*onnx*")) == ["own.onnx"]


ROWS = (6, 8)  # The shape of one image's features in what follows.


def from_features(function, shape=ROWS):
    return onnx_model(function, {}, jax.ShapeDtypeStruct(shape, np.float32), None, {})


def along(x, shift, mode):
    """The rows at some distance from the largest."""
    return jnp.take_along_axis(x, jnp.argmax(x, axis=1, keepdims=True) + shift, axis=1, mode=mode)


CONVERTED = {
    "index clipped": lambda x: jnp.take(x, 100, axis=1, mode="clip"),
    "negative index clipped": lambda x: jnp.take(x, -3, axis=1, mode="clip"),
    "index outside": lambda x: jnp.take(x, 100, axis=1, mode="fill"),
    "index from the end": lambda x: jnp.take(x, -3, axis=1),
    "indices clipped": lambda x: along(x, 3, "clip"),
    "negative indices clipped": lambda x: along(x, -3, "clip"),
    "indices outside": lambda x: along(x, 3, "fill"),
    "indices from the end": lambda x: along(x, -3, "fill"),
    "equal steps": lambda x: lax.scan(lambda c, a: (c * a + x, None), x, jnp.full(3, 0.5))[0],
    "equal rows of steps": lambda x: lax.scan(lambda c, a: (c + a, None), x, jnp.ones((3, 8)))[0],
    "sum over no axis": lambda x: lax.reduce_sum_p.bind(x, axes=()),
    "constants tiled": lambda x: x + jnp.tile(np.arange(48.0).reshape(1, 6, 8), (len(x), 1, 1)),
    "equal points": lambda x: jnp.zeros((len(x), 4)),
    "equal coordinates": lambda x: jnp.broadcast_to(x[:, 0, :1], (len(x), 4)),
    "precision kept": lambda x: lax.reduce_precision(x, 8, 23),
    "log1p": lambda x: jnp.log1p(jnp.abs(x) * 1e-6) * 1e6,
    "log1p of more": lambda x: jnp.log1p(jnp.exp(4 * x) - 0.9),
    "expm1": lambda x: jnp.expm1(x * 1e-6) * 1e6,
    "expm1 of more": lambda x: jnp.tanh(jnp.expm1(60 * x)),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_operations_with_edge_cases_have_the_same_results(case):
    function = CONVERTED[case]
    session = session_of(from_features(lambda _, x: function(x)))
    features = np.random.default_rng(0).normal(size=(3, *ROWS)).astype(np.float32)
    for batch in (features, features[:1]):
        (found,) = session.run(None, {"features": batch})
        np.testing.assert_allclose(found, jax.jit(function)(batch), rtol=2e-5, atol=1e-6)


MIXING = "an image must not depend on the others"
REFUSED = {
    "reduction": (lambda x: lax.reduce(x, np.float32(0), jnp.hypot, (1,)), "computes reduce,"),
    "windows": (
        lambda x: lax.reduce_window(x, np.float32(0), jnp.hypot, (1, 2, 2), (1, 1, 1), "SAME"),
        "computes reduce_window,",
    ),
    "padding of windows": (
        lambda x: nn.max_pool(x[..., None], (2, 2), (2, 2), ((2, 2), (2, 2))),
        "with padding that is negative or fills windows",
    ),
    "negative padding": (
        lambda x: lax.conv_general_dilated(x, jnp.ones((4, 6, 3)), (1,), [(-1, 0)]),
        "with negative padding",
    ),
    "bits": (lambda x: x * (x.astype(jnp.int32) & 1), "and of the bits of integers"),
    "precision": (lambda x: lax.reduce_precision(x, 8, 7), "reduce_precision to fewer bits"),
    "bfloat16": (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), "in bfloat16"),
    "mean": (lambda x: x - x.mean(0), f"reduce_sum across images.*{MIXING}"),
    "maximum": (lambda x: x - x.max(), f"reduce_max across images.*{MIXING}"),
    "products": (lambda x: jnp.einsum("aij,bij->ab", x, x), f"dot_general across .*{MIXING}"),
    "first": (lambda x: x - x[:1], f"slice across images.*{MIXING}"),
    "order": (lambda x: x + x[::-1], f"rev across images.*{MIXING}"),
    "rows of others": (
        lambda x: jnp.take_along_axis(x, x.astype(jnp.int32), axis=0),
        f"number of images.*{MIXING}",
    ),
    "half": (lambda x: jnp.concatenate([x, x])[len(x) :], f"number of images.*{MIXING}"),
    "number": (lambda x: x * len(x), f"with the number of images.*{MIXING}"),
    "numbers": (lambda x: x + np.arange(len(x))[:, None, None], f"number of images.*{MIXING}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_operations_that_would_be_wrong_are_refused(case):
    function, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        from_features(lambda _, x: function(x))


@pytest.mark.parametrize("transform", [nn.jit, nn.remat, lambda module: module])
def test_nodes_and_errors_name_the_whole_place(transform):
    class Part(nn.Module):
        sorts: bool = False

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(jnp.sort(x) if self.sorts else x)

    class Whole(nn.Module):
        sorts: bool = False

        @nn.compact
        def __call__(self, x):
            return transform(Part)(self.sorts, name="part")(x)

    def whole(sorts):
        module = Whole(sorts, name="encoder")
        params = module.init(jax.random.key(0), jnp.zeros((1, 8)))
        return from_features(lambda _, x: module.apply(params, x), (8,))

    names = [node.name for node in whole(False).graph.node]
    assert "encoder/part/Dense_0/MatMul" in names
    with pytest.raises(UserError, match="encoder/part.* computes sort"):
        whole(True)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """An untrained run on letters, and pictures of them in a folder."""
    folder = tmp_path_factory.mktemp("letters")
    config = load_config(
        f"{REPOSITORY}/configs/glyphs.py", [*small_runs.SHORT_GLYPHS, "objective.learn_c=True"]
    )
    small_runs.save_untrained(config, folder / "run")
    (folder / "photos").mkdir()
    for i, letter in enumerate(fonts.glyph_classes()[::9][:30]):
        image = Image.fromarray(glyphs.render(letter.glyphs[0]))
        image.resize((40 + i, 50)).save(folder / "photos" / f"{40 + i}.png")  # Sizes of their own.
    return folder


@pytest.fixture(scope="module")
def exported(letters):
    """The run's model in ONNX, beside the pictures."""
    words = (f"--workdir={letters / 'run'}", "--format=onnx", f"--output={letters / 'model.onnx'}")
    commands.call("convert", *words)
    return letters


def blocks(word):
    """The programs of the manual that contain a word."""
    page = (REPOSITORY / "docs/take-it-with-you.md").read_text()
    found = [block.removeprefix("python") for block in page.split("```")[1::2]]
    (block,) = [block for block in found if word in block]
    return block


def test_the_manuals_search_finds_the_same_neighbours(exported, monkeypatch, capsys):
    monkeypatch.chdir(exported)
    query = sorted((exported / "photos").iterdir())[3]
    model = hypjax.load(exported / "run")
    (expected,) = model.search("photos", str(query), k=10)
    monkeypatch.setattr("sys.argv", ["search.py", "photos", str(query)])
    exec(blocks("import onnxruntime"), {"__name__": "__main__"})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    distances, paths = zip(*lines, strict=True)
    names = [path.rpartition("/")[2] for path in (*paths, *expected.paths)]
    assert names[0] == query.name  # hypjax leaves the query itself out.
    assert names[1:10] == names[10:19]
    np.testing.assert_allclose(np.float64(distances[1:]), expected.distances[:9], atol=1e-3)


def test_the_manuals_service_answers(exported, monkeypatch):
    monkeypatch.chdir(exported)
    (exported / "search.py").write_text(blocks("import onnxruntime"))
    monkeypatch.syspath_prepend(exported)
    paths = sorted(map(str, pathlib.Path("photos").iterdir()))
    pathlib.Path("photos/notes.txt").write_text("No image.")
    monkeypatch.setattr("sys.argv", ["serve.py", "photos"])
    program = blocks("import http.server")
    names = {"__name__": "service"}
    exec(program, names)
    server = names["http"].server.ThreadingHTTPServer(("localhost", 0), names["Search"])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        connection = http.client.HTTPConnection("localhost", server.server_port, timeout=20)
        with open(paths[5], "rb") as file:
            connection.request("POST", "/", file.read())
        hits = json.loads(connection.getresponse().read())
        assert hits[0][0] == paths[5] and len(hits) == 10
        connection.request("POST", "/", b"no image")
        assert connection.getresponse().status == 400
    finally:
        pathlib.Path("photos/notes.txt").unlink()
        server.shutdown()
        thread.join()
        server.server_close()


def test_squares_of_the_manual_are_the_pixels_of_hypjax(exported, monkeypatch):
    monkeypatch.chdir(exported)
    names = {"__name__": "search"}
    exec(blocks("import onnxruntime") + blocks("def square"), names)
    paths = sorted((exported / "photos").iterdir())
    batch = np.stack([names["square"](Image.open(path)) for path in paths])[..., None]
    (found,) = names["session"].run(None, {"images": batch})
    points = hypjax.load(exported / "run").embed([str(path) for path in paths])
    np.testing.assert_allclose(found, points, atol=1e-5)


def test_the_file_says_what_it_is(exported):
    model = hypjax.load(exported / "run")
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    facts = session.get_modelmeta().custom_metadata_map
    facts = {name: json.loads(value) for name, value in facts.items()}
    assert facts["hypjax.space"]["c"] == model.space.c != 0.1
    assert facts["hypjax.fingerprint"] == model.fingerprint
    assert facts["hypjax.view"]["channels"] == 1 and facts["hypjax.mean"] == list(
        model.config.data.mean
    )
    (images,), (points,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.shape) == ("images", ["batch", "height", "width", 1])
    assert (points.name, points.shape) == ("points", ["batch", 8])


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_lower_precision_is_measured_on_test_images(precision, exported, monkeypatch, capsys):
    monkeypatch.setattr(onnx_file, "_LEAST_AGREEMENT", 0.5)  # The model is not trained.
    output = exported / f"{precision}.onnx"
    words = (f"--workdir={exported / 'run'}", "--format=onnx", f"--output={output}")
    commands.call("convert", *words, f"--precision={precision}")
    assert "for 256 test images of the run" in capsys.readouterr().out
    assert output.stat().st_size < (exported / "model.onnx").stat().st_size
    (own,) = onnxruntime.InferenceSession(output).get_inputs()
    assert own.type == "tensor(uint8)"


def test_models_that_disagree_are_not_written(exported, monkeypatch):
    run = onnx_file._run
    model = hypjax.load(exported / "run")
    monkeypatch.setattr(onnx_file, "_run", lambda *given: run(*given) + np.float32(2e-4))
    with pytest.raises(UserError, match="points differ from hypjax's by up to"):
        model.to_onnx(exported / "wrong.onnx")
    monkeypatch.setattr(onnx_file, "_run", lambda *given: run(*given)[::-1])
    with pytest.raises(UserError, match="of the nearest neighbours remain among 256 test images"):
        model.to_onnx(exported / "wrong.onnx", "int8")
    monkeypatch.setattr("hypjax.integrations.onnx_graph._LARGEST_FILE", 1000)
    with pytest.raises(UserError, match="more than the 2 GB that an ONNX file can hold"):
        model.to_onnx(exported / "wrong.onnx")
    assert not list(exported.glob("*wrong*"))


def test_features_of_other_models_are_converted(tmp_path):
    path = small_runs.write_features(tmp_path / "f.npz")
    fields = [*small_runs.SHORT_FEATURES, f"data.path={path}", "model.head_dim=8"]
    config = load_config(f"{REPOSITORY}/configs/features.py", fields)
    small_runs.save_untrained(config, tmp_path / "run")
    model = hypjax.load(tmp_path / "run")
    with pytest.raises(UserError, match="int8 is for matrix products of the encoder"):
        model.to_onnx(tmp_path / "int8.onnx", "int8")
    model.to_onnx(tmp_path / "f.onnx")
    features = np.load(path)["features"]
    session = onnxruntime.InferenceSession(tmp_path / "f.onnx")
    (found,) = session.run(None, {"features": features})
    np.testing.assert_allclose(found, model.embed(features), atol=1e-5)
