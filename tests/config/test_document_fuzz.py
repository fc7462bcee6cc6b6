"""10,000 changed YAML files of every kind that torchport reads: results, or errors with the file in them."""

import collections
import copy
import random
import shutil

import pytest
import yaml
from fakes.fuzz_checkpoints import HOSTILE, flipped, places

from torchport.config.card import check_job
from torchport.config.pack import Pack
from torchport.errors import TorchportError
from torchport.patch.declared.reading import read_file
from torchport.patch.source.drift import read_lock

SEED, CASES = 20261122, 10_000
SNIPPETS = (
    "&a x", "*a", "!!python/object/apply:os.system [id]", "!x", "{", "[", "]", "}", "? ", ": ", "- ", "---\n", "...\n",
    "%YAML 1.1\n", "<<: *a\n", "|\n", ">\n", '"', "'", "\t", "\x00", "\x1b[31m", "\u2028", "\ufeff", "9" * 5000,
    "[" * 500, "{a: " * 500, "0x", "1e999",
)  # fmt: skip


def mutated_text(text, draw):
    """Changes the text of a file: bytes, lines, or pieces of syntax."""
    kind = draw.choice(("bytes", "snippet", "snippet", "line", "swap"))
    if kind == "bytes":
        return flipped(text.encode(), draw).decode("utf-8", "replace")
    at = draw.randrange(len(text) + 1)
    if kind == "snippet":
        return text[:at] + draw.choice(SNIPPETS) + text[at:]
    lines = text.splitlines(keepends=True)
    first, second = draw.randrange(len(lines)), draw.randrange(len(lines))
    if kind == "line":
        lines.insert(first, lines[second])
    else:
        lines[first], lines[second] = lines[second], lines[first]
    return "".join(lines)


def mutated_value(text, draw):
    """Changes a value of a file: exchanges, removes or doubles it."""
    data = copy.deepcopy(yaml.safe_load(text))
    path = draw.choice(list(places(data)))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if draw.random() < 0.2:
        del holder[path[-1]]
    else:
        holder[path[-1]] = draw.choice([value for value in HOSTILE if value != "\ud800"])
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def read(pack, file):
    """Reads a file as the command that wants it does."""
    if file.parent.name == "models":
        pack.card(file.stem)
    elif file.name == "lock.yaml":
        read_lock(file.parent)
    elif file.is_relative_to(pack.patches):
        read_file(file)
    else:
        job, document = pack.job(f"configs/{file.name}")
        check_job(job, pack.card("hunyuan")[0], document)


@pytest.mark.slow
def test_10000_changed_files_end_in_results_or_in_errors_that_name_them(tmp_path, root):
    shutil.copytree(root / "configs", tmp_path / "configs")
    shutil.copytree(root / "patches", tmp_path / "patches")
    pack, draw, ends = Pack(tmp_path), random.Random(SEED), collections.Counter()
    texts = {file: file.read_text() for file in sorted(tmp_path.rglob("*.yaml"))}
    for number in range(CASES):
        file = draw.choice(list(texts))
        text = draw.choice((mutated_text, mutated_value))(texts[file], draw)
        file.write_text(text, errors="surrogateescape", newline="")
        try:
            read(pack, file)
            ends["read"] += 1
        except TorchportError as error:
            ends["refused"] += 1
            for shown in str(error).split("\n"):  # a line for each mistake
                assert file.name in shown.partition(" ")[0] and shown.isprintable(), f"case {number}: {shown[:300]!r}"
        file.write_text(texts[file])
    assert ends["refused"] > CASES // 2
