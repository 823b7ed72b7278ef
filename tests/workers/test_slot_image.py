import os
from pathlib import Path

import numpy as np
import pytest

from streams.adapters.shape import MATRICES, ModelShape
from workers.slot_image import (
    HEADER_BYTES,
    ImageError,
    Precision,
    image_bytes,
    open_image,
    slot_pools,
    slot_rank,
    write_image,
)

SHAPE = ModelShape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=64, context=128)
CONTENT = "ab" * 32


def tensors(
    rank: int, precision: Precision = Precision.F32
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray, float]]:
    """Values that `precision` keeps and no narrower one does."""
    random = np.random.default_rng(1)

    def draw(*size: int) -> np.ndarray:
        values = random.standard_normal(size, np.float32)
        if precision is Precision.BF16:
            return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return values.astype(np.float16).astype(np.float32) if precision is Precision.F16 else values

    return {
        (layer, matrix): (draw(rank, SHAPE.matrices()[matrix][0]), draw(SHAPE.matrices()[matrix][1], rank), 2.0)
        for layer, matrix in ((0, "q"), (1, "q"), (1, "down"))
    }


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_an_image_gives_back_what_was_written_and_zeros_elsewhere(
    tmp_path: Path, rank: int, precision: Precision
) -> None:
    written = tensors(rank, precision)
    write_image(tmp_path / "image", SHAPE, 8, CONTENT, written)
    assert (tmp_path / "image").stat().st_size == image_bytes(SHAPE, 8, precision)
    assert [file.name for file in tmp_path.iterdir()] == ["image"]
    image = open_image(tmp_path / "image", CONTENT, SHAPE, 8)
    assert image.precision is precision
    for matrix, (k, d) in SHAPE.matrices().items():
        for layer in range(2):
            a, b, scale = written.get((layer, matrix), (np.zeros((0, k)), np.zeros((d, 0)), 0.0))
            assert image.scale()[MATRICES.index(matrix), layer] == scale
            np.testing.assert_array_equal(image.a(layer, matrix), np.pad(a, ((0, 8 - len(a)), (0, 0))))
            np.testing.assert_array_equal(image.b(layer, matrix), np.pad(b, ((0, 0), (0, 8 - b.shape[1]))))


def test_another_content_rank_model_or_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image"
    write_image(path, SHAPE, 8, CONTENT, tensors(8))
    with pytest.raises(ImageError, match="holds content"):
        open_image(path, "cd" * 32, SHAPE, 8)
    with pytest.raises(ImageError, match="rank"):
        open_image(path, CONTENT, SHAPE, 16)
    deeper = ModelShape(3, 32, 48, 4, 2, 16, 64, 128)
    with pytest.raises(ImageError, match="payload"):
        open_image(path, CONTENT, deeper, 8)
    with pytest.raises(ImageError, match="sha256"):
        open_image(path, "ab", SHAPE, 8)
    with pytest.raises(ImageError, match="cannot read"):
        open_image(tmp_path / "absent", CONTENT, SHAPE, 8)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ImageError, match="bytes"):
        open_image(path, CONTENT, SHAPE, 8)
    path.write_bytes(b"x" * HEADER_BYTES)
    with pytest.raises(ImageError, match="magic"):
        open_image(path, CONTENT, SHAPE, 8)


@pytest.mark.parametrize(
    ("key", "a", "b", "scale", "said"),
    [
        ((0, "q"), (9, 32), (64, 9), 1.0, "do not fit"),
        ((0, "q"), (8, 31), (64, 8), 1.0, "do not fit"),
        ((0, "q"), (8, 32), (64, 7), 1.0, "do not fit"),
        ((2, "q"), (8, 32), (64, 8), 1.0, "no such matrix"),
        ((0, "lm_head"), (8, 32), (64, 8), 1.0, "no such matrix"),
        ((0, "q"), (8, 32), (64, 8), float("nan"), "not finite"),
    ],
)
def test_a_tensor_that_does_not_fit_leaves_no_file(
    tmp_path: Path, key: tuple[int, str], a: tuple[int, int], b: tuple[int, int], scale: float, said: str
) -> None:
    bad = {key: (np.zeros(a, np.float32), np.zeros(b, np.float32), scale)}
    with pytest.raises(ImageError, match=said):
        write_image(tmp_path / "image", SHAPE, 8, CONTENT, bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [1 + 2**-23, 1 + 2**-8, 65520.0, 2.0**-25, float("inf")])
def test_one_value_decides_the_precision_of_all(tmp_path: Path, value: float) -> None:
    """16 bits are taken only where they give every value back to the bit, and never because they were asked for."""
    written = tensors(8, Precision.BF16)
    written[0, "q"][0][0, 0] = 2.0**-60  # beyond float16
    written[1, "down"][1][31, 3] = value
    write_image(tmp_path / "image", SHAPE, 8, CONTENT, written)
    image = open_image(tmp_path / "image", CONTENT, SHAPE, 8)
    bf16 = not np.float32(value).view(np.uint32) & 0xFFFF
    assert image.precision is (Precision.BF16 if bf16 else Precision.F32)
    for (layer, matrix), (a, b, _) in written.items():
        np.testing.assert_array_equal(image.a(layer, matrix), a)
        np.testing.assert_array_equal(image.b(layer, matrix), b)
    for asked in (Precision.BF16, Precision.F16):
        if asked is not image.precision:
            with pytest.raises(ImageError, match="does not keep"):
                write_image(tmp_path / "other", SHAPE, 8, CONTENT, written, asked)


@pytest.mark.parametrize("told", [0.0, 4.0, 2.5, float("nan")])
def test_an_unknown_precision_is_refused(tmp_path: Path, told: float) -> None:
    path = tmp_path / "image"
    write_image(path, SHAPE, 8, CONTENT, tensors(8, Precision.BF16))
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES : HEADER_BYTES + 4] = np.float32(told).tobytes()
    path.write_bytes(raw)
    with pytest.raises(ImageError, match="precision"):
        open_image(path, CONTENT, SHAPE, 8)
    raw[HEADER_BYTES : HEADER_BYTES + 4] = np.float32(1).tobytes()
    path.write_bytes(raw)
    with pytest.raises(ImageError, match="payload"):
        open_image(path, CONTENT, SHAPE, 8)


@pytest.mark.parametrize("place", ["ranks", "scale"])
@pytest.mark.parametrize("told", [9.0, 1.5, -1.0, float("nan"), float("inf")])
def test_a_rank_or_scale_that_is_none_is_refused(tmp_path: Path, place: str, told: float) -> None:
    path = tmp_path / "image"
    write_image(path, SHAPE, 8, CONTENT, tensors(4))
    held = getattr(open_image(path, CONTENT, SHAPE, 8), place)()
    raw = bytearray(path.read_bytes())
    at = raw.index(held.tobytes(), HEADER_BYTES)
    raw[at : at + 4] = np.float32(told).tobytes()
    path.write_bytes(raw)
    if place == "scale" and np.isfinite(told):
        assert open_image(path, CONTENT, SHAPE, 8).scale()[0, 0] == np.float32(told)
        return
    with pytest.raises(ImageError, match="whole numbers up to 8"):
        open_image(path, CONTENT, SHAPE, 8)


@pytest.mark.parametrize("left", [0, 100, HEADER_BYTES, HEADER_BYTES + 100])
def test_an_image_cut_while_it_is_open_is_an_error_of_its_own(tmp_path: Path, left: int) -> None:
    """And not the end of the process, as a mapped file would be."""
    path = tmp_path / "image"
    write_image(path, SHAPE, 8, CONTENT, tensors(8))
    image = open_image(path, CONTENT, SHAPE, 8)
    os.truncate(path, left)
    with pytest.raises(ImageError, match="cut"):
        image.copy_to(np.empty(image.payload_bytes, np.uint8))
    with pytest.raises(ImageError, match="cut"):
        image.b(1, "down")


def test_an_image_outlives_its_name(tmp_path: Path) -> None:
    write_image(tmp_path / "image", SHAPE, 8, CONTENT, tensors(8))
    image, payload = open_image(tmp_path / "image", CONTENT, SHAPE, 8), (tmp_path / "image").read_bytes()[HEADER_BYTES:]
    (tmp_path / "image").unlink()
    memory = np.empty(image.payload_bytes, np.uint8)
    image.copy_to(memory)
    assert memory.tobytes() == payload


def test_a_failed_rewrite_keeps_the_old_image(tmp_path: Path) -> None:
    write_image(tmp_path / "image", SHAPE, 8, CONTENT, tensors(8))
    with pytest.raises(ImageError):
        write_image(tmp_path / "image", SHAPE, 8, CONTENT, {(9, "q"): next(iter(tensors(8).values()))})
    open_image(tmp_path / "image", CONTENT, SHAPE, 8)


def test_pools_of_slots() -> None:
    assert slot_pools(8, 16, "") == {16: 8}
    assert list(slot_pools(8, 16, "16:4,8:24").items()) == [(8, 24), (16, 4)]
    for wrong in ("16", "16:0", "x:1", "16:4,16:2", "8:4", "32:4,16:1"):
        with pytest.raises(ValueError):
            slot_pools(8, 16, wrong)
    with pytest.raises(ValueError, match="512"):
        slot_pools(8, 513, "")  # beyond it the kernels write over their stack
    assert [slot_rank(rank, (8, 16)) for rank in (0, 1, 8, 9, 16)] == [8, 8, 8, 16, 16]
    with pytest.raises(ImageError, match="17"):
        slot_rank(17, (8, 16))
