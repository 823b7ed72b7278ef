"""What the commands of `lorafleet` share: options, exit codes, and how one ends that failed."""

import sys
from pathlib import Path
from typing import NoReturn

import click

from infra.options import default_home

FAILED, NO_STACK, NOT_THERE, REFUSED, NOT_YET = 1, 3, 4, 5, 6

with_home = click.option(
    "--home",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    default=default_home,
    show_default="$LORAFLEET_HOME, else .lorafleet",
    help="The folder that holds everything the stack keeps. Two homes are two stacks.",
)
with_json = click.option("--json", "wants_json", is_flag=True, help="Print JSON instead of a table.")


def fail(text: str, code: int = FAILED) -> NoReturn:
    click.echo(text, err=True)
    sys.exit(code)
