"""All or none, nested, in one thread, undone in reverse; and what the ledger says of it."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time

import pytest
from fakes.patch_world import World, namespace

from torchport import patch
from torchport.errors import (
    ConflictError,
    NotCalledError,
    RewriteError,
    ScopeError,
    SignatureError,
    StaleTraceError,
    TargetError,
    ThreadError,
    UnknownNameError,
)
from torchport.patch.live import registry
from torchport.patch.patch_set import check_claims


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write(
        "up/m.py",
        "def f(a):\n    b = a\n    return b\n\ndef g(a):\n    return 'g'\n\nclass C:\n    def f(self): pass\n",
    )
    world.python("def new(a): return 'new'\ndef newer(a): return 'newer'\ndef method(self): return 1\n")
    yield world
    world.close()


def _two(world, first="replace: p.py:new", second="replace: p.py:newer", targets=("up.m:f", "up.m:g")):
    return world.yaml(
        f"id: up.one\n  target: {targets[0]}\n  {first}\n- id: up.two\n  target: {targets[1]}\n  {second}"
    )


def test_all_of_a_set_applies_or_none_when_a_module_is_late(world):
    import up.m

    before = namespace(up.m)
    entries = _two(world, second="rewrite: {match: x = 1, put: p.py:new}")
    with pytest.raises(RewriteError):
        patch.applied(entries).__enter__()
    assert namespace(up.m) == before
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("torchport")]


def test_a_failure_at_an_import_takes_back_what_was_applied_before(world):
    world.write("up/late.py", "h = 3\n")
    with pytest.raises(TargetError, match=r"up.late:h is a int"):
        with patch.applied(_two(world, targets=("up.m:f", "up.late:h"))) as ledger:
            import up.m

            assert up.m.f(1) == "new"
            with pytest.raises(TargetError):
                import up.late
            assert up.m.f(1) == 1
            import up.m

            assert ledger.rows()[0]["state"] == "used"
    assert up.m.f(1) == 1


def test_sets_nest_and_what_is_in_force_is_not_applied_twice(world):
    entries = _two(world)
    with patch.applied(entries[:1]) as outer:
        import up.m

        up.m.f(1)
        with patch.applied(entries) as inner:
            up.m.f(1)
            up.m.g(1)
            assert [row["calls"] for row in inner.rows()] == [1, 1]
            assert [row["calls"] for row in outer.rows()] == [2]
        assert (up.m.f(1), up.m.g(1)) == ("new", "g")
    assert up.m.f(1) == 1


def test_nested_rewrites_of_one_function_are_undone_in_reverse(world):
    world.python("def one(a): return a + 10\ndef two(b): return b * 2\n")
    entries = _two(
        world,
        "rewrite: {match: b = a, put: p.py:one}",
        "rewrite: {match: return b, put: p.py:two}",
        ("up.m:f", "up.m:f"),
    )
    with patch.applied(entries[:1]):
        import up.m

        assert up.m.f(1) == 11
        with patch.applied(entries[1:]):
            assert up.m.f(1) == 22
        assert up.m.f(1) == 11
    assert up.m.f(1) == 1


def test_a_set_that_is_left_before_a_later_one_is_refused_and_both_are_undone(world):
    entries = _two(world)
    outer, inner = patch.applied(entries[:1]), patch.applied(entries[1:])
    outer.__enter__()
    inner.__enter__()
    import up.m

    with pytest.raises(ConflictError) as caught:
        outer.__exit__(None, None, None)
    assert str(caught.value) == (
        "patch.applied: A set of patches is left while a later one is in force; both are undone. "
        "Leave sets in the reverse order of entering them."
    )
    assert (up.m.f(1), up.m.g(1)) == (1, "g")
    with pytest.raises(ConflictError):  # who entered the later set hears of it too
        inner.__exit__(None, None, None)
    with patch.applied(entries):
        assert (up.m.f(1), up.m.g(1)) == ("new", "newer")


def test_nothing_of_a_set_stays_in_the_registry(world):
    entries = _two(world)
    with patch.applied(entries):
        import up.m  # noqa: F401

        assert (list(registry.digests), len(registry.sets)) == (["up.one", "up.two"], 1)
        assert registry.owner == threading.get_ident() and not registry.is_idle()
    assert (registry.digests, registry.sets) == ({}, []) and registry.is_idle()
    with pytest.raises(RewriteError):
        patch.applied(_two(world, second="rewrite: {match: x = 1, put: p.py:new}")).__enter__()
    assert (registry.digests, registry.sets) == ({}, []) and registry.is_idle()


def test_two_patches_on_one_target_conflict(world):
    with pytest.raises(ConflictError) as caught:
        patch.applied(_two(world, targets=("up.m:f", "up.m:f"))).__enter__()
    assert str(caught.value) == (
        "patches/up/p.yaml:9: 'up.two' claims up.m:f, and 'up.one' at patches/up/p.yaml:1 claims up.m:f."
        " Keep one of the two."
    )


def test_a_target_and_what_contains_it_conflict(world):
    world.python("class New: pass\ndef method(self): pass\n")
    with pytest.raises(ConflictError, match=r"'up.two' claims up.m:C.f, and 'up.one' at .* claims up.m:C"):
        patch.applied(_two(world, "replace: p.py:New", "replace: p.py:method", ("up.m:C", "up.m:C.f"))).__enter__()


def test_a_nested_set_conflicts_with_what_is_in_force(world):
    with patch.applied(world.one("replace: p.py:new", "up.m:f", key="up.a")):
        with pytest.raises(ConflictError, match=r"'up.b' claims up.m:f, and 'up.a'"):
            patch.applied(world.one("replace: p.py:newer", "up.m:f", key="up.b")).__enter__()
        with pytest.raises(ConflictError, match=r"'up.a' is in force with another content"):
            patch.applied(world.one("replace: p.py:newer", "up.m:f", key="up.a")).__enter__()


def test_a_second_thread_that_applies_is_refused(world):
    entries = world.one("replace: p.py:new", "up.m:f")
    caught = []

    def other():
        try:
            with patch.applied(entries):
                pass
        except ThreadError as error:
            caught.append(str(error))

    with patch.applied(entries):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert caught == [
        "patch.applied: Another thread has patches applied. Apply patches in one thread, around all of its work."
    ]
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_stage_that_does_not_exist_is_refused(world):
    with pytest.raises(UnknownNameError, match=r"No stage 'denoize'. Did you mean 'denoise'"):
        patch.applied([], stage="denoize").__enter__()


def test_a_body_that_raises_is_undone_as_well(world):
    with pytest.raises(KeyError, match="theirs"), patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m

        raise KeyError("theirs")
    assert up.m.f(1) == 1


def test_the_ledger_asks_the_live_object(world):
    entries = world.one("replace: p.py:new", "up.m:f")
    with patch.applied(entries) as ledger:
        state = lambda: ledger.rows()[0]["state"]  # noqa: E731
        assert state() == "armed"
        import up.m

        assert state() == "applied"
        up.m.f(1)
        assert state() == "used"
        ours, up.m.f = up.m.f, lambda a: "theirs"
        assert state() == "displaced"
        up.m.f = ours
        assert state() == "used"
    assert state() == "used"


def test_what_somebody_else_put_in_the_place_stays_there(world):
    with patch.applied(world.one("replace: p.py:new", "up.m:f")) as ledger:
        import up.m

        inner = up.m.f
        up.m.f = lambda a: ["theirs", inner(a)]
        assert up.m.f(1) == ["theirs", "new"]
    assert up.m.f(1) == ["theirs", 1]
    assert ledger.rows()[0]["state"] == "displaced"


def test_a_patch_that_must_be_called_in_its_stage_and_is_not_fails_it(world):
    entries = world.one("replace: p.py:new", "up.m:f", "must_be_called: [denoise]")
    with patch.applied(entries, stage="denoise") as ledger:
        import up.m

        with pytest.raises(NotCalledError) as caught:
            ledger.check_called()
        assert str(caught.value) == (
            "patches/up/p.yaml:1: 'up.one' was not called in denoise (it is applied). "
            "Find what is called instead of up.m:f, or remove the stage from 'must_be_called'."
        )
        up.m.f(1)
        ledger.check_called()
    with patch.applied(entries, stage="decode") as ledger:
        ledger.check_called()
    with patch.applied(entries) as ledger, pytest.raises(NotCalledError, match="was not called in denoise"):
        ledger.check_called()


def test_rows_are_plain_data(world):
    entries = world.one("replace: p.py:new", "up.m:f", "plumbing: true")
    assert entries[0].plumbing
    with patch.applied(entries) as ledger:
        row = json.loads(json.dumps(ledger.rows()))[0]
    assert row == {
        "id": "up.one",
        "target": "up.m:f",
        "kind": "replace",
        "equivalence": "bitwise",
        "state": "armed",
        "calls": 0,
        "plumbing": True,
        "late": False,
        "drift": "unlocked",
        "detail": "",
        "why": "A test.",
        "place": "patches/up/p.yaml:1",
    }


def test_ops_are_handed_out_counted_and_the_engine_touches_nothing(world):
    world.python("def lowered(x): return -x\n")
    entries = world.one("op: p.py:lowered", "torch.ops:aten.neg.default", "must_be_called: [denoise]")
    with patch.applied(entries, stage="denoise") as ledger:
        (op,) = ledger.ops()
        assert ledger.ops() == [op]
        assert (op.id, op.target, op.place) == ("up.one", "torch.ops:aten.neg.default", "patches/up/p.yaml:1")
        with pytest.raises(NotCalledError):
            ledger.check_called()
        assert op.function(3) == -3
        ledger.check_called()
        assert ledger.rows()[0]["state"] == "used"


def test_a_program_traced_under_a_set_is_not_traced_again_without_it(world):
    entries = _two(world)
    with patch.applied(entries[:1]) as ledger:
        import up.m

        up.m.f(1)
        trace = ledger.trace()
        trace.check()
        with patch.applied(entries[1:]), pytest.raises(StaleTraceError, match=r"'up.two' was not in force then"):
            trace.check()
    with pytest.raises(StaleTraceError) as caught:
        trace.check()
    assert str(caught.value) == (
        "trace: A program is traced again, and 'up.one' is not in force. "
        "Trace it inside the same 'with patch.applied(...)', or compile it anew."
    )
    with patch.applied(entries[:1]):
        trace.check()
    world.python("def new(a): return 'another'\ndef newer(a): pass\n")
    with patch.applied(entries[:1]), pytest.raises(StaleTraceError, match=r"'up.one' has changed"):
        trace.check()


def test_a_run_that_uses_the_program_of_an_earlier_one_counts_the_calls_of_its_trace(world):
    entries = world.one("replace: p.py:new", "up.m:f", "must_be_called: [denoise]")
    with patch.applied(entries, stage="denoise") as ledger:
        import up.m

        loaded = ledger.trace()
        up.m.f(1)
        before = ledger.trace()
        up.m.f(1)
        trace = ledger.trace(before)
        assert (before.calls, trace.calls) == ({"up.one": 1}, {"up.one": 1})
        later = ledger.of_run(loaded)
        with pytest.raises(NotCalledError):
            later.check_called()
        later.credit(trace)
        later.check_called()
        assert later.rows()[0]["calls"] == 1
    with patch.applied([]) as ledger, pytest.raises(StaleTraceError):
        ledger.credit(trace)


def test_a_target_that_walks_out_of_its_package_is_refused(world):
    world.write("other/nn.py", "class Norm:\n    def forward(self): return 'norm'\n")
    world.write("up/m.py", "from other import nn\nimport other.nn as onn\nfrom other.nn import Norm\n")
    with pytest.raises(ScopeError) as caught:
        patch.applied(world.one("replace: p.py:method", "up.m:nn.Norm.forward")).__enter__()
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up.m:nn.Norm.forward walks out of up: 'nn' belongs to other. Patch the name that its "
        "module looks up, or declare 'scope: global' with 'scope_reason'."
    )
    for target in ("onn.Norm.forward", "Norm.forward"):
        with pytest.raises(ScopeError, match="walks out of up"):
            patch.applied(world.one("replace: p.py:method", f"up.m:{target}")).__enter__()
    assert "other.nn" not in sys.modules
    more = "scope: global\nscope_reason: A test."
    with patch.applied(world.one("replace: p.py:method", "up.m:Norm.forward", more)):
        import up.m

        assert up.m.nn.Norm().forward() == 1
    assert up.m.nn.Norm().forward() == "norm"


def test_a_target_that_walks_out_in_a_way_that_the_source_hides_is_refused_when_it_is_applied(world):
    world.write("other/nn.py", "class Norm:\n    def forward(self): return 'norm'\n")
    world.write("up/star.py", "from other.nn import Norm\n")
    world.write("up/m.py", "from up.star import *\n")
    with pytest.raises(ScopeError, match=r"'Norm' belongs to other.nn"):
        with patch.applied(world.one("replace: p.py:method", "up.m:Norm.forward")):
            import up.m  # noqa: F401


@pytest.mark.parametrize(
    ("target", "new", "text"),
    [
        ("(a)", "()", "does not take 'a' by position"),
        ("(a)", "(b)", "does not take 'a' by name"),
        ("(a, b)", "(b, a)", "has 'a' in another place"),
        ("(a)", "(a, b)", "asks for 'b'"),
        ("(a=1)", "(a)", "asks for 'a', which has a default"),
        ("(*, a)", "(*, b)", "does not take 'a' by name"),
        ("(*, a=1)", "(*, a)", "asks for 'a', which has a default"),
        ("(*args)", "()", "does not take *args"),
        ("(**kwargs)", "(*args)", "does not take **kwargs"),
        ("(a, b=1)", "(a, /, b=1)", "does not take 'a' by name"),
        ("(a, b, c)", "(a, *args)", "does not take 'b' by name"),
    ],
)
def test_a_replacement_that_does_not_take_every_call_is_refused(world, target, new, text):
    world.write("up/m.py", f"def f{target}: return 1\n")
    world.python(f"def new{new}: return 2\n")
    with pytest.raises(SignatureError) as caught:
        patch.applied(world.one("replace: p.py:new", "up.m:f")).__enter__()
    assert f"'p.py:new' {text}, unlike up.m:f(" in str(caught.value)
    world.write("up/n.py", "from up.m import f as g\ndef keep(x): return x\nf = keep(g)\n")
    with pytest.raises(SignatureError):
        with patch.applied(world.one("replace: p.py:new", "up.n:f")):
            import up.n  # noqa: F401


@pytest.mark.parametrize(
    ("target", "new"),
    [
        ("(a)", "(a, b=1)"),
        ("(a, b=1)", "(*args, **kwargs)"),
        ("(a, /)", "(x)"),
        ("(a, *, b)", "(a, b)"),
        ("(a, b=1, *args, c, **kwargs)", "(a, b=2, *args, **kwargs)"),
        ("(a, b)", "(a, *args, **kwargs)"),
        ("()", "(a=1)"),
    ],
)
def test_a_replacement_that_takes_more_is_accepted(world, target, new):
    world.write("up/m.py", f"def f{target}: return 1\n")
    world.python(f"def new{new}: return 2\n")
    with patch.applied(world.one("replace: p.py:new", "up.m:f")):
        import up.m  # noqa: F401


def test_a_wrapper_without_room_for_the_original_is_refused(world):
    world.python("def new(): return 1\n")
    with pytest.raises(SignatureError, match=r"The wrapper 'p.py:new' of 'up.one' has no parameter for the original"):
        patch.applied(world.one("wrap: p.py:new", "up.m:f")).__enter__()
    world.python("def new(a): return 1\n")
    with pytest.raises(SignatureError, match=r"'p.py:new' does not take 'a' by position"):
        patch.applied(world.one("wrap: p.py:new", "up.m:f")).__enter__()


def test_an_instance_of_another_packages_class_is_shared_and_needs_a_reason(world):
    text = "import logging\nlog = logging.getLogger('shared')\nclass C: pass\nown = C()\nown.info = lambda msg: msg\n"
    world.write("up/m.py", text)
    world.python("def new(*args, **kwargs): return 'new'")
    with pytest.raises(ScopeError) as caught, patch.applied(world.one("replace: p.py:new", "up.m:log.info")):
        import up.m
    assert str(caught.value) == (
        "patches/up/p.yaml:1: up.m:log.info walks out of up: 'log' belongs to logging. Patch the name that its module "
        "looks up, or declare 'scope: global' with 'scope_reason'."
    )
    with patch.applied(world.one("replace: p.py:new", "up.m:own.info")):
        import up.m

        assert up.m.own.info("x") == "new"
    more = "scope: global\nscope_reason: A test."
    with patch.applied(world.one("replace: p.py:new", "up.m:log.info", more)):
        assert up.m.log.info("x") == "new"
    assert "info" not in vars(up.m.log)


def test_entries_are_read_and_claimed_in_linear_time(world):
    """Ten times the entries take about ten times the seconds; they took fifty and a hundred times."""
    reading, claiming = {}, {}
    for count in (100, 1000):
        parts = [f"id: up.f{i}\n  target: up.m:f{i}\n  replace: p.py:new" for i in range(count)]
        world.yaml("\n- ".join(parts))
        start = time.process_time()
        entries = patch.read(world.patches, ["up"])
        reading[count] = time.process_time() - start
        check_claims((), entries)
        claiming[count] = time.process_time() - start - reading[count]
    assert reading[1000] < 30 * reading[100] and claiming[1000] < 30 * claiming[100]


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("f", "f", True), ("C", "C.f", True), ("C.f", "C", True), ("C.f", "C.g", False), ("C.f", "C.f.g", True),
        ("Cc", "C.f", False), ("rewrite f", "rewrite f", False), ("rewrite f", "f", True), ("f", "rewrite f", True),
        ("rewrite C.f", "C", True), ("C", "rewrite C.f", True), ("rewrite f", "rewrite f.g", True),
    ],
)  # fmt: skip
def test_claims_meet_where_one_path_leads_through_the_other(world, one, other, meet):
    kinds = {True: "rewrite: {match: b = a, put: p.py:new}", False: "replace: p.py:new"}
    parts = [
        f"id: up.{name}\n  target: up.m:{path.removeprefix('rewrite ')}\n  {kinds[path.startswith('rewrite')]}"
        for name, path in (("a", one), ("b", other))
    ]
    entries = world.yaml("\n- ".join(parts))
    for running, fresh in (((), entries), (entries[:1], entries[1:])):
        with pytest.raises(ConflictError, match=r"'up.b' claims .*, and 'up.a'") if meet else contextlib.nullcontext():
            check_claims(running, fresh)
