-- One row per load, eviction or failed load of an adapter on a replica (schemas.stats.CacheEvent).
CREATE TABLE IF NOT EXISTS cache_events
(
    at              DateTime64(3, 'UTC')   CODEC(Delta, ZSTD(1)),
    replica         Int32,
    incarnation     Int64,
    adapter         LowCardinality(String),
    content_id      LowCardinality(String),
    event           LowCardinality(String),
    tier            LowCardinality(String),
    source          LowCardinality(String),
    bytes           UInt64                 CODEC(T64, ZSTD(1)),
    duration_ms     Float32                CODEC(ZSTD(1)),
    reason          String                 CODEC(ZSTD(1)),
    kafka_partition UInt16,
    kafka_offset    UInt64                 CODEC(Delta, ZSTD(1)),
    batch_day       Date
)
ENGINE = MergeTree
PARTITION BY batch_day
ORDER BY (replica, event, at)
TTL batch_day + INTERVAL 14 DAY DELETE
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS cache_1m
(
    minute      DateTime('UTC') CODEC(Delta, ZSTD(1)),
    replica     Int32,
    event       LowCardinality(String),
    tier        LowCardinality(String),
    source      LowCardinality(String),
    events      UInt64,
    bytes       UInt64,
    duration_ms Float64
)
ENGINE = SummingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (replica, event, tier, source, minute)
TTL minute + INTERVAL 400 DAY DELETE
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS cache_1m_view TO cache_1m AS
SELECT
    toStartOfMinute(e.at) AS minute,
    e.replica AS replica,
    e.event AS event,
    e.tier AS tier,
    e.source AS source,
    count() AS events,
    sum(e.bytes) AS bytes,
    sum(toFloat64(e.duration_ms)) AS duration_ms
FROM cache_events AS e
GROUP BY minute, replica, event, tier, source;
