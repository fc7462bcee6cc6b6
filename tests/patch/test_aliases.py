"""Who holds the original: found under any name and in any container, rebound, and back again."""

from __future__ import annotations

import functools
import sys

import pytest
from fakes.patch_world import World, namespace

from torchport import patch
from torchport.errors import AliasError, TooLateError

HOLDERS = """
    import collections
    import functools
    from up.m import f
    from up.m import f as other
    import up.m

    LIST = [f, 1]
    DICT = {"f": f}
    KEYS = {1: 1, f: 2, 3: 3}
    TUPLE = (f, 2)
    NESTED = {"a": [(f,)]}
    SET = {f}
    HALF = functools.partial(f, 1)
    ARGUMENT = functools.partial(map, f)
    Pair = collections.namedtuple("Pair", "a b")
    PAIR = Pair(f, 1)

    def default(a, g=f):
        return g(a)

    def keyword(a, *, g=f):
        return g(a)

    def closure():
        g = f
        return lambda a: g(a)

    closed = closure()

    @functools.wraps(f)
    def decorated(a):
        return f(a)

    class Holder:
        method = staticmethod(f)
        plain = f

        def __init__(self):
            self.f = f

    class Slots:
        __slots__ = ("g",)

    holder = Holder()

    def results():
        return [
            f(1), other(1), LIST[0](1), DICT["f"](1), TUPLE[0](1), NESTED["a"][0][0](1), next(iter(SET))(1), HALF(),
            list(KEYS)[1](1),
            next(ARGUMENT([1])), PAIR.a(1), default(1), keyword(1), closed(1), decorated.__wrapped__(1),
            Holder.method(1), Holder.plain(1), holder.f(1),
        ]
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", "def f(a):\n    return 'old'\n")
    world.python("def new(a): return 'new'")
    yield world
    world.close()


def test_a_late_patch_reaches_every_holder_and_leaves_each_as_it_was(world):
    world.write("up/user.py", HOLDERS)
    import up.user

    names = namespace(up.user)
    assert set(up.user.results()) == {"old"}
    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        assert up.user.results() == ["new"] * 18
        assert "rebound a cell" in ledger.rows()[0]["detail"]
        assert "rebound a partial" in ledger.rows()[0]["detail"]
    assert up.user.results() == ["old"] * 18
    kept = {name: key for name, key in namespace(up.user).items() if name not in ("TUPLE", "PAIR", "Holder.method")}
    assert kept == {name: names[name] for name in kept}


def test_who_captures_the_replacement_while_it_is_in_force_has_the_original_afterwards(world):
    world.write("up/user.py", HOLDERS)
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.user

        assert up.user.results() == ["new"] * 18
    assert up.user.results() == ["old"] * 18


def test_an_uncounted_replacement_is_given_back_as_well(world):
    world.write("up/user.py", "from up.m import f\nLIST = [f]\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f", "counted: false")):
        import up.user

        assert up.user.f(1) == "new"
    assert (up.user.f(1), up.user.LIST[0](1)) == ("old", "old")
    assert sys.modules["torchport_patches.up.p"].new(1) == "new"


def test_the_dead_patch_of_the_hand_port_is_repaired_or_refused_and_never_silent(world):
    """The case of the practice: `attention` is changed after the transformer took its function by name."""
    world.write("up/commons/states.py", "def get_state():\n    return 'nccl'\n")
    world.write(
        "up/attention.py",
        """
        import torch
        from up.commons.states import get_state

        def sequence_parallel(q):
            return "flash", get_state()

        @torch.compiler.disable
        def parallel(q):
            return sequence_parallel(q)
        """,
    )
    world.write("up/transformer.py", "from .attention import parallel\ndef forward(q):\n    return parallel(q)\n")
    world.python("def plain(q): return 'plain'\n")
    import up.transformer

    up.attention.parallel = functools.wraps(up.attention.parallel)(lambda q: "assigned")
    assert up.transformer.forward(1) == ("flash", "nccl")  # the assignment changed nothing that the model sees
    up.attention.parallel = up.attention.parallel.__wrapped__
    with patch.applied(world.one("replace: p.py:plain", "up.attention:parallel")) as ledger:
        assert up.transformer.forward(1) == "plain"
        assert ledger.rows()[0]["detail"] == "rebound up.transformer.parallel"
    assert up.transformer.forward(1) == ("flash", "nccl")
    with pytest.raises(TooLateError) as caught:
        patch.applied(world.one("replace: p.py:plain", "up.attention:parallel", "aliases: fail")).__enter__()
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up.attention was imported before its patch (up/transformer.py:1), and "
        "up.attention:parallel is still held by up.transformer.parallel (up/transformer.py:1). "
        "Import it inside 'with patch.applied(...)'."
    )


def test_a_holder_that_cannot_be_rebound_refuses_and_leaves_everything_as_it_was(world):
    world.write("up/user.py", "from up.m import f\nLIST = [f]\nbound = f.__get__(1)\nPENDING = map(f, [1])\n")
    import up.user

    before = namespace(up.user), namespace(sys.modules["up.m"])
    with pytest.raises(TooLateError, match=r"up.m:f is still held by up.user.PENDING, a map"):
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
    assert (namespace(up.user), namespace(sys.modules["up.m"])) == before
    assert up.user.LIST[0] is up.user.f


C_FIELDS = """
    import collections
    import dataclasses
    import functools
    def f(a):
        return "old"
    {line}
"""


@pytest.mark.parametrize(
    ("line", "holder"),
    [
        ("fast = functools.lru_cache(f)", "up.m.fast, a _lru_cache_wrapper"),
        ("made = collections.defaultdict(f, a=f)", "up.m.made, a defaultdict"),
        ("class S:\n        __slots__ = ('f', '__dict__')\n    s = S(); s.f = f; s.g = f", "up.m.s, a S"),
        ("line = collections.deque([1, f])", "up.m.line, a deque"),
        (
            "class D:\n        a: object = dataclasses.field(default_factory=f)\n    dataclasses.dataclass(D)",
            "up.m.D.__dataclass_fields__['a'], a Field",
        ),
        ("class K: table = {'a': [1, functools.lru_cache(f)]}", "up.m.K.table['a'][1], a _lru_cache_wrapper"),
        ("class K: pass\n    k = K(); k.made = collections.defaultdict(f)", "up.m.k.made, a defaultdict"),
        ("pairs = [(1, map(f, [1]))]", "up.m.pairs[0][1], a map"),
    ],
)
def test_a_reference_that_no_name_or_item_explains_is_refused_by_name(world, line, holder):
    world.write("up/m.py", C_FIELDS.replace("{line}", line))
    with pytest.raises(AliasError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m
    assert f"up.m:f is still held by {holder}" in str(caught.value)
    with patch.applied(world.one("replace: p.py:new", "up.m:f", "aliases: report")) as ledger:
        import up.m  # noqa: F401

        assert f"still held by {holder}" in ledger.rows()[0]["detail"]


WEAK = """
    import weakref
    from up.m import f

    REF = weakref.ref(f)
    REFS = [weakref.ref(f), 1]
    CALLED = []
    WATCHED = weakref.ref(f, CALLED.append)
    BY_NAME = weakref.WeakValueDictionary({"f": f})
    BY_FUNCTION = weakref.WeakKeyDictionary({f: 1})
    MEMBERS = weakref.WeakSet([f])

    class Holder:
        def __init__(self):
            self.ref = weakref.ref(f)

    holder = Holder()

    def results():
        refs = [REF(), REFS[0](), WATCHED(), BY_NAME["f"], *BY_FUNCTION, *MEMBERS, holder.ref()]
        return [f(1), *(function and function(1) for function in refs)]
"""


def test_who_holds_a_function_weakly_is_repaired_and_given_back(world):
    world.write("up/user.py", WEAK)
    import up.user

    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        assert up.user.results() == ["new"] * 8
        assert "rebound up.user.REF" in ledger.rows()[0]["detail"]
    assert up.user.results() == ["old"] * 8
    assert up.user.CALLED == []


def test_who_holds_a_replacement_weakly_has_the_original_afterwards(world):
    world.write("up/user.py", WEAK)
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.user

        assert up.user.results() == ["new"] * 8
    assert up.user.results() == ["old"] * 8


def test_a_weak_reference_that_cannot_be_made_anew_is_refused_by_name(world):
    world.write(
        "up/m.py", "import weakref\nclass Own(weakref.ref): pass\ndef f(a):\n    return 'old'\nkept = [Own(f)]\n"
    )
    with pytest.raises(AliasError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m  # noqa: F401
    assert "up.m:f is still held by up.m.kept[0], a Own. Patch that holder instead" in str(caught.value)


def test_a_holder_that_shall_not_be_rebound_is_refused_by_name(world):
    world.write("up/user.py", "from up.m import f\nTABLE = {'a': [1, f]}\ndel f\n")
    import up.user  # noqa: F401

    with pytest.raises(TooLateError, match=r"up.m:f is still held by up.user.TABLE\['a'\], a list. Import it"):
        patch.applied(world.one("replace: p.py:new", "up.m:f", "aliases: fail")).__enter__()


def test_a_bound_method_that_somebody_keeps_is_rebuilt(world):
    world.write("up/m.py", "class C:\n    def f(self, a): return 'old'\nc = C()\nkept = [c.f]\n")
    world.python("def new(self, a): return 'new'")
    import up.m

    with patch.applied(world.one("replace: p.py:new", "up.m:C.f")):
        assert (up.m.c.f(1), up.m.kept[0](1)) == ("new", "new")
    assert (up.m.c.f(1), up.m.kept[0](1)) == ("old", "old")


def test_a_registry_in_another_module_is_repaired(world):
    world.write("up/registry.py", "TABLE = {}\ndef register(f):\n    TABLE[f.__name__] = f\n    return f\n")
    world.write("up/m.py", "from up.registry import register\n@register\ndef f(a):\n    return 'old'\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m  # noqa: F401

        assert sys.modules["up.registry"].TABLE["f"](1) == "new"
    assert sys.modules["up.registry"].TABLE["f"](1) == "old"


def test_an_imported_name_is_changed_alone_where_the_entry_says_so(world):
    world.write("up/user.py", "from up.m import f\n")
    with patch.applied(world.one("replace: p.py:new", "up.user:f", "aliases: report")) as ledger:
        import up.m
        import up.user

        assert (up.user.f(1), up.m.f(1)) == ("new", "old")
        assert ledger.rows()[0]["detail"] == "still held by up.m.f"
    assert up.user.f is up.m.f


def test_a_function_that_a_module_only_passes_on_is_refused_with_its_home(world):
    world.write("up/__init__.py", "from .m import f as g\nfrom . import user\n")
    world.write("up/user.py", "from .m import f\n")
    with pytest.raises(AliasError) as caught:
        patch.applied(world.one("replace: p.py:new", "up:g")).__enter__()
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up:g is imported from up.m (up/__init__.py:1). "
        "Write up.m:f, or 'aliases: report' to change this name alone."
    )
    import up

    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        assert (up.g(1), up.user.f(1)) == ("new", "new")


def test_a_function_of_another_package_or_with_a_definition_beside_its_import_is_changed_where_it_is_used(world):
    world.write("other/m.py", "def f(a):\n    return 'old'\n")
    world.write(
        "up/user.py",
        "from other.m import f\ndef g(a): return 1\ntry:\n    from .fast import g\nexcept ImportError: 0\n",
    )
    for name in ("f", "g"):
        with patch.applied(world.one("replace: p.py:new", f"up.user:{name}")):
            import up.user

            assert getattr(up.user, name)(1) == "new"
    assert up.user.f(1) == sys.modules["other.m"].f(1) == "old"


def test_an_inherited_method_is_changed_for_the_class_alone(world):
    world.write("up/m.py", "class A:\n    def f(self, a): return 'old'\nclass B(A): pass\nclass C(A): pass\n")
    world.python("def new(self, a): return 'new'")
    with patch.applied(world.one("replace: p.py:new", "up.m:B.f")):
        import up.m

        assert (up.m.A().f(1), up.m.B().f(1), up.m.C().f(1)) == ("old", "new", "old")
    assert "f" not in vars(up.m.B)


def test_a_class_that_has_a_subclass_or_an_instance_is_refused(world):
    world.python("class New:\n    pass\n")
    world.write("up/m.py", "class A:\n    pass\nclass B(A):\n    pass\n")
    with pytest.raises(AliasError, match=r"up.m:A is still held by its subclass up.m.B. Patch that holder instead"):
        with patch.applied(world.one("replace: p.py:New", "up.m:A")):
            import up.m
    world.write("up/m.py", "class A:\n    pass\n\nthing = A()\n")
    with pytest.raises(AliasError, match=r"up.m:A is still held by an instance of it, A"):
        with patch.applied(world.one("replace: p.py:New", "up.m:A")):
            import up.m  # noqa: F401


def test_a_class_is_replaced_where_it_is_held_and_its_super_still_works(world):
    world.write(
        "up/m.py",
        """
        class Base:
            def who(self):
                return "base"

        class A(Base):
            def who(self):
                return super().who() + " a"

        TABLE = {"a": A}
        """,
    )
    world.python("class New:\n    def who(self):\n        return 'new'\n")
    with patch.applied(world.one("replace: p.py:New", "up.m:A")):
        import up.m

        assert up.m.TABLE["a"]().who() == "new"
    assert up.m.TABLE["a"]().who() == "base a"


def test_an_undone_set_leaves_nothing_of_it_alive(world):
    import gc
    import weakref

    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m

        gone = weakref.ref(up.m.f)
    gc.collect()
    assert gone() is None or gone()(1) == "old"


def test_a_closure_that_only_waits_to_be_collected_is_no_holder(world):
    import gc

    import up.m

    def leave_a_circle():
        function, circle = up.m.f, []
        circle.append(lambda: (function, circle))

    gc.disable()
    try:
        leave_a_circle()
        with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
            assert up.m.f(1) == "new"
            assert ledger.rows()[0]["detail"] == ""
    finally:
        gc.enable()
