"""`python -m infra` is `lorafleet`."""

from infra.cli import main

main(prog_name="lorafleet")
