"""Features of other libraries' encoders are, bit for bit, what these libraries return."""

import numpy as np
import pytest
from PIL import Image

from hypjax.data.photos import find_images
from hypjax.errors import UserError
from hypjax.inference.image_embedder import open_encoder
from tests.helpers import commands

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
timm = pytest.importorskip("timm", reason="needs the parity extra: timm")
transformers = pytest.importorskip("transformers", reason="needs transformers")
transforms = pytest.importorskip("torchvision.transforms", reason="needs torchvision")
pytest.importorskip("onnx", reason="needs the parity extra: onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the parity extra: onnxruntime")

BICUBIC = transforms.InterpolationMode.BICUBIC
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {**LAYERS, "hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 16}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
SCALING = {"mean": MEAN, "std": STD}


@pytest.fixture(scope="module")
def images(photos_folder):
    return [Image.open(path) for path in find_images(str(photos_folder / "class1")).names]


def features(spec, photos_folder, **options):
    dataset = find_images(str(photos_folder / "class1"))
    (batch,) = open_encoder(spec, **options).batches(dataset)
    assert batch[0].dtype == np.float32 and not batch[1]
    return batch[0]


@pytest.mark.parametrize("classes", [0, 7])
def test_a_model_that_timm_saved(classes, images, photos_folder, tmp_path):
    torch.manual_seed(classes)
    model = timm.create_model("test_vit", num_classes=classes)
    timm.models.save_for_hf(model, tmp_path)
    model.reset_classifier(0)
    config = timm.data.resolve_model_data_config(model)
    prepare = timm.data.create_transform(**config, is_training=False)
    with torch.inference_mode():
        expected = model.eval()(torch.stack([prepare(image) for image in images])).numpy()
    np.testing.assert_array_equal(features(f"timm:local-dir:{tmp_path}", photos_folder), expected)
    with pytest.raises(UserError, match="cannot load timm:none"):
        open_encoder("timm:none")


def vit():  # Without its pooler, which the class has.
    config = transformers.ViTConfig(**VISION)
    return transformers.ViTModel(config, add_pooling_layer=False), {"height": 32, "width": 32}, None


def convnext():
    config = transformers.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 8, 16])
    return transformers.ConvNextModel(config), {"height": 32, "width": 32}, None


def clip():
    text = {**LAYERS, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 49408}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24)
    return transformers.CLIPModel(config), {"shortest_edge": 32}, {"height": 32, "width": 32}


def image_features(model, inputs):
    found = model.get_image_features(**inputs)
    return getattr(found, "pooler_output", found)  # Of Transformers 5 and 4.


OUTPUTS = {
    vit: ("class token", lambda model, inputs: model(**inputs).last_hidden_state[:, 0]),
    convnext: ("pooler output", lambda model, inputs: model(**inputs).pooler_output.flatten(1)),
    clip: ("image features", image_features),
}


@pytest.mark.parametrize("make", OUTPUTS, ids=lambda make: make.__name__)
def test_a_model_of_transformers_in_a_folder(make, images, photos_folder, tmp_path, capsys):
    torch.manual_seed(0)
    model, size, crop = make()
    cropped = {"do_center_crop": crop is not None, "crop_size": crop or size}
    processor = transformers.CLIPImageProcessor(size=size, **cropped)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    words, output = OUTPUTS[make]
    inputs = processor(images=images, return_tensors="pt")
    with torch.inference_mode():
        expected = output(model.eval(), inputs).numpy()
    np.testing.assert_array_equal(features(f"hf:{tmp_path}", photos_folder), expected)
    assert f"features are its {words} (" in capsys.readouterr().err
    first, second = (open_encoder(f"hf:{tmp_path}").fingerprint for _ in range(2))
    assert first == second  # Random weights that are not used do not count.


class Pooled(torch.nn.Module):
    """Convolves images; has a second output."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 4, 4)

    def forward(self, images):
        maps = self.convolution(images)
        return maps.mean((2, 3)), maps


def test_an_onnx_file_whose_pixels_are_scaled_by_flags(
    images, photos_folder, tmp_path, monkeypatch
):
    torch.manual_seed(0)
    names = {"input_names": ["images"], "output_names": ["pooled", "maps"], "dynamo": False}
    axes, path = {"images": {0: "b"}}, f"{tmp_path}/net.onnx"
    torch.onnx.export(Pooled(), (torch.zeros(2, 3, 32, 32),), path, **names, dynamic_axes=axes)
    crop = transforms.Compose([transforms.Resize(36, BICUBIC), transforms.CenterCrop(32)])
    pixels = np.stack([crop(image) for image in images]).astype(np.float32)
    scaled = (pixels * np.float32(1 / 255) - np.float32(MEAN)) / np.float32(STD)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {"images": np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))}
    monkeypatch.chdir(tmp_path)
    flags = [f"--encoder=onnx:{path}@pooled", "--resize=36"]
    flags += [f"--{name}={','.join(map(str, x))}" for name, x in SCALING.items()]
    commands.call("embed", *flags, f"--images={photos_folder}/class1", "--output=g.npz")
    with np.load("g.npz") as file:
        np.testing.assert_array_equal(file["features"], session.run(["pooled"], inputs)[0])
    for output, options, keyword in (("", SCALING, "pooled, maps"), ("@pooled", {}, "--std")):
        with pytest.raises(UserError, match=keyword):
            open_encoder(f"onnx:{path}{output}", **options)
