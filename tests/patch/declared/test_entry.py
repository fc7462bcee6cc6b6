"""Entries: a closed schema, every mistake with its line, and nothing that a file says is ever run."""

from __future__ import annotations

import json
import os
import string
import sys

import pytest
from fakes.patch_world import TAIL, World
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torchport import patch
from torchport.errors import (
    BadValueError,
    ConflictError,
    MissingKeyError,
    ReplacementError,
    SyntaxYamlError,
    TakenNameError,
    TorchportError,
    UnknownKeyError,
    UnknownNameError,
    WrongTypeError,
)
from torchport.patch.declared import reading

GOOD = "- id: up.one\n  target: up.m:f\n  replace: p.py:new\n" + TAIL


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    (world.patches / "up").mkdir()
    yield world
    world.close()


def _read(world, text):
    (world.patches / "up" / "p.yaml").write_text(text)
    return patch.read(world.patches, ["up"])


def test_an_entry_is_read_with_its_place(world):
    (entry,) = _read(world, "# a comment\n" + GOOD)
    assert (entry.id, entry.kind, entry.module, entry.path) == ("up.one", "replace", "up.m", ("f",))
    assert (entry.place, entry.upstream, entry.equivalence.written()) == ("patches/up/p.yaml:2", "up", "bitwise")
    assert not entry.plumbing


@pytest.mark.parametrize(
    ("old", "new", "error", "text"),
    [
        ("  why: A test.\n", "", MissingKeyError, "p.yaml:1: 'why' is missing. Add 'why'."),
        ('  reported: "none: a test"\n', "", MissingKeyError, "'reported' is missing"),
        ("  until: never\n", "", MissingKeyError, "'until' is missing"),
        ('  fits: {up: "*"}\n', "", MissingKeyError, "'fits' is missing"),
        ("  equivalence: bitwise\n", "", MissingKeyError, "'equivalence' is missing"),
        ("until: never", "unitl: never", UnknownKeyError, "p.yaml:6: Unknown key 'unitl'. Did you mean 'until'?"),
        ("replace: p.py:new", "instance: {component: vae, put: p.py:new}", UnknownKeyError, "Unknown key 'instance'"),
        ("why: A test.", "why: A test.\n  why: Again.", SyntaxYamlError, "'why' stands here and on line 4"),
        ("why: A test.", "why: ''", WrongTypeError, "p.yaml:4: 'why' is ''"),
        ("why: A test.", "why: 3", WrongTypeError, "p.yaml:4: 'why' is 3"),
        ("up.m:f", "up.m.f", WrongTypeError, "p.yaml:2: 'target' is 'up.m.f'"),
        ("up.m:f", "up.m:f()", WrongTypeError, "'target' is 'up.m:f()'"),
        ("up.m:f", "up.m:f; import os", WrongTypeError, "'target' is"),
        ("p.py:new", "../p.py:new", WrongTypeError, "p.yaml:3: 'replace' is '../p.py:new'"),
        ("p.py:new", "/etc/p.py:new", WrongTypeError, "'replace' is '/etc/p.py:new'"),
        ("p.py:new", "os:system", WrongTypeError, "'replace' is 'os:system'"),
        ("id: up.one", "id: Up One", WrongTypeError, "p.yaml:1: 'id' is 'Up One'"),
        (
            "equivalence: bitwise",
            "equivalence: exact",
            WrongTypeError,
            "It must be bitwise, or one of {algebraic: why}",
        ),
        ("equivalence: bitwise", "equivalence: {close: {bound: 0}}", WrongTypeError, "'equivalence.close.bound' is 0"),
        ("equivalence: bitwise", "equivalence: {close: {bond: 1}}", UnknownKeyError, "'equivalence.close.bond'"),
        ("equivalence: bitwise", "equivalence: {lossy: a, algebraic: b}", WrongTypeError, "It must be bitwise, or one"),
        (
            "replace: p.py:new",
            "replace:",
            BadValueError,
            "p.yaml:3: 'replace' is empty. Name a function as file.py:name",
        ),
        ("  replace: p.py:new\n", "", BadValueError, "'up.one' has 0 kinds (none). Give exactly one of replace, wrap"),
        ("replace: p.py:new", "replace: p.py:new\n  wrap: p.py:new", BadValueError, "has 2 kinds (replace, wrap)"),
        ('{up: "*"}', '{up: "two"}', BadValueError, "p.yaml:7: 'fits.up' is 'two'. Write a PEP 440 range"),
        ("until: never", "until: never\n  scope: global", BadValueError, "'scope' is global without a reason"),
        ("until: never", "until: never\n  scope_reason: x", BadValueError, "read only with scope: global. Remove it"),
        ("up.m:f", "torch.nn:Linear.forward", BadValueError, "'torch.nn:Linear.forward' is shared by everybody"),
        ("up.m:f", "builtins:len", BadValueError, "'builtins:len' is shared by everybody. Add 'scope: global' and"),
        ("up.m:f", "json.decoder:JSONDecoder.decode", BadValueError, "'json.decoder:JSONDecoder.decode' is shared by"),
        ("until: never", "until: never\n  lifetime: {while_importing: up}", BadValueError, "for targets shared by"),
        ("until: never", "until: never\n  lifetime: always", WrongTypeError, "It must be run, or {while_importing"),
        (
            "until: never",
            "until: never\n  must_be_called: [denoize]",
            WrongTypeError,
            "'must_be_called.0' is 'denoize'",
        ),
        (
            "until: never",
            "until: never\n  counted: false\n  must_be_called: [denoise]",
            BadValueError,
            "'counted' is fal",
        ),
        (
            "replace: p.py:new",
            "value: 3",
            UnknownKeyError,
            "p.yaml:3: The key 'value' was removed. Replace or wrap",
        ),
        ("replace: p.py:new", "op: p.py:a\n  counted: false", BadValueError, "'op' is always counted. Remove"),
        ("replace: p.py:new", "rewrite: {match: x, put: p.py:a, times: 0}", WrongTypeError, "'rewrite.times' is 0"),
        ("replace: p.py:new", "rewrite: {match: x, put: p.py:a, gives: [a, a]}", BadValueError, "repeats a name"),
        ("replace: p.py:new", "rewrite: {match: x}", MissingKeyError, "'rewrite.put' is missing"),
        ("replace: p.py:new", "replace: !!python/object/apply:os.system [id]", SyntaxYamlError, "is not plain data"),
        (
            "until: never",
            "until: never\n  aliases: report",
            UnknownKeyError,
            "p.yaml:7: The key 'aliases' was removed. Re",
        ),
        (
            "until: never",
            "until: never\n  optional: x",
            UnknownKeyError,
            "The key 'optional' was removed. Remove it, and w",
        ),
        ("why: A test.", "why: &a x\n  reported: *a", SyntaxYamlError, "The anchor &a is not plain data"),
        ("replace: p.py:new", "replace: !ENV x", SyntaxYamlError, "The tag !ENV is not plain data. Remove the tag"),
    ],
)
def test_a_mistake_is_refused_with_its_line(world, old, new, error, text):
    assert old in GOOD
    with pytest.raises(TorchportError) as caught:
        _read(world, GOOD.replace(old, new))
    assert text in str(caught.value)
    assert str(caught.value).startswith("patches/up/p.yaml:")
    assert isinstance(caught.value, error) or "stands here" in text


def test_a_file_that_is_no_list_is_refused(world):
    with pytest.raises(WrongTypeError, match=r"p.yaml:1: The file is a dict. Write a list of entries, each '- id"):
        _read(world, "id: up.one\n")
    assert _read(world, "# nothing yet\n") == []
    with pytest.raises(WrongTypeError, match=r"p.yaml:1"):
        _read(world, "- just words\n")


def test_two_entries_with_one_id_are_refused(world):
    with pytest.raises(ConflictError, match=r"p.yaml:9: The id 'up.one' is also at patches/up/p.yaml:1. Rename one"):
        _read(world, GOOD + GOOD)


def test_only_the_files_that_were_asked_for_are_read(world):
    (world.patches / "up" / "a.yaml").write_text(GOOD)
    (world.patches / "up" / "b.yaml").write_text(GOOD.replace("up.one", "up.two"))
    (world.patches / "up" / "lock.yaml").write_text("[]\n")
    (world.patches / "other").mkdir()
    (world.patches / "other" / "c.yaml").write_text("never: read\n")
    assert [entry.id for entry in patch.read(world.patches, ["up"])] == ["up.one", "up.two"]
    assert [entry.id for entry in patch.read(world.patches, ["up/b", "up/a", "up/b"])] == ["up.two", "up.one"]
    assert patch.upstreams(world.patches) == ["other", "up"]
    with pytest.raises(UnknownNameError, match=r"No folder 'upp' of patches. Did you mean 'up'\? Known: other, up"):
        patch.read(world.patches, ["upp"])
    with pytest.raises(UnknownNameError, match=r"No patches 'up/c'. Known: a, b"):
        patch.read(world.patches, ["up/c"])
    with pytest.raises(UnknownNameError, match=r"No such folder of patches"):
        patch.read(world.patches / "absent", ["up"])


@pytest.mark.parametrize("name", ["../up", "up/../up", "/etc", "up/a/b", "", "up/", "up.a", ".", "..", "üp"])
def test_a_name_that_leads_out_of_the_folder_is_refused(world, name):
    with pytest.raises(BadValueError, match=r"is no name of patches. Write upstream or upstream/file"):
        patch.read(world.patches, [name])


def _stack(tmp_path, *texts):
    """Folders of patches on top of each other: `0/patches` is the highest. Each text is its `up/p.yaml`."""
    folders = [tmp_path / str(number) / "patches" for number in range(len(texts))]
    for folder, text in zip(folders, texts, strict=True):
        (folder / "up").mkdir(parents=True)
        (folder / "up" / "p.yaml").write_text(text)
        (folder / "up" / "p.py").write_text("def new(x):\n    return x\n")
    return folders


def _places(entries):
    return [f"{entry.id} {entry.folder.parent.parent.name}" for entry in entries]


OVERRIDING = f"{GOOD}  overrides: true\n"


def test_files_of_one_name_add_up_and_the_lower_folders_entries_come_first(world, tmp_path):
    folders = _stack(tmp_path, GOOD.replace("up.one", "up.two"), GOOD)
    for names in (["up"], ["up/p"], ["up", "up/p"]):
        assert _places(patch.read(folders, names)) == ["up.one 1", "up.two 0"]
    assert patch.upstreams(folders) == ["up"]
    assert _places(patch.read(folders, ["up"], folders[1])) == ["up.one 1"], "a lower folder does not see what is above"
    assert _places(patch.read([tmp_path / "absent", *folders], ["up"], tmp_path / "absent")) == ["up.one 1", "up.two 0"]


def test_an_entry_that_takes_an_id_from_a_lower_folder_must_say_so(world, tmp_path):
    folders = _stack(tmp_path, GOOD.replace("why: ", "why: Mine. "), GOOD)
    with pytest.raises(TakenNameError) as caught:
        patch.read(folders, ["up"])
    assert str(caught.value) == (
        "0/patches/up/p.yaml:1: The id 'up.one' is also at 1/patches/up/p.yaml:1. "
        "Rename it, or write 'overrides: true' in it to take the other one's place."
    )


def test_a_copy_takes_nothing_and_an_edited_function_is_no_copy(world, tmp_path):
    folders = _stack(tmp_path, GOOD, GOOD)
    assert _places(patch.read(folders, ["up"])) == ["up.one 0"]
    (folders[0] / "up" / "p.py").write_text("def new(x):\n    return -x\n")
    with pytest.raises(TakenNameError, match=r"The id 'up.one' is also at 1/patches/up/p.yaml:1"):
        patch.read(folders, ["up"])


def test_an_override_holds_for_whoever_reads_the_lower_entry(world, tmp_path):
    folders = _stack(tmp_path, OVERRIDING, GOOD.replace("up.one", "up.two"), GOOD)
    (folders[0] / "up" / "p.yaml").rename(folders[0] / "up" / "other_name.yaml")
    assert _places(patch.read(folders, ["up/p"])) == ["up.one 0", "up.two 1"]
    assert _places(patch.read(folders, ["up"], folders[2])) == ["up.one 0"], "a shipped card gets it, too"
    assert patch.read(folders, ["up/p"])[0].overrides


def test_an_override_in_a_file_that_is_named_first_is_no_taken_name(world, tmp_path):
    folders = _stack(tmp_path, OVERRIDING, GOOD)
    (folders[0] / "up" / "p.yaml").rename(folders[0] / "up" / "a.yaml")
    for names in (["up/a", "up/p"], ["up/p", "up/a"]):
        assert _places(patch.read(folders, names)) == ["up.one 0"]


def test_the_highest_override_wins(world, tmp_path):
    folders = _stack(tmp_path, OVERRIDING, OVERRIDING.replace("why: ", "why: Second. "), GOOD)
    assert _places(patch.read(folders, ["up"])) == ["up.one 0"]
    assert _places(patch.read(folders, ["up"], folders[2])) == ["up.one 0"]
    assert _places(patch.read(folders[1:], ["up"])) == ["up.one 1"]


def test_an_entry_that_overrides_nothing_is_refused_with_the_nearest(world, tmp_path):
    folders = _stack(tmp_path, OVERRIDING.replace("up.one", "up.onne"), GOOD)
    for home in folders:
        with pytest.raises(BadValueError) as caught:
            patch.read(folders, ["up"], home)
        assert str(caught.value) == (
            "0/patches/up/p.yaml:1: 'up.onne' overrides nothing: no pack under it has a patch with this id. "
            "Did you mean 'up.one'? Known: up.one."
        )


def test_links_that_lead_out_of_the_folder_are_refused(world, tmp_path):
    (tmp_path / "outside.yaml").write_text(GOOD)
    (tmp_path / "outside.py").write_text("raise SystemExit('ran')\n")
    (world.patches / "up" / "p.yaml").symlink_to(tmp_path / "outside.yaml")
    with pytest.raises(BadValueError) as caught:
        patch.read(world.patches, ["up"])
    assert str(caught.value) == ("patches/up/p.yaml: 'p.yaml' is a link out of 'patches'. Put the file itself there.")
    (world.patches / "up" / "p.yaml").unlink()
    (world.patches / "up" / "p.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(ReplacementError, match=r"'p.py' is a link out of the patches. Put the file itself there"):
        patch.applied(_read(world, GOOD)).__enter__()
    (world.patches / "linked").symlink_to(tmp_path)
    (tmp_path / "x.yaml").write_text(GOOD)
    with pytest.raises(BadValueError, match=r"is a link out of 'patches'"):
        patch.read(world.patches, ["linked"])


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("up/p.yml", "patches/up/p.yml: 'p.yml' would never be read. Rename it to p.yaml."),
        ("up/p.YAML", "patches/up/p.YAML: 'p.YAML' would never be read. Rename it to p.yaml."),
        ("up/sub/p.yaml", "patches/up/sub/p.yaml: 'p.yaml' would never be read. Move it up into patches/up."),
        ("up/p.yaml/x", "patches/up/p.yaml: 'p.yaml' would never be read. It is a folder: rename it, or put a file"),
    ],
)
def test_a_file_that_would_never_be_read_is_refused_with_what_to_do(world, file, remedy):
    path = world.patches / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(GOOD)
    for name in ("up", "up/p"):
        with pytest.raises(BadValueError) as caught:
            patch.read(world.patches, [name])
        assert str(caught.value).startswith(remedy)


@pytest.mark.parametrize(("folder", "name"), [("my-up", "my_up"), ("2up", "up_2up"), ("üp", "up__p")])
def test_a_folder_that_could_never_be_named_is_refused_with_its_new_name(world, folder, name):
    (world.patches / folder).mkdir()
    for ask in (lambda: patch.upstreams(world.patches), lambda: patch.read(world.patches, [folder])):
        with pytest.raises(BadValueError) as caught:
            ask()
        fact = f"patches/{folder}: '{folder}' is no name of an upstream. Rename the folder to {name}."
        assert str(caught.value) == fact


def test_the_lock_and_caches_beside_the_entries_are_left_alone(world):
    (world.patches / "up" / "__pycache__").mkdir()
    (world.patches / "up" / "__pycache__" / "x.yml").write_text("- never read")
    (world.patches / "up" / "lock.yaml").write_text("never: read\n")
    assert [entry.id for entry in _read(world, GOOD)] == ["up.one"]


def test_reading_runs_nothing(world):
    world.python("raise SystemExit('ran')\n")
    assert len(_read(world, GOOD)) == 1
    assert "torchport_patches.up.p" not in sys.modules


def test_the_schema_is_a_closed_json_schema_of_what_is_read(world):
    schema = patch.schema()
    json.dumps(schema)
    entry = schema["$defs"]["Entry"]
    assert entry["additionalProperties"] is False
    assert set(entry["required"]) == {"id", "target", "why", "reported", "until", "fits", "equivalence"}
    assert {"replace", "wrap", "rewrite", "op", "stub"} == {part["required"][0] for part in entry["oneOf"]}
    (read,) = _read(world, GOOD)
    assert set(entry["properties"]) == set(type(read).model_fields)
    assert entry["properties"]["equivalence"] == {"$ref": "#/$defs/Equivalence"}
    assert schema["$defs"]["Equivalence"]["anyOf"][0] == {"const": "bitwise"}
    assert schema["$defs"]["Lifetime"]["anyOf"][0] == {"const": "run"}
    assert all(part.get("additionalProperties", False) is False for part in schema["$defs"].values())


_WORDS = st.one_of(
    st.sampled_from(
        [
            "id", "target", "replace", "wrap", "value", "rewrite", "op", "why", "reported", "until", "fits", "run", "~",
            "equivalence", "match", "put", "gives", "times", "scope", "lifetime", "needed", "optional", "aliases",
            "null", "relies_on", "counted", "plumbing", "must_be_called", "bitwise", "global",
            "up.m:f", "p.py:new", "!!python/object/apply:os.system", "!!python/name:os.system", "&a", "*a", "<<", "---",
            "{", "}", "[", "]", "- ", ": ", "\n", "  ", "|\n", ">-\n", '"', "'", "#", "? ", "%TAG ! x", "\t", "\x00",
            "1e400", "0x", "2026-01-01", "!!binary aGk=", "!!timestamp x", ".inf", "1_000", "012", "=", "@",
            "!!set {a}",
        ]
    ),
    st.text(string.printable, max_size=6),
    st.text(max_size=3),
)  # fmt: skip


@st.composite
def _documents(draw):
    """A good entry with words put in, lines dropped or swapped; or only words."""
    if draw(st.booleans()):
        return "".join(draw(st.lists(_WORDS, max_size=12)))
    lines = GOOD.splitlines(keepends=True)
    for _ in range(draw(st.integers(0, 3))):
        index = draw(st.integers(0, len(lines) - 1))
        at = draw(st.integers(0, len(lines[index])))
        change = draw(st.sampled_from(["insert", "drop", "double", "value"]))
        if change == "insert":
            lines[index] = lines[index][:at] + draw(_WORDS) + lines[index][at:]
        elif change == "value":
            lines[index] = lines[index].partition(":")[0] + ": " + draw(_WORDS) + "\n"
        else:
            lines[index] = "" if change == "drop" else lines[index] * 2
    return "".join(lines)


def _entry_or_project_error(folder, text):
    (folder / "up").mkdir(parents=True, exist_ok=True)
    (folder / "up" / "p.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        entries = patch.read(folder, ["up"])
    except TorchportError as error:
        assert str(error).startswith(f"{folder}/up/p.yaml:")
        return
    assert all(isinstance(entry, patch.Entry) for entry in entries)


def _no_calls(monkeypatch):
    """Makes every door that a YAML document could use to run something an error."""

    def refused(*args, **kwargs):
        raise AssertionError(f"a document ran something: {args}")

    for name in ("system", "popen", "execv", "remove"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr(reading, "__import__", refused, raising=False)


_FUZZ = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@given(_documents())
@example("- !!python/object/apply:os.system [id]")
@example("- id: [" * 2000)
@example("- &a x\n- &a y\n")
@example("- 1e400\n- .inf\n- 2026-13-45\n")
@settings(max_examples=400, **_FUZZ)
def test_fuzzed_yaml_gives_an_entry_or_a_project_error(tmp_path_factory, text):
    _entry_or_project_error(tmp_path_factory.getbasetemp() / "fuzz" / "patches", text)


@pytest.mark.slow
@given(_documents())
@settings(max_examples=10_000, **_FUZZ)
def test_ten_thousand_fuzzed_documents_give_an_entry_or_a_project_error(tmp_path_factory, text):
    _entry_or_project_error(tmp_path_factory.getbasetemp() / "fuzz" / "patches", text)


def test_hostile_documents_run_nothing(world, monkeypatch):
    _no_calls(monkeypatch)
    for hostile in (
        "- !!python/object/apply:os.system [touch x]",
        "- !!python/object/new:subprocess.Popen [[id]]",
        "- !!python/module:os",
        "- !!python/name:os.system",
        "a: &a [*a]",
        "- &x {a: *x}",
        "- <<: {id: x}",
    ):
        with pytest.raises(TorchportError):
            _read(world, hostile)
