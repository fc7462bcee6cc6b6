"""`torchport check --static`: what a pack's files and upstream's source say; nothing is imported or run."""

import json
import re
import subprocess
import sys
import textwrap

import pytest
from fakes.patch_world import World

from torchport.commands import check, findings, patches, static_check
from torchport.commands.check import CheckProcess, StagePatches
from torchport.commands.findings import Report
from torchport.config.pack import Pack, find_pack
from torchport.errors import TorchportError, UnknownNameError

FAMILY = """
from torchport.stages.family import Stage

STAGES = (
    Stage("denoise", None, (), network="transformer"),
    Stage("decode", None, (), network="vae"),
)
TAKES_IMAGE = False
VARIANTS: tuple[str, ...] = ()
arrange_tiny = None


def batch(guidance_scale):
    return 1


import up.imported_at_once
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    world.write("up/__init__.py", "raise SystemExit('imported')\n")
    world.write("up/m.py", "def f(a):\n    return 1\n\nclass C:\n    def g(self, a):\n        return 2\n")
    world.python("import up.absent\ndef new(a): return 'new'\ndef old(self, a): return 'old'\nclass D: pass\n")
    monkeypatch.chdir(tmp_path)
    yield world
    world.close()


def _told(report):
    return [f"{finding.place}: {finding.id} {finding.text}" for finding in report.findings]


def _check(world):
    return static_check.check(world.patches, ["up"], world.site)


def test_a_locked_pack_is_clean_and_nothing_of_it_has_run(world):
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new\n- id: up.g\n  target: up.m:C.g\n  replace: p.py:old")
    patches.lock(world.patches)
    report = _check(world)
    assert report.findings == []
    assert {(case.patch, case.step) for case in report.cases} == {
        (patch, step) for patch in ("up.f", "up.g") for step in ("schema", "targets", "drift")
    }
    assert not {"up", "torchport_patches.up.p"} & set(sys.modules)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            "target: up.m:f\n  replace: q.py:new",
            "TP213 No file 'q.py' beside it for 'up.f'. Did you mean 'p.py'? Known: p.py.",
        ),
        ("target: up.m:f\n  replace: p.py:nev", "TP213 'p.py' has no 'nev' for 'up.f'. Did you mean 'new'? Known: D"),
        ("target: up.m:e\n  replace: p.py:new", "TP201 'up.f' finds no 'e' in up/m.py. Known: C, f."),
        ("target: up.n:f\n  replace: p.py:new", "TP201 'up.f' finds no module up.n: no 'up.n'. Install the upstream"),
        ("target: up.m:f\n  replace: p.py:D", "TP209 up.m:f (up/m.py:1) is a function, and 'p.py:D' is none."),
        ("target: up.m:C\n  replace: p.py:new", "TP209 up.m:C is a class, and 'p.py:new' is none. Write a class."),
        ("target: up.m:f\n  wrap: p.py:new", "TP209 'p.py:new' does not take 'a' by position, unlike up.m:f(a)."),
        (
            "target: up.m:f\n  rewrite: {match: 'x = 1', put: 'p.py:new'}",
            "TP205 'up.f' matches 0 times in up.m:f (at no line), not 1.",
        ),
        ("target: up.m:f\n  replace: p.py:new\n  needed: {probe: 'p.py:is_old'}", "TP213 'p.py' has no 'is_old'"),
    ],
)
def test_an_entry_that_cannot_work_is_a_finding_without_running_its_file(world, entry, text):
    world.yaml(f"id: up.f\n  {entry}")
    (told,) = [one for one in _told(_check(world)) if "TP207" not in one]
    assert told.startswith(f"patches/up/p.yaml:1: {text}")


def test_a_patch_file_that_is_no_python_is_a_finding(world):
    world.python("def new(a:\n")
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
    (told,) = _told(_check(world))
    assert told.startswith("patches/up/p.py:1: TP217 Python 3.") and "cannot read it: '(' was never closed." in told


@pytest.mark.parametrize("line", ["new = print", "from math import floor as new", "new = make()", "from x import *"])
def test_what_a_file_does_not_say_is_left_to_the_full_check(world, line):
    world.python(f"import functools\n{line}\n")
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new\n- id: up.g\n  target: up.m:C.g\n  wrap: p.py:new")
    assert [finding.id for finding in _check(world).findings] == ["TP207", "TP207"]


def test_a_decorator_that_may_change_the_signature_leaves_it_unknown(world):
    world.python("@anything\ndef new(): ...\n")
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
    assert [finding.id for finding in _check(world).findings] == ["TP207"]


def test_drift_brings_the_lines_of_the_lock_that_accepting_it_would_change(world):
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new\n- id: up.g\n  target: up.m:C.g\n  replace: p.py:old")
    patches.lock(world.patches)
    before = (world.patches / "up" / "lock.yaml").read_text().splitlines()
    world.write("up/m.py", "def f(a, b=1):\n    return 1\n\nclass C:\n    def g(self, a):\n        return 2\n")
    world.python("def new(a, b=1): return 'new'\ndef old(self, a): return 'old'\n")
    (finding,) = _check(world).findings
    assert (finding.id, finding.patch, finding.step) == ("TP207", "up.f", "drift")
    patches.lock(world.patches)
    after = (world.patches / "up" / "lock.yaml").read_text().splitlines()
    lines = finding.review.splitlines()[2:]
    assert {line[1:] for line in lines if line.startswith("-")} == set(before) - set(after)
    assert {line[1:] for line in lines if line.startswith("+")} == set(after) - set(before)
    assert '+      signature: "(a, b=...)"' in lines


def test_a_version_outside_fits_does_not_hide_the_drift(world):
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
    patches.lock(world.patches)
    world.write("up/m.py", "def f(a):\n    return 10\n")
    file = world.patches / "up" / "p.yaml"
    file.write_text(file.read_text().replace('{up: "*"}', '{click: "<1"}'))
    assert [finding.id for finding in _check(world).findings] == ["TP210", "TP207"]


def test_what_is_not_needed_is_skipped_with_its_reason(world):
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new\n  needed: {click: '<1'}")
    report = _check(world)
    (reason,) = {case.skipped for case in report.cases if case.skipped}
    assert report.findings == [] and reason.startswith("not needed: click is ")


def test_every_bad_file_is_reported_and_an_id_that_two_files_have(world):
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
    world.yaml("id: up.f\n  target: up.m:C.g\n  replace: p.py:old", "q.yaml")
    for name, text in (("a", "- id: [\n"), ("b", "- id: up.b\n  extra: 1\n")):
        (world.patches / "up" / f"{name}.yaml").write_text(text)
    told = sorted((finding.id, finding.place, finding.step) for finding in _check(world).findings)
    assert ("TP104", "patches/up/b.yaml:1", "schema") in told, "all that is wrong in it"
    assert [one for one in told if one[0] != "TP104"] == [
        ("TP101", "patches/up/a.yaml:2", "schema"),
        ("TP103", "patches/up/b.yaml:2", "schema"),
        ("TP202", "patches/up/q.yaml:1", "schema"),
        ("TP207", "patches/up/p.yaml:1", "drift"),
    ]


def test_names_that_are_not_there_are_refused(world):
    (world.patches / "up").mkdir(exist_ok=True)
    with pytest.raises(UnknownNameError, match="torchport check upp: No pack has a folder patches/upp"):
        static_check.check(world.patches, ["upp"])
    (world.patches / "up" / "p.yaml").write_text("[]\n")
    for name in ("up/q", "up/p.yaml"):
        with pytest.raises(UnknownNameError, match=f"torchport check {name}: There is no patches/{name}.yaml. .*p"):
            static_check.check(world.patches, [name])
        with pytest.raises(TorchportError, match=r"'up/p.yaml' is no name of patches|No patches 'up/q'"):
            patches.lock(world.patches, [name])


def test_all_mistakes_of_a_card_are_findings(cards):
    cards.replace("title: ", "titel: ")
    cards.replace("  scheduler: {class:", "  scheduler: {clas:")
    cards.replace("artefacts: HunyuanVideo-1.5\n", "")
    told = [one.partition(" ")[2].partition(". ")[0] for one in cards.told()]
    assert told == [
        "TP103 Unknown key 'titel'",
        "TP103 Unknown key 'components.scheduler.clas'",
        "TP104 'artefacts' is missing",
    ]


KEYS = re.compile(r"^( *(?:- )?)(\w+)(:.*)$", re.MULTILINE)
"""A line of YAML that begins with a key."""


@pytest.mark.parametrize("each", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_misspelt_key_is_one_finding_wherever_it_is(cards, each):
    """Nothing follows from it: no key that is missing, no name that another section has, no job that does not fit."""
    more = []
    for file in (cards.card, cards.world.patches / "up" / "p.yaml"):
        text = file.read_text()
        for key in [*KEYS.finditer(text)][::each]:
            file.write_text(f"{text[: key.end(2)]}x{text[key.end(2) :]}")
            told = cards.told()
            more += [(key[0], told)] if len(told) > 1 else []
        file.write_text(text)
    assert more == []


@pytest.mark.parametrize("line", ["title: [", "\ttitle: x", "title: &a x", "title: {a: 1, a: 2}", "title: x\ntitle: y"])
def test_a_file_that_is_no_yaml_is_one_finding(cards, line):
    cards.replace("title: HunyuanVideo-1.5 text-to-video, through diffusers", line)
    assert len(cards.told()) == 1


def test_a_job_is_not_judged_by_a_card_with_a_mistake(cards):
    cards.replace("  scheduler: {class:", "  schedular: {class:")
    cards.replace("frames: 13", "overrides: true\nframes: 18", cards.demo)
    (line,) = cards.told()
    assert "'scheduler' is no component of 'some'. Did you mean 'schedular'?" in line
    cards.replace("  schedular: {class:", "  scheduler: {class:")
    (line,) = cards.told()
    assert "'frames' is 18" in line


class Cards:
    """A pack with one card, `some`, its family and its demo."""

    def __init__(self, world, root):
        self.world, self.root = world, world.patches.parent
        (self.root / "configs" / "models").mkdir(parents=True)
        text = (root / "configs" / "models" / "hunyuan.yaml").read_text()
        head, _, rest = text.partition("patches:\n")
        head = head.replace("model: hunyuan", "model: some").replace("diffusers/hunyuan_video15_stages", "up/stages")
        self.card = self.root / "configs" / "models" / "some.yaml"
        self.card.write_text(f"{head}patches:\n  denoise: [up/p]\n  decode: [up/p]\n{rest.partition(chr(10) * 2)[2]}")
        self.demo = self.root / "configs" / "demo.yaml"
        self.demo.write_text((root / "configs" / "demo.yaml").read_text())
        world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
        self.family(FAMILY)
        patches.lock(world.patches)

    def family(self, text):
        self.world.python(text, "stages.py")

    def replace(self, old, new, file=None):
        file = file or self.card
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def told(self, **flags):
        return _told(check.report_of(paths=(str(self.root),), static=True, upstream_path=self.world.site, **flags))


@pytest.fixture
def cards(world, root):
    return Cards(world, root)


def test_a_card_with_its_family_and_its_demo_is_clean(cards):
    assert cards.told() == cards.told(model="some") == []
    report = static_check.check_cards(Pack(cards.root))
    assert [(case.place, case.step) for case in report.cases] == [
        ("configs/models/some.yaml:1", "schema"),
        ("configs/models/some.yaml:1", "card"),
        ("configs/demo.yaml:1", "schema"),
        ("configs/demo.yaml:1", "job"),
    ]


def test_a_mistake_in_a_card_is_none_of_the_card_that_extends_it(cards):
    more = cards.card.with_name("more.yaml")
    more.write_text("model: more\nextends: some\ntitle: More\n")
    assert cards.told() == []
    for old, new in (
        ("family: up/stages\n", ""),
        ("  vae: {class", "  vea: {class"),
        ("      transformer:", "      transformr:"),
        ("denoise: [up/p]", "denoise: [up/q]"),
    ):
        text = cards.card.read_text()
        assert old in text
        cards.card.write_text(text.replace(old, new, 1))
        told = cards.told()
        assert len(told) == 1 and told[0].startswith("configs/models/some.yaml:"), told
        cards.card.write_text(text)
    for extends, told in (("3", "'extends' is 3 (a number). It must be text"), ("sme", "There is no model card 'sme'")):
        more.write_text(f"model: more\nextends: {extends}\n")
        [line] = cards.told()
        assert told in line and line.startswith("configs/models/more.yaml:2")


def test_operators_that_a_card_accepts_are_said_with_the_reason(cards):
    cards.replace("decode: [up/p]", "decode: [up/p]\noperators: {aten.flip.default: It flips no 0-dim tensor}")
    report = static_check.check_cards(Pack(cards.root))
    assert findings.as_text(report).splitlines() == [
        "configs/models/some.yaml:15: accepts aten.flip.default, which may differ from PyTorch's: "
        "It flips no 0-dim tensor",
        "clean",
    ]


def test_a_job_is_not_judged_by_other_cards_where_one_cannot_be_read(cards):
    cards.demo.with_name("own.yaml").write_text(cards.demo.read_text().replace("strategy: tp\n", "strategy: split\n"))
    [line] = cards.told()
    assert line.startswith("configs/own.yaml") and "split" in line
    cards.replace("  scheduler: {class:", "  scheduler: {clas:")
    told = cards.told()
    assert "Unknown key 'components.scheduler.clas'" in told[0]
    assert [line for line in told if line.startswith("configs/own.yaml")] == []


@pytest.mark.parametrize(
    ("old", "new", "place", "text"),
    [
        ("decode: [up/p]", "decode: [up/p, up/q]", 14, "TP106 No patches 'up/q'. Known: p."),
        ("decode: [up/p]", "decode: [other/p]", 14, "TP106 No folder 'other' of patches. Known: diffusers, "),
        ("decode: [up/p]", "decode: [up/p/q]", 14, "TP107 'up/p/q' is no name of patches. Write upstream or"),
        ("decode: [up/p]", "decode: [up/p]\noriginal: [up/q]", 15, "TP106 No patches 'up/q'. Known: p."),
        ("family: up/stages", "family: up/verbs", 4, "TP106 'family' is 'up/verbs', and there is no patches/up/verbs"),
        ("  scheduler: {class:", "  scheduler: {clas:", 70, "TP103 Unknown key 'components.scheduler.clas'. Did you"),
        ("model: some", "model: other", 2, "TP107 'model' is 'other'. It must be 'some'."),
        ("title: H", "demo: configs/no.yaml\ntitle: H", 3, "TP106 There is no file 'configs/no.yaml', here or in"),
    ],
)  # fmt: skip
def test_a_card_that_names_what_is_not_there_is_a_finding_with_its_line(cards, old, new, place, text):
    cards.replace(old, new)
    (told,) = cards.told()
    assert told.startswith(f"configs/models/some.yaml:{place}: {text}")


def test_a_family_is_read_and_not_run(cards):
    cards.family(FAMILY.replace("arrange_tiny = None\n", ""))
    assert cards.told()[0].startswith(
        "configs/models/some.yaml:4: TP213 'patches/up/stages.py' has no arrange_tiny. Add"
    )
    cards.family(FAMILY.replace("STAGES = (", "STAGES = ("[:-1]))
    assert cards.told()[0].startswith("patches/up/stages.py:7: TP217 Python 3.")
    cards.family(FAMILY.replace('network="vae"', 'network="vea"'))
    [line] = cards.told()
    assert "TP103 'vea' is no component of 'some'. Did you mean 'vae'?" in line
    cards.family(FAMILY.replace('network="vae"', 'network="decoder"'))
    assert "TP103 'decoder' is no component of 'some'." in cards.told()[0]
    for unknown in ('network="v" + "ae"', "**more", '"", (), (), "vae"'):
        cards.family(FAMILY.replace('network="vae"', unknown))
        assert cards.told() == []


def test_a_builder_that_a_card_names_is_looked_for_and_not_run(cards):
    build = '  scheduler: {{build: "{}", dtype: float32, class: '
    cards.replace("pipeline: diffusers:HunyuanVideo15Pipeline\n", "")  # which would read a layout without builders
    cards.replace("  scheduler: {class: ", build.format("stages.py:batch"))
    assert cards.told() == []
    cards.replace("stages.py:batch", "stages.py:built")
    (line,) = cards.told()
    assert "TP213 'patches/up/stages.py' has no function 'built'. Known: batch." in line
    cards.replace("stages.py:built", "absent.py:built")
    (line,) = cards.told()
    assert line.startswith("configs/models/some.yaml:") and "There is no 'patches/up/absent.py'. Known: " in line


def test_patches_of_one_stage_that_change_one_target_are_a_finding(cards):
    cards.world.yaml("id: up.e\n  target: up.m:f\n  replace: p.py:new", "q.yaml")
    cards.replace("decode: [up/p]", "decode: [up/p, up/q]")
    (told,) = cards.told()
    fact = "'up.e' claims up.m:f, and 'up.f' at patches/up/p.yaml:1 claims up.m:f."
    assert told.startswith(f"patches/up/q.yaml:1: TP202 {fact}")


def test_every_config_is_read_and_some_card_must_be_able_to_do_it(cards):
    text = cards.demo.read_text()
    line = {part: 1 + text[: text.index(f"\n{part}: ") + 1].count("\n") for part in ("frames", "steps")}
    (cards.root / "configs" / "a.yaml").write_text(text.replace("steps: 8", "steps: many"))
    (cards.root / "configs" / "b.yaml").write_text(text.replace("frames: 13", "frames: 18"))
    (cards.root / "configs" / "c.yaml").write_text(text.replace("machine: cpu", "machine: gpv"))
    cards.replace("strategy: ", "overrides: true\nstrategy: no-", cards.demo)
    told = cards.told()
    assert [one.partition(". ")[0] for one in told[1:]] == [
        f"configs/a.yaml:{line['steps']}: TP105 'steps' is 'many' (text)",
        f"configs/b.yaml:{line['frames']}: TP107 'frames' is 18",
        told[3].partition(". ")[0],
    ]
    assert told[0].startswith("configs/demo.yaml:") and "TP106 'some' has no strategy 'no-" in told[0]
    assert told[3].startswith("configs/c.yaml:") and "gpv" in told[3]


def test_one_bad_card_does_not_hide_another(cards):
    (cards.root / "configs" / "models" / "a.yaml").write_text("model: [\n")
    (cards.root / "configs" / "models" / "b.yaml").write_text("model: b\n")
    told = [(one.partition(":")[0], one.partition(" ")[2][:5]) for one in cards.told()]
    assert sorted({*told}) == [("configs/models/a.yaml", "TP101"), ("configs/models/b.yaml", "TP104")]
    assert cards.told(model="some") == []
    assert len(cards.told(model="a")) == 1
    with pytest.raises(UnknownNameError, match="There is no model card 'c'"):
        cards.told(model="c")


def test_a_card_with_a_taken_name_is_a_finding_and_hides_no_other(cards):
    folder = cards.root / "configs" / "models"
    (folder / "hunyuan.yaml").write_text("model: hunyuan\n")
    pack, report = find_pack([str(cards.root)]), Report()
    assert [card.model for card, _ in static_check.read_cards(pack, ["hunyuan", "some"], report)] == ["some"]
    [line] = _told(report)
    assert line.startswith("configs/models/hunyuan.yaml:1: TP110 ") and "hunyuan.yaml has the same name." in line
    assert cards.told() == [line]


def test_an_upstream_that_needs_plumbing_at_import_passes_beside_that_of_its_card(world):
    world.write("other/device.py", "def current():\n    raise AssertionError('no such device here')\n")
    world.write("up/__init__.py", "")
    world.write("up/m.py", "from other.device import current\nDEVICE = current()\ndef f(a):\n    return 1\n")
    world.python("def new(): return 0\n", upstream="other")
    world.python("def new(a): return 'new'\n")
    world.yaml("id: up.f\n  target: up.m:f\n  replace: p.py:new")
    entry = "id: other.current\n  target: other.device:current\n  replace: p.py:new\n  plumbing: true"
    world.yaml(entry, upstream="other")
    patches.lock(world.patches)

    def told(stages):
        return [finding.id for finding in check.check(world.patches, ["up"], world.site, stages=stages).findings]

    assert told([]) == ["TP201"]
    assert told([StagePatches(("up/p", "other/p"))]) == []
    check.require_applied(world.patches, ["up"], world.site, [StagePatches(("up/p", "other/p"))])


def test_an_upstream_is_tried_once_for_each_set_of_plumbing_beside_it(world, monkeypatch):
    """Beside it are plumbing, stubs, and what the original needs; of sets within each other the largest counts."""
    plumbing = "\n  plumbing: true"
    world.yaml(f"id: up.f\n  target: up.m:f\n  replace: p.py:new{plumbing}")
    for name, more in (("a", plumbing), ("b", ""), ("c", plumbing)):
        entry = f"id: other.{name}\n  target: other.m:{name}\n  replace: p.py:new{more}"
        world.yaml(entry, f"{name}.yaml", upstream="other")
    world.yaml("id: gone.f\n  target: gone.m:f\n  stub: {package: gone, importers: [up.m]}", upstream="gone")
    groups = []

    def call(function, folder, tried, mode, **options):
        groups.extend(group for group in tried if mode == "armed")
        return Report()

    monkeypatch.setattr(check.child, "call", call)
    stages = [
        StagePatches(("torchax", "up/p", "other/a", "other/b", "nowhere/p")),
        StagePatches(("up/q", "other/a", "other/b", "other/c")),
        StagePatches(("up/p", "other/b", "gone"), original=("other/b",)),
        StagePatches(("other/a", "gone")),
    ]
    assert check.check(world.patches, ["up"], stages=stages).findings == []
    assert groups == [
        CheckProcess(("up",), ("other.a", "other.c")),
        CheckProcess(("up",), ("gone.f", "other.b")),
    ]


PROBE = """
import importlib.metadata, json, sys
from torchport.__main__ import main
sys.argv = ["torchport", "check", "--static", "--model", "hunyuan"]
try:
    main()
except SystemExit as stop:
    packages = importlib.metadata.packages_distributions()
    names = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps([stop.code, sorted({one.lower() for name in names for one in packages.get(name, ())})]))
"""


def test_the_shipped_pack_is_checked_without_importing_torch_jax_or_an_upstream(root):
    """What the action installs suffices: no other dependency of torchport is imported."""
    command = [sys.executable, "-c", textwrap.dedent(PROBE)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    clean, last = done.stdout.splitlines()
    code, imported = json.loads(last)
    assert (clean, code, done.stderr) == ("clean", 0, "")
    assert not {"torch", "jax", "jaxlib", "torchax", "diffusers", "transformers", "numpy"} & set(imported)
    lines = (root / "tools" / "static.txt").read_text().splitlines()
    installed = {line.partition(">")[0] for line in lines if not line.startswith("#")}
    written = (root / "pyproject.toml").read_text(encoding="utf-8").partition("dependencies = [")[2]
    dependencies = {line.strip().strip('"').partition(">")[0].partition("[")[0] for line in written.splitlines()}
    dependencies.remove("torchport")  # a dependency of its own extras
    assert set(imported) & dependencies == installed


def test_a_shipped_card_that_is_named_is_clean(root):
    report = static_check.check_cards(Pack(root), ["cogvideox", "hunyuan", "ltx", "wan", "wan_5b"])
    assert findings.as_text(report).splitlines()[-1] == "clean"
