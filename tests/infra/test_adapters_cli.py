"""`lorafleet adapters`, `aliases`, `customers` and `replicas` as typed, on a gateway and a registry of their own."""

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from infra.cli import main
from infra.state import StackState, write_state
from tests.gateway.rig import OPERATOR, Rig
from tests.stack import Stack, wait_until

ONE, TWO, PROD = "acme/support@1", "acme/support@2", "acme/support:prod"
COMMANDS = [
    (group, command)
    for group, commands in {
        "adapters": ("list", "show", "register", "retire", "quarantine", "release", "history"),
        "aliases": ("list", "set", "rollback", "history"),
        "customers": ("list", "show", "add", "limits", "keys"),
        "replicas": ("list", "state", "load", "unload", "drain"),
    }.items()
    for command in commands
]


class Desk:
    """A home whose state names the rig's gateway."""

    def __init__(self, rig: Rig, home: Path, url: str) -> None:
        self.rig, self.home = rig, home
        (home / "operator.key").write_text(OPERATOR)
        environment = {"LORAFLEET_SOURCES": f"file://{rig.folder}/inbox", "LORAFLEET_MODEL": str(rig.model_folder)}
        # The first gateway is dead: the next one is asked.
        write_state(home, StackState(1, [], ["http://127.0.0.1:9", url], environment, []))

    def types(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments, "--home", str(self.home)], env={"COLUMNS": "200"})

    def told(self, *arguments: str) -> Any:
        result = self.types(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    def folder(self, adapter_id: str, seed: int) -> Path:
        """A PEFT folder outside of what the registry may read."""
        body = self.rig.registration(adapter_id, seed)
        there = Path(body["weights_uri"].removeprefix("file://")).parent
        away = self.home / f"{adapter_id.replace('/', '-')}-{seed}"
        there.rename(away)
        [weights] = away.glob("*.safetensors")
        weights.rename(away / "adapter_model.safetensors")
        return away


@pytest.fixture(scope="module")
def desk(kafka: str, model: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    rig = Rig(kafka, f"t{uuid.uuid4().hex[:10]}.", model, tmp_path_factory.mktemp("desk"))
    rig.prepare()
    try:
        door = rig.gateway(stack.ports.allot("desk"), stack.ports.allot("desk-internal"))
        rig.ready(door.child, rig.control())
        yield Desk(rig, tmp_path_factory.mktemp("home"), door.internal)
    finally:
        rig.stop()


@pytest.mark.real
def test_an_adapters_life_by_hand(desk: Desk) -> None:
    for adapter_id, seed in ((ONE, 1), (TWO, 2)):
        made = desk.types("adapters", "register", adapter_id, str(desk.folder(adapter_id, seed)))
        assert (made.exit_code, made.output) == (0, f"{adapter_id} is ready\n")
    assert desk.told("aliases", "set", PROD, ONE)["adapter_id"] == ONE
    moved = desk.types("aliases", "set", PROD, TWO)
    assert (moved.exit_code, moved.output) == (0, f"{PROD} -> {TWO}, before {ONE}\n")
    kept = desk.types("adapters", "retire", TWO)
    assert (kept.exit_code, f"{PROD} points at {TWO}" in kept.output) == (5, True)
    assert desk.types("aliases", "rollback", PROD).output == f"{PROD} -> {ONE}, before {TWO}\n"
    judged = desk.types("adapters", "quarantine", TWO, "--why", "it rambles")
    assert (judged.exit_code, judged.output) == (0, f"{TWO} is quarantined\n")
    assert desk.told("adapters", "show", TWO)["why"] == "it rambles"
    assert "it rambles" in desk.types("adapters", "history", TWO).output
    assert desk.types("adapters", "release", TWO).output == f"{TWO} is ready\n"
    assert desk.told("adapters", "quarantine", TWO, "--why", "again")["status"] == "quarantined"
    assert desk.types("adapters", "retire", TWO).exit_code == 0
    assert desk.types("adapters", "release", TWO).exit_code == 5
    assert desk.types("aliases", "rollback", PROD).exit_code == 5

    assert [row["adapter_id"] for row in desk.told("adapters", "list")] == [ONE, TWO]
    assert desk.told("adapters", "list", "--customer", "globex") == []
    shown = desk.told("adapters", "show", ONE)
    assert (shown["status"], shown["aliases"]) == ("ready", [PROD])
    assert f"aliases            {PROD}" in desk.types("adapters", "show", ONE).output
    assert [row["adapter_id"] for row in desk.told("aliases", "list")] == [ONE]
    told = desk.told("aliases", "history", PROD)
    assert [(event["kind"], event["adapter_id"]) for event in told] == [
        ("moved", ONE), ("warming", TWO), ("moved", TWO), ("warming", ONE), ("moved", ONE), ("refused", ""),
    ]  # fmt: skip
    history = desk.types("adapters", "history", TWO).output
    assert "ops operator lf-operat" in history
    assert f"{PROD} points at {TWO}" in history


@pytest.mark.real
def test_refused_and_not_there(desk: Desk) -> None:
    folder = desk.folder("acme/bad@1", 3)
    refused = desk.types("adapters", "register", "acme/bad@1", str(folder), "--base-model-hash", "0" * 64)
    assert refused.exit_code == 5
    assert refused.output.startswith("base_model_hash: ")
    assert desk.told("adapters", "history", "acme/bad@1")[0]["kind"] == "refused"
    outside = desk.types(
        "adapters", "register", "acme/bad@1", str(folder), "--weights-uri", f"file://{folder}/x.safetensors"
    )
    assert (outside.exit_code, "not below any place" in outside.output) == (5, True)
    empty = desk.types("adapters", "register", "acme/bad@1", str(desk.home))
    assert (empty.exit_code, "was not uploaded" in empty.output) == (1, True)
    for arguments in (
        ("adapters", "show", "acme/never@1"),
        ("adapters", "quarantine", "acme/never@1", "--why", "x"),
        ("adapters", "release", "acme/never@1"),
        ("aliases", "set", PROD, "acme/never@1"),
        ("aliases", "rollback", "acme/never:prod"),
        ("aliases", "history", "acme/other:prod"),
    ):
        assert desk.types(*arguments).exit_code == 4, arguments


@pytest.mark.real
def test_a_customers_life_by_hand(desk: Desk) -> None:
    first = desk.types("customers", "add", "initech").output.strip()
    assert first.startswith("lf-")
    again = desk.types("customers", "add", "initech")
    assert (again.exit_code, "is there already" in again.output) == (0, True)
    changed = desk.told("customers", "limits", "initech", "--requests-per-minute", "60", "--weight", "2")
    assert (changed["requests_per_minute"], changed["weight"], changed["tokens_per_minute"]) == (60, 2, 0)
    assert desk.told("customers", "limits", "initech") == changed
    made = desk.told("customers", "keys", "initech", "--add", "--expires", "90d", "--model", "initech/a")
    assert made["models"] == ["initech/a"]
    assert made["expires_unix_ms"] - made["created_unix_ms"] == 90 * 86_400_000
    [old, new] = desk.told("customers", "keys", "initech")
    assert (first.startswith(old["hint"]), new["hint"]) == (True, made["hint"])
    revoked = desk.types("customers", "keys", "initech", "--revoke", old["hint"])
    assert (revoked.exit_code, "no gateway takes it" in revoked.output) == (0, True)
    shown = desk.types("customers", "show", "initech").output
    assert new["hint"] in shown
    assert old["hint"] not in shown
    assert "initech" in [row["customer"] for row in desk.told("customers", "list")]
    for arguments, code, says in (
        (("keys", "initech", "--revoke", "lf-nothing"), 4, "no key with the hint"),
        (("keys", "initech", "--add", "--model", "acme/a"), 5, "give names of initech's"),
        (("limits", "nobody"), 4, "is not there"),
        (("limits", "initech", "--weight", "0"), 5, "above 0"),
        (("add", "Not A Name"), 5, "is no customer id"),
        (("keys", "initech", "--expires", "90d"), 2, "go with --add"),
        (("keys", "initech", "--add", "--expires", "soon"), 2, "such as 90d"),
    ):
        told = desk.types("customers", *arguments)
        assert (told.exit_code, says in told.output) == (code, True), told.output


@pytest.mark.real
def test_a_replicas_adapters_by_hand(desk: Desk) -> None:
    """The last one with a stack: it drains the only replica."""
    three = "acme/support@3"
    assert desk.types("replicas", "list").exit_code == 0
    assert desk.types("replicas", "state", "0").exit_code == 4
    assert desk.types("adapters", "register", three, str(desk.folder(three, 33))).exit_code == 0
    desk.rig.ready(desk.rig.worker())
    wait_until(lambda: desk.told("replicas", "list")[0]["status"] == "ready", 15, "the gateway hears it")
    loaded = desk.types("replicas", "load", "0", three)
    assert (loaded.exit_code, loaded.output) == (0, f"{three} is in a slot of replica 0\n")
    state = desk.told("replicas", "state", "0")
    assert (state["gpu_adapters"], state["slot_leases"], state["thrashing"]) == ([three], 0, [])
    assert state["bytes"]["gpu"] > 0
    shown = desk.types("replicas", "state", "0").output
    assert "bytes gpu" in shown
    assert three in shown
    assert re.search(r"0\s+ready\s+1\s", desk.types("replicas", "list").output)
    unloaded = desk.types("replicas", "unload", "0", three, "--drain", "--wait", "30")
    assert (unloaded.exit_code, unloaded.output) == (0, f"{three} is in no slot of replica 0 any more\n")
    for arguments, code, says in (
        (("unload", "0", three), 4, "is in no slot"),
        (("unload", "0", three, "--wait", "3"), 2, "goes with --drain"),
        (("load", "0", "acme/never@1"), 4, "is not registered"),
        (("load", "9", three), 4, "was never there"),
        (("load", "x", three), 2, "integer"),
    ):
        told = desk.types("replicas", *arguments)
        assert (told.exit_code, says in told.output) == (code, True), told.output
    assert desk.types("replicas", "drain", "0").exit_code == 0
    wait_until(lambda: desk.told("replicas", "list")[0]["status"] == "draining", 15, "it drains")


@pytest.mark.parametrize(("group", "command"), COMMANDS)
def test_every_command_says_what_it_does(group: str, command: str) -> None:
    told = CliRunner().invoke(main, [group, command, "--help"])
    assert told.exit_code == 0
    assert "--json" in told.output


def test_a_quarantine_without_a_reason_is_wrong_usage() -> None:
    told = CliRunner().invoke(main, ["adapters", "quarantine", ONE])
    assert (told.exit_code, "--why" in told.output) == (2, True)


def test_a_probe_without_a_stack(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["probe", "--once", "--home", str(tmp_path)])
    assert (told.exit_code, f"no stack runs in {tmp_path}" in told.output) == (3, True)


def test_without_a_stack(tmp_path: Path) -> None:
    told = CliRunner().invoke(main, ["aliases", "list", "--home", str(tmp_path)])
    assert told.exit_code == 3
    assert told.output == f"no stack runs in {tmp_path}: lorafleet up\n"
