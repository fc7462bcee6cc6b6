"""A scheduled program: read from the compiler's text, and from a real compilation for a TPU that is not there."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchport.errors import TopologyError
from torchport.plan.tpu import hlo
from torchport.plan.tpu.absent import environment
from torchport.plan.tpu.hlo import INTERNAL, HloLoop, SourceLine

REAL = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'torchport[plan]' and run `pytest tests/plan/tpu/test_hlo.py`",
)
FORM = "It must be a scheduled program as libtpu 0.0.51 writes it: the whole of an *after_codegen.txt."
HEADER = "HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8\n"
TABLES = """
FileNames
1 "/venv/lib/python3.11/site-packages/model/block.py"
2 "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py"
3 "<torchport: a.b in /venv/lib/python3.11/site-packages/model/attention.py>"

FunctionNames
1 "Block.forward"
2 "Module.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=1778 end_line=1778 column=4 end_column=9}
3 {file_name_id=3 function_name_id=1 line=7 end_line=7 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}
4 {file_location_id=3 parent_frame_id=3}
5 {file_location_id=2 parent_frame_id=1}

"""
BLOCK = SourceLine("/venv/lib/python3.11/site-packages/model/block.py", 12, "Block.forward")
SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %add = f32[]{:T(128)} add(%a, %b), backend_config={"window_config":{"estimated_cycles":"1000"}}
}

"""


def cost(cycles):
    return f'backend_config={{"flag":["}}"],"window_config":{{"estimated_cycles":"{cycles}"}}}}'


def computation(name, *lines, thread="", entry=False):
    end = f', execution_thread="{thread}"' if thread else ""
    body = "\n".join(f"  {line}" for line in lines)
    return f"{'ENTRY ' if entry else ''}%{name} (p: f32[]) -> f32[] {{\n{body}\n}}{end}\n\n"


def written(folder, *parts, header=HEADER, tables=TABLES, name="a.after_codegen.txt"):
    file = folder / name
    file.write_text(header + tables + "".join(parts))
    return file


def program(folder, *parts, **given):
    return hlo.read(written(folder, *parts, **given))


def entry(*lines):
    return computation("main", "%p = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)", *lines, entry=True)


def counted(limit, step="add(%i, %one)", direction="LT", known=""):
    """Two computations and a loop that counts from 3, with 10 cycles in its body and 1 in its condition."""
    state = "(s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)})"
    body = computation(
        "body",
        f"%s = {state} parameter(0)",
        "%i = s32[]{:T(128)} get-tuple-element(%s), index=0",
        "%x = bf16[8,128]{1,0} get-tuple-element(%s), index=1",
        "%one = s32[]{:T(128)} constant(1)",
        f"%next = s32[]{{:T(128)}} {step}",
        f"%y = bf16[8,128]{{1,0}} copy(%x), {cost(10)}",
        f"ROOT %t = {state} tuple(%next, %y)",
    )
    condition = computation(
        "condition",
        f"%limit = s32[]{{:T(128)}} constant({limit})",
        f"%s = {state} parameter(0)",
        "%i = s32[]{:T(128)} get-tuple-element(%s), index=0",
        f"ROOT %less = pred[]{{:T(512)}} compare(%i, %limit), direction={direction}, {cost(1)}",
    )
    lines = [
        "%zero = s32[]{:T(128)} constant(3)",
        "%from = s32[]{:T(128)S(6)} copy(%zero)",
        f"%state = {state} tuple(%from, %p)",
        f"ROOT %loop = {state} while(%state), condition=%condition, body=%body{known}",
    ]
    return body + condition, lines


def refusal(call, kind=TopologyError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_an_instruction_has_its_shapes_bytes_operands_and_the_compilers_estimate(tmp_path):
    shapes = "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]{0}, pred[5]{0}, u32[]{:S(2)}, token[]"
    metadata = """metadata={op_name="a[\\'b.c\\'], calls=%p"}"""
    line = f"ROOT %f.2 = ({shapes}) fusion(%p, /*index=1*/%p), kind=kLoop, calls=%sum, {metadata}, {cost(77)}"
    found = program(tmp_path, SUM, entry(line))
    made = found.computations["main"].instructions["f.2"]
    assert (found.entry, found.computations["main"].root) == ("main", "f.2")
    assert made.shapes == (("bf16", (8, 128)), ("s4", (3,)), ("pred", (5,)), ("u32", ()))
    assert made.bytes == 8 * 128 * 2 + 2 + 5 + 4
    assert (made.opcode, made.operands, made.calls, made.cycles) == ("fusion", ("p", "p"), ("sum",), 77)
    assert made.kernel is None and made.trips is None


def test_the_constants_of_a_program_are_added_up_wherever_they_are(tmp_path):
    inner = computation("fused", "%zero = f32[] constant(0)", "ROOT %table = f32[4,8]{1,0} constant({...})")
    fusion = "ROOT %f = f32[4,8] fusion(), kind=kLoop, calls=%fused"
    found = program(tmp_path, inner, entry("%mask = pred[16]{0} constant({...})", fusion))
    assert found.constants() == 4 + 4 * 8 * 4 + 16


def test_an_attribute_that_is_written_on_lines_of_its_own_belongs_to_its_instruction(tmp_path):
    """As JAX's own splash attention has them."""
    attribute = 'frontend_attributes={kernel_metadata={\n"profile":"{\\"block_q\\": 2048}"\n}}'
    text = f"""ENTRY %main () -> f32[] {{
  %kernel = f32[2] custom-call(), custom_call_target="tpu_custom_call", {attribute}, metadata={{stack_frame_id=1}}
  ROOT %kept = f32[1] slice(%kernel), {attribute}
}}
"""
    read = program(tmp_path, text)
    assert str(read.computations["main"].instructions["kernel"].source) == str(BLOCK)
    broken = text.replace("f32[1] slice", "1")
    with pytest.raises(TopologyError, match=r":\d+: %kept has no opcode") as caught:
        program(tmp_path, broken)
    lines = (HEADER + TABLES + broken).split("\n")
    place = str(caught.value).split(":")[1]
    assert lines[int(place) - 1].startswith("  ROOT %kept")


def test_a_source_is_the_innermost_line_that_is_not_internal(tmp_path):
    lines = [f'%c{frame} = f32[] copy(%p), metadata={{op_name="x" stack_frame_id={frame}}}' for frame in range(1, 6)]
    made = program(tmp_path, entry(*lines, "ROOT %r = f32[] copy(%p)")).computations["main"].instructions
    attention = SourceLine(
        "<torchport: a.b in /venv/lib/python3.11/site-packages/model/attention.py>", 7, "Block.forward"
    )
    assert [made[f"c{frame}"].source for frame in range(1, 6)] == [BLOCK, BLOCK, BLOCK, attention, None]
    assert made["r"].source is None
    assert str(BLOCK) == "model/block.py:12 in Block.forward"
    assert str(attention) == "model/attention.py:7 in Block.forward"


def test_parents_that_are_numbered_as_frames_are_lead_to_the_same_lines(tmp_path):
    tables = re.sub(r"parent_frame_id=(\d)", lambda found: f"parent_frame_id={int(found[1]) - 1}", TABLES)
    line = 'ROOT %c = f32[] copy(%p), metadata={op_name="x" stack_frame_id=3}'
    assert program(tmp_path, entry(line), tables=tables).computations["main"].instructions["c"].source == BLOCK


def test_internal_files_are_those_of_the_machinery():
    internal = re.compile("|".join(INTERNAL))
    package = Path(hlo.__file__).parents[2]
    for file in ("/v/site-packages/jax/_src/api.py", "/v/site-packages/torchax/tensor.py", "/usr/lib/python3.11/a.py"):
        assert internal.search(file)
    assert internal.search("/a/patches/torch/autocast.py") and not internal.search("/a/patches/diffusers/vae.py")
    assert internal.search(f"{package}/run.py") and internal.search(f"{package}/stages/family.py")
    assert not internal.search(f"{package.parent}/patches/diffusers/some_stages.py")
    for file in (
        "/v/lib/python3.11/site-packages/diffusers/a.py",
        "/v/site-packages/torchvision/a.py",
        "/home/me/a.py",
    ):
        assert not internal.search(file)


def test_a_fusion_without_a_source_has_that_of_what_it_computes_last(tmp_path):
    inside = computation(
        "inside",
        "%p = f32[] parameter(0)",
        'ROOT %c = f32[] copy(%p), metadata={op_name="x" stack_frame_id=3}',
    )
    made = program(tmp_path, inside, entry("ROOT %f = f32[] fusion(%p), kind=kLoop, calls=%inside"))
    assert made.computations["main"].instructions["f"].source == BLOCK


def test_a_loop_is_counted_from_its_constants(tmp_path):
    before, lines = counted(54)
    found = program(tmp_path, before, entry(*lines))
    times = {run.instruction.name: run.times for run in found.walk()}
    assert (times["loop"], times["y"], times["less"]) == (1, 51, 52)
    assert found.cycles() == 51 * 10 + 52
    assert found.loop_bodies() == [HloLoop("body", 51, 1, 10)]
    assert found.cycles("body") == 10


@pytest.mark.parametrize(
    ("given", "trips"),
    [
        ({"limit": 54, "direction": "LE"}, 52),
        ({"limit": 54, "direction": "NE"}, 51),
        ({"limit": 10, "step": "multiply(%i, %i)"}, 2),
        ({"limit": 0, "step": "subtract(%i, %one)", "direction": "GT"}, 3),
        ({"limit": 3}, 0),
        ({"limit": 9, "known": ', backend_config={"known_trip_count":{"n":"4"}}'}, 4),
    ],
)
def test_a_loop_counts_as_its_condition_says_unless_the_compiler_wrote_the_number(tmp_path, given, trips):
    before, lines = counted(**given)
    assert program(tmp_path, before, entry(*lines)).cycles() == trips * 10 + trips + 1


def test_a_loop_is_counted_where_its_condition_is_a_fusion(tmp_path):
    before, lines = counted(5)
    less = "ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT, "
    fused = computation(
        "fused",
        "%n = s32[] parameter(1)",
        "%i = s32[] parameter(0)",
        "%all = pred[] compare(%i, %n), direction=LT",
        "%yes = pred[] constant(true)",
        "ROOT %both = pred[] and(%all, %yes)",
    )
    text = before.replace(less, "ROOT %less = pred[] fusion(%i, %limit), kind=kLoop, calls=%fused, ")
    assert program(tmp_path, fused, text, entry(*lines)).cycles() == 2 * 10 + 3


def test_a_loop_in_a_loop_multiplies_and_takes_its_limit_from_around_it(tmp_path):
    before, lines = counted(5)
    limit = "%limit = s32[]{:T(128)} constant(5)\n"
    before = before.replace(f"  {limit}", "").replace(
        "  ROOT %less", "  %limit = s32[] get-tuple-element(%s), index=2\n  ROOT %less"
    )
    state = "(s32[], bf16[8,128], s32[])"
    before = before.replace("tuple(%next, %y)", "tuple(%next, %y, %n)").replace(
        "  %one", "  %n = s32[] get-tuple-element(%s), index=2\n  %one"
    )
    inner = before.replace("%body", "%inner").replace("%condition", "%until")
    outer = before.replace(
        "  ROOT %t",
        f"  %begin = {state} tuple(%one, %x, %n)\n"
        f"  %loop = {state} while(%begin), condition=%until, body=%inner\n  ROOT %t",
    )
    lines = [line.replace("tuple(%from, %p)", "tuple(%from, %p, %five)") for line in lines]
    found = program(tmp_path, inner, outer, entry("%five = s32[] constant(5)", *lines))
    assert found.cycles("body") == 10 + 4 * 10 + 5
    assert found.cycles() == 2 * (10 + 4 * 10 + 5) + 3
    assert found.loop_bodies() == [HloLoop("body", 2, 1, 55), HloLoop("inner", 4, 2, 10)]


def test_a_loop_that_ends_on_what_it_computes_is_refused(tmp_path):
    before, lines = counted(5, step="reduce(%x, %one), dimensions={0,1}, to_apply=%sum")
    file = written(tmp_path, SUM, before, entry(*lines))
    assert refusal(hlo.read(file).cycles) == (
        f"{file}: The program does not say how many times the loop %loop runs. "
        "It must count from one constant to another, as jax.lax.scan does."
    )


def test_of_a_conditionals_branches_the_dearer_one_runs(tmp_path):
    branches = [
        computation(name, "%p = f32[] parameter(0)", f"ROOT %{name}.c = f32[] copy(%p), {cost(cycles)}")
        for name, cycles in (("no", 5), ("yes", 50))
    ]
    line = "ROOT %if = f32[] conditional(%p, %p, %p), branch_computations={%no, %yes}"
    found = program(tmp_path, *branches, entry(line))
    assert [run.instruction.name for run in found.walk()] == ["p", "if", "p", "yes.c"]
    assert found.cycles() == 50


def test_nothing_is_counted_twice_and_what_runs_beside_the_core_not_at_all(tmp_path):
    wrapped = computation("wrapped", "%q = f32[] parameter(0)", f"ROOT %w = f32[] copy(%q), {cost(7)}")
    plain = computation("plain", "%q = f32[] parameter(0)", f"ROOT %w = f32[] copy(%q), {cost(9)}")
    sparse = computation(
        "sparse", "%q = f32[] parameter(0)", f"ROOT %w = f32[] copy(%q), {cost(2**63 - 1)}", thread="sparsecore"
    )
    found = program(
        tmp_path, SUM, wrapped, plain, sparse,
        entry(
            "%start = ((f32[]), f32[], u32[]{:S(2)}) async-start(%p), calls=%wrapped",
            "%update = ((f32[]), f32[], u32[]{:S(2)}) async-update(%start), calls=%wrapped",
            f"%f = f32[] fusion(%p), kind=kLoop, calls=%sum, {cost(3)}",
            f"%r = f32[] reduce(%p, %p), dimensions={{0}}, to_apply=%sum, {cost(4)}",
            "%c = f32[] call(%p), to_apply=%plain",
            "%d = f32[] call(%p), to_apply=%plain",
            '%s = ((), (), (s32[9])) async-start(), async_execution_thread="sparsecore", calls=%sparse',
            "ROOT %done = f32[] async-done(%update), calls=%wrapped",
        ),
    )  # fmt: skip
    assert found.cycles() == 3 + 4 + 9 + 9
    beside = [run.instruction for run in found.walk() if run.beside and run.instruction.name == "w"]
    assert [instruction.cycles for instruction in beside] == [7, None]


def test_pallas_kernels_are_counted_apart_also_within_a_fusion(tmp_path):
    config = 'custom_call_target="tpu_custom_call", metadata={op_name="k/pallas_call"}'
    fused = computation("fused", "%q = f32[] parameter(0)", f"ROOT %norm.3 = f32[] custom-call(%q), {config}")
    found = program(
        tmp_path,
        fused,
        entry(
            f"%flash.1 = f32[] custom-call(%p), {config}, {cost(1000)}",
            f"%flash.2 = f32[] custom-call(%p), {config}",
            f"%f = f32[] fusion(%p), kind=kCustom, calls=%fused, {cost(500)}",
            f"ROOT %c = f32[] copy(%p), {cost(1)}",
        ),
    )
    assert found.kernels() == {"flash": 2, "norm": 1} and found.cycles() == 1
    assert found.unpriced() == []


def test_the_largest_instructions_are_those_of_all_their_times(tmp_path):
    before, lines = counted(54)
    found = program(tmp_path, before, entry(*lines, f"%once = f32[] copy(%p), {cost(500)}"))
    assert [(run.instruction.name, run.cycles) for run in found.largest(2)] == [("y", 510), ("once", 500)]
    assert [run.cycles for run in found.largest(9, "body")] == [10]


def test_what_the_core_does_without_an_estimate_is_named(tmp_path):
    found = program(
        tmp_path,
        entry(
            "%small = bf16[8]{0} concatenate(%p, %p), dimensions={0}",
            "%large = bf16[8,128]{1,0} reshape(%p)",
            '%joined = bf16[9,128] custom-call(%p), custom_call_target="ConcatBitcast"',
            "%start = (f32[9], f32[9], u32[]) copy-start(%p)",
            "ROOT %done = f32[9] copy-done(%start)",
        ),
    )
    assert [run.instruction.name for run in found.unpriced()] == ["large", "small"]


def exchange(tmp_path, *lines, before=""):
    return program(tmp_path, SUM, before, entry(*lines, "ROOT %end = f32[] copy(%p)")).collectives()


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
    ],
)
def test_groups_of_devices_are_written_out(tmp_path, written, groups):
    line = (
        f"%r = bf16[1,8,16]{{2,1,0}} all-reduce(%p), channel_id=1, replica_groups={written}, to_apply=%sum, "
        'metadata={op_name="x" stack_frame_id=3}'
    )
    (found,) = exchange(tmp_path, line)
    assert (found.kind, found.bytes, found.times, found.source) == ("all-reduce", 256, 1, BLOCK)
    assert found.groups == groups and found.group_size == len(groups[0])


def test_an_exchange_that_starts_and_ends_apart_is_one(tmp_path):
    groups = "replica_groups={{0,1},{2,3}}"
    wrapped = computation("wrapped", "%q = f32[8] parameter(0)", f"ROOT %a = f32[8] all-to-all(%q), {groups}")
    found = exchange(
        tmp_path,
        f"%g = (f32[8], f32[16]) all-gather-start(%p), {groups}",
        "%h = f32[16] all-gather-done(%g)",
        f"%s = f32[4] all-reduce-start(%p), {groups}, to_apply=%sum",
        "%t = f32[4] all-reduce-done(%s)",
        "%c = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
        "%d = f32[8] collective-permute-done(%c)",
        "%w = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%wrapped",
        "%x = f32[8] async-done(%w)",
        before=wrapped,
    )
    assert [(one.kind, one.bytes, one.group_size) for one in found] == [
        ("all-gather", 64, 2),
        ("all-reduce", 16, 2),
        ("collective-permute", 32, 2),
        ("all-to-all", 32, 2),
    ]
    assert found[2].groups == ((0, 1), (1, 0))


def test_a_sum_of_which_a_part_is_kept_is_a_reduce_scatter(tmp_path):
    fused = computation(
        "fused",
        "%q = f32[8] parameter(0)",
        "%r = f32[8] all-reduce(%q), replica_groups=[2,4]<=[8], to_apply=%sum",
        "%n = u32[] constant(0)",
        "ROOT %part = f32[2] dynamic-slice(%r, %n), dynamic_slice_sizes={2}",
    )
    (found,) = exchange(tmp_path, "%f = f32[2] fusion(%p), kind=kCustom, calls=%fused", before=fused)
    assert (found.kind, found.bytes, found.group_size) == ("reduce-scatter", 8, 4)


def test_an_exchange_that_fusions_carry_on_is_one_and_their_cycles_count(tmp_path):
    gather = (
        "%g = f32[8] all-gather(%q), replica_groups=[2,4]<=[8], dimensions={0}, "
        'frontend_attributes={from="x",chain_id="0"}'
    )
    begin = 'ROOT %b = (f32[8], u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"'
    end = 'ROOT %d = f32[8] custom-call(%g), custom_call_target="AsyncCollectiveDone"'
    parts = [
        computation(name, "%q = f32[2] parameter(0)", gather, last)
        for name, last in (("begin", begin), ("go", "ROOT %t = (f32[8], f32[2]) tuple(%g, %q)"), ("end", end))
    ]
    lines = [
        "%f = (f32[8], u32[]) fusion(%p), kind=kCustom, calls=%begin",
        f"%h = (f32[8], f32[2]) fusion(%p), kind=kOutput, calls=%go, {cost(20)}",
        "%i = f32[8] fusion(%p), kind=kCustom, calls=%end",
    ]
    (found,) = exchange(tmp_path, *lines, before="".join(parts))
    assert (found.kind, found.bytes) == ("all-gather", 32)
    assert hlo.read(tmp_path).cycles() == 20


@pytest.mark.parametrize(
    ("text", "line", "fact"),
    [
        ("", 1, "It does not begin with a scheduled HloModule"),
        ("HloModule jit_f, entry_computation_layout={}\n", 1, "It does not begin with a scheduled HloModule"),
        (HEADER + SUM, 6, "There is no ENTRY computation"),
        (HEADER + SUM[:-4], 5, "Computation %sum is not closed, or has no ROOT"),
        (HEADER + SUM.replace("ROOT ", ""), 6, "Computation %sum is not closed, or has no ROOT"),
        (HEADER + entry("other text"), 4, "Computation %main is not closed, or has no ROOT"),
        (HEADER + entry("%c = f32[]"), 4, "%c has no opcode"),
        (HEADER + entry("%c = f32[] copy(%p"), 4, "A bracket is not closed"),
        (HEADER + entry("%c = f32[] copy(%q)"), 4, "%c uses %q, which is not before it in its computation"),
        (HEADER + entry("%c = f32[] call(%p), to_apply=%far"), 4, "%c calls %far, which is not before it"),
        (
            HEADER + entry("%c = f32[] all-gather(%p), replica_groups=@mesh"),
            4,
            "Groups of devices are written '@mesh'",
        ),
        (
            HEADER + entry("%c = f32[] copy(%p), metadata={stack_frame_id=9}"),
            4,
            "The table StackFrames has no row 9 with file_location_id, parent_frame_id",
        ),
    ],
)
def test_text_of_another_form_is_refused_with_its_line(tmp_path, text, line, fact):
    file = tmp_path / "a.txt"
    file.write_text(text)
    assert refusal(lambda: hlo.read(file)) == f"{file}:{line}: {fact}. {FORM}"


def test_a_folder_must_have_one_program(tmp_path):
    none = f"{tmp_path}: Scheduled programs (*after_codegen.txt) there: none. There must be one."
    assert refusal(lambda: hlo.read(tmp_path)) == none
    missing = tmp_path / "b.txt"
    assert refusal(lambda: hlo.read(missing)) == none.replace(str(tmp_path), str(missing))
    for name in ("1.after_codegen.txt", "2.after_codegen.txt"):
        written(tmp_path, name=name)
    assert refusal(lambda: hlo.read(tmp_path)) == none.replace("none", "1.after_codegen.txt, 2.after_codegen.txt")


SCAN = """
import jax, numpy
from torchport.config.machine import parse_machine
from torchport.plan.tpu.absent import describe

def block(x, weights):
    y = jax.lax.psum(jax.nn.gelu(x @ weights[0]) @ weights[1], "tp")
    y = jax.lax.all_to_all(y.reshape(-1, 8, 128), "tp", 1, 0, tiled=True)
    return x + jax.lax.all_to_all(y, "tp", 0, 1, tiled=True).reshape(x.shape), None

def model(x, *weights):
    return jax.lax.scan(block, x, weights)[0]

P = jax.sharding.PartitionSpec
mesh = jax.sharding.Mesh(numpy.array(describe(parse_machine("v6e:2x4", "here")).devices).reshape(2, 4), ("dp", "tp"))
specs = P("dp"), P(None, None, "tp"), P(None, "tp", None)
shapes = (2048, 1024), (6, 1024, 2048), (6, 2048, 1024)
arrays = [
    jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, specs)
]
with jax.set_mesh(mesh):
    call = jax.shard_map(model, mesh=mesh, in_specs=specs, out_specs=P("dp"), check_vma=False)
    jax.jit(call).lower(*arrays).compile()
"""


@REAL
def test_a_real_scan_over_blocks_is_a_loop_with_their_exchanges(tmp_path):
    script, dump = tmp_path / "scan.py", tmp_path / "dump"
    script.write_text(SCAN)
    variables = {
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    given = os.environ | environment() | variables
    subprocess.run([sys.executable, "-P", str(script)], env=given, check=True, capture_output=True)
    found = hlo.read(dump)
    (loop,) = found.loop_bodies()
    assert (loop.trips, loop.times) == (6, 1)
    lines = script.read_text().splitlines()
    sent = found.collectives(loop.body)
    assert [(one.kind, one.bytes, one.group_size) for one in sent] == [
        ("all-reduce", 1024 * 1024 * 2, 4),
        ("all-to-all", 1024 * 1024 * 2, 4),
        ("all-to-all", 1024 * 1024 * 2, 4),
    ]
    for one in sent:
        assert one.source and one.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
        assert one.source.function == "block" and one.kind.replace("-reduce", "").replace("-", "_") in (
            lines[one.source.line - 1].replace("psum", "all")
        )
    assert [one.times for one in found.collectives()] == [6, 6, 6]
    # A block has two products of 1024 x 1024 x 512 on each device, 2048 cycles each at v6e's peak.
    assert 2 * 2048 < loop.cycles < found.cycles() / 6 and found.kernels() == {}
    dearest = found.largest(1)[0]
    assert dearest.times == 6 and dearest.cycles <= found.cycles()
    assert all(run.instruction.bytes <= 8 for run in found.unpriced())
