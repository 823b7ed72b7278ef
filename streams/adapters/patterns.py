"""Matches module names against the patterns of an adapter_config.json, whatever those patterns are.

PEFT takes regular expressions, and a customer's expression may backtrack for ever while holding the interpreter's lock.
Plain names are matched here; anything else in a child process with limited time, memory and files.
"""

import json
import re
import subprocess
import sys

_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_LONGEST = 2_000
_TIME_LIMIT_S = 30  # the processor time below decides; this is for a machine that does not run the child at all
_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
expression, names = json.load(sys.stdin)
try:
    compiled = re.compile(expression)
except (re.error, RecursionError, OverflowError) as error:
    json.dump(str(error), sys.stdout)
else:
    json.dump([name for name in names if compiled.fullmatch(name)], sys.stdout)
"""


class BadPattern(ValueError):
    """The pattern is no regular expression, or takes too long to match."""


def full_matches(expression: str, names: list[str]) -> set[str]:
    """The names that the whole expression matches (PEFT's rule for a string of target_modules). Raises BadPattern."""
    if len(expression) > _LONGEST:
        raise BadPattern(f"{len(expression)} characters; at most {_LONGEST}")
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([expression, names]).encode(),
            capture_output=True,
            timeout=_TIME_LIMIT_S,
            check=False,
            env={},
        )
    except subprocess.TimeoutExpired:
        raise BadPattern(f"not matched within {_TIME_LIMIT_S} s") from None
    if child.returncode != 0:
        raise BadPattern("takes too long or too much memory to match")
    found = json.loads(child.stdout)
    if isinstance(found, str):
        raise BadPattern(f"no regular expression: {found}")
    return set(found)


def suffix_matches(key: str, names: list[str]) -> set[str]:
    """The names that `key` matches at their end, from a dot on (PEFT's rule for pattern keys). Raises BadPattern."""
    if _PLAIN.fullmatch(key):
        # PEFT reads the key as an expression: its dots stand for any character.
        compiled = re.compile(rf"(?:.*\.)?{key}")
        return {name for name in names if compiled.fullmatch(name)}
    return full_matches(rf"(?:.*\.)?(?:{key})", names)
