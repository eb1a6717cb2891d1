"""Parts of the pages that are made from the code; `python -m tests.generated_pages` writes them.

Such a part stands between `<!-- generated: NAME -->` and `<!-- end -->`. `tests/test_docs.py`
compares it with what is made now.
"""

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.kills import summary as peers
from tallystick.epoch.phases import NEXT_PHASES, Phase
from tallystick.ops import metrics, remedies
from tallystick.options.source import SOURCE
from tests import matrix
from tests.campaign import summary
from tests.faults import seen as operators
from tests.simulation import justify
from tests.test_tidy import MAY_IMPORT, PURE, path_of_layer

ROOT = Path(__file__).parents[1]
_PART = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
_GIVEN_UP = (Phase.FENCING, Phase.STOPPING, Phase.STOPPED)


def layers() -> str:
    """A table of the layers, each with its purpose and what it may import."""
    rows = ["| layer | holds | pure | imports |", "| --- | --- | --- | --- |"]
    above: set[str] = set()
    for layer, imports in MAY_IMPORT.items():
        path = path_of_layer(layer)
        is_folder = path.name == "__init__.py" and layer != "__init__"
        (purpose, *_) = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        name = f"`{layer}/`" if is_folder else f"`{layer}.py`"
        not_allowed = sorted(above - imports)
        allowed = ", ".join(sorted(imports))
        if len(imports) > len(above) / 2 and not_allowed:
            allowed = f"all above but {', '.join(not_allowed)}"
        elif imports and not not_allowed:
            allowed = "all above"
        above.add(layer)
        pure = "yes" if layer in PURE else ""
        rows.append(f"| {name} | {purpose} | {pure} | {allowed} |")
    return "\n".join(rows)


def phases() -> str:
    """The phases of an epoch: a diagram of how they follow each other, and what each means."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.IDLE.name}"]
    for phase, following in NEXT_PHASES.items():
        lines += [
            f"    {phase.name} --> {after.name}"
            for after in Phase
            if after in following and (after not in _GIVEN_UP or phase is Phase.IDLE)
        ]
    lines += ["```", "", "| phase | means | a failure leads to |", "| --- | --- | --- |"]
    meanings = dict(re.findall(r"(\w+) = auto\(\)  # (.+)", inspect.getsource(Phase)))
    for phase, following in NEXT_PHASES.items():
        failed = [after.name for after in _GIVEN_UP if after in following]
        shown = " or ".join(failed) if phase is not Phase.IDLE else ""
        lines.append(f"| {phase.name} | {meanings[phase.name]} | {shown} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "layers": layers,
    "phases": phases,
    "source_options": SOURCE.page,
    "metrics": metrics.page,
    "errors": remedies.page,
    "matrix": matrix.summary,
    "faults": summary.faults,
    "operator_faults": operators.page,
    "campaign": summary.campaign,
    "simulated_faults": justify.page,
    "peer_faults": peers.kinds,
    "peers": peers.comparison,
    "peer_outages": peers.outages,
}


def generated(text: str) -> str:
    """Return the text of a page with its generated parts as they are now."""
    return _PART.sub(lambda match: f"{match[1]}{match[2]}{PARTS[match[1]]()}\n", text)


def main() -> None:
    """Write the generated parts of all pages."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page.write_text(generated(page.read_text()))


if __name__ == "__main__":
    main()
