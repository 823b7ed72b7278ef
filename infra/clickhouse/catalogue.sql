-- The fleet's state, as the compacted topics have it (streams/sink/mirror.py): the newest row per key counts, and `gone`
-- takes a key away. Ask the views.
CREATE TABLE IF NOT EXISTS adapter_rows
(
    adapter_id      String,
    tenant_id       LowCardinality(String),
    version         UInt32,
    base_model_hash LowCardinality(String),
    rank            UInt16,
    alpha           Float64,
    target_modules  Array(LowCardinality(String)),
    size_bytes      UInt64,
    weights_uri     String,
    checksum        String,
    status          LowCardinality(String),
    content_id      String,
    updated_at      DateTime64(3, 'UTC'),
    written_ms      UInt64,
    gone            UInt8
)
ENGINE = ReplacingMergeTree(written_ms, gone)
ORDER BY adapter_id;

ALTER TABLE adapter_rows ADD COLUMN IF NOT EXISTS why String AFTER status;

-- Made anew at each start: a view keeps the columns that its table had.
CREATE OR REPLACE VIEW adapters AS
SELECT * EXCEPT (written_ms, gone) FROM adapter_rows FINAL;

CREATE TABLE IF NOT EXISTS alias_rows
(
    alias               String,
    tenant_id           LowCardinality(String),
    adapter_id          String,
    previous_adapter_id String,
    pending_adapter_id  String,
    trial_adapter_id    String,
    trial_share         Float64,
    updated_at          DateTime64(3, 'UTC'),
    written_ms          UInt64,
    gone                UInt8
)
ENGINE = ReplacingMergeTree(written_ms, gone)
ORDER BY alias;

CREATE VIEW IF NOT EXISTS aliases AS
SELECT * EXCEPT (written_ms, gone) FROM alias_rows FINAL;

CREATE TABLE IF NOT EXISTS placement_rows
(
    adapter_id String,
    replica_id UInt16,
    role       LowCardinality(String),
    tier       LowCardinality(String),
    written_ms UInt64,
    gone       UInt8
)
ENGINE = ReplacingMergeTree(written_ms, gone)
ORDER BY (adapter_id, replica_id);

-- When a replica last ended a request of an adapter.
CREATE TABLE IF NOT EXISTS placement_uses
(
    adapter_id   String,
    replica_id   UInt16,
    last_used_at SimpleAggregateFunction(max, DateTime64(3, 'UTC'))
)
ENGINE = AggregatingMergeTree
ORDER BY (adapter_id, replica_id)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS placement_uses_view TO placement_uses AS
SELECT a.adapter AS adapter_id, toUInt16(a.replica) AS replica_id, max(a.at) AS last_used_at
FROM attempts AS a
WHERE a.adapter != ''
GROUP BY adapter_id, replica_id;

CREATE VIEW IF NOT EXISTS placements AS
SELECT p.adapter_id AS adapter_id, p.replica_id AS replica_id, p.role AS role, p.tier AS tier, u.used AS last_used_at
FROM placement_rows AS p FINAL
LEFT JOIN
(
    SELECT adapter_id, replica_id, toNullable(max(last_used_at)) AS used
    FROM placement_uses
    GROUP BY adapter_id, replica_id
) AS u ON u.adapter_id = p.adapter_id AND u.replica_id = p.replica_id;

CREATE TABLE IF NOT EXISTS adapter_1m
(
    adapter_id    LowCardinality(String),
    minute        DateTime('UTC') CODEC(Delta, ZSTD(1)),
    requests      UInt64,
    output_tokens UInt64,
    gpu_hits      UInt64
)
ENGINE = SummingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (adapter_id, minute)
TTL minute + INTERVAL 30 DAY DELETE
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS adapter_1m_view TO adapter_1m AS
SELECT
    r.adapter AS adapter_id,
    toStartOfMinute(r.at) AS minute,
    count() AS requests,
    sum(r.output_tokens) AS output_tokens,
    countIf(r.tier = 'gpu') AS gpu_hits
FROM requests AS r
WHERE r.adapter != ''
GROUP BY adapter_id, minute;

CREATE VIEW IF NOT EXISTS adapter_stats AS
SELECT
    s.adapter_id AS adapter_id,
    s.minute AS window_start,
    sum(s.requests) AS requests,
    sum(s.output_tokens) / 60 AS tokens_per_s,
    sum(s.gpu_hits) / sum(s.requests) AS gpu_hit_rate
FROM adapter_1m AS s
GROUP BY s.adapter_id, s.minute;
