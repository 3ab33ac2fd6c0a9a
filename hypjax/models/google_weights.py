"""Vision transformers in Google's .npz files, converted to timm's names and layouts.

The files are those of vision_transformer and of big_vision, which may stack all blocks in one array
(Dosovitskiy et al., ICLR 2021; Zhai et al., ICCV 2023).
"""

import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from einops import rearrange

from hypjax.models.encoder import renamed

# Patterns of Google's names, and timm's names.
_NAMES = (
    (r"\bTransformer\.encoderblock_(\d+)\.", r"blocks.\1."),
    (r"\bTransformer\.encoder_norm\.", "norm."),
    (r"\b(Transformer\.posembed_input\.)?pos_embedding$", "pos_embed"),
    (r"\bMAPHead_0\.probe$", "attn_pool.latent"),
    (r"\bMAPHead_0\.LayerNorm_0\.", "attn_pool.norm."),
    (r"\bMAPHead_0\.MultiHeadDotProductAttention_0\.", "attn_pool."),
    (r"\bMAPHead_0\.", "attn_pool."),
    (r"\bMultiHeadDotProductAttention_\d\.", "attn."),
    (r"\bLayerNorm_0\.", "norm1."),
    (r"\bLayerNorm_\d\.", "norm2."),
    (r"\bMlpBlock_\d\.Dense_0\.", "mlp.fc1."),
    (r"\bMlpBlock_\d\.Dense_1\.", "mlp.fc2."),
    (r"\bembedding\.(?=kernel$|bias$)", "patch_embed.proj."),
    (r"\bcls$", "cls_token"),
    (r"(?<=\.)out\.(?=kernel$|bias$)", "proj."),
    (r"\b(kernel|scale)$", "weight"),
)
_ATTENTION = re.compile(r"(.*\battn(?:_pool)?)\.(query|key|value)\.(weight|bias)")


def to_timm(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts arrays under Google's names; arrays under other names stay as they are."""
    state, parts = {}, {}
    for name, array in arrays.items():
        if array.dtype.kind == "V":  # NumPy cannot read bfloat16.
            array = array.view(jnp.bfloat16)
        blocks = array if "/encoderblock/" in name else [array]
        for i, block in enumerate(blocks):
            google_name = name.replace("/encoderblock/", f"/encoderblock_{i}/").replace("/", ".")
            timm_name = renamed(google_name, _NAMES)
            if timm_name.endswith(".bias"):
                block = block.ravel()
            elif name.endswith("kernel"):
                block = _transposed(block, joins_heads=".proj." in timm_name)
            if match := _ATTENTION.fullmatch(timm_name):  # timm joins them.
                module, part, leaf = match.groups()
                joint = "qkv" if module.endswith("attn") else "q" if part == "query" else "kv"
                parts.setdefault(f"{module}.{joint}.{leaf}", {})[part] = block
            else:
                state[timm_name] = block
    for name, group in parts.items():
        state[name] = np.concatenate([group[x] for x in ("query", "key", "value") if x in group])
    return state


def _transposed(kernel: np.ndarray, *, joins_heads: bool) -> np.ndarray:
    """A kernel in timm's layout; of three axes, two are heads and their dimensions."""
    if kernel.ndim == 4:
        return rearrange(kernel, "h w i o -> o i h w")
    return kernel.reshape((-1, kernel.shape[-1]) if joins_heads else (len(kernel), -1)).T
