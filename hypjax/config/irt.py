"""The recipes of IRT (El-Nouby et al., 2021): categories, and the loss for particular objects.

For categories, the paper gives encoders, batches, steps, views and the size of the memory. Margin,
λ, optimiser, stochastic depth, the sampling of CUB and the test view follow unofficial code that
agrees with the paper's tables. Nothing is frozen or clipped: paper and code mention neither.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config.defaults import choose_objective
from hypjax.config.variants import Variant

# timm's names of architectures.
ENCODERS = {
    "deit": "deit_small_patch16_224",
    "deit-distilled": "deit_small_distilled_patch16_224",
    "resnet50": "resnet50",  # The second encoder in the paper's study of margin, λ and objectives.
}
# λ of the variants for particular objects. `hyp` is IRT_R in the ball, which no paper reports.
OBJECT_WEIGHTS = {"irt-o": 0.0, "irt-l": 0.0, "irt-r": 4.0, "hyp": 4.0}


class Schedule(NamedTuple):
    """Settings that files in `configs/` choose for their dataset."""

    steps: int
    sampling: str
    memory: float = 1.0  # Size of the memory, as a share of the training images.
    memory_decay: float = 0.0  # Decay of the teacher that embeds the memory's images; 0: none.


def follows(variant: Variant) -> bool:
    """Whether a variant is trained by IRT's whole recipe, not only with IRT's loss."""
    return variant.loss.startswith("irt-") and variant.encoder in ENCODERS


def use(config: ConfigDict, variant: Variant, schedule: Schedule) -> None:
    """Changes Hyp-ViT's recipe to IRT's; `irt-o`, the pretrained encoder, has no steps."""
    start_from(config, ENCODERS[variant.encoder])
    config.data.update(train_view="resize_crop", test_view="centre_crop", resize=256)
    if variant.encoder == "resnet50":  # Weights and pooling are our choice.
        config.model.weights = "resnet50.tv_in1k"
        config.model.pooling = config.model.eval_pooling = "avg"
    else:
        config.model.drop_path = 0.1
    config.objective.update(memory=schedule.memory, memory_decay=schedule.memory_decay)
    config.optim.update(learning_rate=3e-5, weight_decay=5e-4)
    config.train.update(batch_size=64, samples_per_class=2, sampling=schedule.sampling)
    config.train.total_steps = 0 if variant.loss == "irt-o" else schedule.steps
    config.run.checkpoint_every = 500


def start_from(config: ConfigDict, encoder: str) -> None:
    """Starts from timm's weights of an encoder, without a head; all parameters are trained."""
    config.data.update(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # ImageNet's.
    config.model.update(architecture=encoder, weights=f"{encoder}.fb_in1k", head="none")
    config.model.pooling = config.model.eval_pooling = "cls"
    config.optim.update(clip_norm=None, frozen=())


def choose_tuples(config: ConfigDict, kind: str) -> None:
    """Chooses the loss and the batches of a variant in `OBJECT_WEIGHTS`."""
    choose_objective(config, "tuple_contrastive")
    config.objective.koleo_weight = OBJECT_WEIGHTS[kind]
    config.objective.space = "poincare" if kind == "hyp" else "sphere"
    if kind == "hyp":
        config.objective.margin = 4.0  # In the ball's distances.
    config.train.sampling = "tuples"
