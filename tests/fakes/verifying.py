"""Verifications of ports with a planted fault, in this process: a fresh one would import everything again."""

import contextlib
import dataclasses
import functools
import shutil
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import jax

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


class InTurn:
    """A pool that calls a function when its result is asked for: this process has one set of patches."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def submit(self, function, *arguments):
        return SimpleNamespace(result=functools.partial(function, *arguments))


@contextlib.contextmanager
def verifying(root, originals):
    """Gives `verify(model, fault, packs, ...)`.

    Args:
        root: The repository.
        originals: A folder for recordings of originals, by model: no planted patch changes them.
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
        parts = request.model, request.seed, *request.overrides, *("decoded" for _ in range(any(rest)))
        kept = originals / f"{'-'.join(map(str, parts))}.pt".replace("/", "_")
        if not kept.exists():
            clean = dataclasses.replace(request, paths=(str(root),))
            recording.record(clean, steps, kept, *rest)
        shutil.copy(kept, file)

    def verify(model, fault=None, pack=None, sets=(), seed=None, **options):
        """Returns the verification of a port with a fault.

        Args:
            pack: The folder that the fault's pack is written to.
            sets: Fields of the job that are others.
        """
        paths = (str(root),) if fault is None else (str(fault.pack(root, pack)), str(root))
        request = Request(
            model,
            CONFIGS.get(model, f"configs/{model}_demo.yaml"),
            prompt=PROMPTS.get(model, "A cat"),
            seed=seed,
            checkpoint="tiny",
            # Each of Wan's networks has three steps or more.
            overrides=(*SIZES, *(["steps=8"] if model == "wan" else []), *sets),
            paths=paths,
            cache=False,
        )
        return verification.verify(request, Options(**options))

    with mock.patch.object(verification, "_call", call), mock.patch.object(verification, "ThreadPoolExecutor", InTurn):
        yield verify
