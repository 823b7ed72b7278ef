from pathlib import Path

import pytest

from replay.engine_bench.bf16 import bf16_copy, measure_bf16
from replay.engine_bench.machine import Best, limit
from replay.engine_bench.measure import _overhead
from replay.engine_bench.registered import measure_registered
from replay.engine_bench.rig import REQUESTS, Rig, base_leases, image_of, shared, turns, write_adapters
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import save_tiny
from workers.engine import engine
from workers.engine.compiled import best_isa

SHAPE = ModelShape(layers=1, hidden=16, intermediate=32, heads=1, kv_heads=1, head_dim=16, vocab=64, context=128)


def test_the_limit_is_the_slower_of_arithmetic_and_memory() -> None:
    layers, head, low = 4 * 16 * 16 + 3 * 16 * 32, 16 * 64, 2 * (4 * 32 + 3 * 48)
    slow_memory = limit(SHAPE, Best(1e9, 1.0), 4, 8, 2, 3, 2)
    attention, cached = 4 * 16 * 4 * 45, 2 * 16 * 4 * 4 * (8 + 9)
    assert slow_memory.flops == 2 * 4 * 9 * (layers + low) + 2 * 4 * 2 * head + attention
    assert slow_memory.bytes == 2 * 4 * (layers + head + 3 * low) + cached
    assert (slow_memory.by, slow_memory.seconds) == ("memory", slow_memory.bytes / 1e9)
    assert slow_memory.tokens_s == 8 / slow_memory.seconds
    assert limit(SHAPE, Best(1.0, 1e9), 4, 8, 2, 0, 2).by == "arithmetic"


def test_an_overhead_is_the_median_ratio_within_its_interval() -> None:
    base = [1.0 + at % 7 / 10 for at in range(200)]
    found = _overhead("s", 32, base, [b * (1.1 if at % 2 else 1.06) for at, b in enumerate(base)])
    assert found.low <= found.percent <= found.high
    assert 5.9 <= found.low <= found.high <= 10.1
    assert (found.pairs, found.adapters) == (200, 32)


def test_the_engine_serves_every_kind_of_run(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    shape = ModelShape.of(model)
    rig = Rig(model, 1, 4, 24)
    images = [image_of(a, tmp_path / a.name, shape) for a in write_adapters(tmp_path / "peft", shape, 4)]
    leases = [rig.load(image) for image in images]
    contents = [lease.content_id for lease in shared(leases)]
    served = rig.serve(contents, 16, 12)
    assert (served.output_tokens, served.most_adapters, len(served.ttft_s)) == (REQUESTS * 12, 4, REQUESTS)
    kinds = {
        "base": rig.decode_rows(base_leases(), 20, 0),
        "mixed": rig.decode_rows(shared(leases), 20, 1),
        "prompt": rig.prefill_rows(leases[:1], 1),
    }
    took = turns(rig, {name: lambda _, rows=rows: rows for name, rows in kinds.items()}, 3, lambda: None)  # type: ignore[misc]
    assert {name: len(seconds) for name, seconds in took.items()} == {"base": 3, "mixed": 3, "prompt": 3}
    found = measure_registered([2, 50], rig, images, 8, 2, lambda name, parts: lambda: None)
    assert [(each.registered, each.active) for each in found] == [(4, 4), (50, 4)]


def test_an_audit_of_leases_comes_by_the_clock_and_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "AUDIT_S", 0.0)
    rig = Rig(save_tiny(tmp_path / "tiny"), 1, 1, 24)
    assert rig.serve([""], 8, 2).output_tokens == 2


def test_a_run_that_gives_fewer_tokens_is_refused(tmp_path: Path) -> None:
    rig = Rig(save_tiny(tmp_path / "tiny"), 1, 1, 24)
    with pytest.raises(RuntimeError):
        rig.serve(["0" * 64], 8, 2)  # its adapter never comes


def test_bfloat16_takes_turns_with_float32(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    shape = ModelShape.of(model)
    rigs = [Rig(folder, 1, 2, 24) for folder in (model, bf16_copy(model, tmp_path / "narrow"))]
    images = [image_of(a, tmp_path / a.name, shape) for a in write_adapters(tmp_path / "peft", shape, 2)]
    found = measure_bf16(rigs[0], rigs[1], images, (8, 4), (1, 2), lambda name, parts: lambda: None)
    assert [each.adapters for each in found] == ([0, 2] if best_isa() == "avx512bf16" else [])
    assert all(each.step_ratio > 0 and each.tokens_ratio > 0 for each in found)
