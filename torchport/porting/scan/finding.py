"""What each finding means, and the report of a scan, with everything that a drafted patch needs of them."""

from __future__ import annotations

import dataclasses
from typing import Literal

Effort = Literal["none", "minutes", "hours", "days"]
"""How long the patch takes: none is torchport's own, minutes a line, hours a function, days a kernel."""
Draft = Literal["replace", "rewrite", "stub", "wrap", "op", ""]
"""The kind of patch to begin with; empty where no patch would help."""


@dataclasses.dataclass(frozen=True)
class ScanRule:
    """One kind of finding."""

    id: str  #: The id, such as PS401.
    kind: str  #: Its name, such as `branch`.
    title: str  #: What is found, in one sentence.
    why: str  #: Why it does not port.
    do: str  #: What to do about it.
    effort: Effort  #: How long that takes.
    draft: Draft  #: The kind of patch to begin with.
    #: Whether it stops a port for certain; else it may be harmless, and a trace shows it.
    stops: bool
    wrong: str  #: An example that is found.
    right: str  #: The same, ported.
    #: Whether it is in code that was read; else it is about a file that could not be.
    in_code: bool = True


_ALL = (
    ScanRule(
        "PS101",
        "cuda-import",
        "CUDA or a process group is asked for while a module is imported.",
        "The import raises on a machine without CUDA, before any patch of a function could help.",
        "List `torch/cuda` in the card, which answers the usual calls. For a process group, replace the function that "
        "makes it.",
        "minutes",
        "replace",
        True,
        "MAJOR = torch.cuda.get_device_properties(0).major",
        "patches: {denoise: [torch/cuda]}",
    ),
    ScanRule(
        "PS102",
        "cuda-call",
        "A function of torch.cuda is called that cannot answer without CUDA.",
        "It raises, or its answer decides about tiles and offloading.",
        "List `torch/cuda` in the card, or replace the function that asks.",
        "minutes",
        "replace",
        True,
        "torch.cuda.synchronize()",
        "patches: {denoise: [torch/cuda]}",
    ),
    ScanRule(
        "PS103",
        "cuda-device",
        'The device is the literal "cuda".',
        "Under torchport `cuda` means the JAX device while a stage runs. Outside of one there is no such device.",
        "Pass the device as an argument. Leave it if it is only reached inside a stage; a trace shows that.",
        "minutes",
        "replace",
        False,
        'model.to("cuda")',
        "model.to(device)",
    ),
    ScanRule(
        "PS104",
        "host-tensor",
        "A tensor is made on the host on every call.",
        "Where it meets a traced tensor it becomes a constant of the program. Random numbers are refused (TP902).",
        "Make it on the device of a traced tensor, or once in `Stage.prepare`, as a buffer. A small one can stay.",
        "minutes",
        "replace",
        False,
        "positions = torch.arange(n).to(x.device)",
        "positions = torch.arange(n, device=x.device)",
    ),
    ScanRule(
        "PS201",
        "kernel",
        "A package of GPU kernels is imported or called: flash-attn, xformers, sageattention, triton, apex, "
        "bitsandbytes, natten, flex_attention and their like.",
        "It does not run on TPU, and most often cannot be installed there.",
        "Stub the package if your job calls nothing of it. Replace the function that calls it by "
        "`torchport.kernels.attention` or by plain PyTorch.",
        "days",
        "replace",
        True,
        "out = flash_attn_func(q, k, v)",
        "out = F.scaled_dot_product_attention(q, k, v)",
    ),
    ScanRule(
        "PS202",
        "compile",
        "torch.compile, torch.jit or a control of torch.compile.",
        "The function is compiled by JAX. A scripted function cannot be traced by torchax, and torch.compile would "
        "compile for the host. `torch.compiler.disable` alone is harmless.",
        "Replace a compiled function by the one inside it. Set what turns compiling off, if there is such a setting.",
        "minutes",
        "replace",
        False,
        "@torch.jit.script\ndef gate(x): ...",
        "def gate(x): ...",
    ),
    ScanRule(
        "PS301",
        "process-group",
        "torch.distributed is called, or a wrapper of it such as FSDP.",
        "There is no process group: JAX places tensors on a mesh, and XLA adds the collectives.",
        "Replace the function that makes the group, so that the code believes it is alone. Shard by rules of the card.",
        "hours",
        "replace",
        True,
        "dist.all_gather(parts, x, group=group)",
        "strategies: {ulysses: {mesh: {sp: 4}}}",
    ),
    ScanRule(
        "PS302",
        "parallel-state",
        "A function of the codebase is called that asks for ranks, sizes or collectives of a process group.",
        "As for PS301, one call away.",
        "Replace the function that makes the group: then all of these answer for one process.",
        "minutes",
        "replace",
        True,
        "x = x.chunk(get_world_size())[get_rank()]",
        "x = x",
    ),
    ScanRule(
        "PS401",
        "branch",
        "A branch or an assertion depends on the values of a tensor.",
        "While it is traced, a tensor has a shape and a dtype and no value yet (TP903).",
        "Rewrite the statement with `torch.where`, or decide from a setting or a shape.",
        "hours",
        "rewrite",
        True,
        "if torch.all(y == 0):\n    y = y + 1",
        "y = torch.where(torch.all(y == 0), y + 1, y)",
    ),
    ScanRule(
        "PS402",
        "item",
        "The value of a tensor becomes a number or list of Python.",
        "While it is traced, a tensor has no value yet (TP903). In a loop that is not traced it waits for the device.",
        "Compute on with the tensor, or take the number from a shape or from what is known before the trace.",
        "hours",
        "rewrite",
        True,
        "length = int(mask.sum())",
        "length = mask.shape[1]",
    ),
    ScanRule(
        "PS403",
        "mask-index",
        "An index of booleans, `nonzero`, `masked_select`, `unique`: the size of the result depends on values.",
        "XLA's programs have static shapes.",
        "Keep all rows. Sort the valid ones to the front with a stable argsort, or set the others to 0 with "
        "`torch.where`.",
        "hours",
        "rewrite",
        True,
        "tokens = x[mask]",
        "tokens = torch.where(mask[:, None], x, 0)",
    ),
    ScanRule(
        "PS501",
        "autocast",
        "A region or function under torch.autocast.",
        "Without CUDA it disables itself, and dtypes meet that do not fit.",
        "List `torch/autocast` in the card, which casts as CUDA's lists say.",
        "none",
        "",
        True,
        'with torch.autocast("cuda", dtype=torch.bfloat16):\n    y = net(x)',
        "patches: {denoise: [torch/autocast]}",
    ),
    ScanRule(
        "PS502",
        "float64",
        "Numbers of 64 bits.",
        "JAX has none by default, and a TPU computes them in software.",
        "Compute it on the host before the trace, or in float32 if the result allows.",
        "hours",
        "rewrite",
        True,
        "freqs = x.to(torch.float64)",
        "freqs = x.to(torch.float32)",
    ),
    ScanRule(
        "PS503",
        "complex",
        "Complex numbers.",
        "A TPU has no complex unit: XLA computes with two real numbers each, and some operators have no lowering.",
        "Write the rotation with cosine and sine.",
        "hours",
        "replace",
        True,
        "y = torch.view_as_real(torch.view_as_complex(x) * freqs)",
        "y = x * cos + rotate_half(x) * sin",
    ),
    ScanRule(
        "PS601",
        "square-mask",
        "A mask of all pairs of positions is built.",
        "At the lengths of video it has gigabytes, and a fast attention kernel needs none.",
        "Pass what the mask says about keys, or lengths, and let attention mask.",
        "hours",
        "replace",
        True,
        "mask = valid[:, None] & valid[None, :]",
        "mask = valid[:, None, None, :]",
    ),
    ScanRule(
        "PS602",
        "inplace-loop",
        "A tensor is written in a loop of Python.",
        "Each pass is one update in the traced program: it grows with the loop, and so does the time to compile it.",
        "Write it without the loop: a ramp, `torch.where`, `torch.cat`.",
        "hours",
        "replace",
        True,
        "for i in range(n):\n    b[..., i] = a[..., i] * (1 - i / n) + b[..., i] * (i / n)",
        "w = torch.arange(n, device=b.device) / n\nb = a * (1 - w) + b * w",
    ),
    ScanRule(
        "PS701",
        "alias",
        "Another module holds by value a function that has findings.",
        "A patch that only sets the name in its home leaves this holder with the original.",
        "Patch the function at its home with torchport, which rebinds every holder, or patch what it calls by its name "
        "when it runs.",
        "none",
        "",
        False,
        "from up.attention import attention",
        "import up.attention",
    ),
    ScanRule(
        "PS901",
        "syntax-error",
        "A file is no Python that this interpreter reads.",
        "Nothing of it was scanned.",
        "Mend it, or leave it out if nothing imports it.",
        "minutes",
        "",
        False,
        "def f(:\n    pass",
        "def f():\n    pass",
        in_code=False,
    ),
    ScanRule(
        "PS902",
        "python-2",
        "A file is written for Python 2.",
        "Nothing of it was scanned, and torchport cannot import it.",
        "Convert it, or leave it out if nothing imports it.",
        "hours",
        "",
        False,
        'print "loading"',
        'print("loading")',
        in_code=False,
    ),
    ScanRule(
        "PS903",
        "encoding",
        "A file's bytes are no text in the encoding that it declares; without a declaration that is UTF-8.",
        "Nothing of it was scanned.",
        "Declare the encoding in its first line, or save it as UTF-8.",
        "minutes",
        "",
        False,
        "# A comment in Latin-1, and no declaration",
        "# -*- coding: latin-1 -*-",
        in_code=False,
    ),
    ScanRule(
        "PS904",
        "too-large",
        "A file is larger than a scan reads.",
        "It holds data more likely than code. Nothing of it was scanned.",
        "Leave it if it is data. Else split it.",
        "none",
        "",
        False,
        "TABLE = [0.1, 0.2, ...]  # 50 MB",
        'TABLE = numpy.load("table.npy")',
        in_code=False,
    ),
    ScanRule(
        "PS905",
        "link-loop",
        "A link leads back to itself, to a folder that it lies in, or out of the folder that is scanned.",
        "It was not followed.",
        "Remove the link, if nothing needs it.",
        "none",
        "",
        False,
        "ln -s . again",
        "rm again",
        in_code=False,
    ),
    ScanRule(
        "PS906",
        "unreadable",
        "A file or folder cannot be opened.",
        "Nothing of it was scanned.",
        "Give yourself the right to read it.",
        "none",
        "",
        False,
        "chmod 000 model.py",
        "chmod 644 model.py",
        in_code=False,
    ),
)

RULES = {rule.id: rule for rule in _ALL}
"""The rules by id."""
BY_KIND = {rule.kind: rule.id for rule in _ALL}
"""The ids by name."""


Reach = Literal["path", "training", "off", "unknown"]
"""Whether the entry leads there: on its inference path, in training alone, not at all; or nobody named an entry."""

Verdict = Literal["covered", "rewrite", "unknown"]
"""What is to be done: nothing, as a patch does it; a patch is to be written; or only a trace or a look shows it."""


@dataclasses.dataclass(frozen=True)
class ScanFinding:
    """One thing in the source that will not port."""

    rule: str  #: The id that `torchport explain` knows, such as PS401.
    file: str  #: Its file, as it can be opened from the current folder.
    line: int  #: Its line.
    #: What a patch would change, as `pkg.mod:Qual.name`; `pkg.mod:<module>` for what runs at import.
    target: str
    text: str  #: The expression, shortened.
    #: The name in full of what is called or imported, as `torch.cuda.set_device`; empty for none.
    uses: str = ""
    reach: Reach = "unknown"  #: Whether the entry leads there.
    #: The ids of the shipped patches that take care of it.
    covered_by: tuple[str, ...] = ()
    #: Whether it is one for certain: not where a package is tried, or where a tensor is only assumed.
    sure: bool = True

    @property
    def meaning(self) -> ScanRule:
        """What the rule says."""
        return RULES[self.rule]

    @property
    def kind(self) -> str:
        """The rule's name, such as `branch`."""
        return self.meaning.kind

    @property
    def name(self) -> str:
        """The function's qualified name."""
        return self.target.partition(":")[2]

    @property
    def verdict(self) -> Verdict:
        """What is to be done."""
        if self.covered_by:
            return "covered"
        return "rewrite" if self.meaning.stops and self.sure else "unknown"


@dataclasses.dataclass(frozen=True)
class Absent:
    """A package that the path imports and this environment has not."""

    package: str  #: Its name.
    file: str  #: The first file that imports it.
    line: int  #: Its line.


@dataclasses.dataclass(frozen=True)
class ScanReport:
    """What a scan found."""

    #: By file and line; files that could not be read are among them.
    findings: tuple[ScanFinding, ...]
    files: int  #: The number of files that were read.
    lines: int  #: The number of their lines.
    #: The entries, as `pkg.mod:Class`; none if none was named.
    entries: tuple[str, ...] = ()
    #: The packages that are imported without condition, are not installed here, and that no stub stands for. Packages
    #: of kernels are findings.
    absent: tuple[Absent, ...] = ()

    def count(self) -> str:
        """Returns the sentence that counts what is on the path; without an entry, what is not training."""
        some = [finding for finding in self.findings if finding.reach == "path" and finding.meaning.in_code]
        where = "on the inference path"
        if not self.entries:
            some = [finding for finding in self.findings if finding.reach != "training" and finding.meaning.in_code]
            where = "outside training"
        numbers = {
            verdict: sum(finding.verdict == verdict for finding in some)
            for verdict in ("covered", "rewrite", "unknown")
        }
        needs = "needs" if numbers["rewrite"] == 1 else "need"
        return (
            f"{len(some)} {where}: {numbers['covered']} covered, {numbers['rewrite']} {needs} a rewrite, "
            f"{numbers['unknown']} unknown"
        )
