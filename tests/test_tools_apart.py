"""The tools are a distribution of their own, in step with the package, which works without them."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from tallystick.__main__ import app
from tallystick.host.installed import pip_install
from tests.test_tidy import ROOT

COMMANDS = {"chaos": "chaos", "compare": "chaos", "demo": "demo"}
"""The extra that brings each."""
WITHOUT_TOOLS = """
import sys
sys.modules["tallystick_tools"] = None  # as where the distribution is not installed
from tallystick.__main__ import app
app(sys.argv[1:])
"""


def project(folder: str) -> dict[str, Any]:
    """Return what the pyproject.toml of a folder says of its distribution."""
    project_table: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())[
        "project"
    ]
    return project_table


def without_tools(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that cannot import the tools."""
    command = [sys.executable, "-c", WITHOUT_TOOLS, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_package_and_tools_have_one_version_and_ask_for_each_other_exactly() -> None:
    package, tools = project("."), project("tools")
    exactly = f"=={package['version']}"
    extras = package["optional-dependencies"]
    of_tools = [*tools["dependencies"], *tools["optional-dependencies"]["demo"]]
    requirements = [Requirement(text) for text in (*extras["chaos"], *extras["demo"], *of_tools)]

    assert tools["version"] == package["version"]
    assert tools["requires-python"] == package["requires-python"]
    assert {
        (requirement.name, str(requirement.specifier))
        for requirement in requirements
        if requirement.name.startswith("tallystick")
    } == {("tallystick-tools", exactly), ("tallystick", exactly)}


def test_the_plugin_of_pytest_is_where_the_tools_say() -> None:
    ((name, value),) = project("tools")["entry-points"]["pytest11"].items()

    assert callable(EntryPoint(name, value, "pytest11").load().tallystick_chaos)


def test_the_commands_are_offered_where_the_tools_are_installed() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]

    assert {len(commands[name].params) > 1 for name in COMMANDS} == {True}


@pytest.mark.parametrize("tool", COMMANDS)
@pytest.mark.parametrize("words", [(), ("--kills", "3", "--input", "a=b", "--", "python", "a.py")])
def test_without_the_tools_their_commands_say_how_to_install_them(
    tool: str, words: tuple[str, ...]
) -> None:
    done = without_tools(tool, *words)

    assert done.returncode == 1
    assert done.stderr == (f"`tallystick {tool}` is not installed: {pip_install(COMMANDS[tool])}\n")


def test_without_the_tools_all_other_commands_are_there() -> None:
    done = without_tools("--help")

    assert done.returncode == 0
    for name in ("broker", "doctor", "inspect", "warm-up", *COMMANDS):
        assert f" {name} " in done.stdout
    assert done.stdout.count("Not installed") == len(COMMANDS)
