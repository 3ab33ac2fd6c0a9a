import pathlib

import numpy as np
import safetensors.torch
import timm
import torch
from PIL import Image

model = timm.models.VisionTransformer(
    num_classes=128, in_chans=1, img_size=32, patch_size=8, embed_dim=128, depth=4, num_heads=4
)
model.load_state_dict(safetensors.torch.load_file("letters.safetensors"))
paths = sorted(pathlib.Path("letters/test").rglob("*.png"))[:500]
images = [
    Image.open(path).convert("L").resize((32, 32), Image.Resampling.BICUBIC) for path in paths
]
pixels = torch.tensor(np.stack(images)[:, None] / 255, dtype=torch.float32)
with torch.no_grad():
    features = model.eval()((pixels - 0.085) / 0.24)  # data.mean and data.std.

c, radius = 0.1, 2.3  # objective.c and objective.clip_radius.
norms = features.norm(dim=1, keepdim=True)
points = features / norms * torch.tanh(c**0.5 * norms.clamp(max=radius)) / c**0.5

gaps = 1 - c * points.square().sum(dim=1)
gaps = torch.outer(gaps, gaps)
straight = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
distances = 2 / c**0.5 * torch.asinh(straight * (c / gaps).sqrt())
print(*(paths[i] for i in distances[0].argsort()[:10]), sep="\n")
