"""Which replicas own an adapter. Pure."""
