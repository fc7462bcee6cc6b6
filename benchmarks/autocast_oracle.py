"""The dtypes of CUDA autocast, op by op, as JSON: from a GPU, or from torch's CUDA kernels on fake tensors without one.

    python benchmarks/autocast_oracle.py [--out dtypes.json]

The calls are those of tests/autocast_rows.py. What is printed last is how many of them have the dtype that PyTorch
documents; those that have not are named before it. A GPU says most: it runs its own cuDNN and fused kernels.
"""

import argparse
import json
import platform
import sys
import warnings
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from autocast_rows import ROWS, Maker


def on_gpu(call):
    """Returns the dtype of a call's result on the GPU."""
    with torch.autocast("cuda", torch.bfloat16):
        return call(Maker("cuda")).dtype


def on_fake_cuda(call):
    """Returns the dtype that torch's CUDA autocast kernels give on tensors that only say they lie on CUDA."""

    def move(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            return call(Maker(move=move)).dtype
        finally:
            torch.set_autocast_enabled("cuda", False)


def recorded(read):
    """Returns, by row, the dtype that was read, or what prevented it."""
    found = {}
    for name, (call, _) in ROWS.items():
        try:
            found[name] = str(read(call)).removeprefix("torch.")
        except (RuntimeError, AssertionError, AttributeError) as error:
            found[name] = f"not run: {type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def main():
    """Records, writes and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "none: torch's CUDA kernels on fake tensors"
    found = recorded(on_gpu if gpu else on_fake_cuda)
    result = {"device": device, "torch": torch.__version__, "python": platform.python_version(), "dtypes": found}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    documented = {name: str(dtype).removeprefix("torch.") for name, (_, dtype) in ROWS.items()}
    other = [name for name in ROWS if found[name] != documented[name]]
    for name in other:
        print(f"{name}: documented {documented[name]}, found {found[name]}")
    print(f"{len(ROWS) - len(other)} of {len(ROWS)} rows as documented ({len(other) / len(ROWS):.1%} not), on {device}")


if __name__ == "__main__":
    main()
