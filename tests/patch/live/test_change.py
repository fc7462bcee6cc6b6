"""Every shape of target, put in place and taken back."""

from __future__ import annotations

import functools
import inspect
import sys

import pytest
from fakes.patch_world import World, namespace

from torchport import patch
from torchport.errors import SignatureError, TargetError

UP = """
    import functools

    SIZE = 4
    SHAPE = (1, 2)
    RATE = 0.5
    NAMES = ["a"]

    def add(a, b=1):
        return a + b

    def twice(function):
        @functools.wraps(function)
        def both(*args, **kwargs):
            return 2 * function(*args, **kwargs)
        return both

    @twice
    def doubled(a):
        return a

    @functools.lru_cache
    def cached(a):
        return [a]

    class Thing:
        LIMIT = 10

        def __init__(self, a):
            self.a = a

        def method(self, b):
            return self.a + b

        @staticmethod
        def static(b):
            return b

        @classmethod
        def make(cls, a):
            return cls(a)

        @property
        def double(self):
            return 2 * self.a

        @functools.cached_property
        def once(self):
            return 3 * self.a

        class Inner:
            def deep(self):
                return "deep"

    class Child(Thing):
        pass

    thing = Thing(1)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", UP)
    yield world
    world.close()


def _checked(world, entries, check):
    """Applies, imports, checks, and compares the namespace with that before."""
    import up.m

    before = namespace(up.m)
    del sys.modules["up.m"]
    with patch.applied(entries) as ledger:
        import up.m as m

        check(m)
        row = ledger.rows()[0]
    fresh = namespace(sys.modules["up.m"])
    assert fresh.keys() == before.keys()
    with patch.applied(entries) as late:
        check(sys.modules["up.m"])
        assert late.rows()[0]["late"]
    assert namespace(sys.modules["up.m"]) == fresh
    return row


@pytest.mark.parametrize(
    ("target", "new", "call", "wanted"),
    [
        ("add", "def new(a, b=1): return a * 10 + b", lambda m: m.add(2), 21),
        ("doubled", "def new(a): return -a", lambda m: m.doubled(2), -2),
        ("cached", "def new(a): return (a,)", lambda m: m.cached(1), (1,)),
        ("Thing.method", "def new(self, b): return self.a - b", lambda m: m.Thing(5).method(2), 3),
        ("Thing.static", "def new(b): return -b", lambda m: (m.Thing.static(1), m.thing.static(1)), (-1, -1)),
        ("Thing.make", "def new(cls, a): return cls(a + 100)", lambda m: m.Child.make(1).a, 101),
        ("Thing.double", "def new(self): return 20 * self.a", lambda m: m.thing.double, 20),
        ("Thing.once", "def new(self): return 30 * self.a", lambda m: m.Thing(1).once, 30),
        ("Thing.Inner.deep", "def new(self): return 'up'", lambda m: m.Thing.Inner().deep(), "up"),
        ("Child.method", "def new(self, b): return 'child'", lambda m: m.Child(1).method(1), "child"),
        ("Thing.__init__", "def new(self, a): self.a = 7", lambda m: m.Thing(1).a, 7),
    ],
)
def test_a_replacement_takes_the_place_of_every_shape_of_target(world, target, new, call, wanted):
    world.python(new)
    entries = world.one("replace: p.py:new", f"up.m:{target}")

    def check(m):
        assert call(m) == wanted

    row = _checked(world, entries, check)
    assert row["state"] == "used"
    assert row["calls"] >= 1


@pytest.mark.parametrize(
    ("target", "new", "call", "wanted"),
    [
        ("add", "def new(original, a, b=1): return original(a, b) * 10", lambda m: m.add(2), 30),
        ("doubled", "def new(original, a): return original(a) + 1", lambda m: m.doubled(2), 5),
        ("Thing.method", "def new(original, self, b): return -original(self, b)", lambda m: m.thing.method(2), -3),
        ("Thing.static", "def new(original, b): return [original(b)]", lambda m: m.Thing.static(1), [1]),
        ("Thing.make", "def new(original, cls, a): return original(cls, -a)", lambda m: m.Child.make(1).a, -1),
        ("Thing.double", "def new(original, self): return original(self) + 1", lambda m: m.thing.double, 3),
        ("add", "def new(original, *args, **kwargs): return original(*args, **kwargs)", lambda m: m.add(b=2, a=1), 3),
    ],
)
def test_a_wrapper_receives_the_original_first(world, target, new, call, wanted):
    world.python(new)
    entries = world.one("wrap: p.py:new", f"up.m:{target}")

    def check(m):
        assert call(m) == wanted

    assert _checked(world, entries, check)["state"] == "used"


def test_a_class_is_replaced_by_a_class_and_its_instances_are_counted(world):
    world.python("class New:\n    def __init__(self, a): self.a = -a\n")
    entries = world.one("replace: p.py:New", "up.m:Child")
    with patch.applied(entries) as ledger:
        import up.m

        assert up.m.Child(3).a == -3
        assert type(up.m.Child(3)).__name__ == "Child"
        assert ledger.rows()[0]["calls"] == 2
    assert up.m.Child(3).a == 3


def test_a_replaced_function_shows_its_own_source_under_upstreams_name(world):
    world.python("def new(a, b=1):\n    return 'shown'\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:add")):
        import up.m

        assert "shown" in inspect.getsource(up.m.add)
        assert str(inspect.signature(up.m.add)) == "(a, b=1)"
        assert up.m.add.__name__ == "add"


def test_an_uncounted_replacement_adds_no_frame(world):
    world.python("import sys\ndef new(a, b=1):\n    return sys._getframe(1).f_code.co_name\n")
    entries = world.one("replace: p.py:new", "up.m:add", "counted: false")
    with patch.applied(entries) as ledger:
        import up.m

        assert up.m.add(1) == "test_an_uncounted_replacement_adds_no_frame"
        assert ledger.rows()[0]["calls"] is None


def test_a_missing_name_is_refused_before_the_import_with_the_closest_one(world):
    world.python("def new(a): return a")
    with pytest.raises(TargetError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:ad")):
        pass
    assert str(caught.value) == (
        "patches/up/p.yaml:1: 'up.one' finds no 'ad' in up/m.py. "
        "Did you mean 'add'? Known: Child, Thing, add, cached, doubled, twice."
    )
    assert "up.m" not in sys.modules


def test_a_missing_method_is_refused_before_the_import(world):
    world.write("up/m.py", "class Thing:\n    def method(self): pass\n")
    world.python("def new(self): return 1")
    with pytest.raises(TargetError, match=r"finds no 'metod' in up/m.py. Did you mean 'method'"):
        patch.applied(world.one("replace: p.py:new", "up.m:Thing.metod")).__enter__()


def test_a_missing_module_is_refused(world):
    world.python("def new(a): return a")
    with pytest.raises(TargetError, match=r"'up.one' finds no module up.absent: no 'up.absent'. Install the upstream"):
        patch.applied(world.one("replace: p.py:new", "up.absent:add")).__enter__()


def test_a_name_made_at_run_time_is_sought_when_the_module_is_there(world):
    world.write("up/m.py", "globals()['made'] = lambda: 1\n")
    world.python("def new(): return 2")
    with patch.applied(world.one("replace: p.py:new", "up.m:made")):
        import up.m

        assert up.m.made() == 2
    del sys.modules["up.m"]
    with pytest.raises(TargetError, match=r"'up.one' finds no 'absent' in up.m"):
        with patch.applied(world.one("replace: p.py:new", "up.m:absent")):
            import up.m


def test_a_function_does_not_take_the_place_of_a_class_nor_the_reverse(world):
    world.python("def new(a): return a\nclass New: pass\n")
    with pytest.raises(SignatureError, match=r"up.m:Thing is a class, and 'p.py:new' is none. Write a class"):
        patch.applied(world.one("replace: p.py:new", "up.m:Thing")).__enter__()
    with pytest.raises(SignatureError, match=r"up.m:add \(up/m.py:9\) is a function, and 'p.py:New' is none"):
        patch.applied(world.one("replace: p.py:New", "up.m:add")).__enter__()


def test_a_class_cannot_be_wrapped(world):
    world.python("def new(original, a): return original(a)")
    with pytest.raises(SignatureError, match=r"up.m:Thing is a class, and a wrapper takes a function. Wrap one of its"):
        with patch.applied(world.one("wrap: p.py:new", "up.m:Thing")):
            import up.m  # noqa: F401


def test_a_constant_cannot_be_replaced_by_a_function(world):
    world.python("def new(): return 1")
    with pytest.raises(TargetError, match=r"up.m:SIZE is a int, and 'replace' takes a function or class. Patch the f"):
        with patch.applied(world.one("replace: p.py:new", "up.m:SIZE")):
            import up.m  # noqa: F401


def test_a_captured_replacement_does_what_the_original_does_afterwards(world):
    world.python("def new(a, b=1): return 'new'\ndef wrap(original, self, b): return 'wrap'\n")
    entries = world.yaml(
        "id: up.add\n  target: up.m:add\n  replace: p.py:new\n"
        "- id: up.method\n  target: up.m:Thing.method\n  wrap: p.py:wrap"
    )
    with patch.applied(entries):
        import up.m

        add, method = up.m.add, up.m.thing.method
        assert (add(1), method(1)) == ("new", "wrap")
    assert (add(1), method(1)) == (2, 2)


def test_torch_decorators_are_seen_through(world):
    world.write(
        "up/t.py",
        """
        import torch

        @torch.compiler.disable
        def off(a):
            b = a + 1
            return b

        class Net(torch.nn.Module):
            @torch.no_grad()
            def forward(self, a):
                b = a * 2
                return b
        """,
    )
    world.python("def three(a): return a + 3\ndef four(a): return a * 4\ndef new(self, a): return a * 5\n")
    entries = world.yaml(
        "id: up.off\n  target: up.t:off\n  rewrite: {match: b = a + 1, put: p.py:three}\n"
        "- id: up.net\n  target: up.t:Net.forward\n  rewrite: {match: b = a * 2, put: p.py:four}"
    )
    import torch

    with patch.applied(entries):
        import up.t

        assert up.t.off(1) == 4
        result = up.t.Net()(torch.ones(1, requires_grad=True))
        assert (result.item(), result.requires_grad) == (4.0, False)
    assert up.t.off(1) == 2
    with patch.applied(world.one("replace: p.py:new", "up.t:Net.forward")):
        assert up.t.Net()(torch.ones(1)).item() == 5


def test_partial_and_bound_callables_are_left_to_their_own_modules(world):
    world.write("up/q.py", "import functools\nhalf = functools.partial(divmod, 1)\n")
    world.python("def new(*args): return 'new'")
    with patch.applied(world.one("replace: p.py:new", "up.q:half")):
        import up.q

        assert up.q.half(2) == "new"
    assert isinstance(up.q.half, functools.partial)
