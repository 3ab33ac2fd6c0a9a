"""The prepared datasets by name, as `hypjax.catalogue` lists them."""

import importlib
from typing import Any

from hypjax.catalogue import PREPARED
from hypjax.data.preparation.official import OfficialDataset
from hypjax.data.records import RecordBuilder


def _declared(declaration: str) -> Any:
    module, _, name = declaration.partition(".")
    return getattr(importlib.import_module(f"hypjax.data.preparation.{module}"), name)


_DECLARED = {name: _declared(facts.declaration) for name, facts in PREPARED.items()}
OFFICIAL_DATASETS: dict[str, OfficialDataset] = {
    name: dataset for name, dataset in _DECLARED.items() if isinstance(dataset, OfficialDataset)
}
# TFDS builders: `BUILDERS["cub200"](data_dir=...)`.
BUILDERS: dict[str, type[RecordBuilder]] = _DECLARED | {
    name: dataset.builder for name, dataset in OFFICIAL_DATASETS.items()
}
