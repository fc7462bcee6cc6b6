"""The cache folder: where it is, for whom it is made, and whose is refused."""

import os
import types

import pytest

from torchport.errors import BadValueError, OutputError
from torchport.files import cache


@pytest.fixture(autouse=True)
def umask():
    """Modes here are what the tests say."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path):
    """A folder of the cache that is as it should be."""
    return cache.make(tmp_path / "cache" / "jax")


def test_the_cache_is_the_folder_that_is_named_or_where_the_system_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHPORT_CACHE", str(tmp_path / "mine"))
    assert cache.folder() == tmp_path / "mine" and not cache.is_off()
    for none in ("off", ""):
        monkeypatch.setenv("TORCHPORT_CACHE", none)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.folder() == tmp_path / "torchport" and cache.is_off() == (none == "off")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "torchport"


def test_it_and_what_is_missing_above_it_is_made_for_its_owner_alone(tmp_path):
    os.umask(0o002)  # which would let the group write
    made = cache.make(tmp_path / "a" / "b" / "c")
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert cache.make(made) == made


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        cache.make(tmp_path / "file" / "cache")
    assert str(caught.value) == (
        f"{tmp_path}/file: The cache folder cannot be made: File exists. Name another folder with TORCHPORT_CACHE."
    )


def test_a_folder_of_ones_own_is_trusted(folder):
    (folder / "entry").write_text("")
    cache.check_trusted(folder)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("what", ["", "entry"])
def test_a_folder_or_entry_that_others_can_write_is_refused(folder, mode, what):
    (folder / "entry").write_text("")
    (folder / what).chmod(mode)
    with pytest.raises(BadValueError) as caught:
        cache.check_trusted(folder)
    assert str(caught.value) == (
        f"{folder / what}: Others can write to it (mode 0{mode:o}), and what is loaded from the cache is run. "
        f"Run chmod go-w {folder / what}, name another folder with TORCHPORT_CACHE, or run with --no-cache."
    )


def test_a_folder_above_that_others_can_write_is_refused(folder, monkeypatch):
    monkeypatch.setattr(cache, "_is_private", lambda group: False)
    for mode in (0o770, 0o707):
        folder.parent.chmod(mode)
        with pytest.raises(BadValueError, match=f"{folder.parent}: Others can write to it"):
            cache.check_trusted(folder)
    folder.parent.chmod(0o1777)  # the sticky bit, as on /tmp: nobody else can put another folder there
    cache.check_trusted(folder)


def test_a_folder_above_may_be_writable_by_the_users_private_group(folder, monkeypatch):
    group = folder.parent.stat().st_gid
    folder.parent.chmod(0o770)

    def groups(name="me", members=()):
        user = types.SimpleNamespace(pw_name="me", pw_gid=group)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: user)
        found = types.SimpleNamespace(gr_name=name, gr_gid=group, gr_mem=list(members))
        monkeypatch.setattr("grp.getgrgid", lambda gid: found)

    groups()
    cache.check_trusted(folder)
    for other in ({"name": "staff"}, {"members": ["me", "you"]}):
        groups(**other)
        with pytest.raises(BadValueError, match="Others can write to it"):
            cache.check_trusted(folder)


def test_a_link_on_the_way_is_followed_to_what_can_be_written(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_is_private", lambda group: False)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(folder.parent)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "link")
    cache.check_trusted(tmp_path / "link" / "jax")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(BadValueError, match=f"{tmp_path}/open: Others can write to it"):
        cache.check_trusted(tmp_path / "link" / "jax")


def test_what_somebody_else_owns_is_refused(folder, monkeypatch):
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(BadValueError) as caught:
        cache._check_owner(folder, folder.stat())
    assert str(caught.value) == (
        f"{folder}: User {owner} owns it, and what is loaded from the cache is run as user {owner + 1}. "
        "Remove it, name another folder with TORCHPORT_CACHE, or run with --no-cache."
    )
    above = types.SimpleNamespace(st_uid=owner + 2, st_mode=0o40755, st_gid=0)
    with pytest.raises(BadValueError) as caught:
        cache._check_above(folder, above)
    assert str(caught.value) == (
        f"{folder}: User {owner + 2} owns it, who could put another cache there; what is loaded from it is run. "
        "Name another folder with TORCHPORT_CACHE, or run with --no-cache."
    )


def test_another_kind_of_cpu_has_another_name(monkeypatch, tmp_path):
    """XLA compiles for the CPU's own instructions, and JAX's keys do not tell CPUs apart."""
    before, read = cache.cpu_kind(), cache.Path.read_text
    monkeypatch.setattr(cache.Path, "is_file", lambda self: True)
    monkeypatch.setattr(cache.Path, "read_text", lambda self, **rest: "flags : sse2\n\nflags : avx\n")
    lacking = cache.cpu_kind()
    assert lacking != before
    monkeypatch.setattr(cache.Path, "read_text", lambda self, **rest: "flags : sse2\ncpu MHz : 9\n")
    assert cache.cpu_kind() == lacking
    monkeypatch.setattr(cache.Path, "read_text", read)


def test_what_a_dead_writer_left_is_removed_after_a_day(tmp_path):
    for name in ("tiny.old", "tiny.new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    for name in ("tiny.old", "other"):
        os.utime(tmp_path / name, (0, 0))
    cache.remove_leftovers(tmp_path, "tiny.*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "tiny.new"]
