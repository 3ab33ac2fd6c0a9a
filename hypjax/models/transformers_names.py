"""Converts weights under the names of Transformers' models to timm's names.

Supports DINOv2, with and without registers, DINOv3, SigLIP and SigLIP 2, as published by their
authors.
"""

import re
from collections.abc import Mapping

import numpy as np

from hypjax.models.encoder import renamed

_PARTS = ("q", "k", "v")
# Patterns of names below a model's prefix, and timm's names. Queries, keys and values, which are
# separate in Transformers, are joined afterwards.
_DINO = (
    (r"^(?:dinov2(?:_with_registers)?|dinov3_vit)\.", ""),
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
    (r"^vision_model\.", ""),
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
    """Renames the tensors of an image encoder, which may be part of a two-tower model.

    Tensors of other models are returned unchanged.
    """
    names = {name.removeprefix("vision_model."): name for name in state}
    if "embeddings.position_embedding.weight" in names:
        towers = [name for name in state if name.startswith("vision_model.")] or list(state)
        by_name = {renamed(name, _SIGLIP): state[name] for name in towers}
        by_name["pos_embed"] = by_name["pos_embed"][None]
        return _split_pool(_joined(by_name))
    if not any(name.endswith("embeddings.cls_token") for name in state):
        return dict(state)
    by_name = {renamed(name, _DINO): value for name, value in state.items()}
    gated = any(".fc1_g." in name for name in by_name)
    up_proj = "mlp.fc1_x." if gated else "mlp.fc1."
    by_name = {name.replace("mlp.up_proj.", up_proj): value for name, value in by_name.items()}
    if "pos_embed" not in by_name:
        # timm's DINOv3 has other names for LayerScale, and no key biases.
        return _joined({re.sub(r"ls(\d)\.gamma", r"gamma_\1", k): x for k, x in by_name.items()})
    if "reg_token" in by_name:  # timm adds the class token's position embedding to the token.
        positions = by_name["pos_embed"]
        token = by_name["cls_token"] + positions[:, :1]
        by_name |= {"cls_token": token, "pos_embed": positions[:, 1:]}
    return _joined(by_name)


def _joined(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Joins the kernels of queries, keys and values, and their biases if all three have one."""
    for block in [name[: -len("q.weight")] for name in state if name.endswith(".attn.q.weight")]:
        for kind in ("weight", "bias"):
            parts = {part: state.pop(f"{block}{part}.{kind}", None) for part in _PARTS}
            parts = {part: value for part, value in parts.items() if value is not None}
            if len(parts) == len(_PARTS):
                state[f"{block}qkv.{kind}"] = np.concatenate(list(parts.values()))
            else:
                state |= {f"{block}{part}_{kind}": value for part, value in parts.items()}
    return state


def _split_pool(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Splits the attention pooling's matrix into a query matrix and a key-value matrix."""
    for kind in ("weight", "bias"):
        if (packed := state.pop(f"attn_pool.in_proj.{kind}", None)) is not None:
            third = len(packed) // 3
            state[f"attn_pool.q.{kind}"] = packed[:third]
            state[f"attn_pool.kv.{kind}"] = packed[third:]
    return state
