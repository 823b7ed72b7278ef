"""Traffic and proof: canary adapters, the demo, benchmarks. May import everything; nothing imports it."""
