"""Bars on a terminal, one log line elsewhere, nothing with --quiet."""

import io
import logging
import re
import sys
import threading

import pytest

from torchport.commands import terminal
from torchport.progress import log, size_text, table, track, waiting


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    """Makes stderr a terminal, and returns it; within the test, for pytest sets its own just before."""

    def make():
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        return terminal

    return make


@pytest.fixture
def level():
    """Sets the level of torchport's log for one test."""
    before = log.level
    yield log.setLevel
    log.setLevel(before)


def test_every_item_is_passed_on_in_order(level):
    level(logging.ERROR)
    assert list(track("abc", "denoise", "step")) == ["a", "b", "c"]


def test_a_terminal_gets_a_bar_with_unit_and_total(screen, level):
    level(logging.INFO)
    terminal = screen()
    list(track(iter("abc"), "denoise", "step", total=5, done=2))
    shown = terminal.getvalue()
    assert "denoise" in shown and "5/5" in shown and "step" in shown


def test_a_bar_begins_with_nothing_done(screen, level):
    level(logging.INFO)
    terminal = screen()
    list(track("abc", "denoise", "step"))
    assert "0/3" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_a_file_gets_one_log_line_and_no_bar(level, caplog, capsys):
    level(logging.INFO)
    list(track("abc", "load vae", "tensor"))
    assert [record.getMessage() for record in caplog.records] == ["load vae ..."]
    assert capsys.readouterr().err == ""


def test_quiet_gets_nothing_even_on_a_terminal(screen, level, caplog):
    level(logging.ERROR)
    terminal = screen()
    list(track("abc", "denoise", "step"))
    with waiting("compile vae"):
        pass
    assert terminal.getvalue() == "" and not caplog.records


def test_waiting_shows_what_is_being_done_and_ends_with_it(screen, level):
    level(logging.INFO)
    terminal, before = screen(), set(threading.enumerate())
    with pytest.raises(KeyError), waiting("compile vae"):
        raise KeyError
    assert "compile vae" in terminal.getvalue()
    left = {thread for thread in set(threading.enumerate()) - before if "tick" in thread.name}
    assert not left


def test_waiting_in_a_file_is_one_log_line(level, caplog):
    level(logging.INFO)
    with waiting("compile vae"):
        pass
    assert [record.getMessage() for record in caplog.records] == ["compile vae ..."]


def test_a_line_in_a_file_begins_with_the_seconds_since_the_command_began(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    terminal.log_to_stderr()
    record = log.makeRecord("torchport", logging.INFO, "", 1, "load %s ...", ("vae",), None)
    record.relativeCreated = 12_345.0
    root.handle(record)
    assert stderr.getvalue() == "  12.3 s  load vae ...\n"


def test_sizes_are_in_the_largest_unit_that_they_reach():
    sizes = (0, 1023, 1024, 5 * 2**20 + 2**19, 2**30 - 1, 5 * 2**30)
    assert [size_text(size) for size in sizes] == ["0 B", "1023 B", "1.0 KiB", "5.5 MiB", "1024.0 MiB", "5.0 GiB"]


def test_a_table_is_as_wide_as_its_cells_and_ends_without_spaces():
    rows = [("what", "", "GiB", "note"), ("a longer one", "x", "8", "")]
    assert table(rows, left=2) == ["what             GiB  note", "a longer one  x    8"]


def test_a_task_inside_another_one_has_the_same_line(screen, level):
    level(logging.INFO)
    terminal = screen()
    for _ in track("ab", "denoise", "step"):
        with waiting("compile"):
            pass
    shown = terminal.getvalue()
    assert "\x1b[A" not in shown and shown.count("\n") == 1, "a notebook cannot move the cursor up"
    assert re.search(r"\rcompile: 00:00 *\r", shown)


def test_of_tasks_inside_one_another_the_innermost_is_shown(screen, level):
    level(logging.INFO)
    terminal = screen()
    with waiting("plan"), waiting("compile"):
        threading.Event().wait(0.6)  # each is shown again after half a second
    first, *rest = re.findall(r"plan|compile", terminal.getvalue())
    assert first == "plan" and set(rest) == {"compile"} and len(rest) > 1
