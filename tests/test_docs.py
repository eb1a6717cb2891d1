"""What the pages name is there: commands with their options, and files."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from typer.main import get_command

import tallystick
from tallystick.__main__ import app
from tests.generated_pages import PARTS, generated
from tests.rules import of_each

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "examples", "tools")
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *(ROOT / folder / "README.md" for folder in FOLDERS),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_COMMAND = re.compile(r"(?:^|`)(?:\.venv/bin/)?tallystick ([a-z][^`\n#]*)", re.MULTILINE)
_OPTION = re.compile(r"`(--[\w-]+)")
_FILE = re.compile(r"`((?:benchmarks|deploy|examples|tests|tallystick|tools)/[\w/.]+\.\w+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
OF_FLINK = {"--allowNonRestoredState"}
of_each_page = of_each(PAGES, lambda page: str(page.relative_to(ROOT)), lambda page: page)


@cache
def command_line() -> Any:
    return get_command(app)


@cache
def known_options() -> set[str]:
    """All options of the command line, and what the programs of benchmarks put in quotes."""
    options = set(OF_FLINK)
    groups = [command_line()]
    while groups:
        command = groups.pop()
        options |= {name for parameter in command.params for name in parameter.opts}
        groups += getattr(command, "commands", {}).values()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        if "work" not in path.relative_to(ROOT).parts:  # what the peers install there
            options |= set(re.findall(r'"(--[\w-]+)"', path.read_text()))
    return options


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each command line on a page, without `tallystick`, and up to a user's own."""
    for match in _COMMAND.finditer(page.read_text()):
        words = shlex.split(re.sub(r"[\[\]]", "", match[1]))
        yield list(takewhile(lambda word: word != "--", words))


def test_commands_are_found_on_the_pages() -> None:
    commands = {" ".join(words[:2]) for page in PAGES for words in commands_of(page)}

    assert {
        "broker start",
        "savepoint migrate",
        "transactions list",
        "recover MODULE:PIPELINE",
        "inspect CHECKPOINT",
        "doctor CHECKPOINT",
    } <= commands


@of_each_page
def test_each_command_exists_with_its_options(page: Path) -> None:
    for words in commands_of(page):
        command = command_line()
        for word in words:
            if not hasattr(command, "commands") or word.startswith("-"):
                break
            assert word in command.commands, (words, sorted(command.commands))
            command = command.commands[word]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


@of_each_page
def test_each_option_that_stands_by_itself_is_one_of_a_command(page: Path) -> None:
    for option in _OPTION.findall(page.read_text()):
        assert option in known_options(), option


@of_each_page
def test_each_file_exists(page: Path) -> None:
    text = page.read_text()
    for name in _FILE.findall(text):
        assert (ROOT / name).exists(), name
    for target in _LINK.findall(text):
        assert (page.parent / target).exists(), target


@of_each_page
def test_what_is_made_from_the_code_is_as_the_code_is_now(page: Path) -> None:
    assert generated(text := page.read_text()) == text, "run `python -m tests.generated_pages`"


def test_there_are_generated_parts() -> None:
    text = "".join(page.read_text() for page in PAGES)

    assert {f"<!-- generated: {name} -->" for name in PARTS} <= set(text.splitlines())


def test_the_api_page_has_each_public_name_once() -> None:
    named = re.findall(r"^::: tallystick\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    lacking = set(tallystick.__all__) - set(named)
    assert not lacking, f"docs/api.md lacks `::: tallystick.NAME` for {lacking}"
    assert sorted(named) == sorted(tallystick.__all__)


@pytest.mark.parametrize(
    "word",
    [
        "backpressure",
        "sigterm",
        "watermark",
        "exactly once",
        "dead letter",
        "lag",
        "install",
        "graceful shutdown",
        "liveness",
        "checkpointLocation",
    ],
)
def test_the_search_has_what_users_type(word: str) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))

    assert re.search(rf"\b{word}\b", text, re.IGNORECASE)


def test_each_page_is_in_a_group_of_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "docs/.nav.yml").read_text())["nav"]
    start, *groups = nav
    named = [page for group in groups for pages in group.values() for page in pages]

    assert start == "index.md"
    assert sorted(named) == sorted(
        {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} | {"decisions/*.md"}
    )


def test_the_titles_of_decisions_have_one_form() -> None:
    for path in (ROOT / "docs/decisions").iterdir():
        title, _, _ = path.read_text().partition("\n")
        assert title.startswith(f"# {int(path.name[:4])}. "), (path.name, title)


def test_the_site_follows_the_system_and_has_a_toggle() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    palette = settings["theme"]["palette"]

    schemes = {entry["media"]: entry.get("scheme") for entry in palette}
    assert schemes == {
        "(prefers-color-scheme)": None,
        "(prefers-color-scheme: light)": "default",
        "(prefers-color-scheme: dark)": "slate",
    }
    assert all(entry["toggle"]["icon"] for entry in palette)  # the theme looks at no other
    for name in settings["extra_css"]:
        assert (ROOT / "docs" / name).exists()


def test_the_first_page_s_program_runs_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/index.md").read_text()
    (program,) = re.findall(r"<!-- first page -->\n```python\n(.*?)```", text, re.DOTALL)
    started: list[tuple[tallystick.Pipeline, dict[str, Any]]] = []

    class Started:
        def awaitTermination(self) -> None:
            """End at once."""

    def start(pipeline: tallystick.Pipeline, **options: Any) -> Started:
        started.append((pipeline, options))
        return Started()

    monkeypatch.setattr(tallystick.Pipeline, "start", start)
    names: dict[str, Any] = {"__name__": "late_flights"}
    exec(compile(program, "index.md", "exec"), names)
    ((pipeline, options),) = started
    flights = pa.record_batch({"dest": ["JFK", "LAX"], "dep_delay": [3.0, 16.0]})

    assert "topic flights at localhost:9092" in pipeline.explain(**options)
    assert names["source"].starting_offsets == "earliest"
    assert names["late_only"](flights).to_pylist() == [{"dest": "LAX", "dep_delay": 16.0}]
    assert max(map(len, program.splitlines())) <= 80  # wider ones are cut off at 1400 pixels
