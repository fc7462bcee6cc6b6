"""Plans as their JSON has them; `JobPlan.model_validate` makes figures of them."""

GIB = 2**30


def stage(**more):
    """A stage that was planned; `more` takes the place of its fields."""
    step = {
        "attention_s": 3.0,
        "other_s": 1.5,
        "products_s": 0.25,
        "communication_s": 0.25,
        "uncalibrated_s": 4.75,
        "model_s": 4.75,
        "floor_s": 2.5,
        "flops": 10**16,
    }
    collective = {"kind": "all-to-all", "bytes": 123_456_789, "count": 4, "group": 4, "source": "a.py:7 in f"}
    collective |= {"links": "2x2 square", "ports": 2.0}
    figures = {
        "status": "ok",
        "fits": True,
        "per_device": memory(),
        "operators": "",
        "per_block": {
            "count": 54,
            "other_ms": 20.0,
            "kernels": [],
            "attention_ms": 55.5,
            "communication_ms": 4.5,
            "collectives": [collective],
        },
        "per_step": {"communication_ms": 250.0, "collectives": [collective | {"count": 216}]},
        "step": step,
        "attention": attention(),
        "largest": [
            {"ms": 5.0, "opcode": "fusion", "source": "mlp.py:1 in g"},
            {"ms": 3.0, "opcode": "fusion", "source": "mlp.py:1 in g"},
            {"ms": 2.0, "opcode": "copy", "source": ""},
        ],
        "findings": [],
        "not_modelled": ["2 call(s) of kernels outside the blocks"],
        "trace_s": 1.0,
        "compile_s": 60.5,
    } | more
    program = figures | {"inputs": {"x": [2, 65], "y": [2]}, "times": 50, "borders_bytes": 24 * GIB, "dump": None}
    program.pop("steps", None)
    network = {"dtypes": {"transformer": "bfloat16"}, "precision": {"transformer": "default"}}
    return {"steps": 50, "programs": [program], **network, **figures}


def memory(**more):
    """The memory of one device."""
    sizes = {"arguments_bytes": 16 * GIB, "temporaries_bytes": 2 * GIB, "peak_bytes": 19 * GIB}
    return {**sizes, "constants_bytes": 3 * 2**20, "hbm_bytes": 32 * GIB, **more}


def attention(**more):
    """A call of an attention kernel."""
    sizes = {
        "batch": 2,
        "heads": 16,
        "queries": 1000,
        "keys": 1000,
        "head_size": 128,
        "bounded": True,
        "shifted": False,
        "arrays": 1,
    }
    rate = {"flops_per_device": 10**12, "steady_percent": 64.0, "peak_percent": 62.0, "row_tokens": 1000, "ms": 55.5}
    return {"implementation": "splash_transposed", "dtype": "bfloat16", **sizes, **rate, **more}


def plan(**stages):
    """A plan of these stages; by default of one that denoises."""
    left_out = {"status": "not_ported", "why": "It runs on the host"}
    return {
        "model": "m",
        "machine": "v6e:2x4",
        "strategy": "ulysses",
        "mesh": {"dp": 2, "sp": 4},
        "fits": True,
        "versions": {"jax": "0.10.2"},
        "assumptions": ["uncalibrated"],
        "lossy": [],
        "clip": None,
        "verification": None,
        "stages": {"encode": left_out, **(stages or {"denoise": stage()})},
    }
