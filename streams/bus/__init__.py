"""Kafka, and the only code that imports aiokafka: settings, admin, Writer, Reader, TableReader.

aiokafka's own send and stop can wait for ever; everything here ends within a stated time. No consumer groups, no
offset resets, no transactions. aiokafka logs each failed attempt, tens a second while a broker is away: this package
says so once per outage instead.
"""

import logging

logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
