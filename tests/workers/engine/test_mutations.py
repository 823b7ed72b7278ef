"""The mutations still fit the code that they break."""

import shutil
from pathlib import Path

import pytest

from tests.workers.engine.mutations import MUTATIONS, ROOT, TESTS, Mutation, apply


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.fault)
def test_it_applies(mutation: Mutation, tmp_path: Path) -> None:
    (tmp_path / mutation.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.file, tmp_path / mutation.file)
    before = apply(mutation, tmp_path)
    assert (tmp_path / mutation.file).read_text() != before
    assert all((ROOT / TESTS / f"{name}.py").exists() for name in mutation.tests)
