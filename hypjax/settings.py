"""Settings of a run, read once from its configuration: typed values for the code below."""

import dataclasses

from hypjax.types import View


@dataclasses.dataclass(frozen=True)
class Pixels:
    """How images become a model's input."""

    view: View
    mean: tuple[float, ...]  # Of each channel, for pixels from 0 to 1.
    std: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a train step does beside the model, the objective and the optimiser."""

    seed: int  # Of parameters and of each step's random keys.
    microbatch: int = 0  # Images that a device embeds at once; 0 for all.
    drop_path: float = 0.0  # Rate of stochastic depth in the last block.
    ema_decay: float = 0.0  # Decay of the evaluated moving average; 0 for none.
    skips_nonfinite: bool = False  # Whether an update that is not finite is dropped.
    gradient_covariance: bool = False  # Whether to measure the spread of the images' gradients.
    takes_features: bool = False  # Whether batches hold cached features instead of pixels.


@dataclasses.dataclass(frozen=True)
class Embedding:
    """How the images of an evaluation are embedded."""

    scales: tuple[float, ...]  # Sides relative to the view's, whose embeddings are averaged.
    batch_size: int
    workers: int = 0  # Processes that decode images; 0 uses threads.


@dataclasses.dataclass(frozen=True)
class Watch:
    """When steps that are not finite, or that teach nothing, are reported or end a run."""

    batch_size: int
    samples_per_class: int
    total_steps: int
    warmup_steps: int
    stops_on_collapse: bool = False
    max_skipped: int = 0  # Updates that are not finite and are dropped; one more ends the run.
