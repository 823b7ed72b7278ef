"""Kafka to ClickHouse, each record exactly once. `python -m streams.sink` is the process; sink.py has the protocol."""
