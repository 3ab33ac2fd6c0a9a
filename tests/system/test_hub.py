"""Downloads from the hub that fail: each is one sentence."""

import huggingface_hub
import pytest
from huggingface_hub import errors

from hypjax.errors import UserError
from hypjax.models import weight_files
from hypjax.system import hub


def test_downloads_that_fail_are_one_sentence(monkeypatch):
    offline = errors.LocalEntryNotFoundError("not in the cache")
    offline.__cause__ = ConnectionError("no route")
    for error, keyword in ((offline, "no route"), (ValueError("a portal answers"), "a portal")):

        def download(*args, raised=error, **options):
            raise raised

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        with pytest.raises(UserError, match=f"cannot read the repository me/a .*{keyword}"):
            hub.download("hf://me/a", ["*.json"])
        with pytest.raises(UserError, match="they are not in "):
            weight_files.read_state_dict("vit_tiny_patch16_224.dino")
    with pytest.raises(UserError, match="hf-hub:OWNER/NAME"):
        weight_files.read_state_dict("hf-hub:../a")
