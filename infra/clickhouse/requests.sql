-- One row per request that a gateway accepted (schemas.stats.RequestFinished). Durations of -1 were not reached.
-- A block of rows comes from one Kafka partition and shares its batch_day, so that one insert is one part: only then
-- is it atomic. Blocks carry a deduplication token, which needs the window here and in every table behind a view.
CREATE TABLE IF NOT EXISTS requests
(
    request_id          String                 CODEC(ZSTD(1)),
    at                  DateTime64(3, 'UTC')   CODEC(Delta, ZSTD(1)),
    customer            LowCardinality(String),
    model               LowCardinality(String),
    adapter             LowCardinality(String),
    content_id          LowCardinality(String),
    tier                LowCardinality(String),
    outcome             LowCardinality(String),
    gateway             UInt16,
    gateway_incarnation Int64,
    replica             Int32,
    attempts            UInt16,
    prompt_tokens       UInt32                 CODEC(T64, ZSTD(1)),
    output_tokens       UInt32                 CODEC(T64, ZSTD(1)),
    ttft_ms             Float32                CODEC(ZSTD(1)),
    tpot_ms             Float32                CODEC(ZSTD(1)),
    total_ms            Float64                CODEC(ZSTD(1)),
    detail              String                 CODEC(ZSTD(1)),
    kafka_partition     UInt16,
    kafka_offset        UInt64                 CODEC(Delta, ZSTD(1)),
    batch_day           Date
)
ENGINE = MergeTree
PARTITION BY batch_day
ORDER BY (customer, at)
TTL batch_day + INTERVAL 30 DAY DELETE
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 10000;

-- Per customer, tier and outcome. No adapter and no replica in the key: with them it has as many rows as the requests.
-- ttft: quantilesTiming is right within 0.5 % (whole ms below 1024, then steps of 16; capped at 30 s, see ttft_max_ms).
-- tpot: quantilesTDigest, since times per token are fractions of a ms.
CREATE TABLE IF NOT EXISTS tenant_1m
(
    minute        DateTime('UTC') CODEC(Delta, ZSTD(1)),
    customer      LowCardinality(String),
    tier          LowCardinality(String),
    outcome       LowCardinality(String),
    requests      SimpleAggregateFunction(sum, UInt64),
    attempts      SimpleAggregateFunction(sum, UInt64),
    prompt_tokens SimpleAggregateFunction(sum, UInt64),
    output_tokens SimpleAggregateFunction(sum, UInt64),
    ttft_max_ms   SimpleAggregateFunction(max, Float32),
    ttft_ms       AggregateFunction(quantilesTiming(0.5, 0.95, 0.99), Float32),
    tpot_ms       AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), Float32)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (customer, tier, outcome, minute)
TTL minute + INTERVAL 400 DAY DELETE
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS tenant_1m_view TO tenant_1m AS
SELECT
    toStartOfMinute(r.at) AS minute,
    r.customer AS customer,
    r.tier AS tier,
    r.outcome AS outcome,
    count() AS requests,
    sum(r.attempts) AS attempts,
    sum(r.prompt_tokens) AS prompt_tokens,
    sum(r.output_tokens) AS output_tokens,
    max(r.ttft_ms) AS ttft_max_ms,
    quantilesTimingStateIf(0.5, 0.95, 0.99)(r.ttft_ms, r.ttft_ms >= 0) AS ttft_ms,
    quantilesTDigestStateIf(0.5, 0.95, 0.99)(r.tpot_ms, r.tpot_ms >= 0) AS tpot_ms
FROM requests AS r
GROUP BY minute, customer, tier, outcome;
