"""Random upstreams, random sets, applied and undone in random nestings: what is left is what was there."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types

import pytest
from fakes.patch_world import World
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from torchport import patch

MODULES = ("a", "b", "c")

_FUNCTIONS = {
    "plain": "def {name}(x, y=1):\n    z = x + y\n    return ('{name}', z)\n",
    "decorated": "@twice\ndef {name}(x, y=1):\n    z = x + y\n    return ('{name}', z)\n",
    "closure": "def make_{name}(k):\n    def {name}(x, y=1):\n        z = x + y\n        return ('{name}', z, k)\n"
    "    return {name}\n{name} = make_{name}(7)\n",
}
_CLASS = """\
class {name}(Root):

    def method(self, x, y=1):
        z = x + y
        return (super().root(), z)

    @staticmethod
    def static(x, y=1):
        z = x + y
        return ("static", z)

    @classmethod
    def make(cls, x, y=1):
        z = x + y
        return (cls.__name__, z)

    @property
    def prop(self):
        z = 5
        return ("prop", z)
"""
_HEAD = """\
import contextlib
import functools

def twice(f):
    @functools.wraps(f)
    def both(*args, **kwargs):
        return (f(*args, **kwargs), "twice")
    return both

class Root:
    def root(self):
        return "root"
"""
_HOLDERS = (
    "alias{i} = {it}\n",
    "list{i} = [{it}, 1]\n",
    "dict{i} = {{'k': {it}}}\n",
    "tuple{i} = (1, ({it},))\n",
    "keys{i} = {{1: 2, {it}: 3, 4: 5}}\n",
    "set{i} = {{{it}}}\n",
    "def keyword{i}(a, *, g={it}): return g(a)\n",
    "class Holder{i}:\n    held = staticmethod({it})\n",
)
_PYTHON = """\
def replaced(x, y=1): return ("replaced", x, y)
def method(self, x, y=1): return ("replaced", x, y)
def make(cls, x, y=1): return ("replaced", x, y)
def prop(self): return "replaced"
def wrapped(original, *args, **kwargs): return ("wrapped", original(*args, **kwargs))
def put(x, y): return ("put", x, y)
"""


@st.composite
def upstreams(draw):
    """The text of three modules, each of which may import from those before it and hold what it finds."""
    texts, functions, known = {}, {}, []
    for module in MODULES:
        text = _HEAD
        for function, home in known:
            if draw(st.booleans()):
                text += f"from .{home} import {function} as got_{function}\n"
                holders = draw(st.lists(st.sampled_from(_HOLDERS), max_size=2, unique=True))
                text += "".join(h.format(i=f"_{function}", it=f"got_{function}") for h in holders)
        own = {}
        for index in range(draw(st.integers(1, 3))):
            name, kind = f"{module}{index}", draw(st.sampled_from(sorted(_FUNCTIONS)))
            text += _FUNCTIONS[kind].format(name=name)
            own[name] = kind
            holders = draw(st.lists(st.sampled_from(_HOLDERS), max_size=2, unique=True))
            text += "".join(h.format(i=f"_own{index}", it=name) for h in holders)
        text += _CLASS.format(name=f"Class{module}")
        texts[module], functions[module] = text, own
        known += [(name, module) for name in own]
    return texts, functions


@st.composite
def plans(draw):
    """An upstream, entries by target, and steps: import a module, enter a set, leave the last one."""
    texts, functions = draw(upstreams())
    entries = []
    for module in MODULES:
        for name in functions[module]:
            kind = draw(st.sampled_from(["none", "replace: p.py:replaced", "wrap: p.py:wrapped", "rewrite"]))
            entries.append((f"up.{module}:{name}", kind))
        for path, fitting in (
            ("method", "replace: p.py:method"), ("static", "replace: p.py:replaced"), ("make", "replace: p.py:make"),
            ("prop", "replace: p.py:prop"),
        ):  # fmt: skip
            kind = draw(st.sampled_from(["none", fitting, "wrap: p.py:wrapped"]))
            entries.append((f"up.{module}:Class{module}.{path}", kind))
    steps = draw(st.lists(st.sampled_from([*MODULES, "enter", "enter", "leave"]), min_size=2, max_size=9))
    return texts, [entry for entry in entries if entry[1] != "none"], steps


def shape(thing, seen=()):
    """Returns what an object is, functions by their code and containers by their items, without identities."""
    if id(thing) in seen:
        return "seen"
    inner = functools.partial(shape, seen=(*seen, id(thing)))
    if isinstance(thing, types.FunctionType):
        cells = [inner(cell.cell_contents) for cell in thing.__closure__ or ()]
        defaults = inner([thing.__defaults__, thing.__kwdefaults__])
        marks = (thing.__qualname__, thing.__code__.co_filename, thing.__code__.co_code, defaults)
        return (*marks, cells, inner(thing.__dict__))
    if isinstance(thing, (staticmethod, classmethod)):
        return (type(thing).__name__, inner(thing.__func__))
    if isinstance(thing, property):
        return ("property", inner(thing.fget))
    if isinstance(thing, functools.partial):
        return ("partial", inner(thing.func), inner(thing.args))
    if isinstance(thing, type):
        own = {k: inner(v) for k, v in vars(thing).items() if not k.startswith("__") or k == "__init__"}
        return ("class", thing.__qualname__, list(own), own)
    if isinstance(thing, dict):
        return [(inner(key), inner(value)) for key, value in thing.items()]
    return [inner(item) for item in thing] if isinstance(thing, (list, tuple, set)) else repr(thing)


def namespace(module):
    """Returns a module's namespace in its order, as plain values."""
    return [(k, shape(v)) for k, v in vars(module).items() if not k.startswith("__")]


def identities(module):
    """Returns the identity of all that is not rebuilt on the way back: tuples and static methods are."""
    rebuilt = (tuple, staticmethod, classmethod)
    return {name: id(value) for name, value in vars(module).items() if not isinstance(value, rebuilt)}


def _forget():
    for name in [n for n in sys.modules if n.partition(".")[0] in ("up", "torchport_patches")]:
        del sys.modules[name]


def _written(world, texts, wanted):
    for module, text in texts.items():
        world.write(f"up/{module}.py", text)
    world.python(_PYTHON)
    parts = []
    for index, (target, kind) in enumerate(wanted):
        if kind == "rewrite":
            kind = "rewrite: {match: z = x + y, put: p.py:put}"
        parts.append(f"id: up.p{index}\n  target: {target}\n  {kind}")
    return world.yaml("\n- ".join(parts)) if parts else []


def _carried_out(entries, steps):
    """Enters and leaves nested sets, importing on the way; returns the identities of what was imported before."""
    before, cut = {}, max(1, len(entries) // 3)
    with contextlib.ExitStack() as outer:
        stack = [outer.enter_context(contextlib.ExitStack())]
        for number, step in enumerate(steps):
            if step in MODULES:
                importlib.import_module(f"up.{step}")
                if len(stack) == 1:
                    before = {m: identities(sys.modules[f"up.{m}"]) for m in MODULES if f"up.{m}" in sys.modules}
            elif step == "enter":
                inner = stack[-1].enter_context(contextlib.ExitStack())
                inner.enter_context(patch.applied(entries[: cut * (number % 4 + 1)]))
                stack.append(inner)
            elif len(stack) > 1:
                stack.pop().close()
    return before


@given(plans())
@settings(
    max_examples=settings.default.max_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
def test_whatever_was_applied_the_namespaces_are_those_of_an_unpatched_import(tmp_path_factory, plan):
    texts, wanted, steps = plan
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.ExitStack() as stack:
        stack.callback(_forget)
        world = World(tmp_path_factory.mktemp("world"), monkeypatch)
        stack.callback(world.close)
        entries = _written(world, texts, wanted)
        _forget()
        fresh = {m: namespace(importlib.import_module(f"up.{m}")) for m in MODULES}
        _forget()
        before = _carried_out(entries, steps)
        for module in MODULES:
            live = sys.modules.get(f"up.{module}")
            if live is not None:
                left, there = namespace(live), fresh[module]
                assert [name for name, _ in left] == [name for name, _ in there]
                assert [pair for pair in zip(left, there, strict=True) if pair[0] != pair[1]] == []
            if module in before:
                assert {k: v for k, v in identities(live).items() if k in before[module]} == before[module]
        event(f"{len(entries) // 5 * 5} patches, {steps.count('enter')} sets")
