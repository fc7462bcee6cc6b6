"""Families are files beside the patches: found, loaded before any upstream, and refused by name."""

import inspect
import sys

import pytest

from torchport.config.card import STAGES
from torchport.config.pack import Pack
from torchport.errors import ReplacementError, TorchportError, UnknownNameError, WrongTypeError
from torchport.task.family_file import NAMES
from torchport.task.family_file import family as family_of

GOOD = """
from torchport.stages.family import Stage

STAGES = (Stage("encode", lambda parts, call, settings, steps: {}, ()),)
TAKES_IMAGE = False
VARIANTS = ()
arrange_tiny = None

def batch(guidance_scale):
    return 1
"""


def test_every_cards_family_is_there_and_speaks_the_verbs(pack):
    for name in pack.models():
        card, document = pack.card(name)
        stages = family_of(pack, card, document)
        networks = card.call.networks if card.call is not None else ("",)
        image = card.call is not None and card.call.image is not None
        some = {"denoise_first": len(networks) == 2, "encode_image": image}
        assert [stage.name for stage in stages.STAGES] == [name for name in STAGES if some.get(name, True)]
        assert stages.batch(1.0) == 1 and stages.batch(6.0) == 2
        for stage in stages.STAGES:
            names = {*stage.parts, *stage.meta, *([stage.network] if stage.network else [])}
            assert names <= set(card.components), stage.name
            assert set(stage.needs) <= set(STAGES[: STAGES.index(stage.name)])
            assert list(inspect.signature(stage.run).parameters)[:4] == ["parts", "call", "settings", "steps"]


def test_a_precision_is_named_only_for_what_is_compiled(pack):
    """Text encoders run in PyTorch on the host, where it would change nothing."""
    for name in pack.models():
        card, document = pack.card(name)
        networks = {stage.network for stage in family_of(pack, card, document).STAGES}
        assert {key for key, component in card.components.items() if component.precision != "default"} <= networks


def test_every_strategy_has_rules_for_every_network(pack):
    for name in pack.models():
        card, document = pack.card(name)
        networks = {stage.network for stage in family_of(pack, card, document).STAGES} - {None}
        for strategy in card.strategies.values():
            assert networks <= set(strategy.weights) and networks <= set(strategy.inputs)


class World:
    """A pack with one card, `configs/models/some.yaml`, whose family is `up/stages`."""

    def __init__(self, root, card):
        self.root = root
        (root / "configs" / "models").mkdir(parents=True)
        (root / "patches" / "up").mkdir(parents=True)
        text = card.replace("model: hunyuan", "model: some").replace("diffusers/hunyuan_video15_stages", "up/stages")
        self.card = root / "configs" / "models" / "some.yaml"
        self.card.write_text(text)
        self.write(GOOD)

    def write(self, text):
        (self.root / "patches" / "up" / "stages.py").write_text(text)

    def load(self):
        pack = Pack(self.root)
        return family_of(pack, *pack.card("some"))

    def refusal(self, kind):
        with pytest.raises(TorchportError) as caught:
            self.load()
        assert type(caught.value) is kind
        return str(caught.value)


@pytest.fixture
def world(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield World(tmp_path, (root / "configs" / "models" / "hunyuan.yaml").read_text())
    sys.modules.pop("torchport_patches.up.stages", None)


def test_a_family_in_somebody_elses_folder_is_loaded(world):
    assert world.load().STAGES[0].name == "encode"
    assert world.load() is world.load()


def test_a_family_that_does_not_exist_is_refused_with_the_nearest(world):
    (world.root / "patches" / "up" / "stages.py").rename(world.root / "patches" / "up" / "my_stages.py")
    assert world.refusal(UnknownNameError) == (
        "configs/models/some.yaml:4: 'family' is 'up/stages', and there is no patches/up/stages.py in "
        ".. Did you mean 'up/my_stages'? Known: up/my_stages."
    )


@pytest.mark.parametrize("name", ["stages", "../up/stages", "up/stages.py", "/up/stages", ""])
def test_a_family_that_is_no_file_among_the_patches_is_refused(world, name):
    world.card.write_text(world.card.read_text().replace("family: up/stages", f"family: '{name}'"))
    assert "'folder/file', a Python file in patches/ without its ending" in world.refusal(WrongTypeError)


def test_a_link_out_of_the_pack_is_refused(world, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "stages.py"
    elsewhere.write_text(GOOD)
    file = world.root / "patches" / "up" / "stages.py"
    file.unlink()
    file.symlink_to(elsewhere)
    with pytest.raises(TorchportError, match="link"):
        world.load()


def test_a_family_that_does_not_load_says_why(world):
    world.write("import no_such_module\n")
    assert world.refusal(ReplacementError) == (
        "configs/models/some.yaml:4: 'patches/up/stages.py' does not load: "
        "ModuleNotFoundError: No module named 'no_such_module'. "
        "Mend the file."
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_family_that_lacks_a_name_says_which_and_what_it_is(world, name):
    world.write(f"{GOOD}\ndel {name}\n")
    assert world.refusal(ReplacementError) == (
        f"configs/models/some.yaml:4: 'patches/up/stages.py' has no {name}. Add {name}, {NAMES[name]}."
    )


def test_a_family_with_variants_needs_their_task(world):
    world.write(f"{GOOD}\nVARIANTS = ('480p_t2v',)\n")
    assert world.refusal(ReplacementError) == (
        "configs/models/some.yaml:4: 'patches/up/stages.py' has no task. "
        "Add task, the function of a variant's name that returns what its network makes: 't2v' or 'i2v'."
    )


@pytest.mark.parametrize("stages", ["3", "()", "[*STAGES]", "('decode', *STAGES)", "None"])
def test_stages_that_are_none_are_refused(world, stages):
    world.write(f"{GOOD}\nSTAGES = {stages}\n")
    assert world.refusal(ReplacementError) == (
        "configs/models/some.yaml:4: STAGES in 'patches/up/stages.py' is no tuple of Stages. "
        f"It must be {NAMES['STAGES']}."
    )


def test_a_second_stage_that_would_begin_anew_is_refused(world):
    names = ("encode", "denoise_first", "denoise")
    world.write(f"{GOOD}\nSTAGES = tuple(Stage(name, STAGES[0].run, ()) for name in {names})\n")
    assert world.refusal(ReplacementError) == (
        "configs/models/some.yaml:4: Stage 'denoise' in 'patches/up/stages.py' does not name 'denoise_first' in 'needs'"
        ", and would begin anew. Add it: the steps of the one stage go on in the other."
    )


def test_a_family_that_imports_its_upstream_too_early_is_refused(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "diffusers")  # and as it was, at the end
    world.write("import sys, types\nsys.modules['diffusers'] = types.ModuleType('diffusers')\n" + GOOD)
    assert world.refusal(ReplacementError) == (
        "configs/models/some.yaml:4: 'patches/up/stages.py' imports 'diffusers' when it is loaded, before its "
        "patches are applied. "
        "Import it inside the functions."
    )


GOOD_STAGE = 'Stage("encode", lambda parts, call, settings, steps: {}, ()'


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (GOOD_STAGE[:-2] + '("promt",)', "names 'promt' in 'uses'. Did you mean 'prompt'?"),
        (GOOD_STAGE[:-2] + '"prompt"', "has 'prompt' as 'uses', which is text. Write a tuple: ('prompt',)."),
        (GOOD_STAGE + ', needs=("denoise",)', "names 'denoise' in 'needs'."),
        (GOOD_STAGE + ', parts=("tokenzier",)', "names 'tokenzier' in 'parts'. Did you mean 'tokenizer'?"),
        (GOOD_STAGE + ', network="vea"', "names 'vea' in 'network'. Did you mean 'vae'?"),
        (
            'Stage("encode", lambda parts, call: {}, ()',
            "has a function that cannot be called: too many positional arguments. "
            "Write it as run(parts, call, settings, steps, **inputs).",
        ),
    ],
)
def test_a_stage_that_names_what_is_not_there_is_refused(world, stage, text):
    world.write(GOOD.replace(f"{GOOD_STAGE})", f"{stage})"))
    refusal = world.refusal(ReplacementError)
    assert (
        refusal.startswith("configs/models/some.yaml:4: Stage 'encode' in 'patches/up/stages.py' ") and text in refusal
    )
