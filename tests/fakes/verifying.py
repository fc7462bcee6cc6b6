"""Verifications of ports with a planted fault, in this process: a fresh one would import everything again."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import shutil
from concurrent.futures import Future
from importlib import import_module
from unittest import mock

import jax
import psutil

from torchport.task import Request
from torchport.verify import recording, verification
from torchport.verify.verification import Options

SIZES = ("height=32", "width=48", "frames=9", "steps=3", "machine=cpu:1", "mesh={}")
CONFIGS = {
    "hunyuan": "configs/demo.yaml",
    "cogvideox": "configs/cogvideox_demo.yaml",
    "wan": "configs/wan_demo.yaml",
}
PROMPTS = {"hunyuan": 'A cat says "red"', "cogvideox": "A cat", "wan": "A cat"}
"""HunyuanVideo's second encoder reads what is quoted: without it, its tokens are masked, and no picture shows them."""
MOST = 4 * 2**30
"""Bytes of this process's memory above which what JAX keeps of earlier verifications is dropped."""


class InTurn:
    """A pool that calls a function when its result is asked for: this process has one set of patches."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def submit(self, function, *arguments, **options):
        return mock.Mock(Future, result=functools.partial(function, *arguments, **options))


@contextlib.contextmanager
def verifying(originals):
    """Gives `verify(request, ...)`: a verification with its options.

    Args:
        originals: A folder for recordings of originals: neither a patch that is planted nor the mesh changes them.
    """
    # JAX starts here with the devices of all tests. A verification would start it with those of its own mesh.
    jax.devices()
    in_its_process = verification._call

    def call(function, *arguments, **options):
        module, _, name = function.partition(":")
        if name == "drift_of_mesh":  # on a mesh of more devices than this process has
            return in_its_process(function, *arguments, **options)
        if name == "record":
            return recorded(*arguments)
        return getattr(import_module(f"torchport.verify.{module}"), name)(*arguments)

    def recorded(request, steps, file, *rest):
        sets = [field for field in request.overrides if not field.startswith(("strategy", "mesh", "machine"))]
        key = request.model, request.prompt, request.seed, sets, steps, rest
        kept = originals / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.pt"
        if not kept.exists():
            clean = dataclasses.replace(request, paths=request.paths[-1:])  # without the pack of the fault
            recording.record(clean, steps, kept, *rest)
        shutil.copy(kept, file)

    def verify(request, **options):
        if psutil.Process().memory_info().rss > MOST:
            jax.clear_caches()
            gc.collect()
        return verification.verify(request, Options(**options))

    with mock.patch.object(verification, "_call", call), mock.patch.object(verification, "ThreadPoolExecutor", InTurn):
        yield verify


def small(root, model, fault=None, pack=None):
    """Returns the request of a small port on one device; with a fault, of its pack, which is written to a folder."""
    paths = (str(root),) if fault is None else (str(fault.pack(root, pack)), str(root))
    return Request(
        model,
        CONFIGS[model],
        prompt=PROMPTS[model],
        checkpoint="tiny",
        overrides=(*SIZES, "steps=8") if model == "wan" else SIZES,  # each of its networks has three or more
        paths=paths,
        cache=False,
    )
