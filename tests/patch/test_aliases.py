"""Who holds the original: found under any name and in any container, then rebound or refused, and back again."""

from __future__ import annotations

import functools
import re
import sys

import pytest
from fakes.patch_world import World, namespace

from torchport import patch
from torchport.errors import AliasError, TooLateError

REBOUND = """
    import functools
    from up.m import f
    from up.m import f as other
    import up.m

    LIST = [f, 1]
    DICT = {"f": f}
    KEYS = {1: 1, f: 2, 3: 3}
    TUPLE = (f, 2)
    TWICE = (f, f)
    NESTED = {"a": [(f, (1, f))]}
    SET = {f}

    def keyword(a, *, g=f):
        return g(a)

    @functools.wraps(f)
    def decorated(a):
        return f(a)

    class Holder:
        method = staticmethod(f)
        plain = f
        methods = (staticmethod(f),)

        def __init__(self):
            self.f = f

    holder = Holder()

    def results():
        return [
            f(1), other(1), LIST[0](1), DICT["f"](1), TUPLE[0](1), TWICE[0](1), TWICE[1](1), NESTED["a"][0][0](1),
            NESTED["a"][0][1][1](1), next(iter(SET))(1), list(KEYS)[1](1), keyword(1), decorated.__wrapped__(1),
            Holder.method(1), Holder.plain(1), Holder.methods[0](1), holder.f(1),
        ]
"""
CAPTURED = """
    import collections
    import functools
    import weakref
    from up.m import f

    HALF = functools.partial(f, 1)
    ARGUMENT = functools.partial(map, f)
    Pair = collections.namedtuple("Pair", "a b")
    PAIR = Pair(f, 1)
    FROZEN = frozenset([f])
    BOUND = f.__get__(1)
    REF = weakref.ref(f)
    REFS = [weakref.ref(f), 1]
    DIED = []
    WATCHED = weakref.ref(f, DIED.append)
    BY_NAME = weakref.WeakValueDictionary({"f": f})
    BY_FUNCTION = weakref.WeakKeyDictionary({f: 1})
    MEMBERS = weakref.WeakSet([f])

    def default(a, g=f):
        return g(a)

    def closure():
        g = f
        return lambda a: g(a)

    closed = closure()

    class Holder:
        asked = property(f)
        made = classmethod(f)

    def results():
        return [
            HALF(), next(ARGUMENT([1])), PAIR.a(1), next(iter(FROZEN))(1), BOUND(), REF()(1), REFS[0]()(1),
            WATCHED()(1), BY_NAME["f"](1), *[g(1) for g in BY_FUNCTION], *[g(1) for g in MEMBERS], default(1),
            closed(1), Holder().asked, Holder.made(),
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
    world.write("up/user.py", REBOUND)
    import up.user

    names = namespace(up.user)
    assert up.user.results() == ["old"] * 17
    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        assert up.user.results() == ["new"] * 17
        assert "rebound a set" in ledger.rows()[0]["detail"]
        assert "rebound a staticmethod of up.user" in ledger.rows()[0]["detail"]
    assert up.user.results() == ["old"] * 17
    anew = ("TUPLE", "TWICE", "Holder.method", "Holder.methods")  # what cannot be changed is made anew
    kept = {name: key for name, key in namespace(up.user).items() if name not in anew}
    assert kept == {name: names[name] for name in kept}


def test_a_holder_that_the_collector_has_frozen_is_reached_too(world, thawed):
    """A run freezes what is there before a stage, and a stage's own imports are patched later."""
    import gc

    world.write("up/user.py", "from up.m import f\nLIST = [f]\n")
    import up.user

    gc.freeze()
    try:
        with patch.applied(world.one("replace: p.py:new", "up.m:f")):
            assert up.user.LIST[0](1) == "new"
        assert up.user.LIST[0](1) == "old"
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("held", "kind"), [("{(f, 1)}", "tuple"), ("{(f, 1): 2}", "tuple")])
def test_a_tuple_in_a_set_or_a_key_is_refused_as_its_hash_would_change(world, held, kind):
    world.write("up/user.py", f"from up.m import f\nHELD = {held}\n")
    import up.user

    with pytest.raises(TooLateError, match=rf"up\.m:f is still held by up\.user\.HELD\S*, a {kind}"):
        with patch.applied(world.one("replace: p.py:new", "up.m:f")):
            pass
    assert [function(1) for function, _ in up.user.HELD] == ["old"]


def test_two_patches_of_functions_in_one_tuple_reach_both(world):
    world.write("up/m.py", "def f(a):\n    return 'old'\ndef g(a):\n    return 'old'\nBOTH = (f, g)\n")
    entries = world.yaml(
        "id: up.f\n  target: up.m:f\n  replace: p.py:new\n- id: up.g\n  target: up.m:g\n  replace: p.py:new"
    )
    with patch.applied(entries):
        import up.m

        assert [function(1) for function in up.m.BOTH] == ["new", "new"]
    assert [function(1) for function in up.m.BOTH] == ["old", "old"]


def test_who_captures_the_replacement_while_it_is_in_force_has_the_original_afterwards(world):
    world.write("up/user.py", REBOUND)
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.user

        assert up.user.results() == ["new"] * 17
    assert up.user.results() == ["old"] * 17
    assert up.user.LIST[0] is up.user.DICT["f"] is next(iter(up.user.SET)) is up.user.f is sys.modules["up.m"].f


@pytest.mark.parametrize("more", ["", "counted: false"])
def test_who_captures_it_and_cannot_be_rebound_keeps_a_function_that_does_what_the_original_does(world, more):
    import gc

    world.write("up/user.py", CAPTURED)
    with patch.applied(world.one("replace: p.py:new", "up.m:f", more)):
        import up.user

        assert up.user.results() == ["new"] * 15
    gc.collect()
    assert up.user.results() == ["old"] * 15
    assert up.user.DIED == []


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
    up.transformer.frozen = frozenset([up.attention.parallel])
    with pytest.raises(TooLateError) as caught:
        patch.applied(world.one("replace: p.py:plain", "up.attention:parallel")).__enter__()
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up.attention was imported before its patch (up/transformer.py:1), and "
        "up.attention:parallel is still held by up.transformer.frozen, a frozenset (up/transformer.py:1). "
        "Import it inside 'with patch.applied(...)'."
    )
    assert up.transformer.forward(1) == ("flash", "nccl")


def test_a_holder_that_cannot_be_rebound_refuses_and_leaves_everything_as_it_was(world):
    world.write("up/user.py", "from up.m import f\nLIST = [f]\nPENDING = map(f, [1])\n")
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
        import up.m  # noqa: F401
    assert f"up.m:f is still held by {holder}" in str(caught.value)


NOT_REBOUND = [
    ("HALF = functools.partial(f, 1)", "up.m.HALF, a partial"),
    ("ARGUMENT = functools.partial(map, f)", "up.m.ARGUMENT.args, a tuple"),
    ("PAIR = collections.namedtuple('Pair', 'a b')(f, 1)", "up.m.PAIR, a Pair"),
    ("FROZEN = frozenset([f])", "up.m.FROZEN, a frozenset"),
    ("BOUND = [f.__get__(1)]", "up.m.BOUND[0], a method"),
    ("def default(a, g=f): pass", "up.m.default.__defaults__, a tuple"),
    ("def make(g): return lambda a: g(a)\nclosed = make(f)", "up.m.closed.__closure__[0], a cell"),
    ("class C: asked = property(f)", "up.m.C.asked, a property"),
    ("class C: made = classmethod(f)", "up.m.C.made, a classmethod"),
    ("REF = weakref.ref(f)", "up.m.REF, a ReferenceType"),
    ("REFS = [weakref.ref(f)]", "up.m.REFS[0], a ReferenceType"),
    ("BY_NAME = weakref.WeakValueDictionary({'f': f})", "up.m.BY_NAME.data['f'], a KeyedRef"),
    ("BY_FUNCTION = weakref.WeakKeyDictionary({f: 1})", "up.m.BY_FUNCTION.data, a ReferenceType"),
    ("MEMBERS = weakref.WeakSet([f])", "up.m.MEMBERS.data, a ReferenceType"),
    ("NESTED = {'a': (1, frozenset([f]))}", "up.m.NESTED['a'][1], a frozenset"),
    ("PAIRS = frozenset([(1, f)])", "up.m.PAIRS, a tuple"),
]


@pytest.mark.parametrize(("line", "holder"), NOT_REBOUND)
def test_a_form_that_no_upstream_needs_is_refused_with_the_holder_and_leaves_everything_as_it_was(world, line, holder):
    text = "import collections, functools, weakref\ndef f(a):\n    return 'old'\nALSO = [f]\n"
    world.write("up/m.py", text + line + "\n")
    with pytest.raises(AliasError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m
    assert f"up.m:f is still held by {holder}" in str(caught.value)
    assert str(caught.value).endswith("Patch that holder instead.")
    import up.m

    before = namespace(up.m)
    with pytest.raises(TooLateError, match=f"up.m:f is still held by {re.escape(holder)}"):
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
    assert namespace(up.m) == before
    assert up.m.ALSO[0] is up.m.f


def test_a_weak_reference_that_cannot_be_made_anew_is_refused_by_name(world):
    world.write(
        "up/m.py", "import weakref\nclass Own(weakref.ref): pass\ndef f(a):\n    return 'old'\nkept = [Own(f)]\n"
    )
    with pytest.raises(AliasError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m  # noqa: F401
    assert "up.m:f is still held by up.m.kept[0], a Own. Patch that holder instead" in str(caught.value)


def test_a_function_that_knows_itself_by_its_closure_is_no_holder(world):
    text = "def make():\n    def f(a):\n        return getattr(f, 'said', 'old')\n    return f\nf = make()\n"
    world.write("up/m.py", text)
    world.python("def wrap(original, a): return original(a) + ' wrapped'")
    with patch.applied(world.one("wrap: p.py:wrap", "up.m:f")):
        import up.m

        assert up.m.f(1) == "old wrapped"
    assert up.m.f(1) == "old"


def test_a_bound_method_that_somebody_keeps_is_refused(world):
    world.write("up/m.py", "class C:\n    def f(self, a): return 'old'\nc = C()\nkept = [c.f]\n")
    world.python("def new(self, a): return 'new'")
    with pytest.raises(AliasError, match=r"up.m:C.f is still held by up.m.kept\[0\], a method"):
        with patch.applied(world.one("replace: p.py:new", "up.m:C.f")):
            import up.m
    import up.m

    assert (up.m.c.f(1), up.m.kept[0](1)) == ("old", "old")


def test_a_registry_in_another_module_is_repaired(world):
    world.write("up/registry.py", "TABLE = {}\ndef register(f):\n    TABLE[f.__name__] = f\n    return f\n")
    world.write("up/m.py", "from up.registry import register\n@register\ndef f(a):\n    return 'old'\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m  # noqa: F401

        assert sys.modules["up.registry"].TABLE["f"](1) == "new"
    assert sys.modules["up.registry"].TABLE["f"](1) == "old"


def test_a_function_that_a_module_only_passes_on_is_refused_with_its_home(world):
    world.write("up/__init__.py", "from .m import f as g\nfrom . import user\n")
    world.write("up/user.py", "from .m import f\n")
    with pytest.raises(AliasError) as caught:
        patch.applied(world.one("replace: p.py:new", "up:g")).__enter__()
    assert str(caught.value) == ("patches/up/p.yaml:1: up:g is imported from up.m (up/__init__.py:1). Write up.m:f.")
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
