"""What stands in for an upstream's function or class is seen as it: all kinds of target, in all ways to look at one."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import typing
import weakref

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.errors import TargetError

UP = """
    from __future__ import annotations

    import abc
    import functools
    import math
    from other.m import exported

    def twice(function):
        @functools.wraps(function)
        def both(*args, **kwargs):
            return function(*args, **kwargs)
        return both

    def bare(function):
        return lambda *args, **kwargs: function(*args, **kwargs)

    class Flag:
        on = True

    def plain(a: Flag, b: int = 1) -> Flag:
        "Adds."
        z = a
        return z

    def strict(a, /, b=2, *rest, c, d=4, **more) -> int:
        z = a
        return z

    def required(a, b=[]):
        z = a
        return z

    def closed(k):
        def closed(a, b=1):
            z = a
            return z + k
        return closed

    closed = closed(0)
    named = lambda a: a

    @twice
    def decorated(a: Flag, b: int = 1):
        "Decorated."
        z = a
        return z

    @bare
    def hidden(a, b=1):
        z = a
        return z

    @functools.lru_cache(maxsize=3)
    def cached(a, b=1):
        z = a
        return z

    async def awaited(a: Flag, b: int = 1):
        z = a
        return z

    def generated(a, b=1):
        z = a
        yield z

    async def streamed(a, b=1):
        z = a
        yield z

    @functools.singledispatch
    def dispatched(a, b=1):
        z = a
        return z

    half = functools.partial(divmod, 1)
    root = math.sqrt

    class Called:
        flag = 3
        def __call__(self, a, b=1):
            return a
        def __len__(self):
            return 7

    called = Called()
    bound = Called().__call__

    class lazy(property):
        "A property of upstream's own."

    class Thing(abc.ABC):
        def method(self, a: Flag, b: int = 1) -> Flag:
            "A method."
            z = a
            return z

        @staticmethod
        def static(a, b=1):
            z = a
            return z

        @classmethod
        def made(cls, a, b=1):
            z = a
            return z

        @property
        def prop(self):
            "A property."
            z = 1
            return z

        @prop.setter
        def prop(self, value):
            pass

        @lazy
        def slow(self):
            z = 1
            return z

        @functools.cached_property
        def once(self):
            "Once."
            z = 1
            return z

        @abc.abstractmethod
        def wanted(self, a):
            z = a
            return z

        def __call__(self, a):
            z = a
            return z

    class Child(Thing):
        wanted = None

    class Whole:
        "A class."
        supports_mask = True

        def __init__(self, a):
            self.a = a

    for it in (plain, strict, closed, decorated, cached, awaited, generated, dispatched, Thing.method, exported):
        it.supports_mask = True
"""
NAMES = (
    "plain", "strict", "required", "closed", "named", "decorated", "hidden", "cached", "awaited", "generated",
    "streamed", "dispatched", "half", "root", "called", "bound", "exported", "Thing.method", "Thing.static",
    "Thing.made", "Thing.prop", "Thing.slow", "Thing.once", "Thing.wanted", "Thing.__call__", "Child.method", "Whole",
)  # fmt: skip
PYTHON = """
    def loose(original, *args, **kwargs): return original(*args, **kwargs)
    def put(a): return a
    def one(): return 1
    class Whole:
        def __init__(self, a): self.a = a
"""
WRITTEN = {
    "strict": "(a, /, b=2, *rest, c, d=4, **more)",
    "named": "(a)",
    "half": "(a)",
    "root": "(a, /)",
    "hidden": "(*args, **kwargs)",
    "required": "(a, b=[])",
}
OF_CLASS = {"method": "(self, a, b=1)", "made": "(cls, a, b=1)", "wanted": "(self, a)", "__call__": "(self, a)"}
OF_CLASS |= dict.fromkeys(("prop", "slow", "once"), "(self)")
NOT_REWRITTEN = {
    "hidden",
    "named",
    "half",
    "root",
    "called",
    "bound",
    "exported",
    "Thing.slow",
    "Child.method",
    "Whole",
}


def parameters(name):
    return WRITTEN.get(name) or OF_CLASS.get(name.partition(".")[2]) or "(a, b=1)"


def same(name):
    """Returns a replacement with the target's parameters, of its kind."""
    word = {"awaited": "async def", "streamed": "async def"}.get(name, "def")
    body = "yield 1" if name in ("generated", "streamed") else "return 1"
    return f"    {word} same_{name.replace('.', '_')}{parameters(name)}: {body}\n"


MATCHES = {"(self)": "1, put: p.py:one"}
FORMS = {
    "replace": lambda name: f"replace: p.py:same_{name.replace('.', '_')}",
    "replace, uncounted": lambda name: f"replace: p.py:same_{name.replace('.', '_')}\n  counted: false",
    "replace, by any parameters": lambda name: "replace: p.py:any_call",
    "wrap": lambda name: "wrap: p.py:wrap_" + name.replace(".", "_"),
    "wrap, by any parameters": lambda name: "wrap: p.py:loose",
    "rewrite": lambda name: f"rewrite: {{match: z = {MATCHES.get(parameters(name), 'a, put: p.py:put')}}}",
}


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", UP)
    world.write("other/m.py", "def exported(a, b=1):\n    return a\n")
    text = PYTHON + "    def any_call(*args, **kwargs): return 1\n" + "".join(same(name) for name in NAMES[:-1])
    for name in NAMES[:-1]:
        given = parameters(name).removeprefix("(")
        result = "original(a)" if name == "dispatched" else "1"
        text += f"    def wrap_{name.replace('.', '_')}(original, {given}: return {result}\n"
    world.python(text)
    yield world
    world.close()


def entries(world, form, names):
    kinds = {name: "replace: p.py:Whole" if name == "Whole" else FORMS[form](name) for name in names}
    parts = [f"id: up.p{i}\n  target: up.m:{name}\n  {kinds[name]}" for i, name in enumerate(names)]
    return world.yaml("\n- ".join(parts))


def raw(module, name):
    """Returns what stands in the namespace, descriptors unbound."""
    holder, _, last = name.rpartition(".")
    return inspect.getattr_static(getattr(module, holder) if holder else module, last)


def inner(module, name):
    """Returns the function inside a property."""
    thing = raw(module, name)
    return getattr(thing, "fget", None) or getattr(thing, "func", None) or getattr(module, name, None)


def got(module, name):
    """Returns a target as upstream gets it: by its name, or from a property."""
    thing = functools.reduce(getattr, name.split("."), module)
    if isinstance(thing, property):
        return thing.fget
    return thing.func if isinstance(thing, functools.cached_property) else thing


def by_name(thing, module, name):
    """Returns whether a thing comes back from its pickle as itself."""
    return pickle.loads(pickle.dumps(thing)) is thing


def set_later(thing, module, name):
    thing.later = 5
    return vars(thing)["later"], "later" in dir(thing)


def code(thing):
    code = thing.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    mask = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_COROUTINE | inspect.CO_GENERATOR
    names = code.co_varnames[:count]
    return code.co_name, code.co_argcount, code.co_posonlyargcount, names, code.co_flags & mask


def hints(thing, module):
    return {name: getattr(value, "__name__", value) for name, value in typing.get_type_hints(thing).items()}


ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__text_signature__",
)
ATTRIBUTES += ("supports_mask", "__isabstractmethod__", "func", "args", "keywords", "flag", "__self__")
KINDS = ("isfunction", "isbuiltin", "isroutine", "ismethod", "iscoroutinefunction", "isgeneratorfunction", "isclass")
KINDS += ("isasyncgenfunction", "ismethoddescriptor", "isdatadescriptor", "isabstract")
VIEWS = {
    "type": lambda t, m, n: type(t).__name__,
    "class": lambda t, m, n: t.__class__.__name__,
    "type in its namespace": lambda t, m, n: type(raw(m, n)).__name__,
    "attributes in its namespace": lambda t, m, n: sorted(getattr(raw(m, n), "__dict__", {}).keys() - {"lock"}),
    "setter": lambda t, m, n: getattr(raw(m, n), "fset", None) is not None,
    "doc in its namespace": lambda t, m, n: getattr(raw(m, n), "__doc__", None),
    "abstract": lambda t, m, n: getattr(raw(m, n), "__isabstractmethod__", None),
    "annotations": lambda t, m, n: dict(t.__annotations__),
    "type hints": lambda t, m, n: hints(t, m),
    "signature": lambda t, m, n: str(inspect.signature(t)),
    "evaluated": lambda t, m, n: str(inspect.signature(t, eval_str=True)),
    "own signature": lambda t, m, n: str(inspect.signature(t, follow_wrapped=False)),
    "argspec": lambda t, m, n: str(inspect.getfullargspec(t)),
    "bound arguments": lambda t, m, n: str(inspect.signature(t).bind(3, c=1) if n == "strict" else None),
    "code": lambda t, m, n: code(t),
    "wrapped": lambda t, m, n: getattr(t.__wrapped__, "__qualname__", None),
    "unwrapped": lambda t, m, n: inspect.unwrap(t).__qualname__,
    "dict": lambda t, m, n: sorted(vars(t)),
    "set later": set_later,
    "callable": lambda t, m, n: (callable(t), t.__call__ is not None),
    "length": lambda t, m, n: (len(t), isinstance(t, typing.Sized)),
    "equal": lambda t, m, n: (t == t, t != 1, {t: 1}[t]),
    "weak": lambda t, m, n: weakref.ref(t)() is t,
    "pickle": by_name,
    "partial": lambda t, m, n: pickle.loads(pickle.dumps(functools.partial(t, 1))).func is t,
    "copy": lambda t, m, n: (copy.copy(t) is t, copy.deepcopy([t])[0] is t),
    "cache": lambda t, m, n: (t.cache_parameters(), t.cache_clear()),
    "register": lambda t, m, n: t.register(list, lambda a: "list") and (t([]), list in t.registry),
    "bases": lambda t, m, n: (t.__bases__, issubclass(t, object), t.__init_subclass__ is not None),
    "instance": lambda t, m, n: (
        inspect.isclass(t) and (isinstance(t(1), t), pickle.loads(pickle.dumps(t(1))).a, repr(t))
    ),
    "globals": lambda t, m, n: t.__globals__ is vars(m),
} | {name: lambda t, m, n, name=name: re.sub("0x\\w+", "", repr(getattr(t, name))) for name in ATTRIBUTES}
VIEWS |= {name: lambda t, m, n, name=name: getattr(inspect, name)(t) for name in KINDS}

PROXIED = ("cached", "awaited", "generated", "streamed", "half", "root", "called", "bound")
DIFFERENT = {
    (
        "*",
        PROXIED,
        ("type", "type in its namespace"),
    ): "no function in Python is one of these and calls another; `__class__` and `isinstance` are",
    ("*", ("half", "root", "called", "bound"), "copy"): "a copy would lose the patch: it is the substitute",
    ("*", ("half", "root", "called", "bound"), "pickle"): "it is pickled by the target's name, not by its content",
    ("*", ("half", "called", "bound"), "partial"): "the same",
    ("*", ("root",), "weak"): "a function in C cannot be referred to weakly, and a substitute can",
    (
        "*",
        ("exported", "Child.method"),
        ("__qualname__", "__module__", "unwrapped"),
    ): "pickled by the target: upstream's is unpatched",
    (
        "replace",
        "Whole",
        ("dict", "attributes in its namespace"),
    ): "Python 3.13 takes `__firstlineno__` out of a class whose `__module__` is set",
    ("any", "*", ("dict", "attributes in its namespace")): "`__signature__` stands there as long as the patch does",
    (
        "any",
        "*",
        ("code", "own signature"),
    ): "a call is passed on as it was made, since it shows what was given by name",
    ("any", "*", ("evaluated",)): "`inspect` does not evaluate a `__signature__`",
    ("uncounted", ("plain", "decorated", "Thing.method", "Child.method"), ("evaluated",)): "a copy of the replacement",
    ("uncounted", "*", ("globals", "type hints", "code")): "it is a copy of the replacement, and adds no frame",
    ("uncounted", ("decorated",), ("own signature", "argspec", "__defaults__")): "the same; nothing decorates it",
}


def view(function, thing, module, name):
    try:
        return function(thing, module, name)
    except Exception as error:  # noqa: BLE001 - what cannot be asked of the original cannot be asked of the substitute
        return type(error).__name__


def looked_at(module, names):
    return {
        (name, label): view(function, got(module, name), module, name)
        for name in names
        for label, function in VIEWS.items()
    }


def is_listed(form, name, label):
    for forms, names, labels in DIFFERENT:
        labels = (labels,) if isinstance(labels, str) else labels
        if (forms == "*" or forms in form) and (names == "*" or name in names) and label in labels:
            return True
    return False


@pytest.mark.parametrize("form", FORMS)
def test_a_substitute_is_seen_as_what_it_stands_for(world, form):
    names = [name for name in NAMES if form != "rewrite" or name not in NOT_REWRITTEN]
    names = [name for name in names if form.startswith("replace") or name != "Whole"]
    import up.m

    originals = looked_at(up.m, names)
    del sys.modules["up.m"], sys.modules["other.m"]
    with patch.applied(entries(world, form, names)) as ledger:
        patched = looked_at(importlib.import_module("up.m"), names)
        assert {row["state"] for row in ledger.rows()} <= {"applied", "used"}
    differences = {k: (originals[k], patched[k]) for k in originals if originals[k] != patched[k]}
    assert {key: values for key, values in differences.items() if not is_listed(form, *key)} == {}


def test_what_is_set_on_a_substitute_or_on_the_original_is_set_on_both_and_stays(world):
    world.write("up/later.py", "from up.m import plain, cached\nplain.later = cached.later = 2\nplain.flag = False\n")
    world.python("def wrap(original, *args, **kwargs): original.calls = 1 + getattr(original, 'calls', 0)\n")
    target = "wrap: p.py:wrap"
    with patch.applied(
        world.yaml(f"id: up.a\n  target: up.m:plain\n  {target}\n- id: up.b\n  target: up.m:cached\n  {target}")
    ):
        import up.later
        import up.m

        up.m.plain(1)
        up.m.cached(1)
        assert (up.m.plain.calls, up.m.cached.calls, up.m.plain.later) == (1, 1, 2)
    kept = {"supports_mask": True, "later": 2, "flag": False, "calls": 1}
    assert vars(up.m.plain) == kept
    assert up.m.cached.later == 2
    assert up.later.plain is up.m.plain


def test_a_default_that_the_replacement_changes_is_shown_and_used(world):
    world.python("def new(a, b=7): return b\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:plain")):
        import up.m

        assert up.m.plain(1) == 7 == inspect.signature(up.m.plain).parameters["b"].default
        assert up.m.plain.__defaults__ == (7,)
        captured = up.m.plain
    assert captured.__defaults__ == (1,)
    assert inspect.signature(up.m.plain).parameters["b"].default == 1


def test_a_wrapper_sees_a_call_as_it_was_made(world):
    world.python("def wrap(original, *args, **kwargs): return args, kwargs\n")
    with patch.applied(world.one("wrap: p.py:wrap", "up.m:plain")):
        import up.m

        assert up.m.plain(a=1) == ((), {"a": 1})
        assert str(inspect.signature(up.m.plain)) == "(a: 'Flag', b: 'int' = 1) -> 'Flag'"
    assert "__signature__" not in vars(up.m.plain)


def test_a_replacement_that_takes_more_is_given_more(world):
    world.python("def new(a, b=1, scale=1): return a * scale\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:plain")):
        import up.m

        assert up.m.plain(2, scale=3) == 6


def test_the_source_of_a_substitute_is_the_replacements_or_under_a_wrapper_the_originals(world):
    for kind, name, wanted in (
        ("replace: p.py:same_plain", "plain", "same_plain"),
        ("wrap: p.py:loose", "plain", "z = a"),
    ):
        with patch.applied(world.one(kind, f"up.m:{name}")):
            import up.m

            assert wanted in inspect.getsource(getattr(up.m, name))
            assert up.m.plain.__code__.co_qualname == "plain"


def test_another_process_unpickles_what_stands_in_by_upstreams_name(world):
    names = [
        name
        for name in NAMES
        if name not in ("closed", "hidden", "named", "Whole", "Thing.prop", "Thing.slow", "Thing.once")
    ]
    names = [name for name in names if name not in ("closed", "Child.method")]
    with patch.applied(entries(world, "replace", [*names, "Whole"])):
        import up.m

        things = [got(up.m, name) for name in names]
        text = pickle.dumps([*things, up.m.Whole(4), functools.partial(up.m.plain, 1)])
    script = (
        "import pickle, sys; sys.path.insert(0, 'site'); t = pickle.load(sys.stdin.buffer); print(t[0](5), t[-2].a)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script], input=text, capture_output=True, check=True)
    assert done.stdout.split() == [b"5", b"4"]


def test_what_is_registered_after_a_replacement_of_a_dispatching_function_takes_its_types(world):
    world.write("up/more.py", "from up.m import dispatched\n@dispatched.register\ndef _(x: list): return len(x)\n")
    with patch.applied(world.one("replace: p.py:any_call", "up.m:dispatched")) as ledger:
        import up.m
        import up.more

        captured = up.m.dispatched
        assert (captured([1, 2]), captured(5), captured.dispatch(object)(6)) == (2, 1, 1)
        assert ledger.rows()[0]["calls"] == 2
    assert captured is up.m.dispatched
    assert (captured([1, 2]), captured(5)) == (2, 5)


@pytest.mark.parametrize("form", FORMS)
def test_a_module_that_is_imported_again_is_patched_again(world, form):
    with patch.applied(entries(world, form, ["plain", "Thing.method"])) as ledger:
        import up.m

        before = up.m.plain
        importlib.reload(up.m)
        assert up.m.plain is not before
        if form != "wrap, by any parameters":
            up.m.plain(5), before(5), up.m.Child.method(None, 5)
        assert form.endswith(("uncounted", "by any parameters")) or [r["calls"] for r in ledger.rows()] == [2, 1]
    assert (up.m.plain(5), before(5)) == (5, 5)
    assert not [name for name in vars(up.m) if "torchport" in name]


def test_a_property_of_a_class_that_is_made_otherwise_is_refused(world):
    world.write(
        "up/odd.py",
        "class odd(property):\n    def __init__(self, f): super().__init__(f)\n"
        "class C:\n    @odd\n    def p(self): return 1\n",
    )
    world.python("def new(self): return 2\n")
    with pytest.raises(TargetError, match=r"up.odd:C.p is a odd, which cannot be made of a function"):
        with patch.applied(world.one("replace: p.py:new", "up.odd:C.p")):
            import up.odd  # noqa: F401


def test_a_class_shows_the_values_that_its_replacement_lacks_until_the_end(world):
    with patch.applied(world.one("replace: p.py:Whole", "up.m:Whole")):
        import up.m

        whole = up.m.Whole
        assert (whole.supports_mask, whole.__name__, whole.__module__, whole.__doc__) == (
            True,
            "Whole",
            "up.m",
            "A class.",
        )
    assert (hasattr(whole, "supports_mask"), whole.__module__) == (False, "torchport_patches.up.p")
