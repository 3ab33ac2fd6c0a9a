"""Groups of parameters, by the names that configurations use."""

# Each group is the subtree below a path of the parameters {"model": ..., "objective": ...}.
GROUPS = {
    "patch_projection": ("model", "encoder", "patch_embed"),
    "encoder": ("model", "encoder"),
    "head": ("model", "head"),
    "objective": ("objective",),
}
