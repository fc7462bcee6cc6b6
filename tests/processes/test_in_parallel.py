"""Several compilations at once."""

import threading

import pytest

from torchport.errors import TopologyError
from torchport.processes import child


def test_results_come_in_the_order_of_the_items_and_a_refusal_is_one():
    second = threading.Event()

    def work(item):
        if item == 0:
            assert second.wait(10), "both run at once"
        if item == 2:
            raise TopologyError("here", "It is refused", "Mend it")
        second.set()
        return 10 * item

    found = child.in_parallel(work, [0, 1, 2], 2, "test", str)
    assert found[:2] == [0, 10] and str(found[2]) == "here: It is refused. Mend it."


def test_no_more_run_at_once_than_were_asked_for():
    running, most, lock = 0, 0, threading.Lock()

    def work(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    child.in_parallel(work, range(8), 3, "test", str)
    assert most <= 3


def test_each_end_is_a_line_where_there_is_no_bar(caplog, monkeypatch):
    told = threading.Event()
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)

    def work(item):
        if item == "b":
            assert told.wait(10)  # those that end at once come in any order
            raise TopologyError("here", "It is refused", "Mend it")

    def name(item):
        told.set()
        return item.upper()

    with caplog.at_level("INFO", logger="torchport"):
        child.in_parallel(work, ["a", "b"], 2, "sweep", name)
    assert [record.message for record in caplog.records] == [
        "sweep ...",
        "sweep: A: done (1 of 2)",
        "sweep: B: refused (2 of 2)",
    ]


def test_what_is_no_refusal_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        child.in_parallel(lambda item: 1 // item, [0], 1, "test", str)


def test_there_is_room_for_one_at_least(monkeypatch):
    monkeypatch.setattr(child, "COMPILATION", 2**60)
    assert child.default_workers() == 1


def test_after_an_interrupt_nothing_more_is_begun(monkeypatch):
    begun, go = [], threading.Event()

    def work(item):
        begun.append(item)
        assert go.wait(10)

    def interrupted(items, *rest, **named):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(child, "track", interrupted)
    threading.Timer(0.2, go.set).start()
    with pytest.raises(KeyboardInterrupt):
        child.in_parallel(work, range(20), 2, "test", str)
    assert len(begun) <= 2
