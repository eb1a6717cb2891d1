"""A hook of MkDocs: each page as plain Markdown beside its HTML, and `llms.txt`, which lists them.

Many readers are programs. `llms.txt` (https://llmstxt.org) names each page in the order of the
navigation, with its first sentence; links between pages lead to their Markdown. The page of the API
has signatures and docstrings in the place of what mkdocstrings makes of them.
"""

import inspect
import pydoc
import re
from pathlib import Path
from typing import Any

COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
DIRECTIVE = re.compile(r"^::: (\S+)\n((?: .*\n)*)", re.MULTILINE)
SENTENCE = re.compile(r"^((?:[A-Z*]|`(?!`)).*?)(?:(?<=[.?])\s|$)", re.MULTILINE)
ANNOTATED = re.compile(r"(?:typing\.)?Annotated\[(.+?), <function .+? at \w+>\]")
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
OUTSIDE = r"\[([^\]]+)\]\((?:\.\./){%d}[^)]+\)"
"""A link from a page to a file of the repository outside of docs, which the site does not have."""

_pages: dict[str, str] = {}
"""The Markdown of each page, by its path."""
_groups: list[tuple[str, list[Any]]] = []


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the groups of the navigation and their pages."""
    top = [item for item in nav.items if item.is_page]
    _groups[:] = [("Start", top)] + [
        (item.title, item.children) for item in nav.items if item.is_section
    ]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep what a page says, and return it without the links that lead out of the site."""
    depth = page.file.src_uri.count("/")
    markdown = re.sub(OUTSIDE % (depth + 1), r"\1", markdown)
    text = SNIPPET.sub(lambda named: Path(named[1]).read_text().rstrip(), markdown)
    _pages[page.file.src_uri] = DIRECTIVE.sub(_described, COMMENT.sub("", text))
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Write the pages and their list into the site."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for group, pages in _groups:
        lines += ["", f"## {group}", ""]
        for page in pages:
            path, text = page.file.src_uri, _pages[page.file.src_uri]
            (site / path).write_text(text)
            lines.append(f"- [{page.title}]({path}){_about(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _about(text: str) -> str:
    """Return a page's first sentence, without its links."""
    sentence = SENTENCE.search(text.partition("\n")[2])
    return "" if sentence is None else ": " + LINK.sub(r"\1", sentence[1])


def _described(directive: re.Match[str]) -> str:
    """Return the signature and docstring of a public name, and of its methods."""
    name = directive[1]
    described = pydoc.locate(name)
    assert described is not None, f"no {name}"
    parts = [_entry(f"### {name}", described)]
    if inspect.isclass(described):
        methods = inspect.getmembers(described, inspect.isfunction)
        parts += [
            _entry(f"#### {name}.{method_name}", method)
            for method_name, method in methods
            if not method_name.startswith("_") and method_name in vars(described)
        ]
    return "\n".join(parts)


def _entry(heading: str, described: Any) -> str:
    try:
        arguments = ANNOTATED.sub(r"\1", str(inspect.signature(described)))
        signature = f"`{described.__name__}{arguments}`\n\n"
    except (TypeError, ValueError, AttributeError):  # a value, or a class without one
        signature = ""
    return f"{heading}\n\n{signature}{inspect.getdoc(described) or ''}\n"
