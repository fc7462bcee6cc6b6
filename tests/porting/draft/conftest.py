import functools
import importlib
import re
import sys
import textwrap

import pytest

UPSTREAM = """
import asyncio
import functools
import torch
from up.other import shifted

LIMIT = 3


def scaled(x, *, by: float = 2.0, limit=LIMIT):
    return x * min(by, limit)


async def later(x, by=1):
    await asyncio.sleep(0)
    return x + by


def rows(x, count=2):
    for n in range(count):
        yield x[n] * 2


async def stream(x):
    yield x


class Net(torch.nn.Module):
    def __init__(self, width, depth=12, heads=8):
        super().__init__()
        self.up = torch.nn.Linear(3, width)

    def forward(self, x, text):
        if torch.all(text == 0):
            text = text + 1
        return self.up(x) + text

    @property
    def size(self):
        return self.up.weight.shape[0]

    @functools.cached_property
    def twice(self):
        return 2 * self.size

    @staticmethod
    def halved(x, by=2):
        return x / by

    @classmethod
    def small(cls, x, by=4):
        return x * by

    @torch.no_grad()
    def decorated(self, x):
        return self.up(x)


class Child(Net):
    pass
"""


class World:
    """An upstream `up` on the search path, and the folder of a pack."""

    def __init__(self, folder, monkeypatch, call):
        self.call = call
        self.folder, self.checkout, self.pack = folder, folder / "checkout", folder / "pack"
        self.write("checkout/up/__init__.py", "")
        self.write("checkout/up/other.py", "def shifted(x):\n    return x + 1\n")
        self.write("checkout/up/model.py", UPSTREAM)
        monkeypatch.syspath_prepend(str(self.checkout))
        importlib.invalidate_caches()

    def write(self, file, text):
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def drop_child(self):
        """Removes the subclass, for which its base cannot be replaced."""
        self.write("checkout/up/model.py", UPSTREAM.partition("class Child")[0])

    def read(self, file):
        return (self.pack / file).read_text()

    def new(self, *arguments):
        """Runs `torchport new` into the pack, with the checkout; returns exit code, output and errors."""
        return self.call("new", *arguments, "--out", "pack", "--upstream-path", "checkout")

    def patch(self, path, kind, *flags):
        code, out, error = self.new("patch", f"up.model:{path}", "--kind", kind, *flags)
        assert code == 0, error
        return out

    def refusal(self, path, kind, *flags):
        """Returns the one line of a refusal; nothing was written."""
        before = sorted(self.pack.rglob("*"))
        code, out, error = self.new("patch", f"up.model:{path}", "--kind", kind, *flags)
        assert (code, out, len(error)) == (2, [], 1) and sorted(self.pack.rglob("*")) == before
        return error[0]

    def checked(self):
        """What the static check says of the pack, beside that it is a draft."""
        _, out, error = self.call("check", "--static", "--path", "pack", "--upstream-path", "checkout")
        assert out[-1] == "clean" or re.fullmatch(r"\d+ findings?", out[-1])
        return [line for line in out[:-1] if " is a draft: " not in line] + error

    def test_of(self, name):
        """Runs a test of the pack as pytest would."""
        file = self.pack / "tests" / f"test_up_{name}.py"
        scope = {"__file__": str(file), "__name__": "draft"}
        exec(compile(file.read_text(), str(file), "exec"), scope)
        next(value for key, value in scope.items() if key.startswith("test_"))()

    def fill(self, file, *pairs):
        """Replaces texts, each of which a file of the pack has once."""
        text = self.read(file)
        for before, after in pairs:
            assert text.count(before) == 1, (before, text)
            text = text.replace(before, after)
        (self.pack / file).write_text(text)


@pytest.fixture
def world(tmp_path, monkeypatch, torchport, capsys):
    yield World(tmp_path, monkeypatch, functools.partial(torchport, capsys=capsys))
    for name in list(sys.modules):
        if name == "up" or name.startswith(("up.", "torchport_patches.up")):
            del sys.modules[name]
