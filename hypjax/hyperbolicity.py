"""Measures how tree-like embeddings are and which curvature suits them (Hyp-ViT, Table 1)."""

from typing import Annotated

from hypjax import command
from hypjax.fields import at_least, within


def main(
    *,
    overrides: list[str],
    config: str | None = None,
    embeddings: str | None = None,
    samples: Annotated[int, at_least(4)] = 2000,
    trials: command.Positive = 100,
    seed: Annotated[int, within(0, 2**32 - 1)] = 0,
    output: command.Numbers | None = None,
) -> None:
    """Prints the relative δ over random draws, and the curvature that it suggests.

    Args:
        overrides: Fields of the configuration to set, as FIELD=VALUE.
        config: Configuration with a pretrained encoder; --config.FIELD=VALUE sets a field.
        embeddings: File written by python -m hypjax.embed, instead of --config.
        samples: Number of points in each random draw.
        trials: Number of random draws.
        seed: Seed of the draws.
        output: File to write the numbers to, such as delta.json.

    Example:
        python -m hypjax.hyperbolicity --embeddings=gallery.npz
    """
    command.require_one(config=config, embeddings=embeddings)
    import jax

    from hypjax.config import load_config
    from hypjax.evaluate import pretrained_features
    from hypjax.galleries.embeddings import Embeddings
    from hypjax.geometry.hyperbolicity import curvature_from_delta, relative_delta
    from hypjax.monitoring.health import warn_if_collapsed
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import caches, console

    caches.keep_compiled_programs()
    if config:
        points, notes = pretrained_features(load_config(config, overrides))
    else:
        command.refuse_overrides(overrides)
        saved = Embeddings.load(str(embeddings))
        points, notes = saved.features(), ()
        if saved.space.normalized and saved.raw_features is None:
            console.warn("the features are normalised; Hyp-ViT measures raw ones, as --config does")
    warn_if_collapsed(points, "delta says nothing about the images")
    key = jax.random.key(seed)
    deltas = relative_delta(points, num_samples=samples, num_trials=trials, key=key)
    mean, std = float(deltas.mean()), float(deltas.std())
    print(f"relative delta: {mean:.4f} ± {std:.4f}")
    print(f"  over {len(deltas)} draws of {min(samples, len(points))} of {len(points)} points")
    print(f"suggested curvature c: {curvature_from_delta(mean):.3f}")
    print_notes(noted(notes))
    if output:
        command.write_numbers(output, {"relative_delta": mean, "std": std, **noted(notes)})


if __name__ == "__main__":
    command.run(main)
