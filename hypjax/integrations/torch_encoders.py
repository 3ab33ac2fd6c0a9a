"""Encoders of timm and Transformers, each with its preprocessing of images."""

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image

from hypjax.errors import UserError, explained
from hypjax.system import hub

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_CLASS_TOKEN = re.compile(r"(cls|class)_?(token|embedding)")  # In the names of weights.


class TimmEncoder:
    """A pretrained timm model without its classifier, by timm's name."""

    output = "pooled output"

    def __init__(self, name: str) -> None:
        with explained(f"cannot load timm:{name}"):
            import timm

            model = timm.create_model(name, pretrained=True, num_classes=0)
            preprocessing = timm.data.resolve_model_data_config(model)
            self.prepare = timm.data.create_transform(**preprocessing, is_training=False)
        self.facts = ["timm", name, preprocessing, hash_weights(model.state_dict())]
        self._model = model.eval().to(_DEVICE)

    def features(self, prepared: Sequence[torch.Tensor]) -> Float[np.ndarray, "images dim"]:
        """Returns the pooled output of each image."""
        with torch.inference_mode():
            return _as_array(self._model(torch.stack([*prepared]).to(_DEVICE)))


class TransformersEncoder:
    """A Transformers model from the hub or a folder.

    Features are the image features of a model of images and texts, such as CLIP; otherwise the
    output of the pooler, if it has trained weights; otherwise the class token.
    """

    def __init__(self, name: str) -> None:
        name = os.path.expanduser(name)
        if not os.path.isdir(name):
            hub.download(name, ["config.json"])  # Offline, Transformers would retry for a minute.
        with explained(f"cannot load hf:{name}"):
            import transformers

            transformers.logging.set_verbosity_error()  # Hides reports of unused weights.
            self._processor = transformers.AutoImageProcessor.from_pretrained(name)
            model, loading = transformers.AutoModel.from_pretrained(name, output_loading_info=True)
        # Many checkpoints lack weights of the pooler, which are then random.
        random_weights = {key for key in loading["missing_keys"] if "pooler." in key}
        if missing := set(loading["missing_keys"]) - random_weights:
            raise UserError(f"hf:{name} lacks {len(missing)} weights, such as {min(missing)}")
        model = model.float().eval().to(_DEVICE)
        kind = type(model).__name__
        self._embed = getattr(model, "get_image_features", model)
        self._takes_class_token = False
        if self._embed is not model:
            self.output = f"image features ({kind}.get_image_features)"
        elif not random_weights and self._has_pooler():
            self.output = f"pooler output ({kind})"
        elif any(map(_CLASS_TOKEN.search, model.state_dict())):
            self.output, self._takes_class_token = f"class token ({kind})", True
        else:
            raise UserError(f"hf:{name} ({kind}) has no image features, pooler or class token")
        weights = hash_weights(model.state_dict(), without=random_weights)
        config = model.config.to_dict()
        for key in ("_name_or_path", "transformers_version"):  # They differ between machines.
            config.pop(key, None)
        self.facts = ["hf", self.output, repr(config), self._processor.to_json_string(), weights]

    def _has_pooler(self) -> bool:
        blank = [self.prepare(Image.new("RGB", (256, 256)))]
        return getattr(self._outputs(blank), "pooler_output", None) is not None

    def prepare(self, image: Image.Image) -> Mapping[str, torch.Tensor]:
        """Preprocesses an image with the model's processor."""
        return self._processor(images=image, return_tensors="pt")

    def features(self, prepared: Sequence[Mapping[str, torch.Tensor]]) -> np.ndarray:
        """Returns the features of each image."""
        outputs = self._outputs(prepared)
        if self._takes_class_token:
            return _as_array(outputs.last_hidden_state[:, 0])
        pooled = getattr(outputs, "pooler_output", outputs)  # Transformers 4 returns a tensor.
        return _as_array(pooled.flatten(1))

    def _outputs(self, prepared: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        columns = {key: [image[key] for image in prepared] for key in prepared[0]}
        if len({image.shape[1:] for image in columns["pixel_values"]}) > 1:
            raise UserError("this processor gives images different shapes; set --batch_size=1")
        inputs = {key: torch.cat(tensors).to(_DEVICE) for key, tensors in columns.items()}
        with torch.inference_mode():
            return self._embed(**inputs)


def _as_array(features: torch.Tensor) -> np.ndarray:
    return features.float().cpu().numpy()


def hash_weights(state: Mapping[str, torch.Tensor], without: Collection[str] = ()) -> str:
    """Hash of a model's weights; `without` names weights that do not matter."""
    digest = hashlib.sha256()
    for name in sorted(set(state) - set(without)):
        values = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
