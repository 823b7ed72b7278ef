"""Missing programs are named with what to install."""

from pathlib import Path

import pytest

from infra.requires import main


def test_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "java").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["java"]) == 0
    assert main(["java", "mvn", "c++"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "mvn is missing: apt-get install maven (Debian, Ubuntu), or Apache Maven from elsewhere"
    assert second.startswith("c++ is missing: apt-get install g++")
    assert main(["cobol"]) == 2
