"""What patching costs: arming and applying, one call, and the sweep for holders.

    python benchmarks/patching.py

Prints each figure beside what it is measured against. The aims: 100 ms for 50 patches on top of importing diffusers and
transformers, 150 ms for a sweep over 10,000 modules, no added Python frame for an uncounted replacement.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import timeit
import types
from pathlib import Path

from torchport import patch
from torchport.patch.live import holders
from torchport.patch.live.counted import Calls, Wrapped, counting, proxy

_TAIL = """\
  why: A benchmark.
  reported: "none: a benchmark"
  until: never
  fits: {diffusers: "*"}
  equivalence: bitwise
"""

# Ten modules, five methods each: as many patches as two large model cards have.
_TARGETS = {
    "diffusers.models.transformers.transformer_hunyuan_video15": "HunyuanVideo15Transformer3DModel.forward "
    "HunyuanVideo15AttnProcessor2_0.__call__ HunyuanVideo15RotaryPosEmbed.forward HunyuanVideo15PatchEmbed.forward "
    "HunyuanVideo15AdaNorm.forward",
    "diffusers.models.transformers.transformer_hunyuan_video": "HunyuanVideoTransformer3DModel.forward "
    "HunyuanVideoAttnProcessor2_0.__call__ HunyuanVideoRotaryPosEmbed.forward HunyuanVideoPatchEmbed.forward "
    "HunyuanVideoAdaNorm.forward",
    "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15": "HunyuanVideo15AttnBlock.forward "
    "HunyuanVideo15Upsample.forward HunyuanVideo15Downsample.forward HunyuanVideo15ResnetBlock.forward "
    "HunyuanVideo15MidBlock.forward",
    "diffusers.models.transformers.transformer_wan": "WanTransformer3DModel.forward WanAttnProcessor.__call__ "
    "WanRotaryPosEmbed.forward WanTransformerBlock.forward WanTimeTextImageEmbedding.forward",
    "diffusers.models.autoencoders.autoencoder_kl_wan": "WanAttentionBlock.forward WanResample.forward "
    "WanResidualBlock.forward WanMidBlock.forward WanUpBlock.forward",
    "diffusers.models.transformers.transformer_flux": "FluxTransformer2DModel.forward FluxAttnProcessor.__call__ "
    "FluxPosEmbed.forward FluxTransformerBlock.forward FluxSingleTransformerBlock.forward",
    "diffusers.models.normalization": "AdaLayerNorm.forward AdaLayerNormZero.forward AdaLayerNormContinuous.forward "
    "RMSNorm.forward FP32LayerNorm.forward",
    "diffusers.models.embeddings": "TimestepEmbedding.forward Timesteps.forward PatchEmbed.forward "
    "PixArtAlphaTextProjection.forward CombinedTimestepTextProjEmbeddings.forward",
    "transformers.models.t5.modeling_t5": "T5LayerNorm.forward T5Attention.forward T5Block.forward T5Stack.forward "
    "T5LayerFF.forward",
    "transformers.models.llama.modeling_llama": "LlamaRMSNorm.forward LlamaAttention.forward LlamaMLP.forward "
    "LlamaDecoderLayer.forward LlamaModel.forward",
}  # fmt: skip


def _pack(folder: Path) -> Path:
    """Writes 50 wrapping patches and returns their folder."""
    upstream = folder / "patches" / "up"
    upstream.mkdir(parents=True)
    (upstream / "p.py").write_text("def wrap(original, *args, **kwargs):\n    return original(*args, **kwargs)\n")
    targets = [f"{module}:{path}" for module, paths in _TARGETS.items() for path in paths.split()]
    entries = [f"- id: up.p{i}\n  target: {t}\n  wrap: p.py:wrap\n{_TAIL}" for i, t in enumerate(targets)]
    (upstream / "p.yaml").write_text("".join(entries))
    return upstream.parent


_IMPORT = """
import sys, time, importlib, contextlib
import torch, diffusers, transformers
from torchport import patch
entries = patch.read({folder!r}, ["up"])
start = time.perf_counter()
with patch.applied(entries) if {patched} else contextlib.nullcontext():
    armed = time.perf_counter() - start
    for name in {modules!r}:
        importlib.import_module(name)
    done = time.perf_counter() - start
    if {patched}:
        import unittest.mock
print(armed, done, time.perf_counter() - start - done)
"""

_INSIDE = """
import sys, time, importlib
import torch, diffusers, transformers
from torchport import patch
from torchport.patch.live import hook
entries = patch.read({folder!r}, ["up"])
start = time.perf_counter()
context = patch.applied(entries)
ledger = context.__enter__()
armed = time.perf_counter() - start
spent = 0.0
run_callbacks = hook.run_callbacks
def timed(module):
    global spent
    start = time.perf_counter()
    run_callbacks(module)
    spent += time.perf_counter() - start
hook.run_callbacks = timed
for name in {modules!r}:
    importlib.import_module(name)
assert all(row["state"] == "applied" for row in ledger.rows()), [r for r in ledger.rows() if r["state"] != "applied"]
start = time.perf_counter()
context.__exit__(None, None, None)
print(armed, spent, time.perf_counter() - start)
"""


def arming(rounds: int) -> None:
    """Prints what 50 patches add to importing their modules of diffusers and transformers."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"folder": str(_pack(Path(folder))), "modules": list(_TARGETS)}
        runs = [_timed(_INSIDE.format(**values)) for _ in range(rounds)]
        bare = [_timed(_IMPORT.format(**values, patched=False))[1] for _ in range(rounds)]
    armed, applied, undone = (statistics.median(column) * 1e3 for column in zip(*runs, strict=True))
    total = statistics.median(bare) * 1e3
    added = armed + applied
    print(f"50 patches, {len(_TARGETS)} files: armed {armed:.0f} ms, applied {applied:.0f} ms, undone {undone:.0f} ms")
    print(f"  added to importing the modules: {added:.0f} ms (aim 100), {added / total:.2f} of {total:.0f} ms")


def _timed(program: str) -> list[float]:
    root = Path(patch.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    return [float(word) for word in done.stdout.split()[-3:]]


def _call(kind: str, more: str = "") -> float:
    """Returns nanoseconds per call of a function under one patch."""
    with tempfile.TemporaryDirectory() as folder:
        upstream = Path(folder) / "patches" / "up"
        upstream.mkdir(parents=True)
        (Path(folder) / "torchport_bench.py").write_text("def f(a):\n    b = a\n    return b\n")
        python = "def new(a):\n    return a\ndef wrap(original, a):\n    return original(a)\n"
        (upstream / "p.py").write_text(python)
        text = f"- id: up.one\n  target: torchport_bench:f\n  {kind}\n{more}{_TAIL}"
        (upstream / "p.yaml").write_text(text)
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        with patch.applied(patch.read(upstream.parent, ["up"])):
            module = importlib.import_module("torchport_bench")
            result = _nanoseconds(module.f)
        sys.path.remove(folder)
        del sys.modules["torchport_bench"]
        return result


def _nanoseconds(function: types.FunctionType) -> float:
    timer = timeit.Timer("f(1)", globals={"f": function})
    return min(timer.repeat(7, 200_000)) / 200_000 * 1e9


def _proxied() -> types.FunctionType:
    """Returns a wrapped function as it would be if every function had a proxy, and not the special kinds alone."""

    def function(a: int) -> int:
        b = a
        return b  # noqa: RET504 - the same

    call, _ = counting(Wrapped(lambda original, a: original(a), function), Calls(), function)
    return proxy(function, call, None)  # type: ignore[return-value]


def calls() -> None:
    """Prints the cost of one call: bare, under each kind of patch, and under the proxy that special kinds have."""

    def bare(a: int) -> int:
        b = a
        return b  # noqa: RET504 - the shape of the function that is rewritten

    base = _nanoseconds(bare)  # type: ignore[arg-type]
    rows = {
        "bare": base,
        "replace, uncounted": _call("replace: p.py:new", "  counted: false\n"),
        "replace, counted": _call("replace: p.py:new"),
        "rewrite of one statement": _call("rewrite: {match: b = a, put: p.py:new}"),
        "wrap": _call("wrap: p.py:wrap"),
    }
    rows["wrap, by proxy"] = _nanoseconds(_proxied())
    for name, value in rows.items():
        print(f"{name:26} {value:6.0f} ns  {value / base:5.2f} x bare")


def sweep(rounds: int) -> None:
    """Prints the identity sweep over 10,000 modules of 40 names and a class each, and the collector's two passes."""
    names = [f"torchport_bench_{index}" for index in range(10_000)]
    code = compile(textwrap.dedent("class C:\n    def f(self): pass\n") + "a0 = 1\n" * 1, "m", "exec")
    for name in names:
        module = types.ModuleType(name)
        exec(code, vars(module))
        vars(module).update({f"name{i}": object() for i in range(40)})
        sys.modules[name] = module

    def wanted() -> None:
        """Held by one module of the ten thousand."""

    sys.modules[names[5000]].held = wanted  # type: ignore[attr-defined]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        by_id = holders.names_of([wanted])
        times.append(time.perf_counter() - start)
    assert [holder.where for holder in by_id[id(wanted)]] == [f"{names[5000]}.held"]
    start = time.perf_counter()
    holders.Referrers([wanted], lambda referrer: False).holders(wanted)
    deep = time.perf_counter() - start
    print(f"sweep over {len(sys.modules)} modules: {min(times) * 1e3:.0f} ms (aim 150)")
    print(f"  and what the collector knows: {deep * 1e3:.0f} ms more")
    for name in names:
        del sys.modules[name]


def main() -> None:
    """Runs all three."""
    parser = argparse.ArgumentParser(description="What patching costs.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    calls()
    sweep(rounds)
    if importlib.util.find_spec("diffusers") and importlib.util.find_spec("transformers"):
        arming(rounds)


if __name__ == "__main__":
    main()
