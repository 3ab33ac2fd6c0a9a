import numpy as np
import timm
import torch

from hypjax.models import create_encoder
from hypjax.models.pretrained import convert_timm, timm_state_dict


def test_tokens_agree():
    peer = timm.create_model("mixer_s32_224", img_size=64).eval()
    state = {name: value.numpy() for name, value in peer.state_dict().items()}
    encoder = create_encoder("mixer_s32_224", image_size=64)
    images = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype("f")
    with torch.no_grad():
        expected = peer.forward_features(torch.tensor(images.transpose(0, 3, 1, 2))).numpy()
    params = convert_timm(state, encoder)
    tokens = encoder.apply({"params": params}, images, return_tokens=True)
    np.testing.assert_allclose(tokens, expected, atol=2e-5 * np.ptp(expected))
    for name, value in timm_state_dict(params, encoder).items():
        np.testing.assert_array_equal(value, state[name])
