"""Ports diffusers' own small networks with the generic patches alone, and compares them with PyTorch.

    python tools/networks.py --tests diffusers/tests                 # every network, a line for each
    python tools/networks.py --tests diffusers/tests flux --write    # some of them, and their rows of docs/networks.md

The tests of diffusers, at the installed version, have a configuration and inputs for each network. A row has the
largest difference of the ported network's results from eager PyTorch's, relative to their largest value, in float32.
Each network has a process of its own, and three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "networks.md"
BEGIN, END = "<!-- rows: tools/networks.py -->", "<!-- end of rows -->"
FOLDERS = "transformers", "unets", "autoencoders", "controlnets"
PATCHES = "torch/attention", "torch/normalization", "torch/autocast"
LIMIT = 180
"""Seconds for one network."""
GOAL = 1e-5
SMALL = 1e-6
"""A larger error is set beside PyTorch's own: how far its float32 is from its float64."""
RULES = {name: [{"match": ".*", "spec": "replicate"}] for name in ("weights", "inputs")}
METHODS = ("get_init_dict", "get_dummy_inputs"), ("prepare_init_args_and_inputs_for_common",)
"""What says how a network is built and called, in one form of the tests and in the other."""


def networks(tests: Path) -> dict[str, str]:
    """Returns the networks that the tests know: the module and the class that describe each one, by its name."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for file in sorted((tests / "models" / folder).glob("test_models_*.py")):
            with _imported(tests):
                name = f"{tests.name}.models.{folder}.{file.stem}"
                try:
                    module = importlib.import_module(name)
                except ImportError as error:
                    print(f"{file.name}: {error}", file=sys.stderr)
                    continue
            described = [
                c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == name and _methods(c)
            ]
            # Classes that only change a test of another class, such as that of quantization, are `Test...`.
            described = [each for each in described if not each.__name__.startswith("Test")] or described
            distinct = {getattr(class_, _methods(class_)[0]): class_ for class_ in reversed(described)}
            short = re.sub("^test_models_(transformer_|autoencoder_|unet_)?", "", file.stem)
            for class_ in reversed(distinct.values()):
                part = "" if len(distinct) == 1 else f" ({class_.__name__.removesuffix('TesterConfig')})"
                found[f"{folder}/{short}{part}"] = f"{name}:{class_.__name__}"
    return found


@contextlib.contextmanager
def _imported(tests: Path) -> Iterator[None]:
    """Makes the tests of diffusers a package of this process."""
    sys.path.insert(0, str(tests.parent))
    try:
        yield
    finally:
        sys.path.remove(str(tests.parent))


def _methods(class_: type) -> tuple[str, ...]:
    if getattr(class_, "model_class", None) is None:
        return ()
    for methods in METHODS:
        defined = [getattr(class_, method, None) for method in methods]
        if all(defined) and not any(each.__module__.endswith("testing_utils.common") for each in defined):
            return methods
    return ()


def _network(class_: type) -> tuple[Any, Any, Any]:
    """Returns a network's class, and functions that return its configuration and its inputs."""
    test = object.__new__(class_)
    if len(_methods(class_)) == 2:
        return test.model_class, test.get_init_dict, test.get_dummy_inputs
    both = test.prepare_init_args_and_inputs_for_common
    return test.model_class, lambda: both()[0], lambda: both()[1]


def row(tests: Path, where: str) -> dict[str, Any]:
    """Returns what was measured of one network."""
    import torch
    from torch.utils import _pytree as pytree

    import torchport
    from torchport.errors import TorchportError

    with _imported(tests), torch.no_grad():
        with torchport.applied(patches=PATCHES):
            module, _, name = where.partition(":")
            described = getattr(importlib.import_module(module), name)
            importlib.import_module(f"{tests.name}.testing_utils").global_rng.seed(0)  # of some networks' inputs
            class_, settings, inputs = _network(described)
            original = drawn(class_(**settings()))
            arguments = {key: value for key, value in inputs().items() if not isinstance(value, torch.Generator)}
            ported = torchport.port(copy.deepcopy(original), strategy=RULES)
            began, failed, ours = time.monotonic(), None, None
            try:
                ours = ported(**copy.deepcopy(arguments))
            except TorchportError as error:
                failed = error
            found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        try:
            theirs = original(**copy.deepcopy(arguments))
        except Exception as error:  # noqa: BLE001  whatever upstream raises is what it does with its own tests' inputs
            return found | {"eager": _text(f"{type(error).__name__}: {error}")}
        if failed is not None:
            return found | {"refused": _text(str(failed)), "id": failed.id, "line": _line(str(failed))}
        found["error"] = difference(ours, theirs)
        if found["error"] > SMALL:
            try:
                precise = original.double()(**pytree.tree_map_only(torch.Tensor, _precise, arguments))
            except RuntimeError:  # code of the network that names float32
                return found
            found["own"] = difference(pytree.tree_map_only(torch.Tensor, _precise, theirs), precise)
        return found


def _precise(tensor: Any) -> Any:
    return tensor.double() if tensor.is_floating_point() else tensor


def drawn(network: Any) -> Any:
    """Returns a network with weights drawn anew: zeros, with which many begin, would hide what lies before them."""
    import torch

    torch.manual_seed(0)
    for weight in network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=(weight.numel() / len(weight)) ** -0.5)
        else:
            weight.add_(0.1 * torch.randn_like(weight))
    return network.float().eval()


def difference(ours: Any, theirs: Any) -> float:
    """Returns the largest difference of two results, of each tensor relative to its largest value.

    Infinity where shape, dtype or the places of NaN differ.
    """
    import torch
    from torch.utils import _pytree as pytree

    pairs = list(zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True))
    errors = [0.0]
    for one, other in pairs:
        if not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype or not one.isnan().equal(other.isnan()):
            return float("inf")
        if other.numel():
            one, other = one.nan_to_num().double(), other.nan_to_num().double()
            errors.append(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return max(errors)


def _text(text: str) -> str:
    """Returns a text as a cell: one line, without folders of a machine."""
    line = re.sub(r"[^\s`'(]*/(?:site-packages|dist-packages)/", "", text.strip().partition("\n")[0])
    return " ".join(line.replace("|", "/").split())[:240]


def _line(text: str) -> bool:
    """Returns whether an error names a line of diffusers or of a package that it calls."""
    return re.search(r"[\w/.-]+\.py:\d+", text) is not None


def in_child(tests: Path, where: str) -> dict[str, Any]:
    """Returns a row that a process of its own makes."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, __file__, "--tests", str(tests), "--row", where]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"refused": f"takes more than {LIMIT} seconds", "id": "", "line": False, "seconds": LIMIT}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode == 0 and last[0].startswith("{"):
        return dict(json.loads(last[0]))
    error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"refused": _text(error), "id": "", "line": False, "seconds": 0}


def as_line(label: str, found: Mapping[str, Any]) -> str:
    """Returns a row of the page's table."""
    if "error" in found:
        result = f"{found['error']:.1e} | {format(found['own'], '.1e') if 'own' in found else ''}"
    elif "eager" in found:
        result = f"does not run in PyTorch: {found['eager']} |"
    else:
        result = f"refused, {found['id'] or 'not by torchport'}: {found['refused']} |"
    named = "" if "refused" not in found else "yes" if found["line"] and found["id"] else "no"
    return f"| `{label}` | {result} | {named} | {found['seconds']} |"


def summary(lines: Iterable[str]) -> str:
    """Returns the counts of a table in a sentence."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    errors = [float(cell[1]) for cell in cells if re.match(r"[\d.]+e|inf|0", cell[1])]
    refused = [cell for cell in cells if cell[1].startswith("refused")]
    named = sum(cell[3] == "yes" for cell in refused)
    return (
        f"{len(errors)} networks run: median {statistics.median(errors):.1e}, worst {max(errors):.1e}, "
        f"{sum(error > GOAL for error in errors)} above {GOAL:.0e}. "
        f"{len(refused)} are refused, {named} of them by an error that names the line. "
        f"{len(cells) - len(errors) - len(refused)} do not run in PyTorch here."
    )


def _write(rows: Mapping[str, str]) -> None:
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    titles = "network", "largest error, or the refusal", "PyTorch's own, from float64", "the line is named", "seconds"
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---|---|"]
    lines += [rows[key] for key in sorted(rows)]
    text = "\n".join([f"{head}{BEGIN}", summary(rows.values()), "", *lines, f"{END}{tail}"])
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Prints a line for each network; with `--write` the page has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of networks; by default all")
    parser.add_argument("--tests", type=lambda text: Path(text).resolve(), required=True, metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/networks.md")
    parser.add_argument("--row", metavar="MODULE:CLASS", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    warnings.simplefilter("ignore")
    if flags.row:
        print(json.dumps(row(flags.tests, flags.row)))
        return
    body = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = {line.split("`")[1]: line for line in body.splitlines() if line.startswith("| `")}
    for label, where in networks(flags.tests).items():
        if flags.names and not any(name in label for name in flags.names):
            continue
        rows[label] = as_line(label, in_child(flags.tests, where))
        print(rows[label], flush=True)
        if flags.write:
            _write(rows)
    print(summary(rows.values()))


if __name__ == "__main__":
    main()
