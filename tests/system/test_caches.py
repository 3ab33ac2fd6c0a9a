"""The user's cache folder, and JAX's programs in it."""

import jax
import pytest

from hypjax.system.caches import keep_compiled_programs


@pytest.fixture
def restored():
    """Restores JAX's settings after the test."""
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_that_cannot_be_created_is_said_once(tmp_path, monkeypatch, capsys, restored):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    jax.config.update("jax_compilation_cache_dir", None)
    for _ in range(2):
        keep_compiled_programs()
        assert not jax.config.jax_enable_compilation_cache
    printed = capsys.readouterr().err
    assert printed.count("warning:") == 1
    assert f"cannot be kept in {tmp_path / 'file/hypjax/compiled'} (Not a directory)" in printed
