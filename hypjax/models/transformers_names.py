"""Names of tensors in Transformers' models, as their authors publish them, to timm's names.

These are DINOv2, with and without registers, DINOv3, and SigLIP with SigLIP 2.
"""

import re
from collections.abc import Mapping

import numpy as np

_PARTS = ("q", "k", "v")
# Patterns of names below a model's prefix, and timm's names. Queries, keys and values, which
# Transformers keeps apart, are joined afterwards.
_DINO = (
    (r"embeddings\.(cls_token|mask_token)", r"\1"),
    (r"embeddings\.register_tokens", "reg_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.(?:projection\.)?(weight|bias)", r"patch_embed.proj.\1"),
    (r"(?:encoder\.|model\.)?layer\.(\d+)\.", r"blocks.\1."),
    (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
    (r"attention\.attention\.(q|k|v)(?:uery|ey|alue)\.", r"attn.\1."),
    (r"attention\.(q|k|v)_proj\.", r"attn.\1."),
    (r"attention\.(?:output\.dense|o_proj)\.", "attn.proj."),
    (r"mlp\.weights_in\.", "mlp.fc1."),
    (r"mlp\.weights_out\.", "mlp.fc2."),
    (r"mlp\.gate_proj\.", "mlp.fc1_g."),
    (r"mlp\.down_proj\.", "mlp.fc2."),
    (r"^(?:layernorm|norm)\.", "norm."),
)
_SIGLIP = (
    (r"embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"embeddings\.position_embedding\.weight", "pos_embed"),
    (r"encoder\.layers\.(\d+)\.", r"blocks.\1."),
    (r"layer_norm(\d)\.", r"norm\1."),
    (r"self_attn\.(q|k|v)_proj\.", r"attn.\1."),
    (r"self_attn\.out_proj\.", "attn.proj."),
    (r"post_layernorm\.", "norm."),
    (r"head\.probe", "attn_pool.latent"),
    (r"head\.attention\.in_proj_", "attn_pool.in_proj."),
    (r"head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"head\.layernorm\.", "attn_pool.norm."),
    (r"head\.mlp\.", "attn_pool.mlp."),
)


def to_timm(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames the tensors of an image encoder, and joins queries, keys and values.

    Tensors under other names are returned as they are. Of a model of images and texts, only the
    image encoder is.
    """
    names = {name.removeprefix("vision_model."): name for name in state}
    if "embeddings.position_embedding.weight" in names:
        towers = [name for name in state if name.startswith("vision_model.")] or list(state)
        renamed = _renamed({name: state[name] for name in towers}, "vision_model.", _SIGLIP)
        renamed["pos_embed"] = renamed["pos_embed"][None]
        return _split_pool(_joined(renamed))
    if not any(name.endswith("embeddings.cls_token") for name in state):
        return dict(state)
    renamed = _renamed(state, r"(?:dinov2(?:_with_registers)?|dinov3_vit)\.", _DINO)
    gated = any(".fc1_g." in name for name in renamed)
    up = ("mlp.up_proj.", "mlp.fc1_x." if gated else "mlp.fc1.")
    renamed = {name.replace(*up): value for name, value in renamed.items()}
    if "pos_embed" in renamed:
        if "reg_token" in renamed:  # timm adds the class token's embedding to the token.
            positions = renamed["pos_embed"]
            renamed["cls_token"] = renamed["cls_token"] + positions[:, :1]
            renamed["pos_embed"] = positions[:, 1:]
        return _joined(renamed)
    # timm's DINOv3 has other names for LayerScale, and no key biases.
    scales = {name: re.sub(r"ls(\d)\.gamma", r"gamma_\1", name) for name in renamed}
    return _joined({scales[name]: value for name, value in renamed.items()})


def _renamed(
    state: Mapping[str, np.ndarray], prefix: str, table: tuple[tuple[str, str], ...]
) -> dict[str, np.ndarray]:
    renamed = {}
    for name, value in state.items():
        name = re.sub(f"^{prefix}", "", name)
        for pattern, replacement in table:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def _joined(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins the kernels of queries, keys and values, and their biases if all three have one."""
    for name in [name for name in state if name.endswith(".attn.q.weight")]:
        block = name.removesuffix("q.weight")
        weights = [state.pop(f"{block}{part}.weight", None) for part in _PARTS]
        if all(weight is not None for weight in weights):
            state[f"{block}qkv.weight"] = np.concatenate(weights)
        biases = {part: state.pop(f"{block}{part}.bias", None) for part in _PARTS}
        if all(bias is not None for bias in biases.values()):
            state[f"{block}qkv.bias"] = np.concatenate(list(biases.values()))
        else:
            found = {part: bias for part, bias in biases.items() if bias is not None}
            state |= {f"{block}{part}_bias": bias for part, bias in found.items()}
    return state


def _split_pool(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Splits the attention pooling's matrix into those of queries, and of keys and values."""
    for kind in ("weight", "bias"):
        if (whole := state.pop(f"attn_pool.in_proj.{kind}", None)) is not None:
            third = len(whole) // 3
            state[f"attn_pool.q.{kind}"] = whole[:third]
            state[f"attn_pool.kv.{kind}"] = whole[third:]
    return state
