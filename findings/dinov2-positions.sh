#!/usr/bin/env bash
# timm and Transformers embed images of 224 pixels otherwise with the same weights of DINOv2.
#
# Versions: timm 1.0.31, transformers 5.24.0, torch 2.13.0.
#
# Source: DINOv2 (Oquab et al., TMLR 2024) was trained last at 518 pixels, so that its weights have
# positions on a grid of 37 x 37 patches, which are interpolated for other sizes. timm does so by
# `resample_abs_pos_embed(antialias=True)`, Transformers' `Dinov2Embeddings` by `interpolate`
# without antialiasing, though its `Dinov2WithRegistersEmbeddings` antialiases.
#
# Input: a ViT-S/14 of each library with the same random weights (Transformers' names are mapped to
# timm's), and images of noise of 224 and of 518 pixels. Position embeddings are noise of deviation
# 0.3; as a control, they change smoothly over the image.
#
# Expected: the same embedding, but for rounding.
#
# Seen: at 518 pixels the class tokens agree. At 224 pixels their cosine is 0.991, with noise as
# positions; with smooth ones they agree to 0.0014. Released weights lie between, and were not
# available here.
#
# Why it matters: a gallery that one library embedded and queries that the other embeds are not
# exactly comparable. hypjax interpolates as timm does.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 \
  huggingface-hub==1.33.0 pyyaml==6.0.4 tokenizers==0.23.3 regex==2026.11.19 tqdm==4.70.1 \
  packaging==26.4 typer==0.29.2 pillow==13.0.0
"$work/venv/bin/pip" install --quiet --no-deps timm==1.0.31 torchvision==0.28.0 transformers==5.24.0

cat >"$work/positions.py" <<'PYTHON'
import re
import sys
import types

# torchvision's operations are compiled for another build of torch; they are not used here.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("unused")
import timm
import torch
from transformers import Dinov2Config, Dinov2Model

GRID, WIDTH, DEPTH, HEADS = 37, 384, 12, 6
NAMES = [
    (r"^embeddings\.cls_token", "cls_token"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^encoder\.layer\.", "blocks."),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"attention\.o_proj", "attn.proj"),
    (r"^layernorm", "norm"),
]


def transformers_model(positions):
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=DEPTH,
        image_size=14 * GRID,
        patch_size=14,
    )
    model = Dinov2Model(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name and "layer_scale" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        model.embeddings.position_embeddings[:, 1:] = positions.flatten(2).mT
    return model


def timm_model(model, pixels):
    state = {}
    for name, value in model.state_dict().items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    del state["embeddings.mask_token"]  # Of training only.
    for block in range(DEPTH):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"blocks.{block}.attention.{x}_proj.{kind}") for x in "qkv"]
            state[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat(parts)
    peer = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=pixels).eval()
    peer.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(state, peer))
    return peer


def compare(positions, pixels):
    """Cosine and largest difference of the two class tokens."""
    model = transformers_model(positions)
    image = torch.randn(1, 3, pixels, pixels)
    with torch.inference_mode():
        one, other = timm_model(model, pixels)(image)[0], model(image).pooler_output[0]
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=0)
    return float(cosine), float((one - other).abs().max())


torch.manual_seed(1)
noise = 0.3 * torch.randn(1, WIDTH, GRID, GRID)
smooth = 0.3 * torch.randn(1, WIDTH, 5, 5)
smooth = torch.nn.functional.interpolate(smooth, size=(GRID, GRID), mode="bicubic")
own_size = compare(noise, 518)
seen = compare(noise, 224)
control = compare(smooth, 224)
print("cosine and largest difference of class tokens, at 518 pixels:", own_size)
print("at 224 pixels, positions of noise:", seen, "smooth positions:", control)
if own_size[1] > 1e-4 or not 0.98 < seen[0] < 0.996 or not 1e-4 < control[1] < 0.01:
    raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" -W ignore "$work/positions.py"
echo "as described: timm antialiases positions, Transformers does not"
