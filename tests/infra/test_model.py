"""The packaged model: the same bytes on every machine, and a damaged folder noticed."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from infra.local.model import MANIFEST, is_whole, model_folder
from infra.local.once import made_once
from streams.adapters.base_model import BadModel, compute_base_hash

# Of the folder that `convert` makes on any machine; with it the model answers that the capital of France is Paris.
SMOLLM2_HASH = "65fc3322673096a77095441d42dd504c317befd0c2ed8b85189b748b8b7a5145"


@pytest.mark.real
def test_same_hash_everywhere(model: Path) -> None:
    assert compute_base_hash(model) == SMOLLM2_HASH
    assert json.loads((model / "base_hash.json").read_text())["base_hash"] == SMOLLM2_HASH
    assert is_whole(model)


@pytest.mark.real
def test_tokenizer_gives_text_back(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "  Grüße, 東京! 12345\n\tx = [1,2]; 🙂 end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    chat = "<|im_start|>user\nThe capital of France is 42km away<|im_end|>"
    assert tokenizer.encode(chat).ids == [1, 4093, 198, 504, 3575, 282, 4649, 314, 216, 36, 34, 14251, 2025, 2]
    assert tokenizer.get_vocab_size() == 49_152


def test_ones_own_folder_must_be_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_MODEL", str(tmp_path))
    with pytest.raises(BadModel, match="name a Hugging Face folder"):
        model_folder()


def test_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        (part / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once(tmp_path / "thing", fail)
    assert not (tmp_path / "thing").exists()
    made_once(tmp_path / "thing", lambda part: (part / "all").touch())
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["all"]
    made_once(tmp_path / "thing", fail)  # not made again


def test_damage_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    found = (tmp_path / "a").stat()
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    entry = {"bytes": 3, "mtime_ns": found.st_mtime_ns + 1, "sha256": digest}
    manifest = {"package": "p", "source": "s", "source_sha256": "0", "files": {"a": entry}}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert is_whole(tmp_path)  # another time, the same bytes
    (tmp_path / "a").write_text("abd")
    assert not is_whole(tmp_path)
    (tmp_path / "a").write_text("abcd")
    assert not is_whole(tmp_path)
    (tmp_path / "a").unlink()
    assert not is_whole(tmp_path)
