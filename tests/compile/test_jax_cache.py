"""JAX's own cache in torchport's cache folder: a second start loads from it, and what is wrong with it is named."""

import dataclasses
import errno
import json
import os

import jax
import jax.numpy as jnp
import pytest
from fakes.plain_pack import PlainPack
from jax.experimental.compilation_cache import compilation_cache

from torchport.compile import jax_cache
from torchport.errors import BadValueError, OutputError
from torchport.files import cache
from torchport.run.path import run
from torchport.task import Request, accept

pytestmark = pytest.mark.usefixtures("own_jax_cache")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that JAX is to use, which nobody has made yet."""
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path / "cache"))
    before = os.umask(0o022)
    yield cache.jax_folder()
    os.umask(before)


@pytest.fixture
def patched_pack(tmp_path, monkeypatch):
    """The plain network, which needs patches."""
    pack = PlainPack(tmp_path, monkeypatch)
    pack.write_gpu_code()
    yield pack
    pack.close()


def compiled(number):
    """Compiles a program that has a number in it; returns what it computes, and whether JAX's cache delivered it."""
    lowered = jax.jit(lambda x: x * x + number).lower(jnp.float32(2))
    with jax_cache.deliveries() as delivered:
        program = lowered.compile()
    return float(program(jnp.float32(2))), bool(delivered)


def test_jax_keeps_programs_in_the_folder_for_the_length_of_a_with(folder):
    with jax_cache.enabled():
        assert jax.config.jax_compilation_cache_dir == str(folder)
        assert compiled(3) == (7, False)
        names = {file.name for file in folder.iterdir()}
        assert names
    assert not jax.config.jax_compilation_cache_dir
    assert compiled(4) == (8, False)
    assert {file.name for file in folder.iterdir()} == names
    with jax_cache.enabled():
        assert compiled(3) == (7, True)


def test_a_folder_that_the_user_has_named_to_jax_stays(folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    try:
        with jax_cache.enabled():
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")
        assert not folder.exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


def test_programs_are_not_loaded_from_a_folder_that_others_can_write(folder):
    cache.make(folder).chmod(0o777)
    with pytest.raises(BadValueError, match="Others can write to it"), jax_cache.enabled():
        pass
    assert not jax.config.jax_compilation_cache_dir


def test_a_folder_that_cannot_be_made_is_refused(folder, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(OutputError, match="The cache folder cannot be made"), jax_cache.enabled():
        pass


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_is_full_or_read_only_costs_the_file_and_not_the_program(folder, monkeypatch, error):
    def refuse(*_):
        raise OSError(error, os.strerror(error))

    with jax_cache.enabled():
        with monkeypatch.context() as patched, pytest.warns(UserWarning, match=os.strerror(error)):
            patched.setattr("jax._src.lru_cache.LRUCache.put", refuse)
            assert compiled(5) == (9, False)
        assert list(folder.iterdir()) == []


def test_a_damaged_file_costs_a_warning_and_the_program_is_compiled(folder):
    with jax_cache.enabled():
        compiled(6)
        for file in folder.iterdir():
            file.write_bytes(file.read_bytes()[:100])
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            assert compiled(6) == (10, False)


def test_a_second_run_loads_its_programs_from_jax_and_makes_the_same_bits(patched_pack, folder, tmp_path):
    paths = (str(patched_pack.root),)
    request = Request("plain", "configs/small.yaml", prompt="A cat", out=tmp_path / "out", paths=paths)
    run(dataclasses.replace(request, stage="encode"))
    shas, patches, programs = [], [], []
    for _ in range(2):
        run(dataclasses.replace(request, stage="denoise", prompt=None))
        manifest = json.loads((tmp_path / "out" / "denoise.json").read_text())
        shas.append(manifest["sha256"])
        # Plumbing is called while torchax is imported, which happens once in a process.
        patches.append([{**row, "late": None} for row in manifest["patches"] if not row["plumbing"]])
        programs += manifest["programs"]
    assert shas[0] == shas[1] and patches[0] == patches[1]
    assert any(row["calls"] for row in patches[0])
    assert [row["jax_cache"] for row in programs] == [False, True]
    assert not jax.config.jax_compilation_cache_dir
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["jax", "tiny"]


@pytest.mark.parametrize("how", ["flag", "variable", "original"])
def test_nothing_is_kept_where_that_was_switched_off(request_for, folder, monkeypatch, how):
    changes = {"flag": {"cache": False}, "variable": {}, "original": {"backend": "original"}}[how]
    task = accept(dataclasses.replace(request_for(backend="torchax"), **changes))
    if how == "variable":
        monkeypatch.setenv("TORCHPORT_CACHE", "off")
    with jax_cache.of_task(task):
        assert not jax.config.jax_compilation_cache_dir
    assert not folder.exists()


def test_a_run_is_refused_whose_cache_others_can_write(folder, tmp_path, torchport, capsys):
    cache.make(folder).chmod(0o722)
    words = ["run", "--model", "hunyuan", "--config", "demo", "--prompt", "A cat", "--out", tmp_path / "out"]
    code, _, err = torchport(*words, capsys=capsys)
    assert code == 2 and err[-1].startswith(
        f"error[TP107] {folder}: Others can write to it (mode 0722), and what is loaded from the cache"
    )
    assert not (tmp_path / "out").exists()
