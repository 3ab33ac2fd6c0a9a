"""The user's cache folder, and JAX's programs in it."""

from types import SimpleNamespace

import jax

from hypjax.system.caches import keep_compiled_programs


def test_a_folder_that_cannot_be_created_is_said_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file/compiled"
    settings = SimpleNamespace(jax_enable_compilation_cache=True)
    settings.update, settings.jax_compilation_cache_dir = settings.__setattr__, str(folder)
    monkeypatch.setattr(jax, "config", settings)
    for _ in range(2):
        keep_compiled_programs()
        assert not settings.jax_enable_compilation_cache
    problem = f"cannot be kept in {folder} (Not a directory)"
    assert capsys.readouterr().err.count(problem) == 1
