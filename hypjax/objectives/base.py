"""The interface between objectives and the train step."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hypjax.geometry import Space
from hypjax.types import Batch, Outputs

Metrics = dict[str, Float[Array, ""]]


class Spec(NamedTuple):
    """Sizes that an objective may need for its parameters and state.

    Attributes:
        classes: Number of training classes.
        samples_per_class: Images of each class in a batch.
        encoder_dim: Dimension of the encoder's embedding.
        head_dim: Dimension of the head's output.
        training_images: Number of images in the training set.
    """

    classes: int
    samples_per_class: int
    encoder_dim: int
    head_dim: int
    training_images: int


@runtime_checkable
class Objective(Protocol):
    """A loss with its parameters and state, as a pair of pure functions.

    Attributes:
        space: Space in which the loss measures distances.
        score_space: Space in which evaluation compares the head's outputs.
    """

    space: Space
    score_space: Space

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
            state: State of the objective.
            outputs: The model's outputs for the images of the batch, float32.
            teacher: The same from a moving average of the model, for objectives that request one;
                otherwise None.
            batch: Labels and ids of the images.
            key: Random key of the step.

        Returns:
            (loss, (state, metrics)): a float32 scalar, the next state, and float32 scalars by name.
        """
