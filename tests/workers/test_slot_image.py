from pathlib import Path

import numpy as np
import pytest

from streams.adapters.shape import MATRICES, ModelShape
from workers.slot_image import HEADER_BYTES, ImageError, image_bytes, open_image, slot_pools, slot_rank, write_image

SHAPE = ModelShape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab=64, context=128)
CONTENT = "ab" * 32


def tensors(rank: int) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray, float]]:
    random = np.random.default_rng(1)
    return {
        (layer, matrix): (
            random.standard_normal((rank, SHAPE.matrices()[matrix][0]), np.float32),
            random.standard_normal((SHAPE.matrices()[matrix][1], rank), np.float32),
            2.0,
        )
        for layer, matrix in ((0, "q"), (1, "q"), (1, "down"))
    }


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_an_image_gives_back_what_was_written_and_zeros_elsewhere(tmp_path: Path, rank: int) -> None:
    written = tensors(rank)
    write_image(tmp_path / "image", SHAPE, 8, CONTENT, written)
    assert (tmp_path / "image").stat().st_size == image_bytes(SHAPE, 8)
    assert [file.name for file in tmp_path.iterdir()] == ["image"]
    image = open_image(tmp_path / "image", CONTENT, SHAPE, 8)
    for matrix, (k, d) in SHAPE.matrices().items():
        assert (image.a(matrix).shape, image.b(matrix).shape) == ((2, 8, k), (2, d, 8))
        for layer in range(2):
            a, b, scale = written.get((layer, matrix), (np.zeros((0, k)), np.zeros((d, 0)), 0.0))
            assert image.scale()[MATRICES.index(matrix), layer] == scale
            np.testing.assert_array_equal(image.a(matrix)[layer], np.pad(a, ((0, 8 - len(a)), (0, 0))))
            np.testing.assert_array_equal(image.b(matrix)[layer], np.pad(b, ((0, 0), (0, 8 - b.shape[1]))))


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
    assert [slot_rank(rank, (8, 16)) for rank in (0, 1, 8, 9, 16)] == [8, 8, 8, 16, 16]
    with pytest.raises(ImageError, match="17"):
        slot_rank(17, (8, 16))
