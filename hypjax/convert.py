"""Converts a trained model for use in other programs."""

import pathlib

from hypjax import command
from hypjax.errors import UserError
from hypjax.system import integrations

EXAMPLE = "python -m hypjax.convert --workdir=runs/glyphs-hyp --output=letters.safetensors"
FLAGS = command.Flags()
_WORKDIR = FLAGS.string("workdir", None, "Folder of a trained run, or its URL.")
_OUTPUT = FLAGS.string("output", None, "File or folder to write, such as model.safetensors.")
_FORMAT = FLAGS.enum(
    "format",
    "timm",
    ["timm", "onnx", "sentence-transformers"],
    "What to write: weights under timm's names; an ONNX model, from pixels to points; or a folder "
    "for sentence-transformers.",
)
_EMBEDDING = FLAGS.string(
    "embedding", "head", "onnx: output of the trained head, of the encoder, or of a prefix."
)
_PRECISION = FLAGS.enum(
    "precision",
    "float32",
    ["float32", "float16", "int8"],
    "onnx: dtype of the encoder's weights and products.",
)
_IMAGES = FLAGS.string(
    "images",
    None,
    "sentence-transformers: images that show whether cosine ranks as the run's distance does; by "
    "default the run's test images.",
)
_FEATURES = FLAGS.boolean(
    "features",
    False,
    "sentence-transformers: write features as they are, and their distance as a function.",
)
# Flags of one format.
_ONLY = {"embedding": "onnx", "precision": "onnx"}
_ONLY |= dict.fromkeys(("images", "features"), "sentence-transformers")


def main() -> None:
    """Converts the run's best checkpoint or, without validation, its last."""
    command.require(_WORKDIR, _OUTPUT)
    output = pathlib.Path(_OUTPUT.value).expanduser()
    if output.exists():
        raise UserError(f"{output} already exists; name another file or remove it")
    for flag, name in _ONLY.items():
        if name != _FORMAT.value and FLAGS[flag].present:
            raise UserError(f"--{flag} is for --format={name} alone; leave it out")
    if _FORMAT.value == "timm":
        _write_timm(output)
    elif _FORMAT.value == "onnx":
        _write_onnx(output)
    else:
        write = integrations.find("convert", _FORMAT.value)
        print(write(_WORKDIR.value, output, images=_IMAGES.value, features=_FEATURES.value))


def _write_timm(output: pathlib.Path) -> None:
    """Writes the weights under timm's names, and says how PyTorch loads them."""
    command.output_file(_OUTPUT, ".safetensors")
    from hypjax.inference.weights import restore_best
    from hypjax.models.pretrained import pools_as_timm, save_timm, timm_constructor
    from hypjax.runs.cloud_copy import reading

    with reading(_WORKDIR.value) as folder:
        _, model, params, _ = restore_best(folder)
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
    command.output_file(_OUTPUT, ".onnx")
    from hypjax.inference.model import load

    agreement = load(_WORKDIR.value, _EMBEDDING.value).to_onnx(output, _PRECISION.value)
    print(f"wrote the model, {output.stat().st_size / 1e6:.1f} MB, to {output}")
    print(agreement)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
