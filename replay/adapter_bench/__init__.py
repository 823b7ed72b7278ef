"""`lorafleet bench adapters`: what it takes to load, serve and keep them."""
