"""The GPU's kernels: low-rank products over the slot pools, paged attention, norm, rotation, activation.

Every sum has one order, which follows from a row's own inputs and from sizes that are fixed when a kernel is compiled:
no atomics, nothing tuned or split by what else is in the batch, float32 products in full precision. So a row's bits do
not depend on its company. Numbers that vary from step to step are never specialised on: one compiled kernel serves all.

Rows that share loads (one slot's, one sequence's) are found by the programs themselves: there is one for each row in
sorted order, and it works only if its row is the first of a run within an aligned tile; it takes the whole run. Nobody
counts or lists segments, on the host or on the device.

Adapter table, int64 [matrices, 6]: where A, B (rank-major) lie in a slot's values, scale and rank in its floats, d, and
where the outputs start in a row of y. A slot's first float is the precision of its values (slot_image.py's Precision),
which begin `values` floats behind it; `data`, `bf16` and `f16` are the same memory.
"""

import triton
import triton.language as tl


@triton.jit
def wide(data, bf16, f16, start, precision, at, mask):
    """A slot's values `at`, `start` floats into the pool, as the float32 that each of them is exactly."""
    found = tl.zeros(mask.shape, tl.float32)
    if precision == 1:
        found = tl.load(data + start + at, mask=mask, other=0.0)
    elif precision == 2:
        found = tl.load(bf16 + 2 * start + at, mask=mask, other=0.0).to(tl.float32)
    elif precision == 3:
        found = tl.load(f16 + 2 * start + at, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["n"])
def shrink(
    x,
    low,
    data,
    bf16,
    f16,
    table,
    slots,
    by_slot,
    n,
    k,
    first,
    count,
    floats,
    values,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """low [splits, n, matrices, R] = A x over SPLIT columns each. Grid: n, splits, matrices."""
    at, split, matrix, matrices = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    slot = tl.load(slots + tl.load(by_slot + at))
    leads = (at % ROWS == 0) | (tl.load(slots + tl.load(by_slot + tl.maximum(at - 1, 0))) != slot)
    if leads & (slot >= first) & (slot < first + count):
        held = data + (slot - first).to(tl.int64) * floats
        entry = table + matrix * 6
        rank = tl.load(held + tl.load(entry + 3)).to(tl.int32)
        if rank > 0:
            order = at + tl.arange(0, ROWS)
            mine = order < tl.minimum(n, (at // ROWS + 1) * ROWS)
            rows = tl.load(by_slot + order, mask=mine, other=0).to(tl.int64)
            mine = mine & (tl.load(slots + rows, mask=mine, other=-1) == slot)
            start_of, precision = (slot - first).to(tl.int64) * floats + values, tl.load(held).to(tl.int32)
            ranks = tl.arange(0, R)
            own = ranks < rank
            total = tl.zeros((ROWS, R), tl.float32)
            for start in range(0, SPLIT, COLUMNS):
                columns = split * SPLIT + start + tl.arange(0, COLUMNS)
                inside = columns < k
                left = tl.load(
                    x + rows[:, None] * k + columns[None, :], mask=mine[:, None] & inside[None, :], other=0.0
                )
                at_a = tl.load(entry) + ranks[None, :] * k + columns[:, None]
                right = wide(data, bf16, f16, start_of, precision, at_a, own[None, :] & inside[:, None])
                total = tl.dot(left, right, total, input_precision="ieee")
            out = low + ((split * n + rows[:, None]) * matrices + matrix) * R + ranks[None, :]
            tl.store(out, total, mask=mine[:, None] & own[None, :])


@triton.jit(do_not_specialize=["n"])
def expand(
    low,
    y,
    data,
    bf16,
    f16,
    table,
    slots,
    by_slot,
    n,
    width,
    splits,
    first,
    count,
    floats,
    values,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """y [n, width] += scale * B (the sum of low's splits). Grid: n, the widest matrix in COLUMNS, matrices."""
    at, part, matrix, matrices = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    slot = tl.load(slots + tl.load(by_slot + at))
    leads = (at % ROWS == 0) | (tl.load(slots + tl.load(by_slot + tl.maximum(at - 1, 0))) != slot)
    entry = table + matrix * 6
    d = tl.load(entry + 4)
    if leads & (slot >= first) & (slot < first + count) & (part * COLUMNS < d):
        held = data + (slot - first).to(tl.int64) * floats
        rank = tl.load(held + tl.load(entry + 3)).to(tl.int32)
        if rank > 0:
            order = at + tl.arange(0, ROWS)
            mine = order < tl.minimum(n, (at // ROWS + 1) * ROWS)
            rows = tl.load(by_slot + order, mask=mine, other=0).to(tl.int64)
            mine = mine & (tl.load(slots + rows, mask=mine, other=-1) == slot)
            start_of, precision = (slot - first).to(tl.int64) * floats + values, tl.load(held).to(tl.int32)
            scale = tl.load(held + tl.load(entry + 2))
            ranks = tl.arange(0, R)
            own = ranks < rank
            columns = part * COLUMNS + tl.arange(0, COLUMNS)
            inside = columns < d
            left = tl.zeros((ROWS, R), tl.float32)
            for split in range(splits):
                at_low = low + ((split * n + rows[:, None]) * matrices + matrix) * R + ranks[None, :]
                left += tl.load(at_low, mask=mine[:, None] & own[None, :], other=0.0)
            at_b = tl.load(entry + 1) + ranks[:, None] * d + columns[None, :]
            right = wide(data, bf16, f16, start_of, precision, at_b, own[:, None] & inside[None, :])
            added = tl.dot(left, right, input_precision="ieee") * scale
            out = y + rows[:, None] * width + tl.load(entry + 5) + columns[None, :]
            written = mine[:, None] & inside[None, :]
            tl.store(out, tl.load(out, mask=written, other=0.0) + added, mask=written)


@triton.jit
def norm(x, add, gain, out, width, eps, ADD: tl.constexpr, WIDTH: tl.constexpr) -> None:
    """x += add, out = x / sqrt(mean(x^2) + eps) * gain. Grid: n."""
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    row = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        row += tl.load(add + at, mask=inside, other=0.0)
        tl.store(x + at, row, mask=inside)
    root = tl.sqrt_rn(tl.sum(row * row, 0) / width + eps)
    tl.store(out + at, row / root * tl.load(gain + columns, mask=inside, other=0.0), mask=inside)


@triton.jit
def silu_mul(gate_up, out, inner, COLUMNS: tl.constexpr) -> None:
    """silu(gate) * up. Grid: n, inner in COLUMNS."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=inside, other=0.0)
    # the exponential of what is not above 0 only: the other side's may overflow
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * inner + columns, gate * sigmoid * up, mask=inside)


@triton.jit(do_not_specialize=["table_length"])
def rope_store(
    qkv,
    cosine,
    sine,
    positions,
    tables_of,
    tables,
    keys,
    values,
    table_length,
    heads,
    kv_heads,
    head_dim,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rotates q in place, stores rotated k, and v. PARTS: at least heads + 2 kv_heads. Grid: n."""
    row = tl.program_id(0)
    half, parts = head_dim // 2, heads + 2 * kv_heads
    head, lanes = tl.arange(0, PARTS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < parts) & (lanes < half)
    at = qkv + (row.to(tl.int64) * parts + head) * head_dim + lanes
    left, right = tl.load(at, mask=inside, other=0.0), tl.load(at + half, mask=inside, other=0.0)
    position = tl.load(positions + row)
    angle = position * half + lanes
    c = tl.load(cosine + angle, mask=lanes < half, other=0.0)
    s = tl.load(sine + angle, mask=lanes < half, other=0.0)
    turned, turned_right = left * c - right * s, right * c + left * s
    tl.store(at, turned, mask=inside & (head < heads))
    tl.store(at + half, turned_right, mask=inside & (head < heads))
    block = tl.load(tables + tl.load(tables_of + row) * table_length + position // BLOCK).to(tl.int64)
    base, slot = block * kv_heads * head_dim * BLOCK, position % BLOCK
    key = (head >= heads) & (head < heads + kv_heads)
    out = keys + base + ((head - heads) * head_dim + lanes) * BLOCK + slot
    tl.store(out, turned, mask=inside & key)
    tl.store(out + half * BLOCK, turned_right, mask=inside & key)
    out = values + base + ((head - heads - kv_heads) * BLOCK + slot) * head_dim + lanes
    tl.store(out, left, mask=inside & (head >= heads + kv_heads))
    tl.store(out + half, right, mask=inside & (head >= heads + kv_heads))


@triton.jit(do_not_specialize=["n", "table_length"])
def attend(
    qkv,
    positions,
    tables_of,
    tables,
    keys,
    values,
    sums,
    weights,
    n,
    table_length,
    heads,
    kv_heads,
    head_dim,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Attention of each row to SPLIT positions each: sums [splits, n, heads, head_dim], weights [.., 2] (top, total).

    A lane is one query head of one row; GROUP: lanes for the query heads of one KV head. Keys that a lane must not see
    add exactly nothing to it, so that it does not matter up to where the run's other rows see. What a lane's position
    does not reach is left unwritten. Grid: n, kv_heads, splits.
    """
    at, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of = tl.load(tables_of + at)
    first = split * SPLIT
    if (at % ROWS == 0) | (tl.load(tables_of + tl.maximum(at - 1, 0)) != of):
        lanes = tl.arange(0, ROWS * GROUP)
        rows = at + lanes // GROUP
        group = heads // kv_heads
        mine = (rows < tl.minimum(n, (at // ROWS + 1) * ROWS)) & (lanes % GROUP < group)
        mine = mine & (tl.load(tables_of + rows, mask=mine, other=-1) == of)
        position = tl.load(positions + rows, mask=mine, other=-1)
        end = tl.minimum(first + SPLIT, tl.max(position, 0) + 1)
        rows = rows.to(tl.int64)
        head = kv * group + lanes % GROUP
        dims = tl.arange(0, DIM)
        wide = dims < head_dim
        width = (heads + 2 * kv_heads) * head_dim
        reads = mine[:, None] & wide[None, :]
        q = tl.load(qkv + rows[:, None] * width + head[:, None] * head_dim + dims[None, :], mask=reads, other=0.0)
        top = tl.full((ROWS * GROUP,), -1e30, tl.float32)  # finite: a lane that sees nothing here has no NaN
        total = tl.zeros((ROWS * GROUP,), tl.float32)
        out = tl.zeros((ROWS * GROUP, DIM), tl.float32)
        for start in range(first, end, KEYS):
            seen = start + tl.arange(0, KEYS)
            there = seen < end
            block = tl.load(tables + of * table_length + seen // BLOCK, mask=there, other=0).to(tl.int64)
            base = (block * kv_heads + kv) * head_dim * BLOCK
            key = tl.load(
                keys + base[None, :] + dims[:, None] * BLOCK + (seen % BLOCK)[None, :],
                mask=there[None, :] & wide[:, None],
                other=0.0,
            )
            score = tl.dot(q, key, input_precision="ieee") * scale
            score = tl.where(seen[None, :] <= position[:, None], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp(score - higher[:, None])
            kept = tl.exp(top - higher)
            total = total * kept + tl.sum(weight, 1)
            value = tl.load(
                values + base[:, None] + (seen % BLOCK)[:, None] * head_dim + dims[None, :],
                mask=there[:, None] & wide[None, :],
                other=0.0,
            )
            out = tl.dot(weight, value, out * kept[:, None], input_precision="ieee")
            top = higher
        mine = mine & (position >= first)
        reads = mine[:, None] & wide[None, :]
        to = (split.to(tl.int64) * n + rows) * heads + head
        tl.store(sums + to[:, None] * head_dim + dims[None, :], out, mask=reads)
        tl.store(weights + to * 2, top, mask=mine)
        tl.store(weights + to * 2 + 1, total, mask=mine)


@triton.jit(do_not_specialize=["n"])
def combine(
    sums,
    weights,
    positions,
    out,
    n,
    heads,
    head_dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """out [n, heads, head_dim] from what `attend` left, split by split in their order. Grid: n."""
    row = tl.program_id(0).to(tl.int64)
    head, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    there = head < heads
    whole = there[:, None] & (dims < head_dim)[None, :]
    splits = tl.load(positions + row) // SPLIT + 1
    top = tl.full((HEADS,), -1e30, tl.float32)
    for split in range(splits):
        at = (split * n + row) * heads + head
        top = tl.maximum(top, tl.load(weights + at * 2, mask=there, other=0.0))
    total, result = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, DIM), tl.float32)
    for split in range(splits):
        at = (split * n + row) * heads + head
        factor = tl.exp(tl.load(weights + at * 2, mask=there, other=0.0) - top)
        total += tl.load(weights + at * 2 + 1, mask=there, other=1.0) * factor
        part = tl.load(sums + at[:, None] * head_dim + dims[None, :], mask=whole, other=0.0)
        result += part * factor[:, None]
    to = out + (row * heads + head)[:, None] * head_dim + dims[None, :]
    tl.store(to, result / tl.where(there, total, 1.0)[:, None], mask=whole)
