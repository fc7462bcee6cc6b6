"""What `mkdocs build` makes of the repository: pages from other files, links between all of them, llms.txt.

mkdocs.yml names this module as its hook. Pages of docs/ link to files as a folder view does. The site has more pages:
the README and other files beside docs/, a page for each model card, the notebook, and the public names of `torchport`.
Beside the HTML of each page lies its Markdown, `index.html.md`.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import yaml

from torchport.config.pack import find_pack

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SITE, REPOSITORY = PROJECT["urls"]["Documentation"], PROJECT["urls"]["Repository"]
COPIES = {
    "README.md": "index.md",
    "MIGRATION_GUIDE.md": "guide.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""The pages that lie beside docs/, by their files."""
DEMO = "configs/demo.yaml"
"""The demo of a card that names none."""
NOTEBOOK = "notebooks/port.ipynb"
ORIGINS = {**COPIES, NOTEBOOK: "notebook.md"}
"""The pages that stand for one file elsewhere, by their files."""
CARDS = sorted((ROOT / "configs" / "models").glob("*.yaml"))
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
ID = re.compile(r"^(#+) ((?:TP|PS)\d{3}) (.*)$", re.MULTILINE)
FENCE = re.compile(r"^( *```.*?^ *```)$", re.MULTILINE | re.DOTALL)
TEXTS: dict[str, str] = {}
"""The Markdown of each page of this build, by its file."""


def on_config(config: Any) -> Any:
    """Sets the address and the links of the footer, and adds the pages of the models to the navigation."""
    config.site_url = SITE
    config.site_description = PROJECT["description"]
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": REPOSITORY, "name": "Repository"}]
    [models] = [section["Models"] for section in config.nav if "Models" in section]
    models += [{card.stem: f"models/{card.stem}.md"} for card in CARDS]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made from other files."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in COPIES.items()}
    made |= {f"models/{card.stem}.md": of_card(card) for card in CARDS}
    made |= {"notebook.md": of_notebook(), "api.md": of_names()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def of_card(file: Path) -> str:
    """Returns the page of a model: what its card says, and the jobs that are shipped for it."""
    text = file.read_text(encoding="utf-8")
    card = find_pack((str(ROOT),)).card(file.stem)[1].data  # with what the card that it extends says
    place = file.relative_to(ROOT).as_posix()
    facts = [
        ("published weights", _code(card.get("checkpoint", ""))),
        ("pipeline", _code(card.get("pipeline", ""))),
        ("family", _code(card["family"])),
        ("upstream", ", ".join(_code(f"{name} {version}") for name, version in card["upstream"].items())),
        ("strategies", ", ".join(map(_code, card["strategies"]))),
        (
            "demo",
            _code(
                f"torchport run --model {card['model']} --config {card.get('demo', 'configs/demo.yaml')} --prompt TEXT"
            ),
        ),
    ]
    parts = [
        (name, _code(part["class"]), part.get("dtype", ""), f"{part['parameters']:,}" if "parameters" in part else "")
        for name, part in card["components"].items()
    ]
    patches = [(stage, ", ".join(map(_code, names))) for stage, names in card["patches"].items()]
    return "\n\n".join(
        [
            f"# {card['model']}",
            f"{card['title']}. The card is [{place}](../../{place}). [Model cards](../cards.md) explains its fields.",
            _table(("what", "value"), [fact for fact in facts if fact[1]]),
            "## Components",
            _table(("part", "class", "dtype", "parameters"), parts),
            "## Patches",
            "`torchport patches list` says what each of them changes.",
            _table(("stage", "files of patches"), patches),
            "## Jobs",
            _table(("file", "machine", "what it makes"), jobs_of(card["model"])),
            "## The card",
            f"```yaml\n{text.rstrip()}\n```\n",
        ]
    )


def jobs_of(model: str) -> list[tuple[str, ...]]:
    """Returns a row for each shipped job of a model. Its file begins with the model; others are of `hunyuan`."""
    rows = []
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        named = [card.stem for card in CARDS if file.stem.startswith(card.stem)]
        if max(named, key=len, default="hunyuan") == model:
            comment = text[: re.search(r"^[^#]", text, re.MULTILINE).start()].replace("\n# ", " ").removeprefix("# ")
            link = f"[{file.stem}](../../configs/{file.name})"
            rows.append((link, _code(yaml.safe_load(text)["machine"]), comment.strip()))
    return rows


def of_notebook() -> str:
    """Returns the notebook as a page: its text, and its code without outputs."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts]
    return "\n\n".join([*parts, f"This page is [{NOTEBOOK}]({REPOSITORY}/blob/main/{NOTEBOOK})."]) + "\n"


def public_names() -> dict[str, str]:
    """Returns the names that `torchport` exports, and the modules in which they are."""
    tree = ast.parse((ROOT / "torchport" / "__init__.py").read_text(encoding="utf-8"))
    [lazy] = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LAZY"]
    return ast.literal_eval(lazy.value)


def of_names() -> str:
    """Returns the page of the public names: their signatures, and where mkdocstrings puts their docstrings."""
    parts = [
        "# Python",
        "`import torchport` imports neither torch nor JAX. It has these names. Nothing else of the package is promised"
        " to stay. [Your own script, notebook or loop](own-code.md) shows how they are used.",
    ]
    for name, module in public_names().items():
        node, lines = _definition(module, name)
        signature = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
        parts += [f"## {name} {{ #torchport.{name} }}", f"```python\n{signature}\n```", f"::: {module}.{name}"]
    return "\n\n".join(parts) + "\n"


def _definition(module: str, name: str) -> tuple[ast.FunctionDef, list[str]]:
    """Returns a function of a module, and the lines of the module."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    [node] = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return node, text.splitlines()


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Makes a page's links those of the site, and gives the heading of each error and finding its id as an anchor."""
    name = page.file.src_uri
    origins = {copy: origin for origin, copy in ORIGINS.items()}
    folder = posixpath.dirname(origins.get(name, f"docs/{name}"))
    parts = FENCE.split(text)
    for number in range(0, len(parts), 2):
        part = LINK.sub(lambda match: f"]({_target(match, folder, name, files)})", parts[number])
        part = ID.sub(lambda match: f"{match[0]} {{ #{match[2].lower()} }}", part)
        parts[number] = re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]*`", _pipes, row[0]), part, flags=re.MULTILINE)
    TEXTS[name] = "".join(parts)
    return TEXTS[name]


def _pipes(code: re.Match[str]) -> str:
    """Returns code in a table's cell: a folder view needs a backslash before each `|`, and mkdocs would show it."""
    return code[0].replace(r"\|", "|")


def _target(match: re.Match[str], folder: str, name: str, files: Any) -> str:
    """Returns where a link of a page leads: to a page or a picture of the site, or to a file of the repository."""
    path, anchor = match[1], re.sub(r"#((?:tp|ps)\d{3})-.*", r"#\1", match[2] or "")
    if not path:
        return anchor
    path = posixpath.normpath(posixpath.join(folder, path))
    inside = ORIGINS.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(inside) and (path in ORIGINS or path.startswith("docs/")):
        return posixpath.relpath(inside, posixpath.dirname(name) or ".") + anchor
    if not (ROOT / path).exists():
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{name}: {match[0][2:-1]} is no page, and no file of the repository")
    return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor}"


def on_post_build(config: Any) -> None:
    """Writes the Markdown beside the HTML, and llms.txt."""
    folder = Path(config.site_dir)
    for name, text in TEXTS.items():
        text = re.sub(r" \{ #\S+ \}$", "", text, flags=re.MULTILINE)
        text = re.sub(r"^::: (\S+)\.(\w+)$", _docstring, text, flags=re.MULTILINE)
        text = LINK.sub(lambda match, name=name: f"]({_absolute(match, name)})", text)
        (folder / _markdown(name)).write_text(text, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav:
        [(title, pages)] = section.items()
        lines += [f"## {title}", "", *map(_entry, pages), ""]
    (folder / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _entry(page: str | dict[str, str]) -> str:
    """Returns a page's line of llms.txt: its title, its address, and its first sentence."""
    name = page if isinstance(page, str) else next(iter(page.values()))
    heading, *rest = FENCE.sub("", TEXTS[name]).strip().split("\n\n")
    prose = " ".join(next((text for text in rest if re.match(r"[\w`*\[]", text)), "").split())
    first = re.split(r"(?<=[.])\s", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose))[0].rstrip(":")
    return f"- [{heading.removeprefix('# ')}]({urljoin(SITE, _markdown(name))}): {first}"


def _markdown(name: str) -> str:
    """Returns where a page's Markdown lies in the site: beside its index.html."""
    folder = "" if name == "index.md" else name.removesuffix(".md") + "/"
    return f"{folder}index.html.md"


def _absolute(match: re.Match[str], name: str) -> str:
    """Returns the address of the Markdown, or of the picture, that a link of a page leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[1])) if match[1] else name
    return urljoin(SITE, _markdown(path) if path.endswith(".md") else path) + (match[2] or "")


def _docstring(match: re.Match[str]) -> str:
    """Returns the docstring that mkdocstrings puts in a place."""
    return f"```text\n{ast.get_docstring(_definition(match[1], match[2])[0])}\n```"


def _code(text: str) -> str:
    return text and f"`{text}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
