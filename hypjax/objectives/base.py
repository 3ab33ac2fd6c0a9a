"""The interface between objectives and the train step."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hypjax.geometry import Space
from hypjax.types import Batch, Outputs

Metrics = dict[str, Float[Array, ""]]
# Samplings, among the values of `train.sampling`, whose batches are made of classes.
GROUPED = ("epoch_classes", "drawn_classes")


class Spec(NamedTuple):
    """Sizes that an objective may need for its parameters and state.

    Attributes:
        classes: Number of training classes.
        samples_per_class: Images of each class in a batch.
        encoder_dim: Dimension of the encoder's embedding.
        head_dim: Dimension of the head's output.
        training_images: Number of images in the training set.
        batch_size: Number of images in a batch.
        tuples: Tuples of an epoch and images of each; zeros if batches are not made of tuples.
    """

    classes: int
    samples_per_class: int
    encoder_dim: int
    head_dim: int
    training_images: int
    batch_size: int
    tuples: tuple[int, int] = (0, 0)


class Group(NamedTuple):
    """How a group of parameters is trained, apart from the general settings.

    A parameter belongs to the group with the longest path that leads to it.

    Attributes:
        path: Path of its subtree within the parameters.
        rate: Factor of the learning rate.
        weight_decay: Its weight decay; None for the general one.
        start: Step from which it changes; until then its moments accumulate.
    """

    path: tuple[str, ...]
    rate: float = 1.0
    weight_decay: float | None = None
    start: int = 0


@runtime_checkable
class Objective(Protocol):
    """A loss with its parameters and state, as a pair of pure functions.

    Attributes:
        space: Space in which the loss measures distances.
        score_space: Space in which evaluation compares the head's outputs. In an objective that
            inherits from this class, it is by default the one where the head is trained.
        groups: Groups of the objective's parameters that are trained in a way of their own, with
            paths within these parameters. They are no part of the group `objective` that the fields
            of `config.optim` set.
        teacher_decay: Decay of the teacher, an exponential moving average of the model's
            parameters: teacher ← decay · teacher + (1 − decay) · parameters after each update. None
            if the loss needs no teacher, which then is not kept.
    """

    space: Space
    groups: Sequence[Group] = ()
    teacher_decay: float | None = None

    @property
    def score_space(self) -> Space:  # noqa: D102
        return self.space

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[PyTree, PyTree]:
        """Initialises parameters and state.

        Args:
            key: Random key.
            spec: Sizes of the model and the data.

        Returns:
            (params, state): trees of arrays. The optimiser trains the parameters; the state is only
            passed from step to step.
        """

    def loss(
        self,
        params: PyTree,
        state: PyTree,
        outputs: Outputs,
        teacher: Outputs | None,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], tuple[PyTree, Metrics]]:
        """Loss of a whole batch.

        Args:
            params: Parameters of the objective.
            state: Its state.
            outputs: The model's outputs for the images of the batch, float32.
            teacher: The same outputs of the teacher as it was before the step, without a gradient;
                None if `teacher_decay` is None.
            batch: The batch, of which a loss may read labels and ids.
            key: Random key of the step, a function of the run's seed and the step.

        Returns:
            (loss, (state, metrics)): a float32 scalar, the next state, and float32 scalars by name.
        """
