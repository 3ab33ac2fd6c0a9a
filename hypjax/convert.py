"""Converts a trained model for use in other programs."""

import pathlib
from collections.abc import Callable

from hypjax import command
from hypjax.errors import UserError, require_package

EXAMPLE = "python -m hypjax.convert --workdir=runs/glyphs-hyp --output=letters.safetensors"
FLAGS = command.Flags()
_WORKDIR = FLAGS.string("workdir", None, "Folder of a trained run, or its URL.")
_OUTPUT = FLAGS.string("output", None, "File or folder to write, such as model.safetensors.")
_FORMAT = FLAGS.enum(
    "format",
    "timm",
    ["timm", "onnx"],
    "What to write: weights under timm's names, or a model in ONNX, from pixels to points.",
)
_EMBEDDING = FLAGS.string(
    "embedding", "head", "For onnx: output of the trained head, of the encoder, or of a prefix."
)
_PRECISION = FLAGS.enum(
    "precision",
    "float32",
    ["float32", "float16", "int8"],
    "For onnx: dtype of the encoder's weights and products.",
)


def main(overrides: list[str]) -> None:
    """Converts the run's best checkpoint or, without validation, its last."""
    command.require(_WORKDIR, _OUTPUT)
    command.refuse_overrides(overrides)
    output = pathlib.Path(_OUTPUT.value).expanduser()
    if output.exists():
        raise UserError(f"{output} already exists; name another file or remove it")
    _FORMATS[_FORMAT.value](output)


def _write_timm(output: pathlib.Path) -> None:
    """Writes the weights under timm's names, and says how PyTorch loads them."""
    _require_suffix(output, ".safetensors")
    from hypjax.inference.weights import restore_best
    from hypjax.models.pretrained import pools_as_timm, save_timm, timm_constructor
    from hypjax.runs.cloud_copy import reading

    with reading(_WORKDIR.value) as folder:
        _, model, params = restore_best(folder)
    save_timm(output, params, model)
    head = ", with the head as classifier," if model.head_kind == "dense" else ""
    print(f"wrote the encoder{head} to {output}; in PyTorch:")
    print(f"  model = {timm_constructor(params, model)}")
    print(f'  model.load_state_dict(safetensors.torch.load_file("{output}"))')
    if not pools_as_timm(model.encoder):
        print(f"this run uses {model.encoder.pooling} pooling, which timm's model lacks:")
        print("  pool the tokens of model.forward_features(images), then apply the classifier")


def _write_onnx(output: pathlib.Path) -> None:
    """Writes the model, from pixels to points, and says how far it agrees with hypjax."""
    _require_suffix(output, ".onnx")
    command.require_writable(output.parent)
    for package in ("onnx", "onnxruntime"):
        require_package(package, "--format=onnx", "hypjax[onnx]")
    from hypjax.inference.model import load

    agreement = load(_WORKDIR.value, _EMBEDDING.value).to_onnx(output, _PRECISION.value)
    print(f"wrote the model, {output.stat().st_size / 1e6:.1f} MB, to {output}")
    print(agreement)


def _require_suffix(output: pathlib.Path, suffix: str) -> None:
    """Raises an error unless a file's name ends as its format does."""
    if output.suffix != suffix:
        raise UserError(f"--output is {output}; its name must end in {suffix}")


# A new format adds its line, and its name to the flag.
_FORMATS: dict[str, Callable[[pathlib.Path], None]] = {"timm": _write_timm, "onnx": _write_onnx}


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
