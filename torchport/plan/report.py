"""A plan in words, and as a page for people: nothing is computed here that the plan's JSON does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchport.files import atomic

TEMPLATE = Path(__file__).with_suffix(".html")
WIDE = 1000.0
"""Units of a picture's width."""
Part = tuple[str, str, float, str]
"""Of a bar: its kind, which has a colour in the template; what it is; how much; the same in words."""


def lines(found: Mapping[str, Any]) -> list[str]:
    """Returns a plan as text."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in found["mesh"].items())
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    text = [f"{found['model']} on {found['machine']}, {found['strategy']}, {mesh}: {verdict}"]
    for name, stage in found["stages"].items():
        if stage["status"] != "ok":
            text.append(f"{name}: {stage['status'].replace('_', ' ')}. {stage['why']}.")
            continue
        calls = ", ".join(f"{one['times']} x {_shown(one['inputs'])}" for one in stage["programs"])
        text += [f"{name}: {len(stage['programs'])} program(s), called {calls}", *_stage_lines(stage)]
    text.append(f"  assumed: {'; '.join(found['assumptions'])}")
    return text


def _shown(inputs: Mapping[str, Sequence[int]]) -> str:
    """Returns the shape of a network's largest input."""
    shapes = [list(shape) for shape in inputs.values()]
    return str(max(shapes, key=lambda shape: (len(shape), math.prod(shape))))


def _stage_lines(stage: Mapping[str, Any]) -> list[str]:
    device, block, step, gib = stage["per_device"], stage["per_block"], stage["step"], 2**30
    peak = "not known" if device["peak_bytes"] is None else f"{device['peak_bytes'] / gib:.3g} GiB"
    text = [f"  bytes per device  {peak} of {device['hbm_bytes'] / gib:.3g}"]
    if device["arguments_bytes"] is not None:
        text[-1] += (
            f", of them {device['arguments_bytes'] / gib:.3g} arguments and "
            f"{device['temporaries_bytes'] / gib:.3g} temporaries; constants of the program "
            f"{device['constants_bytes'] / 2**20:.3g} MiB"
        )
    text += [f"  DOES NOT FIT: {finding_line(finding)}" for finding in stage["findings"]]
    if block:
        moved = sum(one["bytes"] * one["count"] for one in block["collectives"])
        kernel = "not known" if block["attention_ms"] is None else f"{block['attention_ms']:.3g} ms"
        text.append(
            f"  per block ({block['count']})  attention {kernel} (model), everything else {block['other_ms']:.3g} ms "
            f"(compiler), {moved / 1e6:.3g} MB of collectives {block['communication_ms']:.3g} ms (model)"
        )
        text += [
            f"    {one['count']} x {one['kind']} of {one['bytes'] / 1e6:.1f} MB among {one['group']} ({one['links']})"
            f"  {one['source'] or ''}"
            for one in block["collectives"]
        ]
    whole = "per step" if stage["steps"] > 1 else "in all"
    if stage["per_step"]:
        moved = sum(one["bytes"] * one["count"] for one in stage["per_step"]["collectives"])
        count = sum(one["count"] for one in stage["per_step"]["collectives"])
        text.append(f"  {whole:8}  {count:g} collectives, {moved / 1e6:.3g} MB on each device")
    if step["model_s"] is not None:
        text.append(
            f"  {whole:8}  {step['model_s']:.3g} s by the model (attention {step['attention_s']:.3g}, other "
            f"{step['other_s']:.3g}, communication {step['communication_s']:.3g}{_divided(step)}); "
            f"the arithmetic alone at peak takes {step['floor_s']:.3g} s"
        )
    if stage["largest"]:
        text.append("  the most expensive operations of a block:" if block else "  the most expensive operations:")
    text += [f"    {one['ms']:6.3f} ms  {one['opcode']:8} {one['source']}" for one in stage["largest"]]
    text += [f"  not modelled: {said}" for said in stage["not_modelled"]]
    text.append(f"  traced in {stage['trace_s']:.1f} s, compiled in {stage['compile_s']:.1f} s")
    return text


def _factor(step: Mapping[str, Any]) -> float:
    """Returns by what all but attention was divided; 1 where there is nothing else, or no calibration."""
    if step["model_s"] == step["uncalibrated_s"]:
        return 1.0
    return float((step["other_s"] + step["communication_s"]) / (step["model_s"] - step["attention_s"]))


def _divided(step: Mapping[str, Any]) -> str:
    """Returns what the factor made of a step's parts, in words."""
    factor, left = _factor(step), step["model_s"] - step["attention_s"]
    return "" if factor == 1.0 else f"; the last two divided by {factor:.3g} make {left:.3g}"


def finding_line(finding: Mapping[str, Any]) -> str:
    """Returns what does not fit, in words."""
    where = "".join(f" {finding[key]}" for key in ("kernel", "tile") if finding[key])
    asked, limit = finding["asked_bytes"], finding["limit_bytes"]
    sizes = "" if asked is None else f": {asked:,} bytes, limit {limit:,}"
    return f"{finding['what'].upper()}{where}{sizes}. {finding['fact']}"


def write(file: Path, found: Mapping[str, Any], command: str) -> None:
    """Writes a plan as a page; an older file gives way, once the new one is complete.

    Raises:
        OutputError: It cannot be written.
    """
    with atomic.writing(file) as temporary:
        temporary.write_text(page(found, command), encoding="utf-8")


def page(found: Mapping[str, Any], command: str) -> str:
    """Returns a plan as one HTML page that refers to nothing outside itself.

    Args:
        found: The plan, as `--json` prints it.
        command: What made it.
    """
    import jinja2

    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        plan=found,
        mesh=" x ".join(f"{axis}={size}" for axis, size in found["mesh"].items()),
        stages=[_shown_stage(name, stage) for name, stage in found["stages"].items()],
        versions=sorted(found["versions"].items()),
        command=command,
    )


def _shown_stage(name: str, stage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the template needs of a stage."""
    shown = {"name": name, "status": stage["status"].replace("_", " "), "why": stage.get("why")}
    if stage["status"] != "ok":
        return shown
    return shown | {
        "findings": [f"Does not fit: {finding_line(finding)}" for finding in stage["findings"]],
        "pictures": [*_times(stage), _memory(stage)],
        "tables": [_programs(stage), _collectives(stage), _operations(stage)],
        "not_modelled": stage["not_modelled"],
    }


def _times(stage: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the pictures of a step and of a block, those that the plan has figures for."""
    step, block, pictures = stage["step"], stage["per_block"], []
    if step["model_s"] is not None:
        what = "One step" if stage["steps"] > 1 else "The whole stage"
        # The parts make up the whole as it is modelled: attention as it is, all else divided.
        factor = _factor(step)
        other, moved = (1e3 * step[key] / factor for key in ("other_s", "communication_s"))
        largest = [] if block else [{**one, "ms": one["ms"] / factor} for one in stage["largest"]]
        parts = _split(1e3 * step["attention_s"], other, moved, largest)
        known = "modelled" if factor == 1.0 else f"modelled, all but attention divided by {factor:.3g}"
        title = f"{what}, {known}: {step['model_s']:.4g} s; below it the arithmetic alone at peak, the floor"
        floor = ("floor", "floor: arithmetic alone at peak", step["floor_s"] * 1e3, f"{step['floor_s']:.4g} s")
        pictures.append(_picture(title, parts, step["model_s"] * 1e3, floor))
    if block and block["attention_ms"] is not None:
        parts = _split(block["attention_ms"], block["other_ms"], block["communication_ms"], stage["largest"])
        total = sum(part[2] for part in parts)
        pictures.append(
            _picture(f"One of {block['count']} blocks, modelled: {total:.4g} ms, before any factor", parts, total)
        )
    return pictures


def _split(
    attention_ms: float, other_ms: float, communication_ms: float, largest: Sequence[Mapping[str, Any]]
) -> list[Part]:
    """Returns the parts of a time; operations by their line of PyTorch, and what is left of the others in one."""
    by_line: dict[str, float] = {}
    for one in largest:
        by_line[one["source"] or one["opcode"]] = by_line.get(one["source"] or one["opcode"], 0.0) + one["ms"]
    rest = ("rest", "everything else (compiler)" if largest else "other (compiler)", other_ms - sum(by_line.values()))
    parts = [
        ("attention", "attention (model)", attention_ms),
        *(("operation", line, ms) for line, ms in by_line.items()),
        rest,
        ("communication", "communication (model)", communication_ms),
    ]
    return [(kind, label, ms, f"{ms / 1e3:.4g} s" if ms >= 1e3 else f"{ms:.4g} ms") for kind, label, ms in parts]


def _picture(title: str, parts: Sequence[Part], total: float, below: Part | None = None) -> dict[str, Any]:
    """Returns a stacked bar, with another one below it where one is given; both from zero, on one scale."""
    scale = WIDE / max(total, below[2] if below else 0.0, 1e-12)
    high, at, drawn, shade = (18 if below else 30), 0.0, [], 1.0
    for kind, label, size, text in parts:
        shade = max(shade - 0.08, 0.2) if kind == "operation" else 1.0
        place = {"x": at, "y": 0, "width": max(size, 0.0) * scale, "height": high, "shade": shade}
        drawn.append({"kind": kind, "label": label, "text": text, **place})
        at += max(size, 0.0) * scale
    if below:
        kind, label, size, text = below
        place = {"x": 0.0, "y": 22, "width": size * scale, "height": 8, "shade": 1.0}
        drawn.append({"kind": kind, "label": label, "text": text, **place})
    return {"title": title, "parts": drawn}


def _memory(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the picture of a device's memory."""
    device, gib = stage["per_device"], 2**30
    known = {"arguments": device["arguments_bytes"], "temporaries": device["temporaries_bytes"]}
    peak, hbm = device["peak_bytes"] or 0, device["hbm_bytes"]
    sizes = [(kind, kind, size or 0) for kind, size in known.items()]
    sizes.append(("rest", "rest: outputs and code", max(peak - sum(size for *_, size in sizes), 0)))
    if None in known.values():
        sizes = [("rest", "asked for", peak)]
    sizes.append(("free", "free", max(hbm - peak, 0)))
    shown = f"{peak / gib:.4g}" if device["peak_bytes"] else "not known"
    parts = [(kind, label, float(size), f"{size / gib:.4g} GiB") for kind, label, size in sizes]
    return _picture(f"Memory of each device: {shown} of {hbm / gib:.4g} GiB", parts, float(max(peak, hbm)))


def _table(caption: str, heads: str, rows: Sequence[Sequence[object]]) -> dict[str, Any]:
    """Returns a table; heads that end in `#` are of numbers."""
    named = [(head.rstrip("#"), head.endswith("#")) for head in heads.split("|")]
    return {"caption": caption, "heads": named, "rows": rows}


def _programs(stage: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for one in stage["programs"]:
        model, peak = one["step"]["model_s"], one["per_device"]["peak_bytes"]
        rows.append((
            _shown(one["inputs"]),
            one["times"],
            "not known" if peak is None else f"{peak:,}",
            "yes" if one["fits"] else "no",
            "not known" if model is None else f"{model:.4g}",
            f"{one['step']['floor_s']:.4g}",
            f"{one['compile_s']:.1f}",
        ))  # fmt: skip
    heads = "largest input|calls#|bytes on a device#|fits|modelled s a call#|floor s#|compiled in s#"
    return _table("Programs", heads, rows)


def _collectives(stage: Mapping[str, Any]) -> dict[str, Any]:
    per = stage["per_block"] or stage["per_step"] or {"collectives": []}
    caption = f"Collectives of {'a block' if stage['per_block'] else 'a step' if stage['steps'] > 1 else 'the stage'}"
    rows = [
        (one["kind"], f"{one['count']:g}", f"{one['bytes']:,}", one["group"], one["source"] or "")
        for one in per["collectives"]
    ]
    return _table(caption, "kind|times#|bytes of output#|among#|line", rows)


def _operations(stage: Mapping[str, Any]) -> dict[str, Any]:
    caption = f"Most expensive operations{' of a block' if stage['per_block'] else ''}, by the compiler's estimate"
    rows = [(f"{one['ms']:.4g}", one["opcode"], one["source"]) for one in stage["largest"]]
    return _table(caption, "ms#|operation|line", rows)
