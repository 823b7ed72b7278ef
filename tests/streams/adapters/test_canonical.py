"""The content id knows what an adapter is; the canonical file keeps it, to the byte, and betrays every change."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from streams.adapters.canonical import write_canonical
from streams.adapters.content import content_id
from streams.adapters.delta import Delta, Pair
from streams.adapters.tensors import BadFile
from tests.streams.adapters.files import BASE_HASH, TINY, header, read_back, with_header


def delta(seed: int = 0, scale: float = 2.0, rank: int = 4) -> dict[tuple[int, str], Pair]:
    random = np.random.default_rng(seed)
    return {
        (layer, matrix): Pair(
            random.normal(0, 0.1, (rank, k)).astype(np.float32),
            random.normal(0, 0.1, (d, rank)).astype(np.float32),
            scale,
        )
        for layer in (0, 2)
        for matrix, (k, d) in TINY.matrices().items()
    }


def rounded(to: str) -> dict[tuple[int, str], Pair]:
    def half(values: np.ndarray) -> np.ndarray:
        if to == "F16":
            return values.astype(np.float16).astype(np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    return {place: Pair(half(pair.a), half(pair.b), pair.scale) for place, pair in delta().items()}


def equal(left: Delta, right: Delta) -> bool:
    return set(left) == set(right) and all(
        (left[p].a == right[p].a).all() and (left[p].b == right[p].b).all() and left[p].scale == right[p].scale
        for p in left
    )


def test_the_id_does_not_depend_on_order() -> None:
    assert content_id(delta(), BASE_HASH) == content_id(dict(reversed(delta().items())), BASE_HASH)


def test_the_id_depends_on_everything_that_changes_the_result() -> None:
    changed = delta()
    changed[2, "down"].b[-1, -1] += 1e-6
    moved = {(layer + 1 if layer == 0 else layer, matrix): pair for (layer, matrix), pair in delta().items()}
    swapped = {**delta(), (0, "gate"): delta()[0, "up"], (0, "up"): delta()[0, "gate"]}
    ids = [
        content_id(delta(), BASE_HASH),
        content_id(delta(), "c" * 64),
        content_id(delta(scale=1.0), BASE_HASH),
        content_id(delta(rank=3), BASE_HASH),
        content_id(changed, BASE_HASH),
        content_id(moved, BASE_HASH),
        content_id(swapped, BASE_HASH),
        content_id({place: pair for place, pair in delta().items() if place != (0, "q")}, BASE_HASH),
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(("kind", "width"), [("F32", 4), ("F16", 2), ("BF16", 2)])
def test_it_reads_back_what_was_written_in_the_narrowest_dtype(tmp_path: Path, kind: str, width: int) -> None:
    written = delta() if kind == "F32" else rounded(kind)
    path = tmp_path / "a"
    identity = write_canonical(path, written, BASE_HASH)
    assert equal(read_back(path, identity, BASE_HASH), written)
    told = header(path.read_bytes())
    assert {entry["dtype"] for name, entry in told.items() if name != "__metadata__"} == {kind}
    values = sum(pair.a.size + pair.b.size for pair in written.values())
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 4096 == 0
    assert path.stat().st_size == 8 + length + values * width


def test_those_who_know_the_format_read_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_canonical(path, delta(), BASE_HASH)
    found = load_file(path)
    np.testing.assert_array_equal(found["layers.2.up.B"], delta()[2, "up"].b)


def test_the_bytes_are_a_function_of_the_content(tmp_path: Path) -> None:
    write_canonical(tmp_path / "a", delta(), BASE_HASH)
    write_canonical(tmp_path / "b", dict(reversed(delta().items())), BASE_HASH)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_identity_or_base_is_refused(tmp_path: Path) -> None:
    identity = write_canonical(tmp_path / "a", delta(), BASE_HASH)
    with pytest.raises(BadFile, match="content_id"):
        read_back(tmp_path / "a", "0" * 64, BASE_HASH)
    with pytest.raises(BadFile, match="base_hash"):
        read_back(tmp_path / "a", identity, "c" * 64)


@pytest.mark.parametrize("at", [-1, -5_000, 5_000, 40, 700])
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, at: int) -> None:
    identity = write_canonical(tmp_path / "a", delta(), BASE_HASH)
    data = bytearray((tmp_path / "a").read_bytes())
    checksum = hashlib.sha256(data).hexdigest()
    data[at] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(BadFile):
        read_back(tmp_path / "a", identity, BASE_HASH, checksum)


def test_a_file_cut_short_is_found(tmp_path: Path) -> None:
    identity = write_canonical(tmp_path / "a", delta(), BASE_HASH)
    data = (tmp_path / "a").read_bytes()
    for length in (0, 8, 100, 4096, len(data) - 1):
        (tmp_path / "a").write_bytes(data[:length])
        with pytest.raises(BadFile):
            read_back(tmp_path / "a", identity, BASE_HASH)


def test_a_scale_changed_in_the_metadata_is_found(tmp_path: Path) -> None:
    identity = write_canonical(tmp_path / "a", delta(), BASE_HASH)
    data = (tmp_path / "a").read_bytes()
    told = header(data)
    told["__metadata__"]["scales"] = told["__metadata__"]["scales"].replace("2.0", "3.0")
    (tmp_path / "a").write_bytes(with_header(data, told))
    with pytest.raises(BadFile, match="sha256"):
        read_back(tmp_path / "a", identity, BASE_HASH, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("scales", ["", "[]", '{"0": 1}', '{"0.x": 1}', '{"9.q": 1}', '{"0.q": "x"}', "{}"])
def test_scales_that_do_not_fit(tmp_path: Path, scales: str) -> None:
    identity = write_canonical(tmp_path / "a", delta(), BASE_HASH)
    data = (tmp_path / "a").read_bytes()
    told = header(data)
    told["__metadata__"]["scales"] = scales
    (tmp_path / "a").write_bytes(with_header(data, told))
    with pytest.raises(BadFile):
        read_back(tmp_path / "a", identity, BASE_HASH)
