-- One row per attempt that a worker admitted (schemas.stats.AttemptFinished). Durations of -1 were not reached.
CREATE TABLE IF NOT EXISTS attempts
(
    request_id          String                 CODEC(ZSTD(1)),
    attempt             UInt16,
    at                  DateTime64(3, 'UTC')   CODEC(Delta, ZSTD(1)),
    customer            LowCardinality(String),
    adapter             LowCardinality(String),
    content_id          LowCardinality(String),
    slot                UInt32,
    epoch               UInt64,
    tier                LowCardinality(String),
    reason              LowCardinality(String),
    gateway             UInt16,
    gateway_incarnation Int64,
    replica             Int32,
    incarnation         Int64,
    prompt_tokens       UInt32                 CODEC(T64, ZSTD(1)),
    first_position      UInt32                 CODEC(T64, ZSTD(1)),
    output_tokens       UInt32                 CODEC(T64, ZSTD(1)),
    queue_ms            Float32                CODEC(ZSTD(1)),
    load_ms             Float32                CODEC(ZSTD(1)),
    first_token_ms      Float32                CODEC(ZSTD(1)),
    total_ms            Float64                CODEC(ZSTD(1)),
    kafka_partition     UInt16,
    kafka_offset        UInt64                 CODEC(Delta, ZSTD(1)),
    batch_day           Date
)
ENGINE = MergeTree
PARTITION BY batch_day
ORDER BY (replica, at)
TTL batch_day + INTERVAL 30 DAY DELETE
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000;

-- What each replica did. Prompt tokens of a re-driven request count at every replica that read them.
CREATE TABLE IF NOT EXISTS replica_1m
(
    minute        DateTime('UTC') CODEC(Delta, ZSTD(1)),
    replica       Int32,
    attempts      UInt64,
    prompt_tokens UInt64,
    output_tokens UInt64
)
ENGINE = SummingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (replica, minute)
TTL minute + INTERVAL 400 DAY DELETE
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS replica_1m_view TO replica_1m AS
SELECT
    toStartOfMinute(a.at) AS minute,
    a.replica AS replica,
    count() AS attempts,
    sum(a.prompt_tokens) AS prompt_tokens,
    sum(a.output_tokens) AS output_tokens
FROM attempts AS a
GROUP BY minute, replica;
