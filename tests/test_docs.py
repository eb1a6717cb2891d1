"""What the pages name is there: commands with their options, and files."""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from typer.main import get_command

import tallystick
from tallystick.__main__ import app
from tests.generated_pages import PARTS, generated

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "examples", "tools")
PAGES = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in FOLDERS),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_COMMAND = re.compile(r"(?:^|`)(?:\.venv/bin/)?tallystick ([a-z][^`\n#]*)", re.MULTILINE)
_OPTION = re.compile(r"`(--[\w-]+)")
_FILE = re.compile(r"`((?:benchmarks|deploy|examples|tests|tallystick|tools)/[\w/.]+\.\w+)")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
OF_FLINK = {"--allowNonRestoredState"}


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
        command = get_command(app)
        for word in words:
            if not hasattr(command, "commands") or word.startswith("-"):
                break
            assert word in command.commands, (words, sorted(command.commands))
            command = command.commands[word]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words


@of_each_page
def test_each_option_that_stands_by_itself_is_one_of_a_command(page: Path) -> None:
    known = set(OF_FLINK)
    groups = [get_command(app)]
    while groups:
        command = groups.pop()
        known |= {name for parameter in command.params for name in parameter.opts}
        groups += getattr(command, "commands", {}).values()
    benchmarks = "".join(
        path.read_text()
        for path in (ROOT / "benchmarks").rglob("*.py")
        if "work" not in path.relative_to(ROOT).parts  # what the peers install there
    )
    for option in _OPTION.findall(page.read_text()):
        assert option in known or f'"{option}"' in benchmarks, option


@of_each_page
def test_each_file_exists(page: Path) -> None:
    text = page.read_text()
    for name in _FILE.findall(text):
        assert (ROOT / name).exists(), name
    for target in _LINK.findall(text):
        assert (page.parent / target).exists(), target


@of_each_page
def test_what_is_made_from_the_code_is_as_the_code_is_now(page: Path) -> None:
    text = page.read_text()

    assert generated(text) == text, "run `python -m tests.generated_pages`"


def test_there_are_generated_parts() -> None:
    text = "".join(page.read_text() for page in PAGES)

    assert {f"<!-- generated: {name} -->" for name in PARTS} <= set(text.splitlines())


def test_the_api_page_has_each_public_name_once() -> None:
    named = re.findall(r"^::: tallystick\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(tallystick.__all__)
