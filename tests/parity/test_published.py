"""Published models in timm, as their cards say."""

import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax import train
from tests.helpers import small_runs

timm = pytest.importorskip("timm")
torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (
            *("data.channels=1", "data.mean=(0.4,)", "data.std=(0.2,)"),
            *("data.test_view=squash", "data.resize=24", "model.head=none"),
        ),
    ],
)
def test_a_published_model_gives_the_same_features(photos_folder, tmp_path, fields):
    train.train_and_evaluate(small_runs.load(photos_folder, *fields), tmp_path / "run")
    folder = hypjax.push(tmp_path / "run", "me/photos", folder=tmp_path / "photos")
    peer = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    settings = timm.data.resolve_model_data_config(peer)
    transform = timm.data.create_transform(**settings, is_training=False)
    model = hypjax.load(folder)
    mode = {1: "L", 3: "RGB"}[model.config.data.channels]
    images = [Image.open(path).convert(mode) for path in sorted(photos_folder.rglob("*.png"))[:6]]
    with torch.no_grad():
        features = peer(torch.stack([transform(image) for image in images])).numpy()
    expected = np.asarray(model.space.embed(features))
    np.testing.assert_allclose(model.embed(images), expected, atol=2e-5)
