"""What would be published is whole, and says its version, license and changes in one form."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import tallystick
from tests.release import WITH_VERSION, headings, lacking, set_version, version_of
from tests.wheel import ROOT

KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_is_of_one_place() -> None:
    assert tallystick.__version__ == version_of(ROOT)
    assert "0." not in (ROOT / "tallystick/__init__.py").read_text()


def test_a_new_version_is_written_everywhere(tmp_path: Path) -> None:
    for name in WITH_VERSION:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    old = version_of(ROOT)
    set_version(tmp_path, "9.8.7")

    assert version_of(tmp_path) == version_of(tmp_path / "tools") == "9.8.7"
    for name in WITH_VERSION:
        text = (tmp_path / name).read_text()
        assert "9.8.7" in text
        assert not re.search(rf'(tallystick-|==|^version = "){re.escape(old)}', text, re.MULTILINE)
    tools = tomllib.loads((tmp_path / "tools/pyproject.toml").read_text())["project"]
    assert str(Requirement(tools["dependencies"][0])) == "tallystick==9.8.7"


def test_no_other_file_names_a_wheel_by_its_version() -> None:
    listed = subprocess.run(
        ["git", "grep", "-lE", r"tallystick-[0-9]+\.[0-9.]+[0-9]-py3", "--", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(listed.stdout.split()) <= set(WITH_VERSION)


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, *sections = text.split("\n## ")
    newest, *released = headings(ROOT)

    assert newest == ("Unreleased", "")
    assert all(day for _, day in released)
    assert len(sections) == len(headings(ROOT))
    for section in sections:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert set(kinds) <= KINDS
        assert len(kinds) == len(set(kinds))


def test_a_release_lacks_a_day_in_the_changelog_until_it_has_one(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.2.0]\n")
    (missing,) = lacking(tmp_path)
    assert "## [0.2.0] - YYYY-MM-DD" in missing

    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n")
    assert not [*lacking(tmp_path)]


def test_the_tools_have_the_same_license() -> None:
    assert (ROOT / "tools/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_what_is_vendored_is_in_the_notice() -> None:
    notice = (ROOT / "NOTICE").read_text()
    minified = [*(ROOT / "tallystick").rglob("*.min.*")]
    licenses = [*(ROOT / "tallystick").rglob("*LICENSE*")]

    assert minified
    for path in [*minified, *licenses, ROOT / "tallystick/kafka/messages.json"]:
        assert str(path.relative_to(ROOT)) in notice
