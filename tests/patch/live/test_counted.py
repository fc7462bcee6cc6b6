"""A target keeps its kind under a patch: coroutines, generators, caches, partials and functions in C."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect

import pytest
from fakes.patch_world import World, namespace

from torchport import patch

UP = """
    import functools
    import math

    async def awaited(a):
        return a

    def generated(a):
        yield a

    async def streamed(a):
        yield a

    @functools.lru_cache(maxsize=7)
    def cached(a):
        return [a]

    half = functools.partial(divmod, 1)
    root = math.sqrt

    class Thing:
        length = len

        async def awaited(self, a):
            return (self, a)

        @functools.lru_cache
        def cached(self, a):
            return (self, a)

        @classmethod
        async def made(cls, a):
            return (cls, a)

        @staticmethod
        def generated(a):
            yield a
"""
PYTHON = """
    def wrap(original, *args, **kwargs): return original(*args, **kwargs)
    async def awaited(a): return -a
    def generated(a): yield -a
    async def streamed(a): yield -a
    def cached(a): return [-a]
    def method(self, a): return (self, -a)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", UP)
    world.python(PYTHON)
    yield world
    world.close()


KINDS = [
    ("awaited", inspect.iscoroutinefunction),
    ("generated", inspect.isgeneratorfunction),
    ("streamed", inspect.isasyncgenfunction),
]


@pytest.mark.parametrize(("name", "is_kind"), KINDS)
def test_a_coroutine_or_generator_function_is_one_under_a_wrapper(world, name, is_kind):
    with patch.applied(world.one("wrap: p.py:wrap", f"up.m:{name}")) as ledger:
        import up.m

        function = getattr(up.m, name)
        assert is_kind(function)
        assert inspect.isfunction(function)
        assert str(inspect.signature(function)) == "(a)"
        function(1) if name != "awaited" else asyncio.run(function(1))
        assert ledger.rows()[0]["calls"] == 1
    assert is_kind(function) and function is not getattr(up.m, name)


@pytest.mark.parametrize(("name", "is_kind"), KINDS)
@pytest.mark.parametrize("more", ["", "counted: false"])
def test_a_replacement_of_that_kind_keeps_it_counted_or_not(world, name, is_kind, more):
    with patch.applied(world.one(f"replace: p.py:{name}", f"up.m:{name}", more)):
        import up.m

        assert is_kind(getattr(up.m, name))
        if name == "awaited":
            assert asyncio.run(up.m.awaited(1)) == -1
    if name == "awaited":
        assert asyncio.run(up.m.awaited(1)) == 1


def test_methods_of_these_kinds_are_bound_and_keep_their_kind(world):
    entries = world.yaml(
        "id: up.a\n  target: up.m:Thing.awaited\n  wrap: p.py:wrap\n"
        "- id: up.b\n  target: up.m:Thing.made\n  wrap: p.py:wrap\n"
        "- id: up.c\n  target: up.m:Thing.generated\n  wrap: p.py:wrap"
    )
    with patch.applied(entries) as ledger:
        import up.m

        thing = up.m.Thing()
        assert inspect.iscoroutinefunction(thing.awaited) and inspect.iscoroutinefunction(up.m.Thing.made)
        assert inspect.isgeneratorfunction(thing.generated)
        assert asyncio.run(thing.awaited(1)) == (thing, 1)
        assert asyncio.run(thing.made(2)) == (up.m.Thing, 2)
        assert list(thing.generated(3)) == [3]
        assert [row["calls"] for row in ledger.rows()] == [1, 1, 1]


@pytest.mark.parametrize("kind", ["wrap: p.py:wrap", "replace: p.py:cached"])
def test_a_cached_target_keeps_the_methods_of_its_cache(world, kind):
    with patch.applied(world.one(kind, "up.m:cached")) as ledger:
        import up.m

        first = up.m.cached(1)
        assert up.m.cached.cache_parameters()["maxsize"] == 7
        if kind.startswith("wrap"):
            assert up.m.cached(1) is first and up.m.cached.cache_info().hits == 1
        up.m.cached.cache_clear()
        assert up.m.cached.cache_info().currsize == 0
        assert ledger.rows()[0]["calls"] >= 1
    assert isinstance(up.m.cached, functools._lru_cache_wrapper)


def test_a_cached_method_is_bound_under_a_wrapper_and_a_replacement(world):
    for kind, wanted in (("wrap: p.py:wrap", 1), ("replace: p.py:method", -1)):
        with patch.applied(world.one(kind, "up.m:Thing.cached")):
            import up.m

            thing = up.m.Thing()
            assert thing.cached(1) == (thing, wanted)
            up.m.Thing.cached.cache_clear()


def test_a_partial_is_one_under_a_wrapper(world):
    with patch.applied(world.one("wrap: p.py:wrap", "up.m:half")) as ledger:
        import up.m

        assert isinstance(up.m.half, functools.partial)
        assert (up.m.half.func, up.m.half.args) == (divmod, (1,))
        assert up.m.half(2) == (0, 1)
        assert ledger.rows()[0]["calls"] == 1
    assert type(up.m.half) is functools.partial


def test_a_function_in_c_is_one_under_a_wrapper_and_binds_no_instance(world):
    entries = world.yaml(
        "id: up.a\n  target: up.m:root\n  wrap: p.py:wrap\n- id: up.b\n  target: up.m:Thing.length\n  wrap: p.py:wrap"
    )
    with patch.applied(entries):
        import up.m

        assert inspect.isbuiltin(up.m.root) and inspect.isbuiltin(up.m.Thing.length)
        assert up.m.root(4) == 2
        assert up.m.Thing().length([1, 2]) == 2


def test_whoever_captured_one_of_these_has_the_original_afterwards(world):
    entries = world.yaml(
        "id: up.a\n  target: up.m:awaited\n  replace: p.py:awaited\n"
        "- id: up.b\n  target: up.m:cached\n  wrap: p.py:wrap\n- id: up.c\n  target: up.m:half\n  wrap: p.py:wrap"
    )
    world.write("up/user.py", "from up.m import *\nFROZEN = frozenset([awaited])\nLIST = [cached]\n")
    with patch.applied(entries) as ledger:
        import up.user

        (captured,) = up.user.FROZEN
        assert asyncio.run(captured(1)) == -1
        assert copy.deepcopy(captured) is captured
    assert asyncio.run(captured(1)) == 1
    assert ledger.rows()[0]["calls"] == 1
    assert up.user.awaited is up.m.awaited and up.user.LIST[0] is up.m.cached and up.user.half is up.m.half


def test_these_are_repaired_late_and_leave_everything_as_it_was(world):
    world.write("up/user.py", "from up.m import awaited, cached, root\nLIST = [cached, awaited]\n")
    import up.user

    before = namespace(up.m), namespace(up.user)
    names = ("awaited", "cached", "root", "half", "Thing.awaited", "Thing.cached", "generated", "streamed")
    parts = [f"id: up.p{i}\n  target: up.m:{name}\n  wrap: p.py:wrap" for i, name in enumerate(names)]
    with patch.applied(world.yaml("\n- ".join(parts))) as ledger:
        assert up.user.awaited is up.m.awaited is up.user.LIST[1]
        assert {row["state"] for row in ledger.rows()} == {"applied"}
    assert (namespace(up.m), namespace(up.user)) == before
