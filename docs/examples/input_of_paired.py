def with_features(
    batches: Iterable[Batch], features: Float[np.ndarray, "images dim"], rows: range
) -> Iterator[Batch]:
    """Adds each image's features to the batches; rows that pad a batch are zeros."""
    for batch in batches:
        inputs = {**batch.inputs, "features": padded_rows(features[batch.ids], rows, 0)}
        yield batch._replace(inputs=inputs)
