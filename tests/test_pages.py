"""The pages of docs/ that are made from the code are current, and their examples run as they are printed."""

import importlib.util
import json
import re

import pytest

from torchport.config import parse_document, validated
from torchport.config.card import Card, Job
from torchport.stages.family import Stage


def blocks(file):
    """The code blocks of a page: their languages and texts."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def loaded(file):
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(scope="module")
def reference(root):
    return loaded(root / "tools" / "reference.py")


@pytest.mark.parametrize("name", ["cards.md", "jobs.md", "families.md", "patches.md", "scan.md", "engine.md"])
def test_a_page_made_from_the_code_is_current(root, reference, name):
    assert (root / "docs" / name).read_text(encoding="utf-8") == reference.page(name), (
        "Run `python tools/reference.py --write`"
    )


def test_every_page_made_from_the_code_is_among_these(reference):
    assert set(reference.PAGES) == {"cards.md", "jobs.md", "families.md", "patches.md", "scan.md", "engine.md"}


def test_every_part_that_a_table_refers_to_has_a_table(reference):
    for kind in ("card", "job", "patch"):
        text = reference.of_schema(kind)
        titles = {title.lower() for title in re.findall(r"^#+ (\w+)$", text, re.MULTILINE)}
        assert set(re.findall(r"\]\(#(\w+)\)", text)) <= titles


def test_the_fields_of_the_page_on_cards_are_a_cards(root):
    text = (root / "configs" / "models" / "hunyuan.yaml").read_text(encoding="utf-8")
    card = parse_document(text, "card.yaml").data
    example = next(code for kind, code in blocks(root / "docs" / "cards.md") if kind == "yaml")
    part = parse_document(example, "cards.md").data
    assert validated(Card, parse_document(text, "card.yaml")).model == part["model"]
    for key, value in part.items():
        assert value.items() <= card[key].items() if isinstance(value, dict) else value == card[key], key


def test_the_job_of_the_page_on_jobs_is_a_job(root):
    [example] = [code for kind, code in blocks(root / "docs" / "jobs.md") if kind == "yaml"]
    assert validated(Job, parse_document(example, "jobs.md")).devices == 8


def test_the_family_of_the_page_on_families_is_one(root):
    names = {}
    example = next(code for kind, code in blocks(root / "docs" / "families.md") if kind == "python")
    exec(compile(example, "families.md", "exec"), names)
    assert all(isinstance(stage, Stage) for stage in names["STAGES"])


def test_the_site_has_a_page_for_each_card_and_its_public_names(root):
    website = loaded(root / "tools" / "website.py")
    for card in website.CARDS:
        page = website.of_card(card)
        assert f"# {card.stem}\n" in page and "| transformer | `" in page and "| denoise | `" in page, card
    names = website.of_names()
    assert "def applied(" in names and "::: torchport.own_code.port.port" in names


def test_the_notebook_is_kept_without_outputs(root):
    cells = json.loads((root / "notebooks" / "port.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_every_link_between_pages_leads_somewhere(root):
    pages = [*(root / "docs").glob("*.md"), *root.glob("*.md")]
    for page in pages:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:\s]*(?:#[^)\s]*)?)\)", prose):
            name, _, part = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), (page.name, target)
            if part and file.suffix == ".md":
                assert part in anchors(file), (page.name, target)


def anchors(file):
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
