"""Programs that pip cannot install. `python -m infra.requires java mvn c++` says what is missing and how to get it."""

import shutil
import sys

PACKAGES = {
    "java": ("openjdk-17-jre-headless", "a Java runtime, version 17 or newer"),
    "mvn": ("maven", "Apache Maven"),
    "c++": ("g++", "a C++ compiler"),
}


def missing(*programs: str) -> list[str]:
    """One line per program of `programs` (keys of PACKAGES) that is not on PATH."""
    lines = []
    for program in programs:
        if shutil.which(program) is None:
            package, thing = PACKAGES[program]
            lines.append(f"{program} is missing: apt-get install {package} (Debian, Ubuntu), or {thing} from elsewhere")
    return lines


def main(programs: list[str]) -> int:
    unknown = [program for program in programs if program not in PACKAGES]
    if unknown or not programs:
        print(f"usage: python -m infra.requires {{{'|'.join(PACKAGES)}}}...", file=sys.stderr)
        return 2
    lines = missing(*programs)
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
