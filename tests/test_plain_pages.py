"""The site has its pages as plain Markdown, and `llms.txt` names each of them."""

from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import plain_pages
import tallystick
from tests.test_docs import ROOT

SETTINGS = """\
site_name: A site
site_description: What it is about.
theme: {name: mkdocs}
use_directory_urls: false
hooks: [%s]
nav: [index.md, {Use: [api.md, deep/more.md]}]
"""
PAGES = {
    "index.md": "# Start\n\n<!-- runs -->\n```\nrun\n```\n\n> said\n\nTwo [words](api.md). More.\n",
    "api.md": "# API\n\nNames:\n\n::: tallystick.KafkaSink\n    members: [write]\n\nEnd.\n",
    "deep/more.md": "# More\n\nIs it long? No.\n\n[In](../api.md), [out](../../tests/x.py).\n\n"
    '```python\n--8<-- "plain_pages.py"\n```\n',
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "mkdocs.yml").write_text(SETTINGS % (ROOT / "plain_pages.py"))
    for name, text in PAGES.items():
        page = folder / "docs" / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(ROOT)  # as `make docs`: snippets are named from there
        build(load_config(str(folder / "mkdocs.yml")))
    return folder / "site"


def test_each_page_is_named_in_its_group_with_its_first_sentence(site: Path) -> None:
    assert (site / "llms.txt").read_text() == (
        "# A site\n\n> What it is about.\n\n## Start\n\n- [Start](index.md): Two words.\n\n"
        "## Use\n\n- [API](api.md): Names:\n- [More](deep/more.md): Is it long?\n"
    )


def test_pages_are_as_they_were_written_without_comments_and_with_their_snippets(
    site: Path,
) -> None:
    assert (site / "index.md").read_text() == PAGES["index.md"].replace("<!-- runs -->\n", "")
    assert (ROOT / "plain_pages.py").read_text().rstrip() in (site / "deep/more.md").read_text()


def test_a_link_out_of_the_site_is_a_name_alone(site: Path) -> None:
    assert "[In](../api.md), out.\n" in (site / "deep/more.md").read_text()
    assert '<a href="../api.html">In</a>, out.' in (site / "deep/more.html").read_text()


def test_the_page_of_the_api_has_signatures_and_docstrings(site: Path) -> None:
    text = (site / "api.md").read_text()

    assert ":::" not in text
    assert "members:" not in text
    assert " at 0x" not in text
    assert text.endswith("\nEnd.\n")
    assert "### tallystick.KafkaSink\n\n`KafkaSink(bootstrap_servers: str, *, topic:" in text
    assert "#### tallystick.KafkaSink.write" in text
    assert "Write a DataFrame in a single Kafka transaction" in text


def test_each_public_name_can_be_described() -> None:
    page = (ROOT / "docs/api.md").read_text()
    named = {name for name, _ in plain_pages.DIRECTIVE.findall(page)}

    assert {f"tallystick.{name}" for name in tallystick.__all__} <= named
    text = plain_pages.DIRECTIVE.sub(plain_pages._described, page)
    assert ":::" not in text
    assert all(f"### {name}\n" in text for name in named)


def test_the_site_of_ours_is_built_with_it() -> None:
    assert "\nhooks: [plain_pages.py]" in (ROOT / "mkdocs.yml").read_text()
