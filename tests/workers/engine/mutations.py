"""Faults that would serve the wrong adapter or another text, put into the code one by one: a test must go red for each.

`python -m tests.workers.engine.mutations` copies the tree, breaks one line of the copy at a time, runs the tests that
should notice, and prints the table; it exits with 1 if a fault went unnoticed. test_mutations.py sees to it that every
line still is where it is said to be.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[3]
ENGINE, TESTS = "workers/engine", "tests/workers/engine"
LIMIT_S = 240


@dataclass(frozen=True)
class Mutation:
    """`right` stands once in `file`, and `wrong` takes its place. `tests`: files of tests/workers/engine."""

    fault: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "slot index off by one, in the rows of a step",
        f"{ENGINE}/torch_runner.py",
        "slots = [row.sequence.lease.slot for row in rows]",
        "slots = [max(0, row.sequence.lease.slot - 1) for row in rows]",
        ("test_isolation", "test_merging"),
    ),
    Mutation(
        "slot index off by one, in a pool",
        f"{ENGINE}/native.py",
        "ctypes.addressof(table), pool.first, pool.slots)",
        "ctypes.addressof(table), pool.first - 1, pool.slots)",
        ("test_operations", "test_isolation"),
    ),
    Mutation(
        "scale left out, in the kernel",
        f"{ENGINE}/kernels.cpp",
        "low[j][r] = scale * sum(",
        "low[j][r] = sum(",
        ("test_operations", "test_peft"),
    ),
    Mutation(
        "scale left out, in the merge",
        f"{ENGINE}/merging.py",
        "out[block] = total.mul_(scale).add_(weight[block])",
        "out[block] = total.add_(weight[block])",
        ("test_merging", "test_peft"),
    ),
    Mutation(
        "rank and alpha swapped",
        "streams/adapters/manifest.py",
        "float(alphas.get(module_name(place), alpha)) / (math.sqrt(r) if rslora else r)",
        "(math.sqrt(r) if rslora else r) / float(alphas.get(module_name(place), alpha))",
        ("test_peft",),
    ),
    Mutation(
        "a slot is not overwritten when it is filled again",
        f"{ENGINE}/stacks.py",
        "        return pool.fill(slot, image)",
        "        return pool.fill(slot, image) if not pool.data[slot - pool.first, 0] else 1",
        ("test_isolation", "test_operations"),
    ),
    Mutation(
        "a slot keeps its adapter after it was evicted",
        f"{ENGINE}/slots.py",
        "        self._of.pop(evicted, None)",
        "        pass",
        ("test_slots", "test_isolation", "test_stateful"),
    ),
    Mutation(
        "a slot in use is evicted",
        f"{ENGINE}/slots.py",
        "if s.pool == pool and not s.leases]",
        "if s.pool == pool]",
        ("test_slots", "test_stateful"),
    ),
    Mutation(
        "the epoch is not raised",
        f"{ENGINE}/slots.py",
        "slot.content_id, slot.epoch = content_id, slot.epoch + 1",
        "slot.content_id, slot.epoch = content_id, slot.epoch",
        ("test_slots", "test_stateful", "test_isolation"),
    ),
    Mutation(
        "the check of slot and epoch is removed",
        f"{ENGINE}/runner.py",
        "if held == sequence.lease and sequence.lease.content_id == sequence.content_id:",
        "if True:",
        ("test_isolation", "test_merging"),
    ),
    Mutation(
        "KV blocks shared between adapters",
        f"{ENGINE}/sequence.py",
        "return Space(self.customer, self.content_id, self.merged)",
        'return Space(self.customer, "", self.merged)',
        ("test_prefix_cache", "test_stateful"),
    ),
    Mutation(
        "KV blocks shared between customers",
        f"{ENGINE}/sequence.py",
        "return Space(self.customer, self.content_id, self.merged)",
        'return Space("", self.content_id, self.merged)',
        ("test_prefix_cache", "test_stateful"),
    ),
    Mutation(
        "KV blocks shared between merged and unmerged",
        f"{ENGINE}/sequence.py",
        "return Space(self.customer, self.content_id, self.merged)",
        "return Space(self.customer, self.content_id, False)",
        ("test_merging",),
    ),
    Mutation(
        "a block's prefix is found by its own tokens alone",
        f"{ENGINE}/prefix.py",
        'return parent, array("q", tokens).tobytes()',
        'return 0, array("q", tokens).tobytes()',
        ("test_prefix", "test_prefix_cache"),
    ),
    Mutation(
        "a block in use is given to another sequence",
        f"{ENGINE}/kv_blocks.py",
        "        if self._holders[block]:\n            return\n",
        "",
        ("test_kv_blocks", "test_stateful", "test_prefix_cache"),
    ),
    Mutation(
        "noise does not depend on the seed",
        f"{ENGINE}/kernels.cpp",
        "noise(seeds[row], positions[row])",
        "noise(0, positions[row])",
        ("test_operations",),
    ),
    Mutation(
        "noise counts from where an attempt began",
        f"{ENGINE}/torch_runner.py",
        "positions=torch.tensor([row.sequence.length for row in rows]),",
        "positions=torch.tensor([len(row.sequence.tokens) - row.sequence.given for row in rows]),",
        ("test_isolation", "test_logits"),
    ),
    Mutation(
        "B of another layer",
        f"{ENGINE}/stacks.py",
        "span.b + layer * self.rank * span.d",
        "span.b + (layer ^ 1) * self.rank * span.d",
        ("test_peft", "test_model"),
    ),
    Mutation(
        "a merged matrix is not restored",
        f"{ENGINE}/merging.py",
        "            foldable.weight.data.copy_(self._packed(self._read(checkpoint, foldable), foldable))\n",
        "",
        ("test_merging",),
    ),
    Mutation(
        "the merge is not compared with the slot",
        f"{ENGINE}/torch_runner.py",
        "if not worst <= (most := self._weights.tolerance):",
        "if (most := self._weights.tolerance) < 0:",
        ("test_merging",),
    ),
    Mutation(
        "any adapter runs while one is merged",
        f"{ENGINE}/slots.py",
        "return content_id == merged if merged else content_id in self._of",
        "return content_id == merged or content_id in self._of",
        ("test_merging", "test_slots"),
    ),
    Mutation(
        "a failed row's blocks are taken over",
        f"{ENGINE}/kv_blocks.py",
        "            for known in self._prefixes.forget(block):",
        "            for known in []:",
        ("test_prefix_cache", "test_kv_blocks"),
    ),
]


def apply(mutation: Mutation, root: Path) -> str:
    """Breaks the file under `root`; what it was before. Raises ValueError if the line is not there once."""
    file = root / mutation.file
    text = file.read_text()
    if text.count(mutation.right) != 1:
        raise ValueError(f"{mutation.file}: {text.count(mutation.right)} times, not once: {mutation.right!r}")
    file.write_text(text.replace(mutation.right, mutation.wrong))
    return text


def red(mutation: Mutation, root: Path) -> list[str]:
    """The tests that fail in `root`, broken as it is."""
    files = [f"{TESTS}/{name}.py" for name in mutation.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=3", *files]
    ended = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=LIMIT_S
    )
    return re.findall(r"^(?:FAILED|ERROR) \S+/(\S+?)(?: - .*)?$", ended.stdout, re.MULTILINE)


def main() -> int:
    table = Table("fault", "where", "tests that go red", title="Mutations of the engine")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="lorafleet-mutations-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", ".venv", ".lorafleet", "__pycache__"))
        for mutation in MUTATIONS:
            before = apply(mutation, root)
            failed = red(mutation, root)
            (root / mutation.file).write_text(before)
            missed += not failed
            told = "\n".join(failed) or "[red]NONE[/red]"
            table.add_row(mutation.fault, mutation.file.removeprefix(f"{ENGINE}/"), told)
            print(f"{mutation.fault}: {len(failed)} red", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
