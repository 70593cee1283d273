"""How the project is built: who imports whom, what loads when, how long a function may be, what the files promise."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.glob("duochat/**/*.py"))}
SOURCES = [*MODULES.values(), ROOT / "app.py", *sorted(ROOT.glob("tests/*.py"))]
ROOMS = "duochat terminal config models engine chat bench distill api app __main__"
ORDER = ROOMS.split()  # imports go to the left


def room(module):
    parts = module.split(".")
    return ORDER.index(parts[1] if len(parts) > 1 and parts[1] != "__init__" else "duochat")


def imports(module, when="always"):
    """The project's modules that a module imports; when="loading": at import time only, types apart."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if when == "always" else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "duochat":
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES or f"{whole}.__init__" in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "duochat")


def test_modules_import_only_from_their_left():
    wrong = [
        f"{module} imports {other}" for module in MODULES for other in imports(module) if room(other) > room(module)
    ]
    assert wrong == []


def test_no_module_imports_itself_in_a_circle():
    def named(other):
        return other if other in MODULES else f"{other}.__init__"

    done = set()

    def visit(module, path):
        assert module not in path, " → ".join([*path, module])
        if module in done:
            return
        for other in map(named, imports(module, "loading")):
            if other != module and not other.endswith("__init__"):
                visit(other, [*path, module])
        done.add(module)

    for module in MODULES:
        visit(module, [])


HEAVY = ("duochat.engine.", "duochat.bench.", "duochat.distill.")
PURE = [f"duochat.engine.{name}" for name in ("rounds", "sampling", "lanes", "tree")]
LIGHT = [m.removesuffix(".__init__") for m in MODULES if not m.startswith(HEAVY) or m in PURE]


def test_the_app_loads_neither_torch_nor_llama_cpp():
    """`import duochat` and everything for people work with neither of them installed."""
    block = "import sys, importlib\nfor name in ('torch', 'llama_cpp', 'transformers'): sys.modules[name] = None\n"
    script = block + f"for name in {LIGHT}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def functions(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short(path):
    long = {f.name: n for f in functions(path) if (n := f.end_lineno - f.lineno + 1) > 45}
    assert long == {}


def test_modules_scripts_and_styles_are_short():
    most = dict.fromkeys((*MODULES.values(), ROOT / "app.py"), 350)
    most |= {path: 500 for path in (ROOT / "assets" / "page").rglob("*") if path.suffix in (".js", ".css")}
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in most}
    assert {str(path): n for path, n in lines.items() if n > most[path]} == {}


def test_every_module_says_what_it_is():
    silent = [str(p) for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert silent == []


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_linter_and_formatter_have_nothing_to_say(command):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, str(ROOT)], text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:]


# ---------------------------------------------------------------- project files


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True).stdout.split()
    return [ROOT / name for name in listed]


def test_the_default_pair_is_named_in_one_place():
    import yaml

    default = yaml.safe_load((ROOT / "configs" / "default.yaml").read_text())
    places = [p for p in [*MODULES.values(), ROOT / "app.py"] if default["target"].partition("#")[0] in p.read_text()]
    assert places == []


def test_nothing_points_outside_the_project():
    """No file knows the machine that it was written on."""
    outside = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    texts = [p for p in tracked() if p.suffix in (".py", ".md", ".yaml", ".txt", ".js", ".css", "") and p.is_file()]
    found = [str(p) for p in texts if p != Path(__file__) and outside.search(p.read_text(errors="ignore"))]
    assert found == []


def shell_commands():
    return re.findall(r"^python3 -m venv.*$", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_readme_has_two_commands_and_ci_runs_both():
    start, test = shell_commands()
    assert start.endswith("app.py")
    assert test.endswith("-m pytest")
    assert {start, test} <= set((ROOT / ".ci" / "run").read_text().splitlines())


def test_readme_names_every_command_and_preset_key():
    from duochat.__main__ import COMMANDS

    readme = (ROOT / "README.md").read_text()
    assert all(f"python -m duochat {name}" in readme for name in COMMANDS)


def test_requirements_are_bounded_on_both_sides():
    for name in ("requirements.txt", ".requirements-test.txt"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        loose = [line for line in lines if not re.fullmatch(r"[\w.-]+(==[\w.]+|>=[\w.]+,<[\w.]+)", line)]
        assert loose == []
