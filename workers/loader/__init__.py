"""Brings an adapter from the store to this machine's disk and into shared memory, from where the engine copies it."""
