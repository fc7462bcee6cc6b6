"""Where the shipped cards' strategies put every weight, input and output of a module.

python tests/shard/golden.py [MODEL ...]      prints the whole listing, to be compared by hand
python tests/shard/golden.py --write          writes the digests, `golden.json`
"""

import hashlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")
MODELS = ("hunyuan", "hyvideo", "cogvideox", "cogvideox_i2v", "wan", "wan_5b", "ltx")
CHECKOUTS = {"hyvideo": os.environ.get("TORCHPORT_HYVIDEO")}


def listings(model, jobs=(None,)):
    """Yields what a digest is of, `model strategy published|tiny stage`, with its lines.

    Args:
        jobs: The configs; None is the card's demo. Of another one the tiny network is left out.
    """
    from torchport.config.pack import find_pack

    card, _ = find_pack([str(ROOT)]).card(model)
    for job in jobs:
        for strategy in card.strategies:
            for kind, checkpoint in (("published", card.checkpoint), ("tiny", "tiny")):
                if job and kind == "tiny":
                    continue
                overrides = [f"strategy={strategy}", f"checkpoint={json.dumps(checkpoint)}", "dtypes={}"]
                overrides += ["guidance_scale=3.0"] if job else []
                for stage, lines in _stages(model, job or card.demo, overrides):
                    yield " ".join([model, *([Path(job).stem] if job else []), strategy, kind, stage]), lines


def _stages(model, config, overrides):
    from torchport.compile import preflight
    from torchport.compile.in_force import hushed, in_force
    from torchport.task import Request, accept

    paths = (str(ROOT),)
    request = Request(model, config, paths=paths, overrides=tuple(overrides), upstream_path=CHECKOUTS.get(model))
    task = accept(request, dry=True)
    with hushed(True), in_force(task, task.stages):
        for stage in task.stages:
            if stage.network:
                yield stage.name, list(_lines(task, stage.network, preflight.rehearse(task, stage)))


def _lines(task, network, rehearsal):
    from torchport.shard import activations

    strategy = task.card.strategies[task.job.strategy]
    yield f"mesh {dict(task.job.mesh)} divides {dict(strategy.divides)}"
    for name, rule in sorted(rehearsal.weights.items()):
        yield f"weight {name} {_spec(rule.spec)}{' gathered' if rule.gather else ''}"
    for name, rule in sorted(rehearsal.inputs.items()):
        yield f"input {name} {_spec(rule.spec)}"
    rules = strategy.activations.get(network, [])
    for name, rule in sorted(activations.rule_by_module(rehearsal.module, rules, "").items()):
        specs = [_spec(spec) for spec in rule.outputs]
        while specs and specs[-1] == "free":
            specs.pop()
        if specs:
            yield f"output {name} {' '.join(specs)}{' uneven' if rule.uneven else ''}"


def _spec(spec):
    """Returns a spec as text; what does not differ in effect has the same."""
    from torchport.config.strategy import dims_of

    if spec is None:
        return "free"
    dims = [",".join(axes) or "-" for axes in dims_of(spec)]
    while dims and dims[-1] == "-":
        dims.pop()
    return f"[{' '.join(dims)}]"


def digests(model):
    """Returns the digest of each strategy and stage of a card, `model strategy stage`."""
    sums = {}
    for key, lines in listings(model):
        _, strategy, _, stage = key.split()
        total = sums.setdefault(f"{model} {strategy} {stage}", hashlib.sha256())
        total.update("\n".join([key, *lines, ""]).encode())
    return {key: total.hexdigest()[:16] for key, total in sums.items()}


def main(arguments):
    """Prints the listings of the named cards, or writes the digests of all."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    if arguments == ["--write"]:
        known = {key: value for model in MODELS for key, value in digests(model).items()}
        FILE.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
        return
    jobs = [each for each in arguments if each.endswith(".yaml")]
    for model in [each for each in arguments if each not in jobs] or MODELS:
        for key, lines in listings(model, jobs or (None,)):
            sys.stdout.write("\n  ".join([key, *lines]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
