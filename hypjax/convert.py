"""Converts a trained model for use in other programs, or a released one for use here."""

import pathlib
from typing import Literal

from hypjax import command
from hypjax.errors import UserError
from hypjax.system import integrations

_SUFFIXES = {"timm": ".safetensors", "onnx": ".onnx"}


def main(
    *,
    workdir: str,
    output: str,
    format: Literal["timm", "onnx", "sentence-transformers", "hypjax"] = "timm",
    embedding: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Converts the run's best checkpoint or, without validation, its last.

    Args:
        workdir: Folder of a trained run, or its URL; with --format=hypjax, weights of images and
            texts: a file, its folder or URL, hf://OWNER/NAME.
        output: File or folder to write, such as model.safetensors.
        format: Weights under timm's names, an ONNX model, a sentence-transformers folder, or
            a folder that all commands take as --workdir.
        embedding: With --format=onnx: head, encoder, or a scored prefix. Default: head.
        tokenizer: With --format=hypjax: file or folder of the tokenizer. Default: in the
            weights' folder.

    Example:
        python -m hypjax.convert --workdir=runs/glyphs-hyp --output=letters.safetensors
    """
    path = pathlib.Path(output).expanduser()
    if path.exists():
        raise UserError(f"{path} already exists; name another file or remove it")
    wanted = _SUFFIXES.get(format, "")
    for other, suffix in _SUFFIXES.items():
        if path.suffix == suffix != wanted:
            raise UserError(f"--output is {path}; set --format={other}, or name another file")
    if wanted and path.suffix != wanted:
        raise UserError(f"--output is {path}; it must be a file that ends in {wanted}")
    command.require_writable(path.parent)
    if format == "timm":
        _write_timm(workdir, path)
    elif format == "onnx":
        from hypjax.inference.model import load

        agreement = integrations.find("convert", "onnx")(load(workdir, embedding or "head"), path)
        print(f"wrote the model, {path.stat().st_size / 1e6:.1f} MB, to {path}\n{agreement}")
    elif format == "hypjax":
        from hypjax.inference.released import save_released

        print(f"wrote {save_released(workdir, path, tokenizer)} to {path}")
    else:
        print(integrations.find("convert", format)(workdir, path))


def _write_timm(workdir: str, output: pathlib.Path) -> None:
    """Writes weights under timm's names, and prints how to load them in PyTorch."""
    from hypjax.assemble import saved_method
    from hypjax.experiment.trained import restore_best
    from hypjax.models.pretrained import pools_as_timm, save_timm, timm_constructor
    from hypjax.runs.cloud_copy import reading

    with reading(workdir) as folder:
        trained = restore_best(folder, saved_method(folder))
    model, params = trained.model, trained.params
    constructor = timm_constructor(params, model)  # Refuses encoders that timm lacks.
    save_timm(output, params, model)
    head = ", with the head as classifier," if model.head_kind == "dense" else ""
    print(f"wrote the encoder{head} to {output}; in PyTorch:")
    print(f"  model = {constructor}")
    # timm's model has no parameter for the learned exponent of GeM pooling.
    strict = ", strict=False" if model.encoder.learn_gem else ""
    print(f'  model.load_state_dict(safetensors.torch.load_file("{output}"){strict})')
    if not pools_as_timm(model.encoder):
        print(f"timm's model lacks this run's pooling of tokens, {model.encoder.pooling}:")
        print("  pool the tokens of model.forward_features(images), then apply the classifier")


if __name__ == "__main__":
    command.run(main)
