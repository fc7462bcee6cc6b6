"""The arithmetic of convolutions in a scheduled program, and what they are charged with at the least."""

import importlib.util
import os
import subprocess
import sys

import pytest

from torchport.errors import TopologyError
from torchport.plan.tpu import hlo
from torchport.plan.tpu.absent import environment

REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/tpu/test_convolution.py`",
)
HEADER = "HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8\n"
LABELS = "dim_labels=f01b2_oi012->01b2f"
ROWS = "dim_labels=b0f_0io->b0f"
HIGHEST = "operand_precision={highest,highest}"


def read(tmp_path, body, *, before="", flops_per_cycle=1.0):
    """A program of these lines, in which a device does so many operations in a cycle."""
    file = tmp_path / "a.after_codegen.txt"
    main = "".join(f"  {line}\n" for line in body)
    file.write_text(f"{HEADER}\n{before}ENTRY %main (p: f32[]) -> f32[] {{\n{main}}}\n")
    return hlo.read(file, flops_per_cycle=flops_per_cycle)


def convolution(left, right, output, attributes):
    return (
        f"%a = {left} parameter(0)",
        f"%b = {right} parameter(1)",
        f"ROOT %c = {output} convolution(%a, %b), {attributes}",
    )


def cost(cycles):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


@pytest.mark.parametrize(
    ("left", "right", "output", "attributes", "flops"),
    [
        # A product: every one of 4 x 6 outputs takes 5 multiplies and adds.
        ("bf16[4,5]{1,0}", "bf16[5,6]{1,0}", "bf16[4,6]{1,0}", "dim_labels=bf_io->bf", 2 * 4 * 5 * 6),
        # With a batch of 16, which is a window whose other positions fall between inputs.
        (
            "bf16[16,4,5]{2,1,0}",
            "bf16[16,6,5]{2,1,0}",
            "bf16[16,4,6]{2,1,0}",
            "window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0oi->0bf",
            16 * 2 * 4 * 5 * 6,
        ),
        # Causal in time: 2 of 3 taps are padding for the first frame, 1 for the second; rows are padded on both sides.
        (
            "bf16[8,5,90,7,23]{4,3,2,1,0}",
            "bf16[4,8,3,3,3]{4,3,2,1,0}",
            "bf16[5,90,7,21,4]{4,3,2,1,0}",
            f"window={{size=3x3x3 pad=2_0x1_1x0_0}}, {LABELS}",
            2 * 7 * 8 * 4 * (3 * 5 - 3) * (3 * 90 - 2) * (3 * 21),
        ),
        # Every second position, and rows that are cut off instead of padded.
        ("bf16[2,9,8]", "bf16[3,8,4]", "bf16[2,4,4]", f"window={{size=3 stride=2}}, {ROWS}", 2 * 2 * 8 * 4 * 12),
        ("bf16[2,9,8]", "bf16[3,8,4]", "bf16[2,6,4]", f"window={{size=3 pad=-1_0}}, {ROWS}", 2 * 2 * 8 * 4 * 18),
        ("bf16[2,9,8]", "bf16[3,8,4]", "bf16[2,5,4]", f"window={{size=3 rhs_dilate=2}}, {ROWS}", 2 * 2 * 8 * 4 * 15),
        # 8 groups of one feature: a kernel's i is a group's.
        (
            "bf16[2,9,8]",
            "bf16[3,1,8]",
            "bf16[2,7,8]",
            "window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=8",
            2 * 2 * 1 * 8 * 21,
        ),
    ],
)  # fmt: skip
def test_a_convolution_has_the_operations_that_meet_an_input(tmp_path, left, right, output, attributes, flops):
    lines = convolution(left, right, output, attributes)
    assert read(tmp_path, lines).computations["main"].instructions["c"].flops == flops


@pytest.mark.parametrize(
    ("left", "right", "precision", "passes"),
    [
        ("bf16", "bf16", "", 1),
        ("bf16", "bf16", HIGHEST, 1),
        ("f32", "f32", "", 1),
        ("f32", "f32", "operand_precision={default,default}", 1),
        ("f32", "f32", "operand_precision={high,high}", 3),
        ("f32", "f32", HIGHEST, 6),
        ("bf16", "f32", "operand_precision={high,high}", 2),
        ("f32", "bf16", HIGHEST, 3),
        ("f32", "f32", "operand_precision={highest,default}", 1),
        ("s8", "s8", "", 0),
    ],
)
def test_a_float32_operand_is_passed_as_often_as_its_precision_says(tmp_path, left, right, precision, passes):
    attributes = "dim_labels=bf_io->bf" + (f", {precision}" if precision else "")
    lines = convolution(f"{left}[4,5]", f"{right}[5,6]", "f32[4,6]", attributes)
    assert read(tmp_path, lines).computations["main"].instructions["c"].flops == passes * 240


FUSED = """%inside (a: f32[4,5]) -> f32[4,6] {
  %a = f32[4,5] parameter(0)
  %b = f32[5,6] parameter(1)
  %c = f32[4,6] convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %d = f32[4,6] negate(%c)
}

"""


def fusions(tmp_path, *cycles, **given):
    """Programs of fusions with a product of 240 operations, with these estimates and one other operation."""
    lines = [
        f"%f{n} = f32[4,6] fusion(%p, %q), kind=kOutput, calls=%inside, {cost(one)}" for n, one in enumerate(cycles)
    ]
    parameters = "%p = f32[4,5] parameter(0)", "%q = f32[5,6] parameter(1)"
    return read(tmp_path, [*parameters, *lines, f"ROOT %r = f32[4,5] copy(%p), {cost(7)}"], before=FUSED, **given)


def test_a_product_counts_with_no_less_than_its_arithmetic_takes_at_peak(tmp_path):
    program = fusions(tmp_path, 50, 30, -9, flops_per_cycle=6)
    assert program.cycles() == 50 + 40 + 40 + 7
    assert [run.least for run in program.priced(None)] == [40, 40, 40, 0]
    assert [run.cycles for run in program.largest(9)] == [50, 40, 40, 7] and program.unpriced() == []


def test_without_a_peak_every_estimate_counts_as_it_is_and_a_negative_one_is_none(tmp_path):
    program = fusions(tmp_path, 50, 30, -9, flops_per_cycle=float("inf"))
    assert program.cycles() == 87
    assert [run.instruction.name for run in program.unpriced()] == ["f2"]


@pytest.mark.parametrize("labels", ["none", "bf_io->b", "b0f_0io->b0f", "bf_io->b0"])
def test_a_convolution_of_another_form_is_refused_with_its_line(tmp_path, labels):
    with pytest.raises(TopologyError) as caught:
        read(tmp_path, convolution("f32[4,5]", "f32[5,6]", "f32[4,6]", f"dim_labels={labels}"))
    assert ":6: %c is a convolution, and its window or its dims are not known. It must be" in str(caught.value)


CHUNKS = """
import jax, numpy
from torchport.config.machine import parse_machine
from torchport.plan.tpu.absent import describe

def convolve(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims, precision="high")

def block(x, kernel):
    return jax.nn.relu(convolve(x, kernel)), None

def chunk(cache, x):
    out = jax.lax.scan(block, x + cache[0], cache[1])[0]
    return (out, cache[1]), out

def decode(chunks, cache, kernels):
    return jax.lax.scan(chunk, (cache, kernels), chunks)[1]

P = jax.sharding.PartitionSpec
mesh = jax.sharding.Mesh(numpy.array(describe(parse_machine("v6e:2x4", "here")).devices), ("tp",))
shapes = (5, 1, 32, 64, 128), (1, 32, 64, 128), (3, 3, 3, 128, 128)
specs = P(None, None, None, "tp"), P(None, None, "tp"), P()
arrays = [
    jax.ShapeDtypeStruct(shape, jax.numpy.float32, sharding=jax.sharding.NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, specs)
]
jax.jit(decode).lower(*arrays).compile()
"""


@REAL
def test_a_real_decode_in_chunks_multiplies_its_loops_and_its_passes_and_exchanges_its_edges(tmp_path):
    script, dump = tmp_path / "chunks.py", tmp_path / "dump"
    script.write_text(CHUNKS)
    variables = {
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    given = os.environ | environment() | variables
    subprocess.run([sys.executable, "-P", str(script)], env=given, check=True, capture_output=True)
    program = hlo.read(dump, flops_per_cycle=524_288)
    runs = [run for run in program.walk() if run.instruction.flops]
    assert sum(run.times for run in runs) == 5 * 3, "chunks times blocks"
    done = sum(run.instruction.flops * run.times for run in runs)
    useful = 5 * 3 * 3 * 2 * 9 * 128 * 128 * 32 * 8  # passes; multiply and add; taps; features; a device's positions
    assert 0.9 * useful < done < 1.5 * useful, "edges that are padding are not counted, those computed twice are"
    edges = [one for one in program.collectives() if one.kind == "collective-permute"]
    assert {one.times for one in edges} == {15} and {one.bytes for one in edges} == {32 * 128 * 4}
    assert {str(run.instruction.source).rpartition(" in ")[2] for run in runs} == {"convolve"}
