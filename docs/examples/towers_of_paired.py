def towers(config: ConfigDict) -> dict[str, ModelSettings]:
    """The settings of towers beside the images', by name."""
    if config.objective.name != "paired":
        return {}
    view = View(side=1, resize=1, channels=1)  # Features take none.
    encoder = EncoderSettings("features", view, width=config.objective.features_dim)
    return {"features": ModelSettings(encoder, "dense", config.model.head_dim)}
