-- Where the sink is, per partition: the bounds of the block it is about to insert or has inserted last, written before
-- the rows. After a restart it sends that very block again, with the same token, and goes on at next_offset.
CREATE TABLE IF NOT EXISTS sink_progress
(
    topic        LowCardinality(String),
    partition    UInt16,
    first_offset UInt64,
    next_offset  UInt64,
    batch_day    Date,
    written_at   DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree(written_at)
ORDER BY (topic, partition);
