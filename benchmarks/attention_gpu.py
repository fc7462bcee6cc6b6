"""Attention on an NVIDIA GPU: JAX's cuDNN, as torchport calls it, beside PyTorch's flash attention.

    python benchmarks/attention_gpu.py [--json] [--rounds 7] [--calls 3] [--only 16x128]

Same shapes, same inputs, bfloat16, inference. PyTorch is `scaled_dot_product_attention` with its flash backend and none
other; JAX is `torchport.kernels.attention.stock` with `cudnn`, jitted, and to bring [B, H, S, D] to cuDNN's layout is
counted.
Rows with a length mask the keys from there on: JAX is given the length; PyTorch, whose flash backend takes no mask, the
keys before it. Milliseconds are medians over rounds in which the two take turns, each in a process of its own, warm;
PyTorch's are CUDA events', JAX's the wall clock's until the results are there. TFLOP/s count 4 * S * T * H * D over the
valid keys. `apart` is max|a - b| / max|b| over the first queries.

This has not been run on a GPU by us.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy

COMMAND = "pip install -e '.[cuda]' && python benchmarks/attention_gpu.py"
SHOWN = 4
"""Queries whose outputs are compared."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: H heads of D features, as many queries as keys, `length` of which are valid; None: all."""

    heads: int
    head_size: int
    tokens: int
    length: int | None = None

    @property
    def name(self) -> str:
        """How the row is called."""
        valid = "" if self.length is None else f", {self.length:,} valid"
        return f"{self.heads}x{self.head_size}, {self.tokens:,} tokens{valid}"

    def teraflops(self, milliseconds: float) -> float:
        """Returns TFLOP/s at this time, counted over the valid keys."""
        keys = self.tokens if self.length is None else self.length
        return 4 * self.tokens * keys * self.heads * self.head_size / milliseconds / 1e9


SHAPES = [(16, 128, 8_192), (16, 128, 32_768), (16, 128, 112_856), (48, 64, 39_826)]
# A text of which few tokens are letters leaves some hundreds of keys out; 777 is no multiple of any tile.
CASES = [Case(*shape, length) for shape in SHAPES for length in (None, shape[2] - 777)]


def inputs(case: Case) -> list[numpy.ndarray]:
    """Returns q, k and v, float32 [1, H, S, D], the same in either process."""
    random = numpy.random.default_rng(0)
    shape = (1, case.heads, case.tokens, case.head_size)
    return [random.standard_normal(shape, dtype=numpy.float32) for _ in range(3)]


# A worker: one framework in its process. It prepares a case and then times calls of it, a line of JSON for each.


def prepared_jax(case: Case) -> tuple[Callable[[int], float], numpy.ndarray]:
    """Returns a function that times calls in milliseconds each, and the first queries' outputs."""
    import functools

    import jax
    import jax.numpy as jnp

    from torchport.kernels.attention import stock

    options = {"scale": case.head_size**-0.5, "causal": False, "window": None, "implementation": "cudnn"}
    attention = jax.jit(functools.partial(stock.attention, **options))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(case))
    lengths = None if case.length is None else jnp.asarray([case.length], jnp.int32)
    first = attention(q, k, v, lengths_B=lengths)[0, :, :SHOWN]

    def timed(calls: int) -> float:
        start = time.perf_counter()
        out = [attention(q, k, v, lengths_B=lengths) for _ in range(calls)]
        jax.block_until_ready(out)
        return (time.perf_counter() - start) * 1e3 / calls

    return timed, numpy.asarray(first.astype(jnp.float32))


def prepared_torch(case: Case) -> tuple[Callable[[int], float], numpy.ndarray]:
    """As `prepared_jax`, of PyTorch."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in inputs(case))
    k, v = k[:, :, : case.length], v[:, :, : case.length]

    def attention() -> torch.Tensor:
        with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    first = attention()[0, :, :SHOWN].float().cpu().numpy()

    def timed(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            attention()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls

    return timed, first


PREPARED = {"jax": prepared_jax, "torch": prepared_torch}


def serve(framework: str) -> None:
    """Answers lines of JSON: {"case": ...} prepares and warms, {"calls": n} times; until stdin ends."""
    from torchport.errors import AttentionError

    answers, sys.stdout = sys.stdout, sys.stderr
    timed = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "case" in request:
                timed = None  # gives the last case's tensors back first
                timed, first = PREPARED[framework](Case(**request["case"]))
                timed(1)
                answer: dict[str, Any] = {"first": first.tolist()}
            else:
                answer = {"milliseconds": timed(request["calls"])}
        # Both frameworks' own errors, out of memory included, are RuntimeErrors: a row that fails leaves the others.
        except (AttentionError, RuntimeError) as error:
            answer = {"failed": str(error).splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


class Worker:
    """A framework's process, from outside."""

    def __init__(self, framework: str) -> None:
        # JAX would take three quarters of the GPU's memory beforehand, and PyTorch needs its own.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, __file__, "--worker", framework]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer; {"failed": ...} where there is none."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: there will be no line either
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": f"the process ended with exit code {self.process.wait()}"}

    def close(self) -> None:
        """Lets the process end."""
        self.process.communicate()


def measure(case: Case, workers: dict[str, Any], rounds: int, calls: int) -> dict[str, Any]:
    """Returns one row: what each framework reached, or why it did not, and how far apart their numbers are."""
    row: dict[str, Any] = {"case": case.name}
    firsts, times = {}, {}
    for name, worker in workers.items():
        answer = worker.ask({"case": dataclasses.asdict(case)})
        if "failed" in answer:
            row[name] = answer
        else:
            firsts[name], times[name] = numpy.asarray(answer["first"]), []
    for _ in range(rounds):
        for name in list(times):
            answer = workers[name].ask({"calls": calls})
            if "failed" in answer:
                row[name] = answer
                del times[name]
            else:
                times[name].append(answer["milliseconds"])
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        row[name] = {"milliseconds": median, "teraflops": case.teraflops(median)}
    if len(firsts) == 2:
        ours, theirs = firsts["jax"], firsts["torch"]
        row["apart"] = float(abs(ours - theirs).max() / abs(theirs).max())
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as lines to print, and below them why some have no numbers."""
    lines = [f"{'bfloat16':40}{'jax ms':>10}{'TFLOP/s':>9}{'torch ms':>10}{'TFLOP/s':>9}{'jax/torch':>11}{'apart':>9}"]
    failures = []
    for row in rows:
        line, milliseconds = f"{row['case']:40}", []
        for name in PREPARED:
            result = row[name]
            if "failed" in result:
                line += f"{'-':>10}{'-':>9}"
                failures.append(f"{name}, {row['case']}: {result['failed']}")
            else:
                line += f"{result['milliseconds']:10.2f}{result['teraflops']:9.0f}"
                milliseconds.append(result["milliseconds"])
        both = len(milliseconds) == 2
        line += f"{milliseconds[0] / milliseconds[1]:11.2f}" if both else f"{'-':>11}"
        lines.append(line + (f"{row['apart']:9.4f}" if "apart" in row else f"{'-':>9}"))
    return "\n".join([*lines, *failures])


def missing() -> str | None:
    """Returns why nothing can be measured here, in one line; None: it can."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"PyTorch {torch.__version__} sees no CUDA GPU here. On a machine that has one: {COMMAND}"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds of both frameworks")
    parser.add_argument("--calls", type=int, default=3, help="calls of a round")
    parser.add_argument("--only", default="", help="rows whose name contains this, such as 48x64")
    parser.add_argument("--worker", choices=PREPARED, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Prints the table, or JSON; 2 where there is no GPU."""
    arguments = parsed()
    if arguments.worker:
        serve(arguments.worker)
        return 0
    if reason := missing():
        print(reason, file=sys.stderr)
        return 2
    workers = {name: Worker(name) for name in PREPARED}
    chosen = [case for case in CASES if arguments.only in case.name]
    rows = [measure(case, workers, arguments.rounds, arguments.calls) for case in chosen]
    for worker in workers.values():
        worker.close()
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
