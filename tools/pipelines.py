"""Runs pipelines of diffusers by name, with tiny weights on 8 virtual devices, and compares them with upstream's own.

    python tools/pipelines.py --write                  # every pipeline of the list below
    python tools/pipelines.py FluxPipeline --write     # one of them, and its row of docs/models.md
    python tools/pipelines.py --plan --write           # the published sizes of some, as `torchport plan` has them

The original is upstream's pipeline object, called as its documentation says. A row has the largest difference of the
port's latents from it, relative to the largest latent; of frames, in steps of 8 bits; and the sharding strategies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchport.load import modular

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- rows: tools/pipelines.py -->", "<!-- end of rows -->"
PLANS, PLANS_END = "<!-- plans: tools/pipelines.py -->", "<!-- end of plans -->"
STRATEGIES = ("ulysses", "tp")
SLICES = ("v6e:2x4", "v5e:2x4")
PLANNED: dict[str, dict[str, dict[str, Any]]] = {
    "FluxPipeline": {
        "transformer": {"guidance_embeds": True},
        "vae": {
            "block_out_channels": [128, 256, 512, 512],
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "latent_channels": 16,
        },
    },
    "LTX2Pipeline": {},
    "LTXPipeline": {},
    "MochiPipeline": {},
    "QwenImagePipeline": {},
    "WanPipeline": {},
}
"""Pipelines whose published networks are their classes' defaults, but for these numbers."""
PIPELINES = [
    "AnimaModularPipeline",
    "AnyFlowPipeline",
    "AuraFlowPipeline",
    "BriaFibo2Pipeline",
    "BriaPipeline",
    "ChromaImg2ImgPipeline",
    "ChromaPipeline",
    "CogVideoXFunControlPipeline",
    "CogVideoXImageToVideoPipeline",
    "CogVideoXPipeline",
    "CogVideoXVideoToVideoPipeline",
    "CogView3PlusPipeline",
    "CogView4Pipeline",
    "DreamLitePipeline",
    "EasyAnimatePipeline",
    "ErnieImageModularPipeline",
    "ErnieImagePipeline",
    "Flux2KleinBaseModularPipeline",
    "Flux2KleinModularPipeline",
    "Flux2KleinPipeline",
    "Flux2ModularPipeline",
    "Flux2Pipeline",
    "FluxControlPipeline",
    "FluxImg2ImgPipeline",
    "FluxKontextPipeline",
    "FluxModularPipeline",
    "FluxPipeline",
    "HunyuanImagePipeline",
    "HunyuanSkyreelsImageToVideoPipeline",
    "HunyuanVideo15ImageToVideoPipeline",
    "HunyuanVideo15ModularPipeline",
    "HunyuanVideo15Pipeline",
    "HunyuanVideoPipeline",
    "Krea2ModularPipeline",
    "Krea2Pipeline",
    "Krea2TurboModularPipeline",
    "LTX2ImageToVideoPipeline",
    "LTX2Pipeline",
    "LTXConditionPipeline",
    "LTXImageToVideoPipeline",
    "LTXModularPipeline",
    "LTXPipeline",
    "LattePipeline",
    "LongCatImagePipeline",
    "LucyEditPipeline",
    "Lumina2Pipeline",
    "LuminaPipeline",
    "MochiPipeline",
    "MotifVideoPipeline",
    "NucleusMoEImagePipeline",
    "OvisImagePipeline",
    "PRXPipeline",
    "PixArtAlphaPipeline",
    "PixArtSigmaPipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImageImg2ImgPipeline",
    "QwenImageModularPipeline",
    "QwenImagePipeline",
    "SanaImageToVideoPipeline",
    "SanaPipeline",
    "SanaVideoPipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "SkyReelsV2Pipeline",
    "StableDiffusion3Img2ImgPipeline",
    "StableDiffusion3ModularPipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInstructPix2PixPipeline",
    "StableDiffusionXLModularPipeline",
    "StableDiffusionXLPipeline",
    "WanImageToVideoPipeline",
    "WanModularPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
    "ZImageImg2ImgPipeline",
    "ZImageModularPipeline",
    "ZImagePipeline",
]
PROMPT, NEGATIVE, SEED = "A cat walks past a red sign", "blurry", 3


def row(name: str, strategies: Sequence[str] = STRATEGIES) -> dict[str, Any]:
    """Returns what was measured of one pipeline."""
    import torch

    from torchport import save
    from torchport.config.pack import find_pack
    from torchport.errors import TorchportError
    from torchport.porting import derive
    from torchport.run.path import run
    from torchport.task import Request

    model, began = f"diffusers:{name}", time.monotonic()
    found: dict[str, Any] = {"pipeline": name}
    try:
        derive.ensure(model)
    except TorchportError as error:
        return found | {"refused": str(error)}
    pack = find_pack()
    card, _ = pack.card(model)
    found["derived"] = round(time.monotonic() - began, 1)
    found["patches"] = sorted({file for names in card.patches.values() for file in names})
    picture = None if card.call.image is None else _picture(pack.job(card.demo)[0], card.call.edits)
    theirs = _upstream(pack, card, picture)
    request = Request(model, card.demo, PROMPT, NEGATIVE if _takes_negative(card) else "", seed=SEED, image=picture)
    for strategy in strategies:
        mesh = dict(pack.job(card.demo)[0].mesh)
        if strategy == "tp":
            mesh["tp"] = mesh.pop("sp")
        overrides = (f"strategy={strategy}", f"mesh={json.dumps(mesh)}")
        with tempfile.TemporaryDirectory() as out:
            asked = Request(**{**vars(request), "overrides": overrides, "out": Path(out)})
            try:
                run(asked)
            except TorchportError as error:
                return found | {"refused": f"{strategy}: {error}"}
            ported = {
                stage: save.read_file(Path(out) / f"{stage}.safetensors", "")[1] for stage in ("denoise", "decode")
            }
        errors = []
        for name, latents in theirs.latents.items():
            ours = ported["denoise"][name]
            if ours.shape != latents.shape and ours.ndim == latents.ndim == 5:  # some turn frames and channels round
                ours = ours.transpose(1, 2)
            if ours.shape == latents.shape:
                errors.append(float((ours - latents).abs().max() / latents.abs().max()))
        found |= {f"latents {strategy}": max(errors)} if errors else {}
        pixels = (theirs.frames.clamp(0, 1) * 255).round().to(torch.uint8)
        original, mine = pixels.reshape(-1).int(), ported["decode"]["frames"].reshape(-1).int()
        found[f"levels {strategy}"] = int((original - mine).abs().max())
        if theirs.sound is not None:
            made, sound = ported["decode"]["sound"], theirs.sound.clamp(-1, 1)
            found[f"sound {strategy}"] = float((made - sound).abs().max() / sound.abs().max())
    return found | {"seconds": round(time.monotonic() - began)}


def _pipeline(card: Any) -> Any:
    """Returns the class of a card's pipeline."""
    module, _, name = str(card.pipeline).partition(":")
    return getattr(importlib.import_module(module), name)


def _takes_negative(card: Any) -> bool:
    """Returns whether a pipeline takes a negative prompt, and the card has embeddings of it."""
    takes = inspect.signature(modular.as_pipeline(_pipeline(card)).__call__).parameters
    return "negative_prompt" in takes and bool(card.call.takes_negative)


def _picture(job: Any, is_video: bool) -> Path:
    """Returns a file with a picture of a job's size, of two colours that run into one another; or a video of them."""
    import numpy
    import torch
    from PIL import Image

    from torchport.save import video

    down, across = numpy.mgrid[0 : job.height, 0 : job.width]
    pixels = numpy.stack([down * 255 // job.height, across * 255 // job.width, 0 * down + 90], axis=-1)
    if is_video:
        frames = [numpy.roll(pixels, number, axis=1).transpose(2, 0, 1) for number in range(job.frames)]
        file = Path(tempfile.mkdtemp()) / "video.mp4"
        file.write_bytes(video.encoded(torch.tensor(numpy.stack(frames)).to(torch.uint8), job.fps, iter))
        return file
    file = Path(tempfile.mkdtemp()) / "picture.png"
    Image.fromarray(pixels.astype("uint8")).save(file)
    return file


@dataclasses.dataclass(frozen=True)
class Original:
    """What upstream's own pipeline object made."""

    latents: dict[str, Any]  #: By the names of the port's artefact.
    frames: Any
    sound: Any = None  #: [channels, samples].


def _upstream(pack: Any, card: Any, picture: Path | None) -> Original:
    """Returns what upstream's own pipeline object makes."""
    import av
    import torch
    from PIL import Image

    from torchport.compile.in_force import hushed
    from torchport.load import tiny
    from torchport.stages import file_of
    from torchport.stages.upstream_pipeline import asked_steps

    job, _ = pack.job(card.demo)
    is_modular = modular.is_modular(_pipeline(card))
    with hushed(True):
        folder = tiny.write(card, file_of(pack, card, ""))
        if is_modular:
            pipe = _pipeline(card)(pretrained_model_name_or_path=str(folder))
            pipe.load_components(dtype=torch.float32)
        else:
            pipe = _pipeline(card).from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    fields = {**vars(job), "area": job.height * job.width, "frame_rate": job.fps}
    fields["steps"] = asked_steps(modular.as_pipeline(_pipeline(card)), job.steps, card.call.constants)
    values = {argument: fields[field] for argument, field in card.call.settings.items()}
    values |= {"prompt": PROMPT, **card.call.constants}
    if _takes_negative(card):
        values["negative_prompt"] = NEGATIVE
    if card.call.image is not None and not card.call.edits:
        values[card.call.image] = Image.open(picture)
    elif card.call.edits:
        with av.open(str(picture)) as opened:
            values[card.call.image] = [frame.to_image() for frame in opened.decode(video=0)]
    last: list[Any] = []
    scheduler = type(pipe.scheduler)  # a loop with sound steps with a copy, too
    step = scheduler.step

    @functools.wraps(step)  # upstream reads its signature
    def stepped(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        last.append(output[0])
        return output

    scheduler.step = stepped
    if is_modular:
        scale = values.pop("guidance_scale", None)
        if scale is not None:
            pipe.update_components(guider=pipe.guider.new(guidance_scale=scale))
        state = pipe(**values, generator=torch.Generator().manual_seed(SEED), output_type="pt")
        return Original({"latents": last[-1]}, state.get("videos", state.get("images")))
    if card.call.guider:
        pipe.guider = pipe.guider.new(guidance_scale=job.guidance_scale)
    with torch.no_grad():
        made = pipe(**values, generator=torch.Generator().manual_seed(SEED), output_type="pt", return_dict=False)
    names = ("latents",) if card.call.sound is None else ("latents", "sound_latents")
    latents = dict(zip(names, last[-len(names) :], strict=True))
    return Original(latents, made[0], None if card.call.sound is None else made[1][0])


def in_child(name: str, strategies: Sequence[str] = STRATEGIES) -> dict[str, Any]:
    """Returns a row that a process of its own makes: 8 virtual devices, and no memory that stays."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, __file__, name, "--row", *strategies]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode == 0 and last[0].startswith("{"):
        return dict(json.loads(last[0]))
    lines = done.stderr.strip().splitlines() or [f"no output, exit code {done.returncode}"]
    return {"pipeline": name, "refused": lines[-1][:300]}


def as_line(found: dict[str, Any]) -> str:
    """Returns a row of the page's table."""
    name = f"`diffusers:{found['pipeline']}`"
    if "refused" in found:
        return f"| {name} | no: {' '.join(found['refused'].replace('|', '/').split())[:260]} | | | |"
    latents = [found.get(f"latents {strategy}") for strategy in STRATEGIES]
    levels = max(found[f"levels {strategy}"] for strategy in STRATEGIES)
    sounds = [found[key] for key in found if key.startswith("sound ")]
    heard = f"; sound {max(sounds):.1e}" if sounds else ""
    numbers = ", ".join("other layout" if value is None else f"{value:.1e}" for value in latents)
    return f"| {name} | {numbers} | {levels}{heard} | {', '.join(found['patches'])} | {found['seconds']} |"


def planned(name: str) -> str:
    """Returns a row of the table of published sizes: a denoising step on each slice."""
    from torchport.config.pack import find_pack
    from torchport.porting import derive

    model = f"diffusers:{name}"
    derive.ensure(model)
    card, _ = find_pack().card(model)
    job, _ = find_pack().job(f"configs/{model}.yaml")
    with tempfile.TemporaryDirectory() as folder:
        classes = {part: entry.class_.split(":") for part, entry in card.components.items()}
        # As diffusers writes it: the package, or the folder of the pipeline that has the class.
        index = {part: [(library.split(".")[2:3] or [library])[0], name] for part, (library, name) in classes.items()}
        (Path(folder) / "model_index.json").write_text(json.dumps(index))
        for part in card.components:
            (Path(folder) / part).mkdir()
            config = "scheduler_config.json" if part == "scheduler" else "config.json"
            (Path(folder) / part / config).write_text(json.dumps(PLANNED[name].get(part, {})))
        cells = [cell_of(model, folder, machine) for machine in SLICES]
    frames = f" x {job.frames}" if job.frames > 1 else ""
    return f"| `{model}` | {job.height} x {job.width}{frames}, {job.steps} steps | {' | '.join(cells)} |"


def cell_of(model: str, folder: str, machine: str) -> str:
    """Returns what `torchport plan` says of a denoising step on a slice: bytes of a chip, and seconds."""
    words = [sys.executable, "-m", "torchport", "plan", "--model", model, "--stage", "denoise", "--topology", machine]
    done = subprocess.run(
        [*words, "--set", f"checkpoint={folder}", "--json"], capture_output=True, text=True, check=False
    )
    if not done.stdout.startswith("{"):
        found = [line for line in done.stderr.splitlines() if line.startswith("error")]
        return f"no: {' '.join(found)[:200]}"
    stage = json.loads(done.stdout)["stages"]["denoise"]
    if not stage["fits"]:
        return "does not fit"
    return f"{stage['per_device']['peak_bytes'] / 2**30:.1f} GiB, {stage['step']['model_s']:.3g} s"


def main() -> None:
    """Prints a line for each pipeline; with `--write` the page has them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipelines", nargs="*", help="all of the list by default")
    parser.add_argument("--plan", action="store_true", help="plan the published sizes instead")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/models.md")
    parser.add_argument("--row", nargs="+", metavar="STRATEGY", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.row:
        print(json.dumps(row(flags.pipelines[0], flags.row)))
        return
    begin, end = (PLANS, PLANS_END) if flags.plan else (BEGIN, END)
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    body, tail = rest.split(end)
    rows = {line.split("`")[1]: line for line in body.splitlines() if line.startswith("| `")}
    columns = "| pipeline | latents, " + " and ".join(STRATEGIES) + " | levels of 8 bits | patches | seconds |"
    columns = "| pipeline | size | " + " | ".join(SLICES) + " |" if flags.plan else columns
    for name in flags.pipelines or (PLANNED if flags.plan else PIPELINES):
        line = planned(name) if flags.plan else as_line(in_child(name))
        rows[f"diffusers:{name}"] = line
        print(line, flush=True)
        if flags.write:
            lines = [columns, "|---" * (columns.count("|") - 1) + "|", *(rows[key] for key in sorted(rows))]
            PAGE.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
