"""Model cards, jobs, packs: what is shipped reads, and every mistake in one is refused with its place."""

import contextlib
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchport.config import card as cards
from torchport.config import overridden, parse_document, validated
from torchport.config import pack as packs
from torchport.config.card import check_job
from torchport.config.pack import find_pack
from torchport.config.strategy import shared_strategies
from torchport.errors import (
    BadValueError,
    ConfigError,
    DataFolderError,
    DuplicateKeyError,
    MissingKeyError,
    SyntaxYamlError,
    TakenNameError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
)
from torchport.task.family_file import family as family_of


@pytest.fixture
def copied(tmp_path, root, monkeypatch):
    """The current folder: a copy of the configs, with an empty folder of patches. A pack that a test may change."""
    shutil.copytree(root / "configs", tmp_path / "pack" / "configs")
    (tmp_path / "pack" / "patches").mkdir()
    monkeypatch.chdir(tmp_path / "pack")
    return packs.Pack((tmp_path / "pack").resolve())


def edit(pack, name, old, new):
    """Replaces text in a config, once."""
    file = pack.root / "configs" / f"{name}.yaml"
    text = file.read_text()
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new, 1))


def line_of(pack, name, text):
    """The number of the first line of a config that holds some text."""
    lines = (pack.root / "configs" / f"{name}.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def refused(kind, call):
    """Returns the text of the error that a call gives, which must be of this kind."""
    with pytest.raises(ConfigError) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def test_every_shipped_card_and_config_reads_and_each_config_fits_a_card(pack):
    jobs = sorted(file.stem for file in (pack.root / "configs").glob("*.yaml"))
    assert "hunyuan" in pack.models() and {"demo", "720p"} <= set(jobs)
    fits = set()
    for name in pack.models():
        card, _ = pack.card(name)
        assert card.model == name
        for job in jobs:
            with contextlib.suppress(ConfigError):  # dtypes and strategies for another card's components
                read, document = pack.job(job)
                check_job(read, card, document)
                fits.add(job)
    assert fits == set(jobs)


def test_the_real_job_is_the_real_job(pack):
    job, _ = pack.job("configs/720p.yaml")
    assert (job.width, job.height, job.frames, job.steps, job.guidance_scale) == (1280, 720, 121, 50, 6.0)
    assert job.machine == "v6e:2x4" and job.devices == 8 and job.checkpoint is None


def test_an_unknown_model_is_refused_with_the_nearest(pack):
    text = refused(UnknownNameError, lambda: pack.card("hunyan"))
    assert text.startswith("--model hunyan: There is no model card 'hunyan' in ")
    assert "Did you mean 'hunyuan'? Known: " in text


def test_an_unknown_config_is_refused_with_the_nearest(pack):
    text = refused(UnknownNameError, lambda: pack.job("configs/dem.yaml"))
    assert text.startswith("--config configs/dem.yaml: There is no file 'configs/dem.yaml', here or in ")
    known = sorted(f"configs/{file.name}" for file in (pack.root / "configs").glob("*.yaml"))
    assert text.endswith(f"Did you mean 'configs/demo.yaml'? Known: {', '.join(known)}.")


def test_a_config_is_found_here_then_in_the_pack_then_by_its_name_alone(pack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pack.job("demo")[0] == pack.job("configs/demo.yaml")[0] == pack.job("demo.yaml")[0]
    (tmp_path / "mine.yaml").write_text((pack.root / "configs" / "demo.yaml").read_text().replace("fps: 8", "fps: 9"))
    assert pack.job("mine.yaml")[0].fps == 9
    assert pack.job("mine.yaml")[1].place(["fps"]).startswith("mine.yaml:")


@pytest.mark.parametrize("model", ["hunyuan", "wan"])
def test_demo_is_the_models_own(pack, model):
    card, _ = pack.card(model)
    assert pack.job("demo", card=card)[0] == pack.job(card.demo)[0]


def test_errors_call_a_file_by_a_path_that_the_current_folder_can_open(pack, tmp_path, monkeypatch):
    line = line_of(pack, "demo", "frames:")
    monkeypatch.chdir(pack.root)
    assert pack.job("demo")[1].place(["frames"]) == f"configs/demo.yaml:{line}"
    monkeypatch.chdir(tmp_path)
    assert pack.job("demo")[1].place(["frames"]) == f"{pack.root}/configs/demo.yaml:{line}"


@pytest.mark.parametrize(
    ("name", "old", "new", "kind", "fact"),
    [
        ("demo", "frames: 13", "frame: 13", UnknownKeyError, "Unknown key 'frame'. Did you mean 'frames'? Known: "),
        ("demo", "frames: 13", "frames: '13'", WrongTypeError, "'frames' is '13' (text). It must be a whole number."),
        ("demo", "frames: 13", "steps: 13", DuplicateKeyError, "'steps' stands here and on line"),
        ("demo", "steps: 8", "steps: 0", WrongTypeError, "'steps' is 0 (a number). It must be greater than 0."),
        (
            "demo",
            "guidance_scale: 3.0",
            "guidance_scale: 0.5",
            WrongTypeError,
            "'guidance_scale' is 0.5 (a number). It",
        ),
        ("demo", "dp: 2", "pp: 2", WrongTypeError, "'mesh.pp' is 'pp' (text). It must be 'dp', 'sp' or 'tp'."),
        (
            "demo",
            "vae: float32",
            "vae: float64",
            WrongTypeError,
            "'dtypes.vae' is 'float64' (text). It must be 'float32",
        ),
        (
            "models/wan",
            "spec: [tp]",
            "spec: [pt]",
            WrongTypeError,
            "weights.transformer.0.spec.0' is 'pt' (text). It must be 'dp', 'sp' or 'tp'.",
        ),
        ("models/wan", "spec: [tp]", "spec: [tp, tp]", WrongTypeError, "It must name each axis once at most"),
        ("models/wan", "spec: [tp]", "spec: [[dp, tp], [tp]]", WrongTypeError, "fallbacks go under 'otherwise'"),
        ("models/wan", "spec: [tp]", "spec: [[]]", WrongTypeError, "spec.0' is [] (a list). It must "),
        (
            "models/hunyuan",
            "spec: replicate",
            "spec: replicate, gather: true",
            WrongTypeError,
            "'gather' needs a spec that splits: what is whole everywhere cannot be gathered",
        ),
        ("models/hunyuan", "spec: replicate", "spec: replicated", WrongTypeError, "is 'replicated' (text). It must be"),
        (
            "models/hunyuan",
            r"match: 'context_embedder\..*'",
            r"match: '(context_embedder\..*'",
            WrongTypeError,
            "It must be a regular expression",
        ),
        ("models/hunyuan", '"diffusers:Flow', '"diffusers.Flow', WrongTypeError, "It must be 'package.module:Class'."),
        (
            "models/hunyuan",
            'tokenizer: {class: "transformers:Qwen2Tokenizer"',
            'tokenizer: {class: "transformers:Qwen2Tokenizer", precision: highest',
            WrongTypeError,
            "'precision' is for a component that computes here, and such a component has a 'dtype'",
        ),
        ("models/hunyuan", "precision: high", "precison: high", UnknownKeyError, "Did you mean 'precision'?"),
        (
            "models/hunyuan",
            "multiple_of: 4, ",
            "",
            MissingKeyError,
            "'frames.multiple_of' is missing. Add 'multiple_of'.",
        ),
        (
            "models/hunyuan",
            "model: hunyuan",
            "model: other",
            BadValueError,
            "'model' is 'other'. It must be 'hunyuan'.",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_file_and_line(copied, name, old, new, kind, fact):
    if new == "steps: 13":  # the second one, in this file's order, is the one that is refused
        edit(copied, name, old, new)
        line = line_of(copied, name, "steps: 8")
    else:
        edit(copied, name, old, new)
        line = line_of(copied, name, new or "frames: {")
    text = refused(kind, lambda: copied.card(name[7:]) if "models" in name else copied.job("demo"))
    assert text.startswith(f"configs/{name}.yaml:{line}: ") and fact in text, text


@pytest.mark.parametrize(
    ("field", "fact"),
    [
        ("build: make.py", "'components.guider.build' is 'make.py'. It must be 'file.py:function', a Python file in "
         "the folder of the card's family."),
        ("build: ../make.py:f", "It must be 'file.py:function'"),
        ("build: make.py:f", "'build' makes a module that is loaded here, and it needs a 'dtype'."),
        ("file: ''", "'components.guider.file' is '' (text). It must be "),
        ("file: /x.pth", "'components.guider.file' is '/x.pth'. It must be the path of a file inside the checkpoint."),
        ("file: a/../../x.pth", "It must be the path of a file inside the checkpoint."),
        ("file: inner/", "It must be the path of a file inside the checkpoint."),
        ("key: model", "'key' is for a file of torch.save, and 'file' names none."),
        ("key: model, file: x.safetensors", "'key' is for a file of torch.save, and 'file' names none."),
        ("pickle: x.pth", "Unknown key 'components.guider.pickle'. "),
        (r"rename: [{match: '(a)', to: '\2'}]", r"'to' has \2; the groups of 'match' are \1."),
        (r"rename: [{match: 'a', to: '\1'}]", r"'to' has \1; the groups of 'match' are none: 'match' has no group."),
        (r"rename: [{match: '(a)', to: '\g<1>'}]", r"'to' has \g; the groups of 'match' are \1."),
        ("rename: [{match: '(a', to: b}]", "It must be a regular expression: "),
        ("rename: [{match: '[[a]', to: b}]", "It must be a regular expression: Possible nested set"),
        ("rename: [{match: a}]", "'components.guider.rename.0.to' is missing. Add 'to'."),
    ],
)  # fmt: skip
def test_where_a_components_files_lie_is_checked_as_far_as_a_card_can_say(copied, field, fact):
    edit(copied, "models/hunyuan", "  guider: {", f"  guider: {{{field}, ")
    with pytest.raises(ConfigError) as caught:
        copied.card("hunyuan")
    text = str(caught.value)
    assert text.startswith(f"configs/models/hunyuan.yaml:{line_of(copied, 'models/hunyuan', 'guider: {')}: ")
    assert fact in text


def test_an_override_puts_a_value_in_and_is_the_place_of_its_mistakes(pack):
    job, document = pack.job("demo", ["frames=5", "mesh.tp=2", "dtypes={vae: bfloat16}", "checkpoint=a/b@c"])
    assert (job.frames, job.mesh, job.dtypes, job.checkpoint) == (5, {"dp": 2, "tp": 2}, {"vae": "bfloat16"}, "a/b@c")
    assert document.place(["frames"]) == "--set frames=5" and document.place(["height"]).startswith("configs/demo")
    assert refused(WrongTypeError, lambda: pack.job("demo", ["frames=five"])) == (
        "--set frames=five: 'frames' is 'five' (text). It must be a whole number."
    )
    assert refused(UnknownKeyError, lambda: pack.job("demo", ["frame=5"])).startswith(
        "--set frame=5: Unknown key 'frame'. Did you mean 'frames'? Known: attention, cache, call, checkpoint"
    )
    assert refused(WrongTypeError, lambda: pack.job("demo", ["frames.x=5"])).startswith("--set frames.x=5: 'frames' is")


@pytest.mark.parametrize("override", ["frames", "=5", "a..b=1", ".=1", ""])
def test_an_override_that_is_no_assignment_is_refused(pack, override):
    assert refused(WrongTypeError, lambda: pack.job("demo", [override])) == (
        f"--set {override}: This is not path.to.field=value. Write for example --set steps=10."
    )


def test_an_override_whose_value_is_not_yaml_is_refused(pack):
    text = refused(SyntaxYamlError, lambda: pack.job("demo", ["machine=[a"]))
    assert text.startswith("--set machine=[a: Not YAML: ") and text.endswith(". Quote the value.")


def test_an_override_leaves_the_document_it_was_put_into_alone():
    document = parse_document("a: {b: 1}\n", "a.yaml")
    assert overridden(document, "a.b=2").data == {"a": {"b": 2}} and document.data == {"a": {"b": 1}}


DEMO = """
{height: 64, width: 64, frames: 5, fps: 8, steps: 3, guidance_scale: 6.0, machine: cpu:8, mesh: {dp: 8}, strategy: tp}
"""


@given(st.text(), st.lists(st.text("ab.=:[{ \n", min_size=1), max_size=2))
def test_any_override_is_a_job_or_a_config_error(any_text, more):
    document = parse_document(DEMO, "demo.yaml")
    for text in (any_text, f"{'.'.join(more)}={any_text}"):
        try:
            validated(cards.Job, overridden(document, text))
        except ConfigError as error:
            assert "\n" not in str(error)


def job_with(pack, card, *overrides):
    """Checks the demo with overrides against the card."""
    job, document = pack.job("demo", overrides)
    check_job(job, card, document)


@pytest.mark.parametrize(
    ("frames", "near"), [(2, (1, 5)), (4, (1, 5)), (16, (13, 17)), (18, (17, 21)), (120, (117, 121)), (3, (1, 5))]
)
def test_frames_that_are_not_4n_plus_1_are_refused_with_the_two_nearest(pack, card, frames, near):
    assert refused(BadValueError, lambda: job_with(pack, card, f"frames={frames}")) == (
        f"--set frames={frames}: 'frames' is {frames}. It must be 4n+1: the nearest are {near[0]} and {near[1]}."
    )
    for good in near:
        job_with(pack, card, f"frames={good}")


@given(frames=st.integers(1, 500), step=st.integers(1, 12), plus=st.integers(0, 14))
def test_the_nearest_frames_are_always_allowed_and_on_both_sides(pack, card, frames, step, plus):
    card = card.model_copy(update={"frames": cards.FrameRule(multiple_of=step, plus=plus)})
    document = parse_document(DEMO, "demo.yaml")
    job = validated(cards.Job, document)

    def check(frames):
        check_job(job.model_copy(update={"frames": frames}), card, document)

    try:
        check(frames)
    except BadValueError as error:
        below, above = error.nearest
        assert above - below == step and (below < frames < above or frames < (plus or step) == below)
        for good in error.nearest:
            check(good)
    else:
        assert frames >= plus and (frames - plus) % step == 0


@pytest.mark.parametrize(
    ("key", "value", "near"), [("height", 100, (96, 112)), ("width", 1, (16, 32)), ("width", 321, (320, 336))]
)
def test_sizes_that_the_vae_cannot_divide_are_refused_with_the_two_nearest(pack, card, key, value, near):
    assert refused(BadValueError, lambda: job_with(pack, card, f"{key}={value}")) == (
        f"--set {key}={value}: '{key}' is {value}. The VAE divides it by 16: the nearest are {near[0]} and {near[1]}."
    )


def test_an_unknown_strategy_is_refused_with_those_of_the_card(pack, card):
    text = refused(UnknownNameError, lambda: job_with(pack, card, "strategy=tpp"))
    assert text.startswith("--set strategy=tpp: 'hunyuan' has no strategy 'tpp'. Did you mean 'tp'? Known: ")


def test_a_dtype_for_an_unknown_component_is_refused_with_the_nearest(pack, card):
    text = refused(UnknownKeyError, lambda: job_with(pack, card, "dtypes.transfomer=float32"))
    assert "'hunyuan' has no component 'transfomer'. Did you mean 'transformer'?" in text


def test_an_implementation_is_chosen_by_name_and_one_that_the_card_lacks_is_refused(pack, card):
    cogvideox, _ = pack.card("cogvideox")
    chosen, unknown = "vae.implementation=flax", "vae.implementation=flex"
    job, document = pack.job("cogvideox_demo", [chosen])
    check_job(job, cogvideox, document)
    assert job.implementations == {"vae": "flax"}
    assert "diffusers/cogvideox_vae_flax" in cogvideox.patch_names("decode", {"vae": "flax"})
    assert cogvideox.patch_names("decode", {}) == cogvideox.patch_names("decode", {"vae": "torchax"})
    other, other_document = pack.job("cogvideox_demo", [unknown])
    text = refused(UnknownNameError, lambda: check_job(other, cogvideox, other_document))
    assert text == (
        "--set vae.implementation=flex: 'cogvideox' has no implementation 'flex' of 'vae'. "
        "Did you mean 'flax'? Known: flax, torchax."
    )
    assert refused(UnknownKeyError, lambda: job_with(pack, card, chosen)) == (
        "--set vae.implementation=flax: 'hunyuan' has one implementation of 'vae', and it has no name. "
        "Remove 'implementation'."
    )


def test_a_default_that_is_none_of_the_implementations_is_refused(copied):
    edit(copied, "models/cogvideox", "default: torchax", "default: torch")
    line = line_of(copied, "models/cogvideox", "default: torch")
    text = refused(WrongTypeError, lambda: copied.card("cogvideox"))
    assert text.startswith(f"configs/models/cogvideox.yaml:{line - 1}: 'implementations.vae' is ")
    assert text.endswith("'default' is 'torch'; the names in 'patches' are torchax, flax.")


def test_a_stage_has_a_set_of_patches_for_each_implementation(pack, card):
    cogvideox, _ = pack.card("cogvideox")
    sets = [names for stage, names in cogvideox.patch_sets() if stage == "decode"]
    assert sets == [cogvideox.patch_names("decode", {"vae": name}) for name in ("torchax", "flax")]
    assert dict(card.patch_sets()) == card.patches


def test_all_mistakes_of_a_job_are_named_together(pack, card):
    changes = ("frames=18", "height=721", "strategy=tpp", "dtypes={vaee: float32, scheduler: float32}")
    with pytest.raises(BadValueError) as caught:
        job_with(pack, card, *changes)
    assert [line.partition(".")[0] for line in str(caught.value).splitlines()] == [
        "--set frames=18: 'frames' is 18",
        "--set height=721: 'height' is 721",
        "--set strategy=tpp: 'hunyuan' has no strategy 'tpp'",
        "--set dtypes={vaee: float32, scheduler: float32}: 'hunyuan' has no component 'vaee'",
        "--set dtypes={vaee: float32, scheduler: float32}: 'scheduler' has no weights, and so no dtype",
    ]


def test_a_dtype_for_a_component_without_weights_is_refused(pack, card):
    text = refused(BadValueError, lambda: job_with(pack, card, "dtypes.scheduler=float32"))
    assert text.startswith("--set dtypes.scheduler=float32: 'scheduler' has no weights")


def test_the_packs_are_the_flags_then_the_environments_then_the_shipped_one(copied, root, monkeypatch, tmp_path):
    assert roots(find_pack()) == [root], "never the current folder unasked"
    other, third = tmp_path / "other", tmp_path / "third"
    (other / "patches").mkdir(parents=True)
    (third / "configs").mkdir(parents=True)
    monkeypatch.setenv("TORCHPORT_PATH", os.pathsep.join([str(other), str(copied.root)]))
    assert roots(find_pack()) == [other, copied.root, root]
    assert roots(find_pack([str(third), "."])) == [third, copied.root, other, root]
    assert roots(find_pack([str(root), str(third)])) == [third, other, copied.root, root], "what is shipped lies lowest"
    assert [layer.root for layer in find_pack([str(root)]).checked] == [other, copied.root, root]


def roots(pack):
    """The folders of a pack and of those under it."""
    return [layer.root for layer in pack.layers()]


def package(monkeypatch, tmp_path, value, folder="patches"):
    """An installed package, which must not be imported, that says in its metadata where its pack is."""
    site = tmp_path / "site"
    (site / "portpack" / "data" / folder).mkdir(parents=True)
    (site / "portpack" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = site / "portpack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: portpack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torchport.packs]\nport = {value}\n")
    monkeypatch.syspath_prepend(str(site))
    return site / "portpack"


def test_an_installed_package_brings_its_pack_without_being_imported(monkeypatch, tmp_path, root, copied):
    folder = package(monkeypatch, tmp_path, "portpack.data")
    assert roots(find_pack()) == [folder / "data", root]
    assert roots(find_pack(["."])) == [copied.root, folder / "data", root]
    assert find_pack().name == "package port" and find_pack().checked[0].root == root


@pytest.mark.parametrize(
    "value", ["portpack", "portpack.other", "nope.data", "portpack.data.patches", "a-b.data", "../x"]
)
def test_a_package_whose_entry_point_leads_nowhere_is_refused(monkeypatch, tmp_path, value):
    package(monkeypatch, tmp_path, value)
    assert refused(DataFolderError, find_pack) == (
        f"package port: '{value}' is no folder with patches/ or configs/ in it. "
        "Mend the entry point 'port' of the group torchport.packs, or uninstall its package."
    )


def test_a_card_or_config_that_takes_a_shipped_name_must_say_so(copied, root):
    pack = find_pack(["."])
    assert pack.card("hunyuan")[1].file == "configs/models/hunyuan.yaml", "a copy changes nothing"
    edit(copied, "models/hunyuan", "title: ", "title: My ")
    edit(copied, "demo", "fps: 8", "fps: 9")
    for name, read in (("models/hunyuan", lambda: pack.card("hunyuan")), ("demo", lambda: pack.job("demo.yaml"))):
        assert refused(TakenNameError, read) == (
            f"configs/{name}.yaml:1: {root}/configs/{name}.yaml has the same name. "
            "Rename this file, or write 'overrides: true' in it to take the other one's place."
        )
        file = copied.root / "configs" / f"{name}.yaml"
        file.write_text(file.read_text() + "overrides: true\n")
    assert pack.card("hunyuan")[0].title.startswith("My ") and pack.job("demo")[0].fps == 9
    assert pack.home("hunyuan").root == copied.root and pack.home("hyvideo").root == copied.root


def test_a_config_that_overrides_nothing_is_refused(copied):
    file = copied.root / "configs" / "mine.yaml"
    file.write_text((copied.root / "configs" / "demo.yaml").read_text() + "overrides: true\n")
    for name in ("mine", "configs/mine.yaml", str(file)):
        assert ": It overrides nothing: no pack under it has configs/mine.yaml. Remove 'overrides'." in refused(
            BadValueError, lambda name=name: find_pack(["."]).job(name)
        )


def test_a_link_out_of_a_lower_pack_is_refused(copied, tmp_path):
    (tmp_path / "outside.yaml").write_text((copied.root / "configs" / "demo.yaml").read_text())
    (copied.root / "configs" / "linked.yaml").symlink_to(tmp_path / "outside.yaml")
    (tmp_path / "top" / "configs").mkdir(parents=True)
    pack = find_pack([str(tmp_path / "top"), "."])
    text = "configs/linked.yaml: 'linked.yaml' is a link out of 'pack'. Put the file itself there."
    assert refused(BadValueError, lambda: pack.job("linked")) == text


def test_a_card_that_overrides_nothing_is_refused(copied):
    file = copied.root / "configs" / "models" / "mine.yaml"
    text = (copied.root / "configs" / "models" / "hunyuan.yaml").read_text()
    file.write_text(text.replace("model: hunyuan", "model: mine", 1) + "overrides: true\n")
    line = len(file.read_text().splitlines())
    assert refused(BadValueError, lambda: find_pack(["."]).card("mine")) == (
        f"configs/models/mine.yaml:{line}: It overrides nothing: no pack under it has configs/models/mine.yaml. "
        "Remove 'overrides'."
    )


def test_one_bad_card_does_not_hide_the_others(copied):
    edit(copied, "models/hunyuan", "title: ", "titel: ")
    cards = dict(find_pack(["."]).cards())
    assert isinstance(cards["hunyuan"], TakenNameError) and cards["hyvideo"][0].model == "hyvideo"


def test_a_card_that_would_never_be_read_is_told(copied):
    folder = copied.root / "configs" / "models"
    (folder / "hunyuan.yaml").rename(folder / "hunyuan.yml")
    (folder / "sub").mkdir()
    (folder / "sub" / "x.yaml").write_text("model: x\n")
    assert [str(read) for name, read in find_pack(["."]).cards() if not name] == [
        "configs/models/hunyuan.yml: 'hunyuan.yml' would never be read. Rename it to hunyuan.yaml.",
        "configs/models/sub/x.yaml: 'x.yaml' would never be read. Move it up into configs/models.",
    ]


def test_the_demo_of_a_card_is_its_own_packs_and_not_the_current_folders(copied, root):
    pack = find_pack()
    assert pack.demo(pack.card("hunyuan")[0]) == str(root / "configs" / "demo.yaml")


@pytest.mark.parametrize("source", ["--path", "TORCHPORT_PATH"])
def test_a_folder_without_a_pack_is_refused(source, monkeypatch, tmp_path):
    if source == "TORCHPORT_PATH":
        monkeypatch.setenv(source, str(tmp_path))
    assert refused(DataFolderError, lambda: find_pack([str(tmp_path)] if source == "--path" else [])) == (
        f"{source} {tmp_path}: There is no folder here with patches/ or configs/ in it. "
        "Name the folder that holds them."
    )


def test_the_wheels_own_copy_is_found_where_there_is_no_checkout(monkeypatch, tmp_path, copied):
    package = tmp_path / "site-packages" / "torchport"
    package.mkdir(parents=True)
    monkeypatch.setattr(packs, "__file__", str(package / "config" / "pack.py"))
    text = refused(DataFolderError, lambda: find_pack())
    assert text == (
        f"{package}: Neither a checkout nor the wheel's copy of patches/ and configs/ is here. Reinstall torchport."
    )
    copied.root.rename(package / "_data")
    assert find_pack().root == package / "_data"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("activations:\n      transformer:", "activations:\n      transfomer:", "'transfomer' is no network"),
        ("stacks:\n  transformer:", "stacks:\n  text_encoder:", "'text_encoder' is no network"),
        ("divides: {tp: transformer.", "divides: {tp: nope.", "'nope' is no network"),
        ("    scheduler: {shift", "    shceduler: {shift", "'shceduler' is no component"),
    ],
)
def test_a_section_for_what_the_model_has_not_is_refused(copied, old, new, said):
    edit(copied, "models/hunyuan", old, new)
    card, document = copied.card("hunyuan")
    text = refused(UnknownKeyError, lambda: cards.check_names(card, ["transformer", "vae"], document))
    line = line_of(copied, "models/hunyuan", "stacks:") + 1 if "stacks" in new else 0
    line = line or line_of(copied, "models/hunyuan", new.rpartition("\n")[2])
    assert text.startswith(f"configs/models/hunyuan.yaml:{line}: {said} of 'hunyuan'. ")


def test_a_card_extends_another_and_a_mistake_is_refused_where_it_stands(copied):
    card, document = copied.card("wan_5b")
    assert (card.pipeline, card.call.network) == ("diffusers:WanPipeline", "transformer")
    assert "transformer_2" not in card.components and "denoise_first" not in card.patches  # `null`
    assert card.components["transformer"].lora_names == copied.card("wan")[0].components["transformer"].lora_names
    line = line_of(copied, "models/wan", "    class: diffusers:WanTransformer3DModel")
    assert document.place(["components", "transformer", "class"]) == f"configs/models/wan.yaml:{line}"
    line = line_of(copied, "models/wan_5b", "parameters: 4_999")
    assert document.place(["components", "transformer", "parameters"]) == f"configs/models/wan_5b.yaml:{line}"
    edit(copied, "models/wan", "precision: high", "precison: high")
    text = refused(UnknownKeyError, lambda: copied.card("wan_5b"))
    line = line_of(copied, "models/wan", "precison")
    assert text.startswith(f"configs/models/wan.yaml:{line}: Unknown key 'components.vae.precison'. ")


@pytest.mark.parametrize(
    ("other", "kind", "said"),
    [
        ("wam", UnknownNameError, "There is no model card 'wam' in "),
        ("cogvideox_i2v", BadValueError, "'cogvideox_i2v' extends another card. Extend one that extends none."),
        ("wan_5b", BadValueError, "'wan_5b' extends another card. "),
        ("[wan]", WrongTypeError, "'extends' is ['wan'] (a list). It must be text"),
    ],
)
def test_a_card_extends_one_that_is_there_and_extends_none(copied, other, kind, said):
    edit(copied, "models/wan_5b", "extends: wan", f"extends: {other}")
    text = refused(kind, lambda: copied.card("wan_5b"))
    line = line_of(copied, "models/wan_5b", "extends: ")
    assert f"configs/models/wan_5b.yaml:{line}: {said}" in text


def test_shared_rules_follow_a_strategys_own_and_it_has_what_the_one_that_it_is_like_has(copied):
    card, document = copied.card("hunyuan")
    tp, rows, fsdp = (card.strategies[name] for name in ("tp", "tp_replicated_rows", "fsdp"))
    shared = shared_strategies()["tp"]
    assert tp.weights["transformer"][1:] == shared.network.weights and tp.weights["vae"] == shared.vae.weights
    assert (rows.inputs, rows.divides, rows.mesh) == (tp.inputs, tp.divides, shared.mesh)
    assert fsdp.activations == {"transformer": [*card.strategies["ulysses"].activations["transformer"]]}
    edit(copied, "models/hunyuan", "    like: ulysses", "    like: ulises")
    line = line_of(copied, "models/hunyuan", "    like: ulises")
    card, document = copied.card("hunyuan")
    text = refused(UnknownKeyError, lambda: cards.check_names(card, ["transformer", "vae"], document))
    said = "'ulises' is no strategy of 'hunyuan'. Did you mean 'ulysses'?"
    assert text.startswith(f"configs/models/hunyuan.yaml:{line}: {said}")


def test_a_network_without_rules_is_refused(copied):
    edit(copied, "models/hunyuan", "    shared: ulysses\n", "")
    card, document = copied.card("hunyuan")
    text = refused(MissingKeyError, lambda: cards.check_names(card, ["transformer", "vae"], document))
    line = line_of(copied, "models/hunyuan", "  ulysses:")
    said = "There are no rules for 'vae'. Add 'vae', a network of 'hunyuan'."
    assert f"configs/models/hunyuan.yaml:{line}: {said}" in text.splitlines()[1]


def test_all_wrong_names_of_a_card_are_named_together(copied):
    card, document = copied.card("hunyuan")
    with pytest.raises(MissingKeyError) as caught:
        cards.check_names(card, ["transformer", "text_encoder"], document)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(": There are no rules for 'text_encoder'. Add 'text_encoder', a network of 'hunyuan'.")
    wrong = [line for line in lines if "'vae' is no network of 'hunyuan'" in line]
    own = [strategy for strategy in card.strategies.values() if strategy.like is None]
    assert 0 < len(own) < len(card.strategies)  # what a strategy takes from another is refused there
    assert len(wrong) == 2 * len(own) and len(lines) == 4 * len(own)


def test_a_network_that_is_no_component_is_refused_as_that_alone(copied):
    card, document = copied.card("hunyuan")
    with pytest.raises(UnknownKeyError) as caught:
        cards.check_names(card, ["transformer", "video_vae"], document)
    [line] = str(caught.value).splitlines()
    assert "'video_vae' is no component of 'hunyuan'" in line


def test_a_card_that_extends_another_says_its_own_name(copied):
    file = copied.root / "configs" / "models" / "cogvideox_i2v.yaml"
    file.write_text(file.read_text().replace("model: cogvideox_i2v\n", ""))
    with pytest.raises(MissingKeyError, match=r"cogvideox_i2v.yaml:1: 'model' is missing. Add 'model: cogvideox_i2v'."):
        copied.card("cogvideox_i2v")


def test_every_shipped_card_names_its_own_networks_alone(pack):
    for name in pack.models():
        card, document = pack.card(name)
        networks = {stage.network for stage in family_of(pack, card, document).STAGES if stage.network}
        cards.check_names(card, networks, document)


@pytest.fixture
def generic(pack):
    """Returns the card of a model whose family is made from it, after changes to its text."""
    text = (pack.root / "configs/models/cogvideox.yaml").read_text()

    def made(*changes):
        changed = text
        for old, new in changes:
            assert old in changed
            changed = changed.replace(old, new)
        document = parse_document(changed, "card.yaml")
        return validated(cards.Card, document), document

    return made


def test_a_family_that_is_made_from_a_card_needs_its_pipeline_and_call(generic):
    text = refused(MissingKeyError, lambda: cards.check_call(*generic(("pipeline: diffusers:CogVideoXPipeline\n", ""))))
    assert text == "card.yaml:4: 'family' is 'diffusers', and there is no 'pipeline'. Add 'pipeline': docs/cards.md."


def test_a_call_beside_another_family_is_refused(generic):
    text = refused(UnknownKeyError, lambda: cards.check_call(*generic(("family: diffusers\n", "family: up/stages\n"))))
    assert "'call' is for 'family: diffusers', and the family is 'up/stages'" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("num_frames", "'num_frames' gets the field 'frames'. Set 'frames', and remove it from 'call'."),
        ("prompt_embeds", "torchport passes 'prompt_embeds' itself. Remove it from 'call'."),
        ("generator", "torchport passes 'generator' itself. Remove it from 'call'."),
    ],
)
def test_a_jobs_call_does_not_set_what_is_set_elsewhere(pack, generic, name, said):
    job, document = pack.job("configs/cogvideox_demo.yaml", [f"call.{name}=1"])
    text = refused(BadValueError, lambda: cards.check_job(job, generic()[0], document))
    assert text == f"--set call.{name}=1: {said}"


@pytest.mark.parametrize("flag", ["call.use_dynamic_cfg=true", "scheduler.class=DDIMScheduler"])
def test_a_jobs_call_and_scheduler_for_a_model_without_one_are_refused(pack, card, flag):
    text, key = refused(UnknownKeyError, lambda: job_with(pack, card, flag)), flag.partition(".")[0]
    assert text == (
        f"--set {flag}: '{key}' is for models with 'family: diffusers', and 'hunyuan' has "
        f"'diffusers/hunyuan_video15_stages'. Remove '{key}'."
    )


def test_dims_of_hand_written_latents_are_named_once_each(generic):
    with pytest.raises(WrongTypeError, match="'order' must name each dim once"):
        generic(("order: [B, T, C, H, W]", "order: [B, T, T, H, W]"))


def test_conditions_are_among_the_embeddings(generic):
    conditions = "  conditions: {encoder_hidden_states: [prompt_embeds, negative]}"
    with pytest.raises(WrongTypeError, match="'conditions' has 'negative', which is none of 'embeddings'"):
        generic(("  settings:", f"{conditions}\n  settings:"))


@pytest.mark.parametrize("changes", [("network: transformer", "network: transfromer"), ("[text_encoder,", "[encoder,")])
def test_a_call_names_components(generic, changes):
    card, document = generic(changes)
    text = refused(UnknownKeyError, lambda: cards.check_names(card, card.call.compiled, document))
    assert "is no component of 'cogvideox'" in text and text.startswith("card.yaml:")


def like(name):
    """A change to a card's text: another component, which is like the one of a name."""
    here = "  tokenizer: {class"
    entry = f'{{class: "diffusers:CogVideoXTransformer3DModel", dtype: bfloat16, like: {name}}}'
    return here, f"  other: {entry}\n{here}"


def test_a_component_that_is_like_another_one_has_its_rules(generic):
    card, document = generic(like("transformer"), ("network: transformer", "network: [transformer, other]"))
    cards.check_names(card, (*card.call.networks, "vae"), document)
    assert card.components["other"].published == card.components["transformer"].published != {}
    assert card.stacks["other"] == card.stacks["transformer"]
    assert card.tiny.components["other"] == card.tiny.components["transformer"]
    for strategy in card.strategies.values():
        for kind in (strategy.weights, strategy.inputs, strategy.activations):
            assert kind["other"] == kind["transformer"]
    assert (card.rule_key("other"), card.rule_key("vae")) == ("transformer", "vae")


def test_a_component_cannot_be_like_one_that_there_is_not(generic):
    card, document = generic(like("transformr"))
    text = refused(UnknownKeyError, lambda: cards.check_names(card, ["transformer"], document))
    assert "'transformr' is no component of 'cogvideox'. Did you mean 'transformer'?" in text


def test_a_loop_has_one_network_or_two(generic):
    for networks in ("[transformer]", "[transformer, vae, tokenizer]"):
        with pytest.raises(ConfigError, match=r"call\.network"):
            generic(("network: transformer", f"network: {networks}"))


def test_a_scale_and_a_negative_prompt_that_a_pipeline_does_not_take_are_refused(pack, generic):
    card, _ = generic()
    alone = {"embeddings": {"prompt_embeds": [1, 8, 16]}, "negative_apart": False, "settings": {"frames": "frames"}}
    card = card.model_copy(update={"call": card.call.model_copy(update=alone)})
    job, document = pack.job("configs/cogvideox_demo.yaml")
    assert "'guidance_scale' is 2.0, and 'cogvideox' takes none" in refused(
        BadValueError, lambda: cards.check_job(job, card, document)
    )
    cards.check_job(job.model_copy(update={"guidance_scale": 1.0}), card, document)
    assert not card.call.takes_negative and generic()[0].call.takes_negative
