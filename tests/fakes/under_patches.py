"""A plugin of pytest: a session runs under the patches that UNDER_PATCHES names, and writes which of them were called.

It runs an upstream's own tests, in a process of their own.
"""

import contextlib
import json
import os
from pathlib import Path

from torchport import patch
from torchport.config.pack import find_pack

CONTEXT = contextlib.ExitStack()


def pytest_configure(config):
    names = os.environ["UNDER_PATCHES"].split(",")
    config.ledger = CONTEXT.enter_context(patch.applied(patch.read(find_pack().folders, names)))


def pytest_unconfigure(config):
    calls = {row["id"]: row["calls"] for row in config.ledger.rows()}
    Path(os.environ["PATCH_CALLS"]).write_text(json.dumps(calls))
    CONTEXT.close()
