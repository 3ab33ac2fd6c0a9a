"""The face every objective shows to the train step."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from hypjax.geometry import Space
from hypjax.types import Batch, Outputs

Metrics = dict[str, Float[Array, ""]]


class Spec(NamedTuple):
    """What an objective may need to size its parameters and state.

    Attributes:
        classes: Number of training classes.
        samples_per_class: Images of each class in a batch.
        encoder_dim: Coordinates of the encoder's embedding.
        head_dim: Coordinates of the head's output.
        training_images: Size of the training set.
    """

    classes: int
    samples_per_class: int
    encoder_dim: int
    head_dim: int
    training_images: int


@runtime_checkable
class Objective(Protocol):
    """A loss with its parameters and its state, as a pair of pure functions.

    Attributes:
        space: Where the loss measures distances.
        score_space: Where the head's output is compared at evaluation.
    """

    space: Space
    score_space: Space

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[PyTree, PyTree]:
        """Returns (params, state): what is trained, and what is only carried along."""

    def loss(
        self,
        params: PyTree,
        state: PyTree,
        outputs: Outputs,
        teacher: Outputs | None,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], tuple[PyTree, Metrics]]:
        """Returns (loss, (state, metrics)) of a whole batch.

        `teacher` holds the outputs of an averaged model, for objectives that ask for one.
        """
