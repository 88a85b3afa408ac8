"""Rules that the tree keeps: who imports what, and that importing the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "dsv4dist"
ROOMS = ["config", "distributed", "kernels", "checkpoint", "cache", "step", "layers", "model", "workers", "engine"]
ONLY_IN = {
    "ray": {"workers", "cli", "bench", "smoke", "engine/metrics.py"},
    "triton": {"kernels", "cli"},
    "safetensors": {"checkpoint", "cli"},
}
ANYWHERE = {"errors", "arch", "env"}


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether it is imported when the file is) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found += [(name, node in tree.body) for name in names]
    return found


def _files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_rooms_import_only_what_stands_before_them() -> None:
    for path in _files():
        room = path.relative_to(ROOT).parts[0]
        if room not in ROOMS:
            continue
        for module, _ in _imports(path):
            target = module.split(".")[1] if module.startswith("dsv4dist.") else None
            if target in ROOMS and target != room:
                assert ROOMS.index(target) < ROOMS.index(room), f"{path}: {module}"


def test_heavy_libraries_stay_in_their_rooms() -> None:
    for path in _files():
        room = path.relative_to(ROOT).parts[0]
        for module, _ in _imports(path):
            library = module.split(".")[0]
            place = str(path.relative_to(ROOT))
            assert library not in ONLY_IN or {room, place} & ONLY_IN[library], f"{path} imports {module}"


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, dsv4dist; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_env_reads_the_environment() -> None:
    for path in _files():
        if path.name == "env.py":
            continue
        assert "os.environ" not in path.read_text(encoding="utf-8"), f"{path} reads os.environ; add a switch to env.py"
