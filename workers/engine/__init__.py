"""The engine: a process of its own that turns sequences of token ids into tokens. Torch lives only here.

`__main__.py` wires it. A step reads: `scheduler.plan` -> `runner.run` (torch or simulated) -> `scheduler.settle`.
Pure modules: slots, prefix, kv_blocks, fairness, sequence, waiting, scheduler. `wire.py` frames the protocol of
schemas/engine.py for both sides.
"""
