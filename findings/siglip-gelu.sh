#!/usr/bin/env bash
# timm and Transformers compute other embeddings from one set of weights of SigLIP's ViT-B.
#
# Versions: timm 1.0.31, transformers 5.24.0, torch 2.13.0.
#
# Source: SigLIP (Zhai et al., ICCV 2023) was trained in big_vision, whose perceptrons call
# `flax.linen.gelu`, which is the approximation by tanh. Transformers' `SiglipVisionConfig` has
# `hidden_act="gelu_pytorch_tanh"`. timm's architectures `vit_base_patch16_siglip_*` and
# `vit_large_patch16_siglip_*` build their perceptrons with the exact GELU; only some of So400m take
# tanh. Both libraries publish the same weights of these models.
#
# Input: a ViT-B/16 of each library with the sizes of SigLIP at 224 pixels, the same random weights
# of deviation 0.05 in both (timm's names are mapped to Transformers'), and an image of noise. As a
# control, timm's model with the approximation by tanh.
#
# Expected: the same pooled embedding, but for rounding.
#
# Seen: as timm builds its model, the embeddings differ by 1.5e-4 of their largest coordinate, some
# 300 times as much as with the approximation by tanh, where they agree to rounding.
#
# Why it matters: a gallery that one library embedded and queries that the other embeds are not
# exactly comparable, and a comparison of two implementations stops at this difference. hypjax
# follows the file: by timm's name the exact GELU, with Transformers' config.json the one it names.
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

cat >"$work/compare.py" <<'PYTHON'
import re
import sys

import torch
from torch import library as operations

try:
    import torchvision  # noqa: F401
except RuntimeError:  # It is compiled for another build of torch; its operations are not used here.
    library = operations.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
import timm
from transformers import SiglipVisionConfig, SiglipVisionModel

torch.manual_seed(0)
theirs = SiglipVisionModel(SiglipVisionConfig()).eval()
for name, parameter in theirs.named_parameters():
    if "norm" not in name:
        torch.nn.init.normal_(parameter, std=0.05)
state = {name.removeprefix("vision_model."): x for name, x in theirs.state_dict().items()}
names = [
    (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^encoder\.layers\.", "blocks."),
    (r"layer_norm(\d)", r"norm\1"),
    (r"self_attn\.out_proj", "attn.proj"),
    (r"^post_layernorm", "norm"),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.out_proj", "attn_pool.proj"),
    (r"^head\.layernorm", "attn_pool.norm"),
    (r"^head\.mlp", "attn_pool.mlp"),
]
renamed = {}
for name, value in state.items():
    for pattern, replacement in names:
        name = re.sub(pattern, replacement, name)
    renamed[name] = value
for block in range(12):
    for kind in ("weight", "bias"):
        parts = [renamed.pop(f"blocks.{block}.self_attn.{x}_proj.{kind}") for x in "qkv"]
        renamed[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat(parts)
for kind in ("weight", "bias"):
    packed = renamed.pop(f"head.attention.in_proj_{kind}")
    renamed[f"attn_pool.q.{kind}"], renamed[f"attn_pool.kv.{kind}"] = packed.split([768, 1536])
renamed["pos_embed"] = renamed["pos_embed"][None]

ours = timm.create_model("vit_base_patch16_siglip_224", num_classes=0).eval()
print("timm's activation:", ours.blocks[0].mlp.act)
print("Transformers' activation:", theirs.config.hidden_act)
ours.load_state_dict(renamed)
image = torch.randn(1, 3, 224, 224)


def difference():
    with torch.inference_mode():
        one, other = ours(image)[0], theirs(image).pooler_output[0]
    return float((one - other).abs().max() / other.abs().max())


as_built = difference()
for block in ours.blocks:
    block.mlp.act = torch.nn.GELU(approximate="tanh")
ours.attn_pool.mlp.act = torch.nn.GELU(approximate="tanh")
with_tanh = difference()
print(f"largest difference as built: {as_built:.1e}, with tanh: {with_tanh:.1e}")
if as_built < 20 * with_tanh or with_tanh > 1e-4:
    raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" "$work/compare.py"
echo "as described: timm's SigLIP has the exact GELU, Transformers' the approximation by tanh"
