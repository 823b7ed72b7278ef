"""The content id: what an adapter is, whoever calls it what. Pure.

sha256 over the base's hash and, for each adapted matrix in the one order, its rank, scale and values as float32. The
file's dtype, the tensors' order and every field of the config without effect leave it as it is.
"""

import hashlib

import numpy as np

from streams.adapters.delta import Delta, ordered

_DOMAIN = b"lorafleet adapter content 1\n"


def content_id(delta: Delta, base_hash: str) -> str:
    """64 hex digits."""
    digest = hashlib.sha256(_DOMAIN)
    digest.update(f"base {base_hash}\n".encode())
    for layer, matrix in ordered(delta):
        a, b, scale = delta[layer, matrix]
        digest.update(f"{layer} {matrix} a {a.shape} b {b.shape} scale {float(scale).hex()}\n".encode())
        # Little-endian bytes on every machine. -0.0 and 0.0 stay two values: they are different bits in the engine.
        digest.update(np.ascontiguousarray(a, "<f4").data)
        digest.update(np.ascontiguousarray(b, "<f4").data)
    return digest.hexdigest()
