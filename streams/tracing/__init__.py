"""Traces with OpenTelemetry: where they go, and how a trace's context travels. Off unless an endpoint is set.

`exporter` and `context` import OpenTelemetry, which takes half a second: whoever may run without traces imports them
only once `settings.endpoint` has named one.
"""
