"""Comparison of image crops and views with torchvision."""

import numpy as np
import pytest
from PIL import Image

from hypjax.data import pixels
from hypjax.data.views import TEST_VIEWS, RandomCrop
from hypjax.models import colours
from hypjax.types import View

transforms = pytest.importorskip(
    "torchvision.transforms", reason="needs the parity extra: torchvision"
)
torch = pytest.importorskip("torch", reason="needs the parity extra: torch")

AREA, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
BICUBIC = transforms.InterpolationMode.BICUBIC
DRAWS = 4000


@pytest.mark.parametrize("size", [(375, 500), (500, 333), (300, 300), (60, 200), (40, 41)])
def test_crop_boxes_have_the_distribution_of_random_resized_crop(size):
    """Kolmogorov–Smirnov test; for long images some boxes come from the fallback."""
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    image = Image.new("L", size[::-1])
    draw = transforms.RandomResizedCrop.get_params
    theirs = np.array([draw(image, list(AREA), list(RATIO)) for _ in range(DRAWS)])
    crop = RandomCrop(AREA, RATIO, flip=0.5)
    ours = crop.boxes(np.random.default_rng(0), np.tile([size], (DRAWS, 1)))

    def features(boxes):
        top, left, height, width = boxes.T.astype(float)
        room = np.maximum([size[0] - height, size[1] - width], 1)
        places = top / room[0], left / room[1]
        return [height * width, width / height, height, width, *places, top + left]

    for our_feature, their_feature in zip(features(ours), features(theirs), strict=True):
        assert stats.ks_2samp(our_feature, their_feature).pvalue > 1e-4


@pytest.mark.parametrize("size", [(90, 120), (121, 90), (50, 50), (37, 500)])
def test_pixels_of_test_views_equal_torchvisions(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
    cropped = transforms.Compose([transforms.Resize(40, BICUBIC), transforms.CenterCrop(35)])
    squashed = transforms.Resize((40, 40), BICUBIC)
    centre, squash = View(35, 40, 3, "centre_crop"), View(40, 7, 3, "squash")
    for view, theirs in ((centre, cropped), (squash, squashed)):
        shown = pixels.show(image, TEST_VIEWS[view.test](*size, view), view.side)
        np.testing.assert_array_equal(shown, theirs(image))


def test_changes_of_colour_are_those_of_torchvision():
    """Of saturation with its constants of luma; a blur's edges are mirrored there."""
    functional, side = transforms.functional, 224
    image = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), np.uint8)
    theirs = torch.tensor(image).permute(0, 3, 1, 2).float() / 255
    for draw, change, border in (
        ({"factors": [1.3, 1, 1]}, lambda x: functional.adjust_brightness(x, 1.3), 0),
        ({"factors": [1, 0.7, 1]}, lambda x: functional.adjust_contrast(x, 0.7), 0),
        ({"factors": [1, 1, 1.4]}, lambda x: functional.adjust_saturation(x, 1.4), 0),
        ({"sigma": 1.5}, lambda x: functional.gaussian_blur(x, 21, 1.5), 12),
    ):
        none = {"factors": [1, 1, 1], "hue": 0.0, "grey": False, "sigma": 0.0} | draw
        draws = colours.Draws(**{name: np.array([value]) for name, value in none.items()})
        found = np.asarray(colours.changed(image, draws))[0] / 255
        expected = change(theirs)[0].permute(1, 2, 0).numpy()
        inside = slice(border, side - border)
        np.testing.assert_allclose(found[inside, inside], expected[inside, inside], atol=1.2 / 255)
