"""A wrong example, a right example and the cure for every error, by its id: what `torchport explain` shows.

They are beside `errors.py` and not in it, because every command imports
that one. tests/commands/test_examples.py runs them: a wrong example raises its id, and the right one does not.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["job", "card", "rules", "patch", "python", "code", "command", "family", "forward", "upstream"]
"""What the texts of an example are.

job: Fields of a config. card: Fields of a model card. rules: Sharding rules for the weights of a network.
patch: A file of patches; fields that every entry must have are left out. python: Code that uses torchport.
code: Other Python code. command: Lines for a shell. family: Statements in a function of a family.
forward: Statements in the `forward` of an upstream's network, where `y` is a tensor of the network.
upstream: Statements in a module of an upstream.
"""


_PLACES: dict[Kind, str] = {
    "job": "in a config",
    "card": "in a model card",
    "rules": "as rules for the weights of a network",
    "patch": "in a file of patches",
    "python": "in Python",
    "code": "in Python",
    "command": "in a shell",
    "family": "in a function of the family",
    "forward": "in a network's `forward`",
    "upstream": "in a module of upstream's",
}
_LANGUAGES: dict[Kind, str] = {"job": "yaml", "card": "yaml", "rules": "yaml", "patch": "yaml", "command": "sh"}


@dataclasses.dataclass(frozen=True)
class Side:
    """One text of an example: the wrong one, or the right one."""

    kind: Kind
    text: str

    @property
    def place(self) -> str:
        """Where the text stands, in words."""
        return _PLACES[self.kind]

    @property
    def language(self) -> str:
        """The name of the text's language, as Markdown has it."""
        return _LANGUAGES.get(self.kind, "python")


@dataclasses.dataclass(frozen=True)
class Example:
    """One error, provoked and mended.

    Attributes:
        kind: What the texts are.
        wrong: It raises the error.
        right: The same, mended.
        cure: What to do about the error, in general.
        upstream: The package that the patches of the example change.
        right_kind: What the right text is, if it stands elsewhere than the wrong one: code of an upstream's stays as it
            is, and a patch mends it.
    """

    kind: Kind
    wrong: str
    right: str
    cure: str
    upstream: str = ""
    right_kind: Kind | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        """The wrong text and the right one."""
        return Side(self.kind, self.wrong), Side(self.right_kind or self.kind, self.right)


EXAMPLES = {
    "TP101": Example(
        "job",
        "mesh: &mesh {dp: 2, tp: 4}",
        "mesh: {dp: 2, tp: 4}",
        "Write plain YAML: mappings, lists, text, numbers, true and false. Instead of an anchor or a tag, write "
        "the value itself. Keep one document in a file.",
    ),
    "TP102": Example(
        "job",
        "steps: 8\nfps: 8\nsteps: 30",
        "steps: 30\nfps: 8",
        "Remove one of the two lines. The error names both.",
    ),
    "TP103": Example(
        "job",
        "step: 30",
        "steps: 30",
        "Take the name that the error suggests, or remove the key. The keys are in docs/cards.md, docs/jobs.md and "
        "docs/patches.md, and an editor completes them (`torchport schema`).",
    ),
    "TP104": Example(
        "patch",
        """\
- target: up.m:f
  rewrite:
    match: y = x * 2""",
        """\
- target: up.m:f
  rewrite:
    match: y = x * 2
    put: p.py:doubled""",
        "Add the key. The tables in docs/ say what it means.",
    ),
    "TP105": Example(
        "job",
        'steps: "30"',
        "steps: 30",
        "Write a value of the type that the error names. torchport converts nothing: text in quotes is no number.",
    ),
    "TP106": Example(
        "job",
        "strategy: tensor_parallel",
        "strategy: tp",
        "Take one of the names that the error lists. `torchport models` lists the cards with their strategies, and "
        "`torchport patches list` the patches.",
    ),
    "TP107": Example(
        "job",
        "frames: 16      # the card says: frames: {multiple_of: 4, plus: 1}",
        "frames: 17",
        "Take a value that the error names. What a model can do is in its card; what a machine can do depends on "
        "its chips.",
    ),
    "TP108": Example(
        "command",
        "torchport models --path my_pack/patches",
        "torchport models --path my_pack",
        "Name the folder that holds `patches/`, `configs/`, or both, and not one of the two: docs/packs.md.",
    ),
    "TP109": Example(
        "command",
        "torchport check --upstream-path ~/no-such-checkout",
        "git clone https://example.com/waves ~/waves\ntorchport check --upstream-path ~/waves",
        "Clone the repository that the card names (`checkout.url`), and pass the folder of the clone.",
    ),
    "TP110": Example(
        "job",
        "fps: 24      # my_pack/configs/demo.yaml; torchport's pack has a configs/demo.yaml too",
        "fps: 24\noverrides: true",
        "Rename the card, the config or the patch (its `id`). Or write `overrides: true` in it: it then takes the "
        "other one's place, in every run with this pack. docs/packs.md says which pack lies on top.",
    ),
    "TP200": Example(
        "code",
        'import sys\n\nif not has_gpu():\n    sys.exit("needs a GPU")',
        'if not has_gpu():\n    raise RuntimeError("needs a GPU")',
        "The text of the error says what happened. If the process ended, run upstream's import alone (`python -c "
        "'import up.m'`) and patch the statement that ends it. If a module was not restored, report it.",
    ),
    "TP201": Example(
        "patch",
        "- target: up.m:old_name\n  replace: p.py:new",
        "- target: up.m:f\n  replace: p.py:new",
        "Look for the function in upstream's source: it was renamed, moved or removed. If importing it fails, the "
        "error names the line: install what is missing, or patch that line.",
        upstream="def f(x):  # its name was old_name\n    return x * 2",
    ),
    "TP202": Example(
        "patch",
        "- id: up.one\n  target: up.m:f\n  replace: p.py:new\n- id: up.two\n  target: up.m:f\n  replace: p.py:new",
        "- id: up.one\n  target: up.m:f\n  replace: p.py:new",
        "Keep one of the two, or write one patch that does the work of both. Rewrites of different statements of "
        "one function can stand beside each other.",
    ),
    "TP203": Example(
        "python",
        """\
import up.m

HANDLERS = frozenset([up.m.f])  # nobody can change a frozen set

with patch.applied(entries):  # a patch of up.m:f
    pass""",
        """\
with patch.applied(entries):
    import up.m

    HANDLERS = frozenset([up.m.f])""",
        "Import upstream inside `with patch.applied(...)`. With `torchport run` this means: import it inside the "
        "functions of the family, and not at the top of the file.",
    ),
    "TP204": Example(
        "patch",
        "- target: up.m:f\n  replace: p.py:new",
        "- target: up.m:apply\n  replace: p.py:apply_new",
        "Something holds the function itself, here a frozen set. Patch a function that uses what it holds. The error "
        "names the holder by the expression that leads to it. docs/patches.md lists the holders that torchport "
        "changes by itself.",
        upstream="""\
def f(x):
    return x * 2


HANDLERS = frozenset([f])  # holds the function itself, not its name


def apply(x):
    return [handler(x) for handler in HANDLERS]""",
    ),
    "TP205": Example(
        "patch",
        "- target: up.m:f\n  rewrite: {match: y = x + x, put: p.py:doubled}",
        "- target: up.m:f\n  rewrite: {match: y = x * 2, put: p.py:doubled}",
        "Copy whole, consecutive statements of upstream's function to `match`. Formatting and comments do not "
        "matter. If they appear more than once, set `times`.",
        upstream="def f(x):\n    y = x * 2\n    return y",
    ),
    "TP206": Example(
        "patch",
        "- target: up.m:g\n  replace: p.py:new\n  must_be_called: [encode, denoise]",
        "- target: up.m:g\n  replace: p.py:new\n  must_be_called: [encode]",
        "Find out what the stage calls instead, and patch that. If the stage has no reason to call the target, "
        "take the stage out of `must_be_called`.",
        upstream="""\
def f(x):  # denoise calls this
    return x * 2


def g(x):  # encode calls this
    return x""",
    ),
    "TP207": Example(
        "code",
        """\
def f(x):  # up/m.py, as it was locked
    return x * 2


def f(x, scale=1.0):  # up/m.py now
    return x * 2 * scale


def new(x):  # patches/up/p.py
    return x + x""",
        """\
def new(x, scale=1.0):  # patches/up/p.py
    return (x + x) * scale""",
        "Read the change that the error shows. Change the patch if it needs that. Then accept the new source: "
        "`torchport patches lock up`.",
    ),
    "TP208": Example(
        "patch",
        "- target: up.m:textwrap.dedent\n  replace: p.py:new",
        "- target: up.m:g\n  replace: p.py:new",
        "Patch the function of the package that calls it. If everybody may get the patch, name the target in its "
        "own module (`textwrap:dedent`) with `scope: global` and a `scope_reason`.",
        upstream="import textwrap\n\n\ndef g(x):\n    return textwrap.dedent(x)",
    ),
    "TP209": Example(
        "patch",
        "- target: up.m:f\n  replace: p.py:new_of_two    # def new_of_two(x, y)",
        "- target: up.m:f\n  replace: p.py:new           # def new(x)",
        "Give the replacement the target's parameters: the same names, order and defaults. A wrapper has the "
        "original as one more parameter, the first.",
        upstream="def f(x):\n    return x * 2",
    ),
    "TP210": Example(
        "patch",
        '- target: up.m:f\n  replace: p.py:new\n  fits: {torch: "<2"}',
        '- target: up.m:f\n  replace: p.py:new\n  fits: {torch: ">=2.12,<2.14"}',
        "Install a version in the range. Or try the patch with the installed version (`torchport check`), and "
        "widen `fits`.",
    ),
    "TP211": Example(
        "python",
        """\
from concurrent.futures import ThreadPoolExecutor


def work():
    with patch.applied([]):
        pass


with patch.applied(entries), ThreadPoolExecutor() as pool:
    pool.submit(work).result()""",
        """\
from concurrent.futures import ThreadPoolExecutor


def work():
    pass


with patch.applied(entries), ThreadPoolExecutor() as pool:
    pool.submit(work).result()""",
        "Apply the patches once, in one thread, around the work of all threads. Or use one process for each set.",
    ),
    "TP212": Example(
        "python",
        """\
with patch.applied(entries) as ledger:
    import up.m

    trace = ledger.trace()

trace.check()  # what a compiled network does before it is traced again""",
        """\
with patch.applied(entries) as ledger:
    import up.m

    trace = ledger.trace()
    trace.check()""",
        "Call the compiled network inside the `with patch.applied(...)` in which it was traced first. A call with "
        "new shapes traces it again.",
    ),
    "TP213": Example(
        "patch",
        "- target: up.m:f\n  replace: p.py:nwe",
        "- target: up.m:f\n  replace: p.py:new",
        "Write the name of a function in a Python file beside the YAML file. The Python file must not import "
        "upstream at its top.",
    ),
    "TP214": Example(
        "patch",
        "- target: flash_attn:flash_attn_func\n  stub: {package: flash_attn, importers: [up.m]}",
        """\
- id: up.flash
  target: flash_attn:flash_attn_func
  stub: {package: flash_attn, importers: [up.m]}
- id: up.attention
  target: up.m:f
  replace: p.py:new""",
        "A stub only lets an import succeed. Patch the function that calls the package; the error names it. Or "
        "install the package.",
        upstream="import flash_attn\n\n\ndef f(x):\n    return flash_attn.flash_attn_func(x)",
    ),
    "TP215": Example(
        "python",
        """\
import sys

sys.path.insert(0, "site/up")  # a folder inside the package

with patch.applied(entries):
    import m
    import up.m""",
        """\
with patch.applied(entries):
    import up.m""",
        "Take the folder inside the package off `sys.path` and `PYTHONPATH`, and import the module by its whole name "
        "everywhere. A file that is run as a script and imported as well needs a script of its own.",
    ),
    "TP216": Example(
        "python",
        """\
import torchport

with torchport.applied(patches=["up"], paths=["."]):
    pass""",
        """\
import torchport

with torchport.applied(patches=["up"], paths=["."]):
    import up.m""",
        "Name the model of the code that runs. Import its upstream inside the `with`, by the name that the card has.",
    ),
    "TP217": Example(
        "command",
        "torchport patches lock up --upstream-path old_checkout  # its up/m.py is written for Python 2",
        "torchport patches lock up --upstream-path new_checkout",
        "Mend the file on the line that the error names. If it is written for another version of Python, get the "
        "version of it that is for the one that runs torchport.",
    ),
    "TP301": Example(
        "command",
        'torchport run --model some --config configs/demo.yaml --prompt "A cat" --checkpoint ~/no-such-folder',
        'torchport run --model some --config configs/demo.yaml --prompt "A cat" --checkpoint owner/repo@main',
        "Name a folder that exists, `owner/repo@revision`, or `tiny`. A repository with a licence to accept needs "
        "a login (`hf auth login`).",
    ),
    "TP302": Example(
        "command",
        "head -c 1000000 model.safetensors > broken/model.safetensors\n"
        'torchport run --model some --config configs/720p.yaml --prompt "A cat" --checkpoint broken',
        'torchport run --model some --config configs/720p.yaml --prompt "A cat" --checkpoint owner/repo@main',
        "Download the file again. A file that was copied while it was downloaded is truncated.",
    ),
    "TP303": Example(
        "card",
        'components:\n  text_encoder: {class: "transformers:T5EncoderModel", dtype: float32}',
        "components:\n"
        "  text_encoder: {class: \"transformers:T5EncoderModel\", dtype: float32, unread: ['decoder\\..*']}",
        "Name a checkpoint of the card's model. If it is the right one, and holds tensors that the class does not "
        "use, name these under `unread`.",
    ),
    "TP304": Example(
        "code",
        'self.register_buffer("table", torch.empty(64, device="meta"), persistent=False)',
        'self.register_buffer("table", torch.arange(64.0), persistent=False)',
        "The buffer is in no file, so code must compute it: the constructor of its class, or `prepare` of the family.",
    ),
    "TP401": Example(
        "job",
        "machine: cpu:8\nmesh: {dp: 2, tp: 2}",
        "machine: cpu:8\nmesh: {dp: 2, tp: 4}",
        "The product of the axes must be the number of devices. `tp` and `sp` must divide the heads, and `dp` the "
        "batch (2 with guidance).",
    ),
    "TP402": Example(
        "rules",
        "- {match: 'block\\.\\d+\\.up\\.weight', spec: [tp]}\n- {match: '.*', spec: replicate}",
        "- {match: 'blocks\\.\\d+\\.up\\.weight', spec: [tp]}\n- {match: '.*', spec: replicate}",
        "Correct the expression, or remove the rule. It must match the whole name of a tensor. `torchport shard "
        "show` prints what every rule matches.",
    ),
    "TP403": Example(
        "rules",
        "- {match: 'blocks\\.\\d+\\.up\\.weight', spec: [tp]}",
        "- {match: 'blocks\\.\\d+\\.up\\.weight', spec: [tp]}\n- {match: '.*\\.bias', spec: replicate}",
        "Add a rule for the tensor. Write `spec: replicate` if every device should hold it whole.",
    ),
    "TP404": Example(
        "code",
        "call(x=latents, t=torch.tensor([0.5], dtype=torch.float64))",
        "call(x=latents, t=torch.tensor([0.5], dtype=torch.float32))",
        "Cast tensors of 64 bits before they reach the network: JAX has 32. If the error says that an array lies "
        "elsewhere than its rule puts it, report it.",
    ),
    "TP405": Example(
        "card",
        "stacks:\n  transformer:\n    transformer_blocks: {carries: [hidden_states]}",
        "stacks:\n  transformer:\n    transformer_blocks: {carries: [hidden_states, encoder_hidden_states]}",
        "Name all outputs of a block that the next block takes, under `carries`. Leave out blocks that differ, at the "
        "beginning with `first` and at the end with `last`. If a block changes a carry's dtype, the error names it. A "
        "list of blocks that all differ cannot be stacked: remove it from `stacks`.",
    ),
    "TP501": Example(
        "command",
        'torchport run --model some --config configs/720p.yaml --prompt "A cat"     # on a laptop',
        'torchport run --model some --config configs/demo.yaml --prompt "A cat"\n'
        "torchport plan --model some --config configs/720p.yaml",
        "Run the job on the machine that its config names, or use another config. `torchport doctor` prints the "
        "devices and the memory here. `torchport plan` says without a TPU what a job needs.",
    ),
    "TP502": Example(
        "command",
        "pip install torchport\n"
        "torchport plan --model some --config configs/720p.yaml      # the TPU compiler is not installed",
        "pip install 'torchport[plan]'\ntorchport plan --model some --config configs/720p.yaml",
        "Install the TPU compiler (Linux, x86-64), and name a slice that exists. If the compiler refuses the "
        "program, the error has its words.",
    ),
    "TP503": Example(
        "code",
        "tile = Tile(block_q=8192, block_kv=8192, columns=8192)",
        "tile = Tile(block_q=1024, block_kv=2048, columns=1024)",
        "Use a smaller tile, or none: torchport then takes the one from its table. `torchport tune` finds tiles "
        "that fit.",
    ),
    "TP504": Example(
        "command",
        "kill -KILL 4711      # one of four processes; the other three end with this error",
        'torchport run --model some --config configs/720p.yaml --prompt "A cat" --distributed --out same-folder',
        "Look at the other host: most often its memory was full. Then give the same command again on all hosts: it "
        "continues after the last saved step.",
    ),
    "TP601": Example(
        "command",
        "torchport run --model some --config configs/demo.yaml --stage decode --out b",
        "torchport run --model some --config configs/demo.yaml --stage decode --out b --inputs a",
        "Name the folder with the earlier stage's file (`--inputs`), or run that stage first. The error has the "
        "command.",
    ),
    "TP602": Example(
        "command",
        "sed -i 's/float32/bfloat16/' a/encode.json\n"
        "torchport run --model some --config configs/demo.yaml --stage denoise --out a",
        'torchport run --model some --config configs/demo.yaml --stage encode --prompt "A cat" --out a\n'
        "torchport run --model some --config configs/demo.yaml --stage denoise --out a",
        "Make the file again, or copy it again from where it was made. An edited manifest is refused: change the "
        "config.",
    ),
    "TP603": Example(
        "command",
        "torchport run --model some --config configs/demo.yaml --stage decode --out a --set frames=33",
        "torchport run --model some --config configs/demo.yaml --stage decode --out a",
        "Read the files of the same model, checkpoint and sizes; or use another `--out` for another job.",
    ),
    "TP604": Example(
        "command",
        'torchport run --model some --config configs/demo.yaml --prompt "A cat" --out /proc/videos',
        'torchport run --model some --config configs/demo.yaml --prompt "A cat" --out videos',
        "Name a folder that you can write to, or free some space. After the disk was full, the same command continues.",
    ),
    "TP605": Example(
        "code",
        "attention = scores.masked_fill(~mask, -math.inf).softmax(-1)  # NaN for a row without a valid key",
        "attention = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)\n"
        "attention = torch.where(mask, attention, 0.0)",
        "Run the same with `--backend original`. If that has no NaN, a patch or a precision is wrong: see traps 2 "
        "and 3 in docs/traps.md. float16 overflows where bfloat16 does not.",
    ),
    "TP701": Example(
        "command",
        "kill -TERM 4711      # what a cluster does to a job whose time is over",
        'torchport run --model some --config configs/demo.yaml --prompt "A cat" --out same-folder',
        "Nothing is wrong. Give the same command with the same `--out`: it continues after the last saved step.",
    ),
    "TP801": Example(
        "job",
        "machine: cpu:8\nattention: splash",
        "machine: cpu:8\nattention: plain",
        "Remove `attention` from the config: each platform then takes its own. docs/attention.md says what each "
        "implementation can compute.",
    ),
    "TP901": Example(
        "family",
        "letters = settings.text",
        "letters = settings.prompt",
        "Read the line that the error names, and the exception below it. Mend a family or a patch's function there. "
        "Call upstream otherwise in the family, or patch it.",
    ),
    "TP902": Example(
        "forward",
        "y = y + torch.arange(4.0, dtype=torch.float64)",
        "y = y + torch.arange(4.0)",
        "A tensor of the host becomes a constant of the program, up to 1 MiB and with numbers of 32 bits. Register a "
        "larger one in `prepare` as a buffer of the network. Make one that is written to on the device of one of the "
        "network's (`device=x.device`). Draw random numbers in the stage's function, and pass them as an input.",
    ),
    "TP903": Example(
        "forward",
        "if torch.all(y == 0):\n    y = y + 1",
        "y = torch.where(torch.all(y == 0), y + 1, y)",
        "Paste the entry that the error ends with: a `rewrite` of the statement. Write its function, which returns the "
        "same without the value: with `torch.where`, from shapes, or from a setting. See traps 4 and 5 in "
        "docs/traps.md.",
    ),
    "TP904": Example(
        "upstream",
        "DEVICE = torch.cuda.current_device()",
        "patches:\n  denoise: [torch/cuda]",
        "List `torch/cuda` under `patches` in the card; `torchport patches list torch/cuda` shows the calls that it "
        "answers. For another call, paste the entry that the error ends with, and write its function.",
        right_kind="card",
    ),
    "TP905": Example(
        "upstream",
        "import flash_attn",
        """\
- id: up.flash-attn
  target: flash_attn:flash_attn
  stub: {package: flash_attn, importers: [up.model]}
  plumbing: true""",
        "Install the package. Or, if your job calls nothing of it, paste the entry that the error ends with, and list "
        "its file in the card. What is called of a stub is refused (TP214): patch the function that calls it.",
        right_kind="patch",
    ),
    "TP906": Example(
        "forward",
        "y = torch.special.airy_ai(y)",
        "- target: torch.ops.aten:special_airy_ai.default\n  op: lowerings.py:special_airy_ai",
        "Paste the entry that the error ends with. Write its function with `torchport.engine.call_jax`, which computes "
        "the operator with functions of JAX. Or rewrite the statement with other operators.",
        right_kind="patch",
    ),
}
