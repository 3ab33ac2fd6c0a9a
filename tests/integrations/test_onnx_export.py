"""Exported ONNX models, by ONNX Runtime, beside hypjax."""

import importlib
import pathlib
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.config import load_config
from hypjax.config.custom import registered_encoder
from hypjax.data import pixels, views
from hypjax.data.preparation import fonts, glyphs
from hypjax.errors import UserError
from hypjax.experiment.embedding import embed_function
from hypjax.geometry import Fused, Lorentz, PoincareBall, Product, Sphere
from hypjax.inference import released as released_models
from hypjax.models import Embedder, create_encoder
from hypjax.models.custom import custom_encoder
from hypjax.models.tokens import open_tokenizer
from hypjax.retrieval.projection import fit
from hypjax.settings import Embedding, Pixels
from hypjax.types import TEXTS, View
from tests.helpers import commands, small_runs
from tests.helpers.manual import program_with
from tests.helpers.small_runs import REPOSITORY
from tests.helpers.texts import released, write_tokenizer

pytest.importorskip("onnx", reason="needs onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

onnx_file = importlib.import_module("hypjax.integrations.onnx")
translate = importlib.import_module("hypjax.integrations.onnx_rules").translate

BALL, PAGE = PoincareBall(0.1, 2.3), "take-it-with-you.md"
SPACES = [
    *(Sphere(), BALL, PoincareBall(0.0, None), PoincareBall(2.0, None), Lorentz(0.1, 2.3, 1.7)),
    *(Lorentz(3.0, None), Fused(((Sphere(), 1.0), (BALL, 0.5)))),
    Fused(((BALL, 1.0), (Sphere(), 1.0)), normalized=False),
    *(PoincareBall(1.0, 2.3, max_distance=6.0), Product(((Sphere(), 1.0), (BALL, 0.5)))),
]
SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2}
OTHER_SIZES = {
    "convnext_tiny": {"image_size": 32, "depths": (1, 1, 1, 1), "widths": (8, 16, 16, 32)},
    "resnet50": {"image_size": 32, "depths": (1,) * 4},
    "tf_efficientnet_lite0": {"image_size": 64},
}
DESIGNS = ("vit_small_patch16_dinov3_qkvb", "vit_so400m_patch16_siglip_256", "convnext_tiny")
DESIGNS += ("deit_tiny_distilled_patch16_224", "vit_pe_core_small_patch16_384")
DESIGNS += ("resnet50", "tf_efficientnet_lite0")


def embedder(encoder, space=BALL, *, head="dense", scales=(1.0,), part="head"):
    """A model with parameters in which all terms count, as `Model` has it."""
    model = Embedder(encoder, 8 if head != "none" else encoder.dim, head)
    images = jnp.zeros((1, encoder.image_size, encoder.image_size, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        values = rng.normal(0, 1, leaf.shape) / max(1, *leaf.shape[:-1], 1) ** 0.5
        return np.float32(np.abs(values) + 0.5 if "variance" in str(path) else values)

    view = View(encoder.image_size, encoder.image_size + 5, 3)
    pixels = Pixels(view, mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.3))
    method = types.SimpleNamespace(pixels=pixels, embedding=Embedding(tuple(scales), 3))
    return types.SimpleNamespace(
        method=method,
        name="a model",
        **{"module": model, "params": jax.tree_util.tree_map_with_path(draw, shapes)},
        **{"space": space, "part": part, "takes_pixels": True, "projection": None},
    )


def check(trained):
    """Compares a model in ONNX Runtime with hypjax, for batches of two sizes."""
    pixels, view = trained.method.pixels, trained.method.pixels.view
    spaces = {trained.part: trained.space}
    embed = embed_function(trained.module, pixels, spaces, trained.method.embedding.scales)
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (3, view.resize, view.resize, 3), np.uint8)
    seen = images[:, 2 : 2 + view.side, 2 : 2 + view.side]
    expected = np.asarray(jax.jit(embed)(trained.params, seen)[trained.part])
    if trained.projection is not None:
        expected = trained.projection.apply(expected)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    session = session_of(onnx_file.to_onnx(trained, trained.module))
    for number in (3, 1):
        (found,) = session.run(None, {"images": images[:number]})
        np.testing.assert_allclose(found, expected[:number], atol=1e-4)


def session_of(model):
    return onnxruntime.InferenceSession(model.SerializeToString())


def small(name, **options):
    """A small encoder of a design."""
    if name.startswith("vit_pe") or "siglip" in name:
        options["attention_pool"] = 2 if "siglip" in name else 8
    return create_encoder(name).clone(**OTHER_SIZES.get(name, SMALL), **options)


@pytest.mark.parametrize("name", DESIGNS)
def test_each_design_gives_the_same_points(name):
    check(embedder(small(name)))


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        *(("vit_tiny_patch16_224", "rmac"), ("deit3_small_patch16_224", "gem")),
        *(("eva02_small_patch14_224", "max"), ("convnext_tiny", "avg_max")),
        *(("deit_tiny_distilled_patch16_224", "cls"), ("vit_so400m_patch16_siglip_256", "avg")),
    ],
)
def test_each_pooling_is_computed(name, pooling):
    check(embedder(small(name, pooling=pooling), Sphere(), head="none"))


def test_a_norm_after_the_pooling_two_scales_a_prefix_and_principal_components():
    encoder = create_encoder("vit_tiny_patch16_224", pool_first=True).clone(**SMALL)
    for pooling in ("avg", "gem"):
        check(embedder(encoder.clone(pooling=pooling), Sphere(), head="none"))
    encoder = create_encoder("vit_tiny_patch16_224").clone(**SMALL)
    check(embedder(encoder, Sphere(), head="norm_dense", scales=(1.0, 0.75)))
    check(embedder(encoder, part="head@3"))
    trained = embedder(encoder, scales=(1.0, 0.75))
    with pytest.raises(UserError, match="cannot be written as ONNX: .* while"):
        onnx_file.to_onnx(trained, trained.module)
    trained = embedder(encoder)
    features = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    trained.projection = fit(np.asarray(BALL.embed(features)), space=BALL, dim=3, whiten=True)
    check(trained)


class Own(nn.Module):
    """An encoder of a user's own."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3), strides=2)(x)), (2, 2), (2, 2))
        return nn.Dense(16)(nn.gelu(nn.GroupNorm(4)(x)).reshape(x.shape[0], -1))


def test_encoders_of_users_are_converted():
    with registered_encoder("own:Own", Own()):
        check(embedder(custom_encoder("own:Own", View(32, 37, 3))))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_each_space_has_its_points_and_features(space):
    rng = np.random.default_rng(0)
    given = np.float32(rng.normal(size=(20, 6)) * np.geomspace(0.01, 9, 20)[:, None])
    points = np.asarray(space.embed(given))
    for function, inputs in ((space.embed, given), (space.features, points)):
        example = jax.ShapeDtypeStruct(inputs.shape[1:], np.float32)
        session = session_of(translate(function, example, "x", "y"))
        (found,) = session.run(None, {"x": inputs})
        # Far out, features are known less well than the points that they stand for.
        found = found if function == space.embed else np.asarray(space.embed(found))
        np.testing.assert_allclose(found, points, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "size", [(50, 37), (37, 50), (90, 61), (20, 31), (37, 37), (300, 200), (1, 9000), (9000, 2)]
)
@pytest.mark.parametrize("test_view", ["centre_crop", "letterbox", "squash"])
def test_images_are_resized_and_cropped_as_by_hypjax(size, test_view):
    view = View(32, 37, 3, test_view)
    session = onnxruntime.InferenceSession(onnx_file.view_model(view).SerializeToString())
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 7, 3), np.uint8))
    image = coarse.resize(size[::-1], Image.Resampling.BICUBIC)
    expected = pixels.show(image, views.TEST_VIEWS[test_view](*size, view), 32).astype(int)
    (found,) = session.run(None, {"images": np.asarray(image)[None]})
    differences = np.abs(found[0] - expected)
    # Pillow may take a tall image's rows before its columns, which matters where scales differ.
    level, share = (2, 0.2) if test_view == "squash" else (1, 0.001)
    assert differences.max() <= level and (differences > 0).mean() <= share


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An untrained run on letters, its model in ONNX, and pictures of letters in a folder."""
    folder = tmp_path_factory.mktemp("letters")
    fields = [*small_runs.SHORT_GLYPHS, "objective.learn_c=True"]
    config = load_config(f"{REPOSITORY}/configs/glyphs.py", fields)
    small_runs.save_untrained(config, folder / "run")
    (folder / "photos").mkdir()
    for i, letter in enumerate(fonts.glyph_classes()[::9][:30]):
        image = Image.fromarray(glyphs.render(letter.glyphs[0]))
        image.resize((40 + i, 50)).save(folder / "photos" / f"{40 + i}.png")  # Sizes of their own.
    words = (f"--workdir={folder / 'run'}", "--format=onnx", f"--output={folder / 'model.onnx'}")
    commands.call("convert", *words)
    return folder


def test_the_manuals_search_finds_the_same_neighbours(exported, monkeypatch, capsys):
    monkeypatch.chdir(exported)
    query = sorted((exported / "photos").iterdir())[3]
    model = hypjax.load(exported / "run")
    assert model.space.c != 0.1  # Which the file says.
    (expected,) = model.search("photos", str(query), k=10)
    monkeypatch.setattr("sys.argv", ["search.py", "photos", str(query)])
    exec(program_with(PAGE, "import onnxruntime"), {"__name__": "__main__"})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    distances, paths = zip(*lines, strict=True)
    assert paths[0].endswith(query.name)  # hypjax leaves the query itself out.
    shown, found = ([pathlib.Path(path).name for path in x] for x in (paths[1:], expected.paths))
    assert shown[:9] == found[:9]
    np.testing.assert_allclose(np.float64(distances[1:]), expected.distances[:9], atol=1e-3)


def test_models_that_disagree_are_not_written(exported, monkeypatch):
    points, model = onnx_file._exported_points, hypjax.load(exported / "run")
    shift = np.float32(2e-4)
    monkeypatch.setattr(onnx_file, "_exported_points", lambda *given: points(*given) + shift)
    with pytest.raises(UserError, match="onnx was not written"):
        onnx_file.write_onnx(model, exported / "wrong.onnx")
    assert not list(exported.glob("*wrong*"))


def test_features_of_other_models_are_converted(tmp_path):
    path = small_runs.write_features(tmp_path / "f.npz")
    fields = [*small_runs.SHORT_FEATURES, f"data.path={path}", "model.head_dim=8"]
    config = load_config(f"{REPOSITORY}/configs/features.py", fields)
    small_runs.save_untrained(config, tmp_path / "run")
    model = hypjax.load(tmp_path / "run")
    onnx_file.write_onnx(model, tmp_path / "f.onnx")
    features = np.load(path)["features"]
    session = onnxruntime.InferenceSession(tmp_path / "f.onnx")
    (found,) = session.run(None, {"features": features})
    np.testing.assert_allclose(found, model.embed(features), atol=1e-5)


def test_texts_have_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(released_models, "read_language_image", lambda _: released())
    tokenizer = write_tokenizer(tmp_path)
    (tmp_path / "meru.pth").write_bytes(b"weights")
    model = hypjax.load(tmp_path / "meru.pth", engine="jax")
    assert "model-texts.onnx, coordinates" in onnx_file.write_onnx(model, tmp_path / "model.onnx")
    texts = ["a plum", "x", "a plum on a plate " * 9]
    ids, _ = open_tokenizer(tokenizer, model.module.towers[TEXTS].encoder.settings).tokenize(texts)
    session = onnxruntime.InferenceSession(tmp_path / "model-texts.onnx")
    (found,) = session.run(["points"], {"ids": ids})
    np.testing.assert_allclose(found, model.embed_texts(texts).vectors, atol=2e-5)
    image = np.random.default_rng(0).integers(0, 256, (1, 40, 40, 3), np.uint8)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["points"], {"images": image})
    np.testing.assert_allclose(found, model.embed(image[0]), atol=2e-5)
