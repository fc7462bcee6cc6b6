"""Bundles of kernels that nobody compiled: as regions and counts, and as the files in which libtpu writes them."""

import numpy

from torchport.plan.tpu.bundles import KernelBundles, Region

SLOTS = {"MATMUL": 2, "VSTORE:SPILL": 1, "VLOAD:FILL": 1}
KEY = "= control target key start\nLB: loop body\nPF: predicated region fallthrough\n= control target key end\n\n"

# A grid loop with a region for the first step, one for the steady steps and one for the last; one delay slot.
GRID = [
    "   : { s }",
    "LB: > { s } /* Start region 9 */",
    "   : > { sbr.rel (%p1_p2) target = $region3 }",
    "   : {}",
    "   : > { s = first }",
    "PF: > { s } /* Start/End empty region 3 :: Start region 4 */",
    "   : > { %7 = sbr.rel (!%p1) target = $region5 ;; v = vadd }",
    "   : > { s = slot }",
    "   : > { v = vmatmul /* a comment\nthat: goes on\n0: 1 */ }",
    "   : > { v = vmatmul }",
    "PF: > { sbr.rel (%p3) target = $region6 } /* Start/End empty region 5 */",
    "   : > { s = slot }",
    "   : > { v = vmatmul }",
    "PF: > { s } /* End region 4 :: Start/End empty region 6 */",
    "   : { %9 = sbr.rel (!%p4) target = $region9 }",
    "   : > { s = slot }",
    "   : { s = after }",
]
GRID_MATMUL = [0, 0, 0, 0, 1, 0, 0, 0, 2, 2, 0, 0, 1, 0, 0, 0, 0]

# A grid loop whose first tile stands before an inner loop, which a predicate guards.
INNER = [
    "LB: > { v } /* Start region 1 */",
    "   : > { sbr.rel (%p1) target = $region2 }",
    "   : {}",
    "LB: >> { v } /* Start region 3 */",
    "   : >> { v }",
    "   : >> { sbr.rel (!%p2) target = $region3 }",
    "   : >> { v }",
    "PF: > { s } /* Start/End empty region 2 */",
    "   : > { sbr.rel target = $region1 }",
    "   : > { s }",
]


def bundles_of(root, busy=()):
    """A kernel whose bundles in the ranges `busy` use one matrix unit each."""
    counts = numpy.zeros((root.end, len(SLOTS)), numpy.int64)
    for start, end in busy:
        counts[start:end, 0] = 1
    return KernelBundles("k.1", SLOTS, counts, root)


def kernel(*inside, end):
    return Region("kernel", 0, end, 0, inside)


def loop(start, end, *inside):
    return Region("loop", start, end, 1, inside)


def predicated(start, end, *inside):
    return Region("predicated", start, end, 1, inside)


def dump(folder, bundles, matmul, kernel="k.1", slots="MATMUL, VALU, VLOAD:FILL, VSTORE:SPILL", capacities="2 4 3 2"):
    """Writes a kernel's two files as libtpu does, and others that it leaves beside them; the columns are made up."""
    folder.mkdir(exist_ok=True)
    lines = [f"{hex(at) if at else '0':>6} {bundle}" for at, bundle in enumerate(bundles)]
    rows = "".join(f"{count} {at % 3} {count} 1\n" for at, count in enumerate(matmul))
    (folder / f"17-{kernel}-72-final_bundles.txt").write_text(KEY + "\n".join(lines) + "\n")
    text = f"== CAPACTIY:\n{slots}\n  {capacities}\n== UTILIZATION:\n{rows}\n"
    (folder / f"17-{kernel}-70-final_hlo-static-per-bundle-utilization.txt").write_text(text)
    for other in (
        f"{kernel}-71-schedule-analysis_final_bundles",
        f"{kernel}-68-pre-delay_hlo-static",
        "TLP-7-final_bundles",
    ):
        (folder / f"17-{other}.txt").write_text("not this one")
    (folder / "17-<late-finalization>-68-final_bundles.txt").write_text("nor this one")
    return folder
