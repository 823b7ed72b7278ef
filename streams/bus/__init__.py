"""Kafka, and the only code that imports aiokafka: settings, admin, Writer, Reader, TableReader.

aiokafka's own send and stop can wait for ever; everything here ends within a stated time. No consumer groups, no
offset resets, no transactions.
"""

from streams.bus.client_log import spare

spare()
