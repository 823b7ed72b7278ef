"""Where a file lies: `s3://bucket/key` or `file:///path`. Pure; nothing that could leave its root parses.

No percent-decoding, no `.` or `..`, no empty segment, no query: one text is one place.
"""

import re

import msgspec

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9._@=+,()' -]{1,255}")
_LONGEST = 1024


class InvalidLocation(ValueError):
    """Shows the text (shortened) and what is wrong with it."""


class Location(msgspec.Struct, frozen=True):
    """`bucket` is empty for files. `segments`: the key's or path's parts; empty for a whole bucket."""

    scheme: str
    bucket: str
    segments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}" if self.segments else f"{self.scheme}://{self.bucket}"

    @property
    def key(self) -> str:
        return "/".join(self.segments)

    @property
    def path(self) -> str:
        return f"/{self.key}"

    def beside(self, name: str) -> "Location":
        """Another file in the same folder."""
        return Location(self.scheme, self.bucket, (*self.segments[:-1], name))

    def under(self, *segments: str) -> "Location":
        return Location(self.scheme, self.bucket, (*self.segments, *segments))

    def within(self, root: "Location") -> tuple[str, ...] | None:
        """The segments below `root`; None when it is not below it."""
        depth = len(root.segments)
        same = (self.scheme, self.bucket, self.segments[:depth]) == (root.scheme, root.bucket, root.segments)
        return self.segments[depth:] if same and len(self.segments) > depth else None


def parse_location(text: str) -> Location:
    """Raises InvalidLocation."""

    def bad(why: str) -> InvalidLocation:
        return InvalidLocation(f"{text[:120]!r}: {why}")

    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("s3", "file"):
        raise bad("s3://bucket/key or file:///path is needed")
    if len(text) > _LONGEST:
        raise bad(f"longer than {_LONGEST} characters")
    bucket, _, key = rest.partition("/")
    if scheme == "file" and bucket:
        raise bad("a file has three slashes, file:///path, and no host")
    if scheme == "s3" and not _BUCKET.fullmatch(bucket):
        raise bad("the bucket's name is not valid")
    segments = tuple(key.split("/")) if key else ()
    for segment in segments:
        if segment in ("", ".", "..") or not _SEGMENT.fullmatch(segment):
            raise bad(f"the part {segment!r} is not accepted: letters, digits and . _ @ = + , ( ) ' - alone, and no ..")
    return Location(scheme, bucket, segments)
