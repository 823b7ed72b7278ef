"""`lorafleet bench engine`, `equal`, `slots` and `prefix`: the engine alone, beside its peers and its machine."""
