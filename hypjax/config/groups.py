"""Names of parameter groups, for fields such as `optim.frozen`."""

# Each group is a subtree of the parameters {"model": ..., "objective": ...}, given by its path.
GROUPS = {
    "patch_projection": ("model", "encoder", "patch_embed"),
    "encoder": ("model", "encoder"),
    "head": ("model", "head"),
    "objective": ("objective",),
}
