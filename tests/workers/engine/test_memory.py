import pytest

from workers.engine.memory import Budget, kv_bytes

GB, MB = 10**9, 10**6
GIVEN = Budget(80 * GB, 14 * GB, 33_600 * MB, 4 * GB)


def test_the_design_s_own_figures() -> None:
    """80 GB, a base of 14, a KV cache of 33.6, a workspace of 4, adapters of 80 MB."""
    assert GIVEN.adapter_bytes == 28_400 * MB
    assert GIVEN.slots(80 * MB) == 355
    assert GIVEN.slots(80 * MB, cap=250) == 250
    assert GIVEN.slots(800 * MB, cap=250) == 35


def test_pools_fit_exactly_or_are_refused() -> None:
    assert GIVEN.spare_bytes({16: (355, 80 * MB)}) == 0
    assert GIVEN.spare_bytes({8: (100, 40 * MB), 16: (300, 80 * MB)}) == 400 * MB
    with pytest.raises(MemoryError, match="356 of rank 16"):
        GIVEN.spare_bytes({16: (356, 80 * MB)})


def test_a_base_that_leaves_no_room_is_refused() -> None:
    assert Budget(10, 5, 3, 2).slots(1) == 0
    with pytest.raises(MemoryError, match="1 more than"):
        Budget(10, 6, 3, 2).slots(1)


def test_kv_bytes_count_keys_and_values_of_every_layer() -> None:
    assert kv_bytes(layers=30, kv_heads=3, head_dim=64, tokens=16, value_bytes=4) == 2 * 30 * 3 * 64 * 16 * 4
