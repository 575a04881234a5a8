"""The house keeps its shape: arrows go one way, and files stay readable."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "drafter": set(),
    # the interface of attention, and what must not be decided twice: how products round, how a kernel is
    # launched, how large a chunk of logits is
    "csbp": {"drafter.attention", "drafter.precision", "drafter.kernels.launch", "drafter.vocabulary"},
    "pipelines": {"drafter", "csbp"},
    "eval": {
        "drafter",
        "csbp",
        "pipelines.target",
        "pipelines.records",
        "pipelines.store",
        "pipelines.rejected",
        "pipelines.vllm_cpu_seeds",
    },
}
HOUSE = {*ALLOWED, "cli"}


def _project_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in HOUSE}


def _is_allowed(name: str, package: str) -> bool:
    targets = ALLOWED[package] | {package}
    inside = any(name == t or name.startswith(f"{t}.") for t in targets)
    leads_inside = any(t.startswith(f"{name}.") for t in targets)
    return inside or leads_inside


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_follow_the_arrows(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in sorted(_project_imports(path))
        if not _is_allowed(name, package)
    ]
    assert not wrong, wrong


def test_importing_the_command_line_loads_no_heavy_library():
    tree = ast.parse((ROOT / "cli.py").read_text())
    top = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    heavy = {"torch", "vllm", "transformers", "deepspeed", "datasets", "matplotlib"}
    assert not {name.split(".")[0] for name in top} & heavy
