"""Measures how tree-like embeddings are and which curvature suits them (Hyp-ViT, Table 1)."""

from hypjax import command

EXAMPLE = "python -m hypjax.hyperbolicity --embeddings=gallery.npz"
FLAGS = command.Flags(
    overrides=True,
    config=command.string(
        "Configuration whose pretrained encoder embeds its training images. --config.FIELD=VALUE "
        "sets one of its fields."
    ),
    embeddings=command.string("File written by python -m hypjax.embed, instead of --config."),
    samples=command.integer("Number of points in each random draw.", 2000, lower_bound=4),
    trials=command.positive("Number of random draws.", 100),
    seed=command.natural("Seed of the draws.", 0, upper_bound=2**32 - 1),
)


def main(overrides: list[str]) -> None:
    """Prints the relative δ over random draws, and the curvature that it suggests."""
    FLAGS.require_one("config", "embeddings")
    import jax

    from hypjax.geometry.hyperbolicity import curvature_from_delta, relative_delta
    from hypjax.monitoring.health import warn_if_collapsed
    from hypjax.retrieval.embeddings import Embeddings
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import caches, console

    caches.keep_compiled_programs()
    if FLAGS.embeddings:
        command.refuse_overrides(overrides)
        embeddings = Embeddings.load(FLAGS.embeddings)
        points, notes, published = embeddings.features(), (), None
        if embeddings.space.normalized:
            console.warn(
                "these embeddings have unit length; Hyp-ViT's Table 1 measures the encoder's "
                "output before normalisation, as --config does"
            )
    else:
        from hypjax.config import load_config
        from hypjax.evaluate import pretrained_features
        from hypjax.runs.published import published_delta

        config = load_config(FLAGS.config, overrides)
        points, notes = pretrained_features(config)
        published = None if notes else published_delta(config)
    warn_if_collapsed(points, "delta says nothing of the images")
    key = jax.random.key(FLAGS.seed)
    deltas = relative_delta(points, num_samples=FLAGS.samples, num_trials=FLAGS.trials, key=key)
    print(f"relative delta: {deltas.mean():.4f} ± {deltas.std():.4f}")
    drawn = min(FLAGS.samples, len(points))
    print(f"  over {len(deltas)} draws of {drawn} of {len(points)} points")
    print(f"suggested curvature c: {curvature_from_delta(deltas.mean()):.3f}")
    print_notes(noted(notes))
    if published is not None:
        difference = deltas.mean() - published
        print(f"published (Hyp-ViT, Table 1): {published:.3f} (ours {difference:+.3f})")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
