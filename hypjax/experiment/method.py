"""A method: what is trained and scored, whatever the images."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import PyTree

from hypjax.experiment.embedding import fingerprint
from hypjax.geometry import Space
from hypjax.geometry.learned import Bounds, Scalars, initial_parameters, scalar_values
from hypjax.geometry.registry import describe_space
from hypjax.models import Embedder, model_shapes
from hypjax.objectives import Objective
from hypjax.settings import Embedding, Pixels, Scoring, Start


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A model, its objective, and how its embeddings are compared.

    Evaluation compares embeddings in several spaces, which `initial_spaces` names. A part's first
    space is named after the part, "head" or "encoder"; further spaces have a suffix, as in
    "head:sphere". Prefixes of the head's output are named "head@16" and "head@16:sphere".

    Attributes:
        fields: The configuration by dotted name, as in files; code below asks typed settings.
        model: The encoder and the head, in evaluation mode.
        pixels: How images become the model's input.
        objective: The objective with initial scalars.
        scalars: Initial values of the learned scalars.
        scalar_bounds: Bounds of the learned scalars.
        initial_spaces: The compared spaces by name; None is the objective's `score_space`.
        embedding: How images are embedded.
        scoring: How embeddings are scored.
        start: The weights with which the model starts.
        code: Hashes of a user's code, "loss" and "encoder", which may change between runs.
        own_encoder: The user's encoder and its changed fields; "" for an encoder of hypjax.
    """

    fields: Mapping[str, Any]
    model: Embedder
    pixels: Pixels
    objective: Objective
    scalars: Scalars
    scalar_bounds: Bounds
    initial_spaces: Mapping[str, Space | None]
    embedding: Embedding
    scoring: Scoring
    start: Start
    code: Mapping[str, str]
    own_encoder: str = ""

    @property
    def objective_fields(self) -> dict[str, Any]:
        """The fields of `config.objective`, by their last names."""
        prefix = "objective."
        names = [name for name in self.fields if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.fields[name] for name in names}

    @property
    def shapes(self) -> PyTree:
        """Shapes of the model's parameters, including learned scalars."""
        return model_shapes(self.model, self.pixels.view, self.scalars)

    def learned(self, params: PyTree) -> dict[str, Any]:
        """Learned scalars in a model's parameters; missing ones are a `KeyError`."""
        return scalar_values(params["scalars"]) if self.scalars else {}

    def initial_parameters(self) -> dict[str, PyTree]:
        """Parameters of the learned scalars, "scalars", if there are any."""
        return initial_parameters(self.scalars)

    def trained_objective(self, params: PyTree) -> Objective:
        """The objective with the learned scalars in these parameters."""
        return self.objective.with_scalars(self.learned(params))

    def spaces(self, params: PyTree) -> dict[str, Space]:
        """The spaces in which the model with these parameters is compared, by name.

        By default, heads are compared in the objective's space and encoders by cosine (Hyp-ViT,
        Section 4.2).
        """
        scalars, score_space = self.learned(params), self.trained_objective(params).score_space
        return {
            name: score_space if space is None else space.with_scalars(scalars)
            for name, space in self.initial_spaces.items()
        }

    def fingerprint(self, params: PyTree, name: str) -> str:
        """Hash of all that determines the embeddings `name` (see `spaces`) but the images.

        The parameters must not be sharded.
        """
        space = describe_space(self.spaces(params)[name])
        pooling = self.fields["model.eval_pooling"]
        view = self.pixels.view, self.pixels.mean, self.pixels.std
        facts = [name, space, view, [*self.embedding.scales], pooling, self.model.head_kind]
        if pooling == "gem":
            facts.append(self.fields["model.gem_exponent"])
        # The parameters of a custom module do not show its activation or stride.
        if self.own_encoder:
            facts.append(self.own_encoder)
        return fingerprint(facts, params)
