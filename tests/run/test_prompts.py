"""A file of prompts: what its lines say, and every mistake in it by its line, all at once."""

from pathlib import Path

import pytest

from torchport.errors import ConfigError
from torchport.run.series import _request, read_prompts
from torchport.task import Request


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns the lines of a file with this text, which is `p.jsonl` to errors."""
    monkeypatch.chdir(tmp_path)

    def call(*lines):
        file = tmp_path / "p.jsonl"
        file.write_text("\n".join(lines), encoding="utf-8")
        return read_prompts(file.relative_to(tmp_path))

    return call


def refusal(read, *lines):
    """The lines of the error of a file."""
    with pytest.raises(ConfigError) as refused:
        read(*lines)
    return str(refused.value).splitlines()


def test_a_line_is_a_video_with_a_folder_of_its_own(read):
    cat, fox = read(
        '{"prompt": "A cat\u2028"}', "", '{"prompt": "A fox", "seed": 7, "height": 64, "frames": 5, "out": "fox"}'
    )
    assert (cat.prompt.prompt, cat.name, cat.place) == ("A cat\u2028", "0001", "p.jsonl:1")
    assert (fox.prompt.seed, fox.name, fox.place) == (7, "fox", "p.jsonl:3")
    shared = Request("small", "small.yaml", out=Path("out"), overrides=("steps=2",))
    assert _request(shared, cat).overrides == ("steps=2",)
    assert _request(shared, fox).overrides == ("steps=2", "height=64", "frames=5")


def test_every_mistake_is_named_with_its_line_at_once(read):
    assert refusal(
        read,
        '{"prompt": "A cat", "heigth": 64}',
        '{"prompt": 3, "seed": -1}',
        '{"seed": 1}',
        '{"prompt": "x"',
        "[1]",
        '{"prompt": "x", "prompt": "y"}',
        '{"prompt": "x", "height": true}',
    ) == [
        "p.jsonl:1: Unknown key 'heigth'. Did you mean 'height'? "
        "Known: frames, height, image, negative, out, prompt, seed, width.",
        "p.jsonl:2: 'prompt' is 3 (a number). It must be text.",
        "p.jsonl:2: 'seed' is -1 (a number). It must be greater than or equal to 0.",
        "p.jsonl:3: 'prompt' is missing. Add 'prompt'.",
        "p.jsonl:4:15: Not JSON: Expecting ',' delimiter. "
        'Write one object on a line, such as {"prompt": "A cat", "seed": 7}.',
        'p.jsonl:5: It is no JSON object: [1]. Write one object on a line, such as {"prompt": "A cat", "seed": 7}.',
        "p.jsonl:6: 'prompt' stands here twice. Keep one of the two.",
        "p.jsonl:7: 'height' is True (true or false). It must be a whole number.",
    ]


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "a\\\\b", "x" * 256])
def test_a_folder_that_leads_elsewhere_is_refused(read, name):
    [line] = refusal(read, f'{{"prompt": "x", "out": "{name}"}}')
    assert line.startswith("p.jsonl:1: 'out' is '")
    assert line.endswith("'. It must be the name of one folder in --out: no slash, and no dot in front.")


REFUSED = {
    "a\\nb": "'a\\nb'. A folder's name has no '\\n': use letters, digits, '-', '_', '.' and spaces.",
    "a\\u0007": "'a\\x07'. A folder's name has no '\\x07': use letters, digits, '-', '_', '.' and spaces.",
    "a:b": "'a:b'. A folder's name has no ':': use letters, digits, '-', '_', '.' and spaces.",
    " ": "' '. A folder's name neither begins with a space nor ends with a space or a dot: remove it.",
    "a ": "'a '. A folder's name neither begins with a space nor ends with a space or a dot: remove it.",
    "a.": "'a.'. A folder's name neither begins with a space nor ends with a space or a dot: remove it.",
    "-x": "'-x'. Commands take a name with '-' in front for a flag: begin with a letter or a digit.",
    "aux": "'aux'. Windows has no folder of this name: write for example 'video-aux'.",
    "NUL.mp4": "'NUL.mp4'. Windows has no folder of this name: write for example 'video-NUL.mp4'.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_not_every_system_or_command_takes_is_refused(read, name):
    assert refusal(read, f'{{"prompt": "x", "out": "{name}"}}') == [f"p.jsonl:1: 'out' is {REFUSED[name]}"]


@pytest.mark.parametrize("name", ["fox 2", "1.5", "a-b_c", "Füchse", "狐", "console", "com10"])
def test_an_ordinary_name_is_taken(read, name):
    assert read(f'{{"prompt": "x", "out": "{name}"}}')[0].name == name


def test_folders_that_are_one_on_some_disks_are_refused(read):
    assert refusal(read, '{"prompt": "x", "out": "Fox"}', '{"prompt": "y", "out": "fox"}') == [
        "p.jsonl:2: Its folder is 'fox', and 'Fox', the same on some disks, is that of p.jsonl:1. "
        "Give each line an 'out' of its own."
    ]
    assert len(refusal(read, '{"prompt": "x", "out": "\u00fc"}', '{"prompt": "y", "out": "u\u0308"}')) == 1


def test_a_byte_order_mark_is_no_part_of_the_first_line(read):
    assert read('\ufeff{"prompt": "A cat"}')[0].prompt.prompt == "A cat"
    [line] = refusal(read, '\ufeff{"prompt": "A cat"')
    assert line.startswith("p.jsonl:1:19: Not JSON: ")


def test_two_lines_with_one_folder_are_refused(read):
    assert refusal(read, '{"prompt": "x", "out": "0002"}', '{"prompt": "y"}') == [
        "p.jsonl:2: Its folder is '0002', and so is that of p.jsonl:1. Give each line an 'out' of its own."
    ]


def test_a_file_without_a_line_is_refused(read):
    assert refusal(read, "", " ") == ['p.jsonl: It has no line. Write one such as {"prompt": "A cat"} for each video.']


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"It cannot be read: No such file or directory\. Put a file there"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ConfigError, match=r"Byte 15 is not UTF-8\. Save the file as UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
