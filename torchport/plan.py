"""`torchport plan`: does this job trace, shard and fit on that slice, and how fast should it be; no TPU is needed.

What the compiler says is exact: bytes per device, collectives, its own estimate of cycles for all but the kernels. The
rest is a model, printed as one: attention from its share of peak by static schedule, communication from bytes and
links, one after the other. Nothing of it has been calibrated against a chip.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torchport import errors, hlo, topology
from torchport.attention import tiles, transposed
from torchport.attention.dispatch import HEAD_AXES
from torchport.errors import BadValueError, TopologyError
from torchport.machine import Chip, Machine, chip
from torchport.run import versions
from torchport.task import Request, Task, accept

LINKS = {"v5e": 50e9, "v5p": 100e9, "v6e": 100e9, "tpu7x": 100e9}
"""Bytes per second of one link between chips, in one direction.

Source: cloud.google.com/tpu/docs: 400, 1200, 800 and 1200 GB/s a chip, both directions, over 4, 6, 4 and 6 ports.
"""
PORTS = 2
"""Links that a group of neighbours has for itself: a square of four chips."""
MOVED = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "collective-permute": 1.0}
"""How many times a collective moves the larger of its input and output through a device's links, before (n - 1) / n."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective of one block or step: output bytes on a device, how often, and among how many devices."""

    kind: str
    bytes: int
    count: int
    group: int
    source: str | None = None

    def seconds(self, chip_name: str) -> float:
        """Returns the model's time: bytes over links, nothing overlapped."""
        size = self.bytes * (self.group if self.kind == "reduce-scatter" else 1)
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return self.count * MOVED.get(self.kind, 1.0) * size * share / (PORTS * LINKS[chip_name])


def plan(request: Request, topology_name: str | None, keep: Path | None = None) -> dict[str, Any]:
    """Returns the plan of a job, as `--json` prints it.

    Args:
        request: Model, config and overrides.
        topology_name: A TPU slice in place of the config's machine.
        keep: A folder for the compiler's dump, from which every figure can be computed again.

    Raises:
        TopologyError: No libtpu, no such slice, or a program that the compiler refuses.
        TorchportError: Whatever the job is refused for; see `task.accept`.
    """
    overrides = request.overrides if topology_name is None else (*request.overrides, f"machine={topology_name}")
    task = accept(dataclasses.replace(request, stage="denoise", overrides=overrides))
    if task.machine.platform != "tpu":
        place = f"machine {task.machine.name}"
        raise BadValueError(place, "It is no TPU, and a plan is for one", "Name a slice with --topology v6e:2x4")
    result, program = _compiled(task, keep)
    denoise = _unfit(result, task.machine) if program is None else _stage(task, result, program)
    stages = {"encode": {"status": "not_ported"}, "denoise": denoise, "decode": {"status": "not_planned"}}
    return {
        "model": task.card.model,
        "machine": task.machine.name,
        "strategy": task.job.strategy,
        "mesh": dict(task.job.mesh),
        "fits": stages["denoise"]["fits"],
        "versions": versions(),
        "assumptions": ["uncalibrated", *_assumptions(task)],
        "stages": stages,
    }


def _assumptions(task: Task) -> list[str]:
    known = [f"the norms' gains keep the scores '{name}' within their bound" for name in task.card.score_bounds]
    return [*known, "every token is valid", "nothing overlaps"]


def _compiled(task: Task, keep: Path | None) -> tuple[dict[str, Any], hlo.Program | None]:
    """Returns the compiler's outcome and its program, none if it does not fit; from a process of its own."""
    request = task.request
    fields: dict[str, Any] = {
        "model": request.model,
        "config": request.config,
        "stage": "denoise",
        "prompt": None,
        "checkpoint": request.checkpoint,
        "upstream_path": str(request.upstream_path) if request.upstream_path else None,
        "path": request.path,
        "overrides": list(request.overrides),
    }
    with tempfile.TemporaryDirectory(prefix="torchport-plan-") as scratch:
        folder = Path(keep if keep is not None else scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        asked, outcome, dump = (Path(scratch) / name for name in ("request.json", "outcome.json", "hlo"))
        dump = folder / "hlo"
        asked.write_text(json.dumps({"task": fields, "stage": "denoise"}))
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text".strip()
        own = {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false", **topology.environment()}
        command = [sys.executable, "-P", "-m", "torchport.outline", str(asked), str(outcome)]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
        if not outcome.is_file():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise TopologyError(f"plan {task.machine.name}", f"The compiler stopped: {said[:300]}", "Run it with -v")
        answer = json.loads(outcome.read_text())
        if "refusal" in answer:
            kind = getattr(errors, answer["refusal"]["kind"])
            raise kind(*answer["refusal"]["args"])
        return answer["result"], hlo.read(dump) if "bytes" in answer["result"] else None


def _unfit(result: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Returns what is known of a stage that does not fit: there is no program."""
    kind = chip(machine)
    assert kind is not None
    asked = {"arguments_bytes": None, "temporaries_bytes": None, "peak_bytes": result["exceeds"]["asked"]}
    step = {"model_s": None, "floor_s": result["flops"] / (kind.flops * machine.devices), "flops": result["flops"]}
    return {
        "status": "ok",
        "fits": False,
        "per_device": {**asked, "hbm_bytes": result["exceeds"]["limit"]},
        "per_block": None,
        "step": step,
        "attention": None,
        "largest": [],
        "trace_s": result["trace_s"],
        "compile_s": result["compile_s"],
    }


def _stage(task: Task, result: Mapping[str, Any], program: hlo.Program) -> dict[str, Any]:
    """Returns what is known of a stage."""
    machine, kind = task.machine, chip(task.machine)
    assert kind is not None
    sizes = result["bytes"]
    peak = sizes["argument"] + sizes["temp"] + sizes["output"] + sizes["generated_code"] - sizes["alias"]
    attention, loop = _attention(task, result["attention"], kind), _loop(program)
    block = _block(program, attention, machine, kind)
    step = _step(program, block, attention, result["flops"], machine, kind)
    return {
        "status": "ok",
        "fits": peak <= kind.memory,
        "per_device": {
            "arguments_bytes": sizes["argument"],
            "temporaries_bytes": sizes["temp"],
            "peak_bytes": peak,
            "hbm_bytes": kind.memory,
        },
        "per_block": block,
        "step": step,
        "attention": attention,
        "largest": [
            {"ms": _ms(one.cycles, kind), "opcode": one.instruction.opcode, "source": str(one.instruction.source or "")}
            for one in program.largest(10, None if loop is None else loop.body)
        ],
        "trace_s": result["trace_s"],
        "compile_s": result["compile_s"],
    }


def _loop(program: hlo.Program) -> hlo.Loop | None:
    """Returns the loop over blocks: of those with a kernel, the one that takes longest."""
    loops = [loop for loop in program.loop_bodies() if program.kernels(loop.body)]
    return max(loops, key=lambda loop: loop.cycles, default=None)


def _attention(task: Task, calls: list[dict[str, Any]], kind: Chip) -> dict[str, Any] | None:
    """Returns the largest attention of the program, and its share of peak by static schedule."""
    if not calls:
        return None
    call = max(calls, key=lambda call: call["queries"] * call["keys"])
    name = task.machine.name.partition(":")[0]
    split = math.prod(task.job.mesh.values())
    flops = 4 * call["batch"] * call["heads"] * call["queries"] * call["keys"] * call["head_size"] // split
    found: dict[str, Any] = {**call, "flops_per_device": flops, "steady_percent": None, "peak_percent": None}
    implementation: Literal["splash_transposed", "splash"]
    if call["implementation"] in ("splash_transposed", "splash"):
        implementation = call["implementation"]
        own = call["heads"] // math.prod(task.job.mesh.get(axis, 1) for axis in HEAD_AXES)
        _, size = transposed.grouping(max(own, 1), call["head_size"])
        row = tiles.row(name, implementation, size, call["bounded"])
        found |= {"steady_percent": row.steady_percent, "peak_percent": row.peak_percent}
        found["ms"] = 1e3 * flops / (kind.flops * row.peak_percent / 100)
    return found


def _block(
    program: hlo.Program, attention: Mapping[str, Any] | None, machine: Machine, kind: Chip
) -> dict[str, Any] | None:
    """Returns what one block costs, if blocks run in a loop; unrolled ones cannot be told apart."""
    loop = _loop(program)
    if loop is None:
        return None
    name = machine.name.partition(":")[0]
    found = _exchanges(program, loop.body)
    return {
        "count": loop.trips,
        "other_ms": _ms(loop.cycles, kind),
        "attention_ms": attention.get("ms") if attention else None,
        "communication_ms": 1e3 * sum(one.seconds(name) for one in found),
        "collectives": [dataclasses.asdict(one) for one in found],
    }


def _exchanges(program: hlo.Program, of: str | None) -> list[Exchange]:
    """Returns the collectives of a computation, those of one kind, size and line counted together."""
    together: dict[Exchange, int] = {}
    for one in program.collectives(of):
        key = Exchange(one.kind, one.bytes, 0, one.group_size, str(one.source) if one.source else None)
        together[key] = together.get(key, 0) + one.times
    return [dataclasses.replace(key, count=count) for key, count in together.items()]


def _step(
    program: hlo.Program,
    block: Mapping[str, Any] | None,
    attention: Mapping[str, Any] | None,
    flops: int,
    machine: Machine,
    kind: Chip,
) -> dict[str, Any]:
    """Returns the model of one denoising step, in seconds, with its parts; and the floor from arithmetic alone."""
    name = machine.name.partition(":")[0]
    count = block["count"] if block else sum(program.kernels().values())
    kernel = count * attention["ms"] / 1e3 if attention and "ms" in attention else None
    other = program.cycles() / kind.clock
    moved = sum(one.seconds(name) for one in _exchanges(program, None))
    return {
        "attention_s": kernel,
        "other_s": other,
        "communication_s": moved,
        "model_s": None if kernel is None else kernel + other + moved,
        "floor_s": flops / (kind.flops * machine.devices),
        "flops": flops,
    }


def _ms(cycles: int, kind: Chip) -> float:
    return 1e3 * cycles / kind.clock


def lines(found: Mapping[str, Any]) -> list[str]:
    """Returns a plan as text."""
    stage, gib = found["stages"]["denoise"], 2**30
    device, block, step = stage["per_device"], stage["per_block"], stage["step"]
    mesh = " x ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    text = [
        f"{found['model']} on {found['machine']}, {found['strategy']}, {mesh}: "
        f"{'fits' if found['fits'] else 'DOES NOT FIT'}",
        f"  bytes per device  {device['peak_bytes'] / gib:.3g} GiB of {device['hbm_bytes'] / gib:.3g}",
    ]
    if device["arguments_bytes"] is not None:
        text[-1] += (
            f", of them {device['arguments_bytes'] / gib:.3g} arguments and "
            f"{device['temporaries_bytes'] / gib:.3g} temporaries"
        )
    if block:
        moved = sum(one["bytes"] * one["count"] for one in block["collectives"])
        kernel = "not known" if block["attention_ms"] is None else f"{block['attention_ms']:.3g} ms"
        text.append(
            f"  per block ({block['count']})  attention {kernel} (model), everything else {block['other_ms']:.3g} ms "
            f"(compiler), {moved / 1e6:.3g} MB of collectives {block['communication_ms']:.3g} ms (model)"
        )
        text += [
            f"    {one['count']} x {one['kind']} of {one['bytes'] / 1e6:.1f} MB among {one['group']}"
            f"  {one['source'] or ''}"
            for one in block["collectives"]
        ]
    if step["model_s"] is not None:
        text.append(
            f"  per step  {step['model_s']:.3g} s by the model (attention {step['attention_s']:.3g}, other "
            f"{step['other_s']:.3g}, communication {step['communication_s']:.3g}); the arithmetic alone at peak takes "
            f"{step['floor_s']:.3g} s"
        )
    if stage["largest"]:
        text.append("  the most expensive operations of a block:" if block else "  the most expensive operations:")
    text += [f"    {one['ms']:6.3f} ms  {one['opcode']:8} {one['source']}" for one in stage["largest"]]
    text.append(f"  traced in {stage['trace_s']:.1f} s, compiled in {stage['compile_s']:.1f} s")
    text.append(f"  assumed: {'; '.join(found['assumptions'])}")
    return text
