"""Model names: what a customer may use, and that all else looks the same."""

import msgspec
import pytest

from gateway.catalogue import BASE, Catalogue, Target
from gateway.errors import ApiError
from schemas.adapters import AdapterRecord, AliasRecord
from schemas.reasons import AdapterStatus


def adapter(
    adapter_id: str, status: AdapterStatus = AdapterStatus.READY, offset: int = 0, base: str = "b", partition: int = 0
) -> AdapterRecord:
    name, version = adapter_id.split("@")
    return AdapterRecord(
        adapter_id, name.split("/")[0], int(version), base, 16, 32.0, ["q_proj"], 1, "s3://a/b", "c", "s3://u/v", "d",
        f"content of {adapter_id}", status, partition, offset, 1_000,
    )  # fmt: skip


def alias(name: str, adapter_id: str, offset: int = 0) -> AliasRecord:
    return AliasRecord(name, name.split("/")[0], adapter_id, "", 0, offset, 1_000)


@pytest.fixture
def catalogue() -> Catalogue:
    catalogue = Catalogue("base", "b")
    for record in (
        adapter("acme/support@1"), adapter("acme/support@2"), adapter("acme/old@1", AdapterStatus.RETIRED),
        adapter("acme/bad@1", AdapterStatus.QUARANTINED), adapter("acme/other@1", base="x"), adapter("globex/sales@1"),
    ):  # fmt: skip
        catalogue.apply_adapter(record.adapter_id, record)
    for name, target in (
        ("acme/support:prod", "acme/support@2"), ("acme/old:prod", "acme/old@1"), ("acme/gone:prod", "acme/gone@1"),
        ("acme/steal:prod", "globex/sales@1"), ("globex/sales:prod", "globex/sales@1"),
    ):  # fmt: skip
        catalogue.apply_alias(name, alias(name, target))
    return catalogue


def test_alias_adapter_and_base(catalogue: Catalogue) -> None:
    assert catalogue.resolve("acme", "acme/support:prod", 0) == Target("acme/support@2", "content of acme/support@2")
    assert catalogue.resolve("acme", "acme/support@1", 0).adapter == "acme/support@1"
    assert catalogue.resolve("acme", "base", 0) == BASE


def test_unknown_foreign_and_retired_are_the_same(catalogue: Catalogue) -> None:
    answers = set()
    names = [
        "acme/never@1", "acme/never:prod", "globex/sales@1", "globex/sales:prod", "globex/never@1", "acme/old@1",
        "acme/old:prod", "acme/gone:prod", "acme/steal:prod", "acme/other@1", "Base", "", "acme/support", "a/b/c@1",
    ]  # fmt: skip
    for name in names:
        with pytest.raises(ApiError) as refused:
            catalogue.resolve("acme", name, 0)
        problem = refused.value
        answers.add((problem.status, problem.param, problem.shape, problem.message.replace(f"'{name}'", "''")))
    assert len(answers) == 1
    assert next(iter(answers))[:2] == (404, "model")


def test_quarantined_says_so(catalogue: Catalogue) -> None:
    with pytest.raises(ApiError) as refused:
        catalogue.resolve("acme", "acme/bad@1", 0)
    assert (refused.value.reason, refused.value.message) == ("quarantined", "acme/bad@1 is quarantined")
    row = msgspec.structs.replace(adapter("acme/bad@1", AdapterStatus.QUARANTINED, 5), why="it rambles")
    catalogue.apply_adapter("acme/bad@1", row)
    catalogue.apply_alias("acme/bad:prod", alias("acme/bad:prod", "acme/bad@1"))
    with pytest.raises(ApiError, match=r"^acme/bad:prod is quarantined: it rambles$"):
        catalogue.resolve("acme", "acme/bad:prod", 0)
    with pytest.raises(ApiError, match="does not exist"):
        catalogue.resolve("globex", "acme/bad@1", 0)


def test_an_older_record_changes_nothing(catalogue: Catalogue) -> None:
    catalogue.apply_alias("acme/support:prod", alias("acme/support:prod", "acme/support@1", offset=7))
    catalogue.apply_alias("acme/support:prod", alias("acme/support:prod", "acme/support@2", offset=6))
    assert catalogue.resolve("acme", "acme/support:prod", 0).adapter == "acme/support@1"
    catalogue.apply_adapter("acme/support@1", adapter("acme/support@1", AdapterStatus.RETIRED, offset=9))
    catalogue.apply_adapter("acme/support@1", adapter("acme/support@1", offset=8))
    with pytest.raises(ApiError):
        catalogue.resolve("acme", "acme/support@1", 0)


def test_tombstones_remove(catalogue: Catalogue) -> None:
    catalogue.apply_alias("acme/support:prod", None)
    catalogue.apply_adapter("acme/support@2", None)
    assert [record.adapter_id for _, record in catalogue.models("acme")] == ["acme/support@1"]


def test_models_are_what_resolves(catalogue: Catalogue) -> None:
    assert [name for name, _ in catalogue.models("acme")] == ["acme/support:prod", "acme/support@1", "acme/support@2"]
    for name, record in catalogue.models("acme"):
        assert catalogue.resolve("acme", name, 0).adapter == record.adapter_id
    assert list(catalogue.models("nobody")) == []
