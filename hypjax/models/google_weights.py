"""Vision transformers in Google's .npz files (Dosovitskiy et al., ICLR 2021), converted to timm's.

timm joins queries, keys and values, which Google keeps by head, in one matrix.
"""

from collections.abc import Mapping

import numpy as np
from einops import rearrange

from hypjax.models.encoder import renamed

# Patterns of Google's names, and timm's names.
_NAMES = (
    ("/", "."),
    (r"\bTransformer\.encoderblock_", "blocks."),
    (r"\bTransformer\.encoder_norm\.", "norm."),
    (r"\bTransformer\.posembed_input\.pos_embedding$", "pos_embed"),
    (r"\bMultiHeadDotProductAttention_1\.", "attn."),
    (r"\bLayerNorm_0\.", "norm1."),
    (r"\bLayerNorm_2\.", "norm2."),
    (r"\bMlpBlock_3\.Dense_0\.", "mlp.fc1."),
    (r"\bMlpBlock_3\.Dense_1\.", "mlp.fc2."),
    (r"\bembedding\.", "patch_embed.proj."),
    (r"\bcls$", "cls_token"),
    (r"\battn\.out\.", "attn.proj."),
    (r"\b(kernel|scale)$", "weight"),
)


def to_timm(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts arrays under Google's names; arrays under other names stay as they are."""
    state = {}
    for name, array in arrays.items():
        timm_name = renamed(name, _NAMES)
        if name.endswith("kernel") and array.ndim == 4:
            array = rearrange(array, "h w i o -> o i h w")
        elif timm_name.endswith(".attn.proj.weight"):
            array = rearrange(array, "heads dim o -> o (heads dim)")
        elif name.endswith("kernel"):
            array = array.reshape(len(array), -1).T
        state[timm_name] = array.ravel() if name.endswith("bias") else array
    for name in [name for name in state if ".attn.query." in name]:
        parts = [state.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        state[name.replace("query", "qkv")] = np.concatenate(parts)
    return state
