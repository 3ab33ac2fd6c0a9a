"""What models read of a configuration."""

from ml_collections import ConfigDict

from hypjax.models.encoder import FEATURES
from hypjax.settings import EncoderSettings, ModelSettings, TextSettings
from hypjax.types import TEXTS, View


def model_settings(config: ConfigDict, *, evaluating: bool = False) -> ModelSettings:
    """The settings of a run's model; if `evaluating`, it pools by `model.eval_pooling`."""
    model, data = config.model, config.data
    encoder = EncoderSettings(
        architecture=model.architecture,
        view=View(data.image_size, data.resize, data.channels, data.test_view),
        pooling=model.eval_pooling if evaluating else model.pooling,
        precision=model.precision,
        patch_size=model.patch_size,
        width=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        pool_first=model.pool_first,
        gem_exponent=model.gem_exponent,
        learn_gem=model.learn_gem,
        remat=config.run.remat,
        attention=config.run.attention,
        norm_eps=model.norm_eps,
        activation=model.activation,
    )
    return ModelSettings(encoder, model.head, model.head_dim, _further_towers(config))


def _further_towers(config: ConfigDict) -> dict[str, ModelSettings]:
    """The settings of towers beside the tower of images: that of texts, if there is one."""
    text = config.model.text
    if not text.width:
        return {}
    if text.kind == FEATURES:
        view = View(config.data.image_size, config.data.resize, config.data.channels)
        features = EncoderSettings(FEATURES, view, width=text.width)
        return {TEXTS: ModelSettings(features, text.head, config.model.head_dim)}
    encoder = TextSettings(
        width=text.width,
        depth=text.depth,
        num_heads=text.num_heads,
        vocabulary=text.vocabulary,
        context=text.context,
        activation=text.activation,
        norm_eps=text.norm_eps,
        mlp_ratio=text.mlp_ratio,
        kind=text.kind,
        precision=config.model.precision,
        remat=config.run.remat,
        attention=config.run.attention,
    )
    return {TEXTS: ModelSettings(encoder, text.head, config.model.head_dim)}
