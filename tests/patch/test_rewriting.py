"""Rewrites: found exactly as often as declared, compiled into the live function, refused where it is not safe."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import textwrap
import traceback

import pytest
from fakes.patch_world import World

from torchport import patch
from torchport.errors import ConflictError, RewriteError, ScopeError, SignatureError, TargetError

UP = '''\
import functools


def doubling(name):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return 2 * function(*args, **kwargs)
        return wrapper
    return decorate


class Base:
    def size(self):
        return 100


class Thing(Base):
    __secret = 7

    @doubling("a")
    @doubling("b")
    def size(self, n):
        """A docstring."""
        start = super().size()  # a comment
        total = 0
        for i in range(n):
            total += i
            total += self.__secret
        rest = [total for _ in range(2)]
        return start + total


def make(offset):
    def added(a):
        b = a + offset
        c = b * 2
        return c
    return added


added = make(5)


def branches(a):
    if a:
        x = 1
        y = 2
    else:
        x = 3
        y = 4
    while a:
        a -= 1
        x = a
    return x + y


def gen(n):
    for i in range(n):
        v = i * 2
        yield v
'''


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", UP)
    yield world
    world.close()


def _rewrite(world, target, match, put="new", key="up.one", **more):
    fields = {"match": json.dumps(textwrap.dedent(match)), "put": f"p.py:{put}", **more}
    text = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return world.one(f"rewrite: {{{text}}}", target, key=key)


def _refusal(world, error, target, match, **more):
    with pytest.raises(error) as caught:
        with patch.applied(_rewrite(world, target, match, **more)):
            import up.m  # noqa: F401
    return str(caught.value)


def test_decorators_super_names_of_a_class_and_lines_survive(world):
    world.python("def new(n, total):\n    return 1000 + n + total\n")
    entries = _rewrite(
        world,
        "up.m:Thing.size",
        """
        for $i in range($n):
            $...body
        """,
        gives="[total]",
    )
    with patch.applied(entries) as ledger:
        import up.m

        assert up.m.Thing().size(3) == 4 * (100 + 1003)
        assert ledger.rows()[0]["calls"] == 1
        assert up.m.Thing.size.__doc__ == "A docstring."
        code = up.m.Thing.size.__wrapped__.__wrapped__.__code__
        assert code.co_firstlineno == 21
        assert code.co_qualname == "Thing.size"
    assert up.m.Thing().size(3) == 4 * (100 + 3 + 21)
    assert "__torchport" not in "".join(vars(up.m))


def test_getsource_and_tracebacks_show_what_runs(world):
    world.python("def new(n, total):\n    raise RuntimeError('here')\n")
    match = "for $i in range($n):\n    $...body"
    with patch.applied(_rewrite(world, "up.m:Thing.size", match, gives="[total]")):
        import up.m

        source = inspect.getsource(up.m.Thing.size)
        assert "total = __torchport_up_one__(n=n, total=total)" in source
        assert "super().size()  # a comment" in source
        assert len(source.splitlines()) == 11
        with pytest.raises(RuntimeError) as caught:
            up.m.Thing().size(3)
        frames = traceback.extract_tb(caught.value.__traceback__)
        (frame,) = [frame for frame in frames if frame.name == "size"]
        assert frame.filename.startswith("<torchport: up.one in ")
        assert (frame.lineno, frame.line) == (27, "total = __torchport_up_one__(n=n, total=total)")
    assert "__torchport" not in inspect.getsource(up.m.Thing.size)


def test_a_statement_after_the_run_keeps_its_line(world):
    world.write(
        "up/m.py",
        """\
        def f(a):
            x = (a +
                 1)
            y = x; z = 1 / (a - 1)
            return y + z
        """,
    )
    world.python("def new(a): return a\n")
    with patch.applied(_rewrite(world, "up.m:f", "x = a + 1")):
        import up.m

        with pytest.raises(ZeroDivisionError) as caught:
            up.m.f(1)
        assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == 4


def test_a_run_that_shares_lines_with_its_neighbours_is_replaced_alone(world):
    world.write("up/m.py", "def f(a):\n    x = 1; y = (a +\n      2); z = 'é'; w = 5\n    return x, y, z, w\n")
    world.python("def new(a): return -a\n")
    with patch.applied(_rewrite(world, "up.m:f", "y = a + 2")):
        import up.m

        assert up.m.f(4) == (1, -4, "é", 5)


def test_a_closure_keeps_its_cells(world):
    world.python("def new(b, offset): return b * 100 + offset\n")
    with patch.applied(_rewrite(world, "up.m:added", "c = b * 2")):
        import up.m

        assert up.m.added(1) == 605
    assert up.m.added(1) == 12


def test_dropping_the_last_use_of_a_closed_over_variable_is_refused(world):
    world.python("def new(a): return a\n")
    assert _refusal(world, RewriteError, "up.m:added", "b = a + offset") == (
        "patches/up/p.yaml:1: 'up.one' drops or adds the use of 'offset', a variable of an enclosing scope. "
        "Match less, or take it as a parameter of 'put'."
    )


def test_two_rewrites_of_one_function_stand_beside_each_other(world):
    world.python("def one(a): return a + 1\ndef two(b): return b + 2\n")
    entries = world.yaml(
        "id: up.one\n  target: up.m:added\n  rewrite: {match: c = b * 2, put: p.py:two}\n"
        "- id: up.two\n  target: up.m:make\n  rewrite: {match: return added, put: p.py:never}\n"
    )
    world.python("def two(b): return b + 2\ndef never(added): return added\n")
    with patch.applied(entries) as ledger:
        import up.m

        assert up.m.added(1) == 8
        assert up.m.make(1)(1) == 4
        assert [row["state"] for row in ledger.rows()] == ["used", "used"]


def test_two_rewrites_of_one_function_are_both_alive_and_undone(world):
    world.python("def one(a, offset): return a + offset + 1\ndef two(b): return b + 2\n")
    entries = world.yaml(
        "id: up.one\n  target: up.m:added\n  rewrite: {match: b = a + offset, put: p.py:one}\n"
        "- id: up.two\n  target: up.m:added\n  rewrite: {match: c = b * 2, put: p.py:two}\n"
    )
    with patch.applied(entries) as ledger:
        import up.m

        assert up.m.added(1) == 9
        assert [row["state"] for row in ledger.rows()] == ["used", "used"]
        assert "up.one, up.two in" in up.m.added.__code__.co_filename
    assert up.m.added(1) == 12


def test_rewrites_whose_runs_overlap_are_refused(world):
    world.python("def one(a, offset): return a + offset\ndef two(a, offset): return a + offset\n")
    entries = world.yaml(
        "id: up.one\n  target: up.m:added\n  rewrite: {match: b = a + offset, put: p.py:one}\n"
        '- id: up.two\n  target: up.m:added\n  rewrite: {match: "b = $x\\nc = b * 2", put: p.py:two, gives: [c]}\n'
    )
    with pytest.raises(ConflictError, match=r"'up.two' matches what another patch put in up.m:added"):
        with patch.applied(entries):
            import up.m  # noqa: F401
    assert "up.m" not in sys.modules


def test_a_run_that_ends_in_a_return_is_returned(world):
    world.python("def new(b): return -b\n")
    with patch.applied(_rewrite(world, "up.m:added", "c = b * 2\nreturn c")):
        import up.m

        assert up.m.added(1) == -6


def test_a_generator_stays_one(world):
    world.python("def new(i): return -i\n")
    with patch.applied(_rewrite(world, "up.m:gen", "v = i * 2")):
        import up.m

        assert list(up.m.gen(3)) == [0, -1, -2]


def test_a_run_is_replaced_as_often_as_declared(world):
    world.python("def new(): return 10, 20\n")
    entries = _rewrite(world, "up.m:branches", "x = $a\ny = $b", gives="[x, y]", times=2)
    with patch.applied(entries) as ledger:
        import up.m

        assert up.m.branches(0) == 30
        assert up.m.branches(2) == 20
        assert ledger.rows()[0]["calls"] == 2


def test_a_match_that_is_found_another_number_of_times_is_refused_with_the_lines(world):
    world.python("def new(): return 10, 20\n")
    text = _refusal(world, RewriteError, "up.m:branches", "x = $a\ny = $b", gives="[x, y]")
    assert text == (
        "patches/up/p.yaml:1: 'up.one' matches 2 times in up.m:branches (at 47, 50), not 1. "
        "Read the upstream that is installed and mend 'match'."
    )
    assert "matches 0 times in up.m:branches (at no line), not 1" in _refusal(
        world, RewriteError, "up.m:branches", "z = 1"
    )


def test_the_same_hole_twice_must_match_the_same(world):
    world.write("up/m.py", "def f(a, b):\n    c = a + a\n    d = a + b\n    return c, d\n")
    world.python("def new(): return 0\n")
    with patch.applied(_rewrite(world, "up.m:f", "$t = $x + $x")):
        import up.m

        assert up.m.f(1, 2) == (0, 3)


def test_a_dollar_inside_a_string_is_only_a_dollar(world):
    world.write("up/m.py", "def f():\n    c = 'cost: $x'\n    d = 'other'\n    return c, d\n")
    world.python("def new(): return 0\n")
    with patch.applied(_rewrite(world, "up.m:f", "c = 'cost: $x'")):
        import up.m

        assert up.m.f() == (0, "other")


def test_a_hole_for_statements_may_stand_for_none(world):
    world.write("up/m.py", "def f(a):\n    b = 1\n    c = 2\n    return b + c\n")
    world.python("def new(): return 10, 20\n")
    with patch.applied(_rewrite(world, "up.m:f", "b = 1\n$...between\nc = 2", gives="[b, c]")):
        import up.m

        assert up.m.f(0) == 30


def test_drifted_source_is_refused_before_the_import(world):
    world.write("up/m.py", "def added(a):\n    b = a + 6\n    return b\n")
    world.python("def new(a): return a\n")
    text = _refusal(world, RewriteError, "up.m:added", "b = a + offset")
    assert "matches 0 times in up.m:added" in text
    assert "up.m" not in sys.modules


@pytest.mark.parametrize(
    ("match", "text"),
    [
        ("x = = 1", r"'match' of 'up.one' is not Python: invalid syntax. Write whole statements"),
        ("$...all", r"'match' of 'up.one' names no statement"),
        ("$...a\nx = 1", r"begins or ends with a hole for statements"),
        ("x = f($...args)", r"has '\$...args' inside a statement"),
    ],
)
def test_a_match_that_is_no_pattern_is_refused(world, match, text):
    world.python("def new(): return 0\n")
    with pytest.raises(RewriteError, match=text):
        patch.applied(_rewrite(world, "up.m:branches", match)).__enter__()


@pytest.mark.parametrize(
    ("body", "match", "new", "more", "text"),
    [
        (
            "b = a\n    c = b\n    return b + c",
            "b = a\nc = b",
            "def new(a): return 0",
            {},
            "binds b, c. Say in 'gives'",
        ),
        (
            "b = a\n    c = b\n    return b + c",
            "b = a\nc = b",
            "def new(a): return 0",
            {"gives": "[c]"},
            "'b' is bound in the run of 'up.one' and read after it. Add 'b' to 'gives'",
        ),
        (
            "b = a\n    return a + b",
            "b = a",
            "def new(): return 0",
            {"gives": "[b, a]"},
            "'gives' of 'up.one' has 'a', which the run does not bind. Give some of b, or a new name",
        ),
        (
            "a.append(1)\n    return a",
            "a.append(1)",
            "def new(a): return 0",
            {"gives": "[a]"},
            "It assigns no name: write 'gives: []', also where it changes an object in place",
        ),
        ("b = a\n    return b", "b = a", "def new(b): return 0", {}, "takes 'b', which up.m:f binds only in or after"),
        ("b = a\n    return b", "b = a", "def new(zz): return 0", {}, "takes 'zz', which up.m:f cannot see"),
        ("b = a\n    return b", "b = a", "def new(*args): return 0", {}, "takes '*args' for 'up.one'"),
        ("b = yield a\n    return b", "b = yield a", "def new(a): return 0", {}, "has a yield on line 2"),
        (
            "for i in a:\n        break\n    return a",
            "break",
            "def new(a): return 0",
            {},
            "has a break on line 3. Match less: a call cannot do that",
        ),
        (
            "if a:\n        return 1\n    b = 2\n    return b",
            "if a:\n    return 1",
            "def new(a): return 0",
            {},
            "a return",
        ),
        (
            "b = a\n    return b",
            "return b",
            "def new(b): return 0",
            {"gives": "[b]"},
            "has 'gives', and its run returns",
        ),
        ("global g\n    g = a", "global g\ng = a", "def new(a): return 0", {}, "has a global on line 2"),
        ("b = a\n    del b", "del b", "def new(b): return 0", {}, "has a delete on line 3"),
    ],
)
def test_what_a_call_cannot_do_is_refused(world, body, match, new, more, text):
    world.write("up/m.py", f"def f(a):\n    {body}\n")
    world.python(new)
    error = SignatureError if "*args" in text else RewriteError
    assert text in _refusal(world, error, "up.m:f", match, **more)


def test_a_name_that_is_written_again_before_it_is_read_need_not_be_given(world):
    world.write(
        "up/m.py",
        """
        def f(a):
            total = 0
            for item in a:
                total += item
            for item in a:
                total += item
            if a:
                last = 1
            else:
                last = 2
            return total, last
        """,
    )
    world.python("def new(total): return 50\n")
    match = "for item in a:\n    total += item\nfor $x in $y:\n    $...z"
    with patch.applied(_rewrite(world, "up.m:f", match, gives="[total]")):
        import up.m

        assert up.m.f([1]) == (50, 1)


def test_a_name_read_in_the_next_turn_of_a_loop_must_be_given(world):
    world.write("up/m.py", "def f(a):\n    b = 0\n    for i in a:\n        c = b\n        b = i\n    return c\n")
    world.python("def new(i): return 5\n")
    text = _refusal(world, RewriteError, "up.m:f", "b = i", gives="[]")
    assert "'b' is bound in the run of 'up.one' and read after it" in text


def test_a_name_captured_by_an_inner_function_must_be_given(world):
    world.write("up/m.py", "def f(a):\n    g = lambda: b\n    b = a\n    return g()\n")
    world.python("def new(a): return 5\n")
    assert "'b' is bound in the run" in _refusal(world, RewriteError, "up.m:f", "b = a", gives="[]")


def test_a_new_name_may_be_given_for_another_rewrite_to_take(world):
    world.write("up/m.py", "def f(a):\n    b = a\n    c = b\n    return b + c\n")
    world.python("def one(a): return a, 100\ndef two(extra): return extra\n")
    entries = world.yaml(
        "id: up.one\n  target: up.m:f\n  rewrite: {match: b = a, put: p.py:one, gives: [b, extra]}\n"
        "- id: up.two\n  target: up.m:f\n  rewrite: {match: c = b, put: p.py:two}\n"
    )
    with patch.applied(entries):
        import up.m

        assert up.m.f(1) == 101


def test_what_is_no_function_of_the_module_is_refused(world):
    world.write("other/n.py", "def g(a):\n    b = a\n    return b\n")
    world.write("up/m.py", "from other.n import g\nx = 3\nclass C:\n    pass\nh = len\n")
    world.python("def new(a): return 0\n")
    assert "up.m:g is imported (up/m.py:1). Name the module that defines it" in _refusal(
        world, ScopeError, "up.m:g", "b = a"
    )
    assert "up.m:C is a class. Name one of its methods" in _refusal(world, RewriteError, "up.m:C", "b = a")
    assert "is a int, not a Python function" in _refusal(world, RewriteError, "up.m:x", "b = a")
    assert "is a builtin_function_or_method, not a Python function" in _refusal(world, RewriteError, "up.m:h", "b = a")


def test_an_inherited_method_is_rewritten_where_it_is_written(world):
    world.write("up/m.py", "class A:\n    def f(self, a):\n        b = a\n        return b\nclass B(A): pass\n")
    world.python("def new(a): return 0\n")
    assert "up.m:B.f is inherited" in _refusal(world, RewriteError, "up.m:B.f", "b = a")


def test_a_function_that_another_module_of_the_package_made_is_named_there(world):
    world.write("up/deco.py", "def made(f):\n    def inner(a):\n        b = f(a)\n        return b\n    return inner\n")
    world.write("up/m.py", "from up.deco import made\ndef f(a):\n    return a\nf = made(f)\n")
    world.python("def new(a): return 0\n")
    text = _refusal(world, TargetError, "up.m:f", "b = f(a)")
    assert "up.m:f is a function of up.deco. Write up.deco:made.<locals>.inner" in text


@pytest.mark.parametrize("home", ["up/deco.py", "up/m.py"])
def test_a_function_under_a_decorator_that_leaves_no_mark_is_rewritten(world, home):
    """As hyvideo's `torch_compile_wrapper`: no `functools.wraps`, and another module's function in the slot."""
    deco = """
        def hiding(scale):
            def decorate(function):
                def wrapper(*args):
                    b = scale * function(*args)
                    return b
                return wrapper
            return decorate
    """
    world.write("up/deco.py", deco)
    text = "" if home == "up/m.py" else "from up.deco import hiding\n"
    text = (textwrap.dedent(deco) if home == "up/m.py" else "") + text
    text += "class C:\n    @hiding(2)\n    def f(self, a):\n        b = a\n        return b\n"
    world.write("up/m.py", text)
    world.python("def new(a): return 10\n")
    with patch.applied(_rewrite(world, "up.m:C.f", "b = a")) as ledger:
        import up.m

        assert up.m.C().f(1) == 20
        assert ledger.rows()[0]["state"] == "used"
    assert up.m.C().f(1) == 2


def test_captured_functions_run_the_rewrite_too(world):
    world.write("up/user.py", "from up.m import added\nTABLE = [added]\n")
    import up.user

    world.python("def new(b): return 0\n")
    with patch.applied(_rewrite(world, "up.m:added", "c = b * 2")):
        assert (up.user.added(1), up.user.TABLE[0](1)) == (0, 0)
    assert up.user.added(1) == 12


ELIF = """
def f(a, b):
    x = 0
    if a:
        x = 1
    elif b:
        x = 2
    else:
        x = 3
    return x


def g(a, b):
    x = 0
    if a: x = 1
    elif b: x = 2
    return x
"""


@pytest.mark.parametrize(
    ("target", "match"), [("f", "if b:\n    x = 2\nelse:\n    x = 3"), ("g", "if b:\n    x = 2")], ids=["f", "g"]
)
def test_a_run_that_begins_at_an_elif_stays_in_the_outer_ifs_else(world, target, match):
    world.write("up/m.py", ELIF)
    world.python("def new(b):\n    return 90 + b\n")
    with patch.applied(_rewrite(world, f"up.m:{target}", match, gives="[x]")):
        import up.m

        function = getattr(up.m, target)
        assert [function(True, False), function(True, True), function(False, True)] == [1, 1, 91]


def test_a_text_that_would_mean_something_else_is_refused(world, monkeypatch):
    """The net under every misplacement: what is written is parsed again and compared."""
    monkeypatch.setattr("torchport.patch.rewriting._replace", lambda lines, run, statement: None)
    world.python("def new():\n    return 1\n")
    text = _refusal(world, RewriteError, "up.m:branches", "while $a:\n    $...body", gives="[a, x]")
    assert "'up.one' cannot be put into up.m:branches without changing what stands around it." in text


CACHED = """\
import functools

@functools.lru_cache
def f(x):
    y = x
    return y

class K:
    def __own(self, x):
        y = x
        return y

    def outer(self, x):
        return self.__own(x)
"""


@pytest.fixture
def cached_world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/m.py", CACHED)
    world.python("def put(x): return x + 100\n")
    yield world
    world.close()


def test_a_cache_around_a_rewritten_function_forgets_what_it_knew(cached_world):
    from up import m

    assert m.f(1) == 1
    with patch.applied(cached_world.one("rewrite: {match: 'y = x', put: 'p.py:put'}", "up.m:f")):
        assert m.f(1) == 101
    assert m.f(1) == 1


@pytest.mark.parametrize("kind", ["rewrite: {match: 'y = x', put: 'p.py:put'}", "wrap: p.py:more"])
def test_a_private_method_is_patched_under_the_name_that_python_gives_it(cached_world, kind):
    cached_world.python("def put(x): return x + 100\ndef more(original, self, x): return original(self, x) + 100\n")
    with patch.applied(cached_world.one(kind, "up.m:K._K__own")):
        from up import m

        assert m.K().outer(1) == 101
    assert m.K().outer(1) == 1


def test_the_work_for_each_of_many_rewrites_of_a_module_is_the_same(world, monkeypatch):
    """Not that of the whole module: the letters that are parsed grow with it as it does, not with its square."""
    parsed, parse = [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda text, *rest, **named: parsed.append(text) or parse(text, *rest, **named))

    def letters(count):
        module = world.write(
            f"up/m{count}.py", "".join(f"def f{n}(a):\n    x = 1\n    return a + x\n\n\n" for n in range(count))
        )
        world.python("def put():\n    return 2\n")
        rows = [
            f"id: up.f{n}\n  target: up.m{count}:f{n}\n  rewrite: {{match: 'x = 1', put: 'p.py:put'}}"
            for n in range(count)
        ]
        entries = world.yaml("\n- ".join(rows))
        parsed.clear()
        with patch.applied(entries):
            up = importlib.import_module(f"up.m{count}")
            assert [getattr(up, f"f{n}")(1) for n in range(count)] == [3] * count
        assert [getattr(up, f"f{n}")(1) for n in range(count)] == [2] * count
        whole = len(module.read_text().replace("\n", ""))
        return sum(len(text.replace("\n", "")) for text in parsed if isinstance(text, str)) / whole

    assert letters(40) < 1.2 * letters(10)
