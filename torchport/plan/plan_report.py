"""A plan as text for the terminal and as an HTML page; all figures are from `figures`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchport.config.card import DENOISING
from torchport.files import atomic, page
from torchport.files.page import BarChart, BarPart, PageTable
from torchport.plan.figures import (
    BlockTime,
    Clip,
    JobPlan,
    Memory,
    Operation,
    Overflow,
    StageLeftOut,
    StagePlan,
    largest_shape,
    mesh_text,
    moved_bytes,
)
from torchport.progress import size_text

TEMPLATE = Path(__file__).with_suffix(".html")


def lines(job: JobPlan) -> list[str]:
    """Returns the printed lines of `torchport plan`: verdict, stages, clip, cost of a verification, assumptions."""
    verdict = "fits" if job.fits else "DOES NOT FIT"
    text = [f"{job.model} on {job.machine}, {job.strategy}, {mesh_text(job.mesh)}: {verdict}"]
    for name, stage in job.stages.items():
        if isinstance(stage, StageLeftOut):
            text.append(f"{name}: {stage.status.replace('_', ' ')}. {stage.why}.")
            continue
        calls = ", ".join(f"{program.times} x {largest_shape(program.inputs)}" for program in stage.programs)
        text += [f"{name}: {len(stage.programs)} program(s), called {calls}", *_stage_lines(name, stage)]
    if (size := job.at_once_bytes) is not None:
        limit = job.stage("denoise").per_device.hbm_bytes
        outcome = "both would fit at once" if size <= limit else "both would not fit at once"
        sizes = f"{_size(size)} of {_size(limit)}"
        text.append(f"two networks take turns, one is on the devices at a time; {outcome}: {sizes}")
    if job.clip is not None:
        text += _clip_lines(job.clip)
    if (cost := job.verification) is not None:
        host, values, device = (size_text(size) for size in (cost.host_bytes, cost.values_bytes, cost.device_bytes))
        text.append(
            f"verify: a step takes about {host} on the host, {values} of them in TMPDIR, too, and weights of {device} "
            f"on one device; {cost.flops:.3g} FLOP on the host, {cost.host_s:.3g} s at 1 TFLOP/s"
        )
    text += [f"  lossy: {reason}" for reason in job.lossy]
    text.append(f"  assumed: {'; '.join(job.assumptions)}")
    return text


def _clip_lines(clip: Clip) -> list[str]:
    cost = "" if clip.dollars is None else f", {clip.dollars:.2g} US dollars"
    text = [
        f"a clip: {clip.first_s:.3g} s for the first, {clip.next_s:.3g} s for each after it, by the model; "
        f"{clip.times_real_time:.3g} times as long as it plays ({clip.length_s:.3g} s), {clip.chip_s:.3g} chip-s{cost}"
    ]
    text += [
        f"  {part.part:13} {part.seconds:7.3g} s{'  (the first alone)' if part.once else ''}  {part.limit}"
        for part in clip.parts
    ]
    memory = "a size that is not known" if clip.host_memory_bytes is None else size_text(clip.host_memory_bytes)
    verdict = "" if clip.fits_host else ": DOES NOT FIT"
    return [*text, f"  the host's memory: {size_text(clip.host_bytes)} of {memory}{verdict}"]


def _stage_lines(name: str, stage: StagePlan) -> list[str]:
    device = stage.per_device
    usage = f"  bytes per device  {_size(device.peak_bytes)} of {size_text(device.hbm_bytes)}"
    if device.arguments_bytes is not None:
        usage += (
            f", of them {size_text(device.arguments_bytes)} arguments and {_size(device.temporaries_bytes)} temporaries"
            f"; constants of the program {_size(device.constants_bytes)}"
        )
    text = [usage]
    text += [f"  DOES NOT FIT: {_finding_line(finding)}" for finding in stage.findings]
    if stage.per_block:
        text += _block_lines(stage.per_block)
    text += _step_lines(name, stage)
    if stage.largest:
        of_block = " of a block" if stage.per_block else ""
        text.append(f"  the most expensive operations{of_block}:")
    text += [f"    {operation.ms:6.3f} ms  {operation.opcode:8} {operation.source}" for operation in stage.largest]
    text += [f"  not modelled: {fact}" for fact in stage.not_modelled]
    if stage.operators:
        text.append(f"  {stage.operators}")
    text.append(f"  traced in {stage.trace_s:.1f} s, compiled in {stage.compile_s:.1f} s")
    return text


def _step_lines(name: str, stage: StagePlan) -> list[str]:
    """Returns lines on the collectives and the time of a denoising step, or of a whole stage of another kind."""
    text = []
    scope = "per step" if name in DENOISING else f"a {name}"
    if stage.per_step:
        collectives = stage.per_step.collectives
        count = sum(collective.count for collective in collectives)
        text.append(f"  {scope:8}  {count:g} collectives, {moved_bytes(collectives) / 1e6:.3g} MB on each device")
    if step := stage.step.known:
        left = step.model_s - step.attention_s
        divided = f"; the last two make {left:.3g}, as all of them but the products is divided by {step.factor:.3g}"
        divided = "" if step.factor == 1.0 else divided
        text.append(
            f"  {scope:8}  {step.model_s:.3g} s by the model (attention {step.attention_s:.3g}, other "
            f"{step.other_s:.3g}, of it {step.products_s:.3g} for products at peak, communication "
            f"{step.communication_s:.3g}{divided}); the arithmetic alone at peak takes {stage.step.floor_s:.3g} s"
        )
    return text


def _finding_line(finding: Overflow) -> str:
    where = "".join(f" {name}" for name in (finding.kernel, finding.tile) if name)
    asked = finding.asked_bytes
    limit = finding.limit_bytes
    sizes = "" if asked is None else f": {asked:,} bytes, limit {limit:,}"
    return f"{finding.what.upper()}{where}{sizes}. {finding.fact}"


def _size(size: int | None) -> str:
    return "not known" if size is None else size_text(size)


def _block_lines(block: BlockTime) -> list[str]:
    attention = "not known" if block.attention_ms is None else f"{block.attention_ms:.3g} ms"
    return [
        f"  per block ({block.count})  attention {attention} (model), "
        f"everything else {block.other_ms:.3g} ms (compiler), {moved_bytes(block.collectives) / 1e6:.3g} MB "
        f"of collectives {block.communication_ms:.3g} ms (model)",
        *(
            f"    {collective.count} x {collective.kind} of {collective.bytes / 1e6:.1f} MB "
            f"among {collective.group} ({collective.links})"
            f"  {collective.source or ''}"
            for collective in block.collectives
        ),
    ]


def write(file: Path, job: JobPlan, command: str) -> None:
    """Writes a plan as an HTML page; an older file is replaced when the new one is complete."""
    atomic.write_text(file, page_of(job, command))


def page_of(job: JobPlan, command: str) -> str:
    """Returns a plan as one self-contained HTML page; `command` is the command line that makes the plan."""
    return page.rendered(
        TEMPLATE,
        plan=job,
        mesh=mesh_text(job.mesh),
        stages=[_section(name, stage) for name, stage in job.stages.items()],
        clip=_clip_chart(job),
        versions=page.table("Versions", "package|version", sorted(job.versions.items())),
        command=command,
    )


def _clip_chart(job: JobPlan) -> BarChart | None:
    """Returns a clip's time as a bar of its parts, without parts of the first clip alone; None without a clip."""
    if job.clip is None:
        return None
    # A kind is a colour of the page, whatever its name: neighbouring parts differ.
    kinds = {"encode": "arguments", "write": "rest", "decode": "communication"}
    rest = [part for part in job.clip.parts if not part.once]
    parts = [_bar(kinds.get(part.part, "attention"), f"{part.part}: {part.limit}", 1e3 * part.seconds) for part in rest]
    title = (
        f"A clip, modelled: {job.clip.next_s:.4g} s, {job.clip.times_real_time:.3g} times as long as it plays; the "
        f"first takes {job.clip.first_s:.4g} s"
    )
    return BarChart(title, parts, 1e3 * job.clip.next_s)


def _section(name: str, stage: StagePlan | StageLeftOut) -> dict[str, Any]:
    """Returns the variables of the page's template for one stage: its texts, charts and tables."""
    if isinstance(stage, StageLeftOut):
        nothing: dict[str, Any] = dict.fromkeys(("findings", "charts", "tables", "not_modelled"), ())
        return {"name": name, "status": stage.status.replace("_", " "), "why": stage.why, **nothing}
    return {
        "name": name,
        "why": "",
        "findings": [f"Does not fit: {_finding_line(item)}" for item in stage.findings],
        "charts": [*_time_charts(name, stage), _memory_chart(stage.per_device)],
        "tables": _tables(name, stage),
        "not_modelled": stage.not_modelled,
    }


def _time_charts(name: str, stage: StagePlan) -> list[BarChart]:
    """Returns the bar charts of a step's time and of a block's time; a chart whose time is not known is left out."""
    block, charts = stage.per_block, []
    if step := stage.step.known:
        scope = "One step" if name in DENOISING else "The whole stage"
        # So that the parts add up to `model_s`, they are shown as the calibration makes them.
        factor = step.factor
        other = 1e3 * step.calibrated_other_s
        moved = 1e3 * (step.model_s - step.attention_s) - other
        share = step.calibrated_other_s / (step.other_s or 1)
        largest = [operation.model_copy(update={"ms": operation.ms * share}) for operation in stage.largest]
        known = "modelled" if factor == 1.0 else f"modelled, all but attention and products divided by {factor:.3g}"
        title = f"{scope}, {known}: {step.model_s:.4g} s; below it the arithmetic alone at peak, the floor"
        floor_s = stage.step.floor_s
        floor = BarPart("floor", "floor: arithmetic alone at peak", floor_s * 1e3, f"{floor_s:.4g} s")
        # If there are blocks, `stage.largest` has operations of a block, which do not belong into a step's bar.
        bars = _bars(1e3 * step.attention_s, other, moved, [] if block else largest)
        charts.append(BarChart(title, bars, step.model_s * 1e3, floor))
    if block and block.attention_ms is not None:
        bars = _bars(block.attention_ms, block.other_ms, block.communication_ms, stage.largest)
        total = sum(part.amount for part in bars)
        title = f"One of {block.count} blocks, modelled: {total:.4g} ms, before any factor"
        charts.append(BarChart(title, bars, total))
    return charts


def _bars(attention_ms: float, other_ms: float, communication_ms: float, largest: Sequence[Operation]) -> list[BarPart]:
    """Returns the parts of a time: attention, the longest operations, other operations, communication. `largest` has
    the longest operations, which are within `other_ms`, added up by their line of PyTorch.
    """
    by_line = collections.defaultdict[str, float](float)
    for operation in largest:
        by_line[operation.source or operation.opcode] += operation.ms
    others = "everything else (compiler)" if largest else "other (compiler)"
    return [
        _bar("attention", "attention (model)", attention_ms),
        # Each operation is paler than the operation before it.
        *(_bar("operation", line, ms, max(1 - 0.08 * n, 0.2)) for n, (line, ms) in enumerate(by_line.items(), 1)),
        _bar("rest", others, other_ms - sum(by_line.values())),
        _bar("communication", "communication (model)", communication_ms),
    ]


def _bar(kind: str, label: str, ms: float, shade: float = 1.0) -> BarPart:
    return BarPart(kind, label, ms, f"{ms / 1e3:.4g} s" if ms >= 1e3 else f"{ms:.4g} ms", shade)


def _memory_chart(device: Memory) -> BarChart:
    """Returns a bar chart of a device's memory: arguments, temporaries, the rest of the peak, and free memory."""
    peak, hbm = device.peak_bytes or 0, device.hbm_bytes
    if device.arguments_bytes is None or device.temporaries_bytes is None:
        sizes = [("rest", "asked for", peak)]
    else:
        rest = max(peak - device.arguments_bytes - device.temporaries_bytes, 0)
        sizes = [
            ("arguments", "arguments", device.arguments_bytes),
            ("temporaries", "temporaries", device.temporaries_bytes),
            ("rest", "rest: outputs and code", rest),
        ]
    sizes.append(("free", "free", max(hbm - peak, 0)))
    parts = [BarPart(kind, label, float(size), size_text(size)) for kind, label, size in sizes]
    usage = size_text(peak) if peak else "not known"
    title = f"Memory of each device: {usage} of {size_text(hbm)}"
    return BarChart(title, parts, float(max(peak, hbm)))


def _tables(name: str, stage: StagePlan) -> list[PageTable]:
    """Returns the tables of a stage: programs, collectives and longest operations; `#` marks a column of numbers."""
    programs = []
    for program in stage.programs:
        model = program.step.model_s
        peak = program.per_device.peak_bytes
        programs.append((
            largest_shape(program.inputs),
            program.times,
            "not known" if peak is None else f"{peak:,}",
            "yes" if program.fits else "no",
            "not known" if model is None else f"{model:.4g}",
            f"{program.step.floor_s:.4g}",
            f"{program.compile_s:.1f}",
        ))  # fmt: skip
    traffic = stage.per_block or stage.per_step
    sent = [
        (collective.kind, f"{collective.count:g}", f"{collective.bytes:,}", collective.group, collective.source or "")
        for collective in (traffic.collectives if traffic else ())
    ]
    where = "a block" if stage.per_block else "a step" if name in DENOISING else "the stage"
    operations = [(f"{operation.ms:.4g}", operation.opcode, operation.source) for operation in stage.largest]
    of_block = " of a block" if stage.per_block else ""
    heads = "largest input|calls#|bytes on a device#|fits|modelled s a call#|floor s#|compiled in s#"
    longest = f"Most expensive operations{of_block}, by the compiler's estimate"
    return [
        page.table("Programs", heads, programs),
        page.table(f"Collectives of {where}", "kind|times#|bytes of output#|among#|line", sent),
        page.table(longest, "ms#|operation|line", operations),
    ]
