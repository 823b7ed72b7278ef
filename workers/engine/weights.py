"""The base model's tensors from safetensors, single or sharded. Every tensor is asked for exactly once, or refused."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from streams.adapters.base_model import weight_files
from workers.engine.model_config import UnsupportedModel
from workers.engine.pages import CPU

_DERIVED = "rotary_emb.inv_freq"  # older exports carry it; it follows from rope_theta


def _names(file: safe_open) -> list[str]:
    return list(file.keys())  # type: ignore[no-untyped-call]


class BaseWeights:
    """Hands out tensors by name, on `device`. `finish` raises UnsupportedModel if any was left over."""

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self._device = device
        self._files = [safe_open(folder / name, framework="pt") for name in weight_files(folder)]
        self._of = {name: file for file in self._files for name in _names(file)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices: bfloat16 if all are, else taken for float32, which holds each of the others."""
        slices = [file.get_slice(name) for name, file in self._of.items()]  # type: ignore[no-untyped-call]
        kinds = {part.get_dtype() for part in slices if len(part.get_shape()) == 2}
        return torch.bfloat16 if kinds == {"BF16"} else torch.float32

    def vector(self, name: str, size: int) -> Tensor:
        """A copy in float32, to be kept: the file may be written over while the model is served."""
        return self.take(name, size).to(torch.float32, copy=True)

    def take(self, name: str, *size: int) -> Tensor:
        """The tensor as stored, of exactly this size, where the file is mapped. Raises UnsupportedModel."""
        file = self._of.pop(name, None)
        if file is None:
            raise UnsupportedModel(f"{name}: no such tensor, or asked for twice")
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != size or not tensor.is_floating_point():
            raise UnsupportedModel(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected floats of {size}")
        return tensor.to(self._device)

    def drop(self, name: str, of: Tensor) -> None:
        """Leaves out a tensor that repeats another one, if it is there. Raises UnsupportedModel if it is no copy.

        Readers differ in which of two they take.
        """
        if name in self._of and not torch.equal(self.take(name, *of.shape), of):
            raise UnsupportedModel(f"tie_word_embeddings: true, but {name} is another tensor than the embedding")

    def finish(self) -> None:
        left = [name for name in self._of if not name.endswith(_DERIVED)]
        if left:
            raise UnsupportedModel(f"tensors that this engine does not know: {', '.join(sorted(left)[:8])}")
