"""Who may import whom, which modules stay pure, and what no file may be named or contain."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("schemas", "gateway", "workers", "streams", "infra", "replay", "tests")
SHARED = (
    "streams.bus",
    "streams.adapters",
    "streams.formats",
    "streams.placement",
    "streams.presence",
    "streams.tracing",
)
# First match wins: which of our packages a module may import besides its own.
ALLOWED = {
    "schemas": ("schemas",),
    "gateway": ("schemas", "gateway", *SHARED),
    "workers": ("schemas", "workers", *SHARED),
    "streams": ("schemas", "streams"),
    "infra": OURS[:-2],
    "replay": OURS[:-1],
    "tests": OURS,
}
# Package -> the only places that may import it.
HOMES = {
    "aiokafka": ("streams.bus", "replay.pingpong"),  # the bare client is what the benchmark measures against
    "faust": ("streams.control", "streams.bus.settings"),  # its credentials come out of the same settings
    "torch": ("workers.engine", "replay", "tests"),
    "llguidance": ("streams.formats",),
    "opentelemetry": ("streams.tracing", "gateway.traces", "workers.traces"),
}
PURE = (
    "schemas", "streams.placement", "streams.presence.listening", "streams.presence.holders", "streams.adapters.shape",
    "gateway.flight", "gateway.flights", "gateway.fleet", "gateway.loadview", "gateway.router", "gateway.sequencer",
    "workers.inbox", "workers.audit", "workers.residency", "workers.loader.shelf", "workers.loader.owned",
    "workers.loader.governor",
)  # fmt: skip
IMPURE = {"aiokafka", "aiohttp", "faust", "torch", "time", "random", "secrets", "uuid", "asyncio", "threading"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@cache
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module named, wherever in the file: an import inside a function is one too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            # `from streams import bus` names streams.bus.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in tracked()
    if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in OURS
}


@pytest.mark.parametrize("module", MODULES)
def test_imports(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    # A module that calls itself pure is held to it.
    pure = inside(module, PURE) or "Pure." in (ast.get_docstring(tree) or "").partition("\n\n")[0]
    for name in imports(tree):
        top = name.partition(".")[0]
        if top in OURS:
            assert inside(name, ALLOWED[module.partition(".")[0]]), f"{module} must not import {name}"
        if top in HOMES:
            assert inside(module, (*HOMES[top], "tests")), f"only {HOMES[top]} may import {top}, not {module}"
        if pure and not inside(module, ("tests",)):
            assert top not in IMPURE, f"{module} is pure and must not import {name}"


def test_every_pure_module_is_there() -> None:
    for module in PURE:
        assert module in MODULES, f"{module} has moved: mend PURE"


def test_names_say_something() -> None:
    for path in tracked():
        parts = {part.partition(".")[0] for part in path.relative_to(ROOT).parts}
        assert not parts & FORBIDDEN_NAMES, f"{path.relative_to(ROOT)}: name it by what it holds"


def test_nothing_of_the_machine_it_was_written_on() -> None:
    # Written so that this file does not match itself.
    machine = re.compile(rb"/(?:work|root)/|files\.python" + rb"hosted\.org|(?:index-url|registry)[ =]+https?:", re.I)
    for path in tracked():
        found = machine.search(path.read_bytes())
        assert found is None, f"{path.relative_to(ROOT)} holds {found.group() if found else b''!r}"
