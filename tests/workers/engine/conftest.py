from pathlib import Path

import pytest
import torch

from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import save_tiny
from workers.engine.compiled import best_isa
from workers.engine.native import NativeOperations


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tensors as small as these only lose by torch's threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shape(tiny: Path) -> ModelShape:
    return ModelShape.of(tiny)


@pytest.fixture(scope="session")
def native() -> NativeOperations:
    return NativeOperations(2, best_isa())
