"""One value of every message type of every topic; `python -m tests.schemas.examples` writes the goldens still missing.

A golden is written once and never again: it stands for the bytes that lie in logs. When a type gains a field, its value
here stays as it is, and so shows that the field has a default; a further value of the type has the field.
"""

from pathlib import Path
from typing import Any, get_args

import msgspec

from schemas import topics
from schemas.adapters import (
    AdapterEvent,
    AdapterRecord,
    AliasRecord,
    CommandResult,
    ConcludeFlip,
    EndTrial,
    PendingFlip,
    QuarantineAdapter,
    Refusal,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
    Trial,
)
from schemas.codec import encode
from schemas.customers import ApiKey, Customer
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.placement import AdapterStats, Drain, Load, OwnerPlan, Unload
from schemas.reasons import AdapterStatus, EventKind, FinishReason, Outcome, RejectReason, Role, Tier
from schemas.replicas import (
    Answer,
    Answered,
    FailedLoad,
    ReplicaBeat,
    ReplicaClaim,
    ReplicaStatus,
    Residency,
    TierReport,
)
from schemas.requests import Cancel, Sampling, Submit
from schemas.stats import AttemptFinished, CacheEvent, RequestFinished, Usage
from schemas.tokens import Admitted, Finished, LoadReport, Logprobs, Rejected, TokenBatch, Tokens
from schemas.topics import Topic

GOLDEN = Path(__file__).parent / "golden"
SHA, OTHER_SHA = "3b" * 32, "c0" * 32
AT = 1_790_000_000_123
LOAD = LoadReport(read_offset=901, running=3, waiting=2, tokens_in_flight=4096)

FLIP = PendingFlip("acme/support@8", "alias", "cmd-8", "acme pipeline lf-3b1", AT, 6, 43)
TRY = PendingFlip("acme/support@8", "alias", "cmd-8", "acme pipeline lf-3b1", AT, 6, 43, 0.25)
TRIAL = Trial("acme/support@8", 0.25, "cmd-8", "acme pipeline lf-3b1", AT)

EXAMPLES: list[tuple[Topic, msgspec.Struct]] = [
    (
        topics.REQUESTS,
        Submit(
            request_id="req-1",
            attempt=1,
            customer="acme",
            adapter="acme/support@7",
            content_id=SHA,
            base_hash=OTHER_SHA,
            replica=5,
            incarnation=77,
            gateway=2,
            gateway_incarnation=1 << 40,
            prompt=[1, 49151, 0],
            generated=[17, 18],
            max_tokens=128,
            sampling=Sampling(
                seed=(1 << 63) - 1,
                temperature=0.7,
                top_p=0.9,
                top_k=40,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logit_bias={7: -100.0},
                top_logprobs=5,
            ),
            stop_ids=[2],
            remaining_ms=59_000,
        ),
    ),
    (
        topics.REQUESTS,
        Submit(
            request_id="req-2",
            attempt=1,
            customer="acme",
            adapter="acme/support@7",
            content_id=SHA,
            base_hash=OTHER_SHA,
            replica=5,
            incarnation=77,
            gateway=2,
            gateway_incarnation=1 << 40,
            prompt=[1, 49151, 0],
            generated=[17, 18],
            max_tokens=128,
            sampling=Sampling(
                seed=(1 << 63) - 1,
                temperature=0.7,
                top_p=0.9,
                top_k=40,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logit_bias={7: -100.0},
                top_logprobs=5,
                json_schema='{"type":"object"}',
            ),
            stop_ids=[2],
            remaining_ms=59_000,
        ),
    ),
    (topics.REQUESTS, Cancel("req-1", 1, 2, 1 << 40)),
    (
        topics.TOKENS,
        TokenBatch(
            replica=5,
            incarnation=77,
            gateway=2,
            gateway_incarnation=1 << 40,
            load=LOAD,
            events=[
                Admitted("req-1", 0, Tier.DISK),
                Tokens("req-1", 0, 2, [49151, 7], [Logprobs(-0.5, [(7, -0.25)]), Logprobs(-1.5, [])], 512),
                Finished("req-1", 0, 4, FinishReason.ERROR, "out of blocks"),
                Rejected("req-2", 1, RejectReason.STALE, "incarnation 4, here 77"),
            ],
        ),
    ),
    (
        topics.ADAPTER_COMMANDS,
        RegisterAdapter(
            command_id="cmd-1",
            adapter_id="acme/support@7",
            version=7,
            base_model_hash=OTHER_SHA,
            rank=16,
            alpha=32.0,
            target_modules=["q_proj", "v_proj"],
            weights_uri="s3://pipeline/acme/7/adapter_model.safetensors",
            checksum=SHA,
        ),
    ),
    (topics.ADAPTER_COMMANDS, RetireAdapter("cmd-2", "acme/support@6")),
    (topics.ADAPTER_COMMANDS, SetAlias("cmd-3", "acme/support:prod", "acme/support@7")),
    (topics.ADAPTER_COMMANDS, RollbackAlias("cmd-7", "acme/support:prod", "acme pipeline lf-3b1")),
    (
        topics.ADAPTER_COMMANDS,
        RegisterAdapter(
            command_id="cmd-1",
            adapter_id="acme/support@7",
            version=7,
            base_model_hash=OTHER_SHA,
            rank=16,
            alpha=32.0,
            target_modules=["q_proj", "v_proj"],
            weights_uri="s3://pipeline/acme/7/adapter_model.safetensors",
            checksum=SHA,
            by="acme pipeline lf-3b1",
        ),
    ),
    (topics.ADAPTER_COMMANDS, RetireAdapter("cmd-2", "acme/support@6", "acme pipeline lf-3b1")),
    (topics.ADAPTER_COMMANDS, SetAlias("cmd-3", "acme/support:prod", "acme/support@7", "acme pipeline lf-3b1")),
    (topics.ADAPTER_COMMANDS, SetAlias("cmd-3", "acme/support:prod", "acme/support@7", "acme pipeline lf-3b1", 0.25)),
    (topics.ADAPTER_COMMANDS, EndTrial("cmd-10", "acme/support:prod", TRIAL, "3 of 3 failed", "registry")),
    (topics.ADAPTER_COMMANDS, ConcludeFlip("cmd-9", "acme/support:prod", FLIP, True, "none lives", "registry")),
    (topics.ADAPTER_COMMANDS, ConcludeFlip("cmd-11", "acme/support:prod", TRY, True, "none lives", "registry")),
    (topics.ADAPTER_COMMANDS, QuarantineAdapter("cmd-10", "acme/support@7", "it answers in the wrong language")),
    (topics.ADAPTER_COMMANDS, ReleaseAdapter("cmd-11", "acme/support@7")),
    (topics.ADAPTER_COMMANDS, QuarantineAdapter("cmd-10", "acme/support@7", "it rambles", "ops operator lf-3b1")),
    (topics.ADAPTER_COMMANDS, ReleaseAdapter("cmd-11", "acme/support@7", "ops operator lf-3b1")),
    (
        topics.ADAPTER_EVENTS,
        AdapterEvent(
            customer="acme",
            kind=EventKind.REFUSED,
            by="acme pipeline lf-3b1",
            at_unix_ms=AT,
            command="alias",
            command_id="cmd-3",
            command_partition=6,
            command_offset=42,
            adapter_id="acme/support@7",
            content_id=SHA,
            alias="acme/support:prod",
            previous_adapter_id="acme/support@6",
            status=409,
            reasons=[Refusal("adapter_id", "it is retired")],
        ),
    ),
    (
        topics.ADAPTER_EVENTS,
        AdapterEvent(
            customer="acme",
            kind=EventKind.TRIED,
            by="acme pipeline lf-3b1",
            at_unix_ms=AT,
            command="alias",
            command_id="cmd-8",
            command_partition=6,
            command_offset=44,
            adapter_id="acme/support@8",
            content_id=SHA,
            alias="acme/support:prod",
            previous_adapter_id="acme/support@7",
            status=200,
            reasons=[Refusal("alias", "none")],
            share=0.25,
        ),
    ),
    (
        topics.ADAPTER_EVENTS,
        AdapterEvent(
            customer="acme",
            kind=EventKind.QUARANTINED,
            by="ops operator lf-3b1",
            at_unix_ms=AT,
            command="quarantine",
            command_id="cmd-10",
            command_partition=6,
            command_offset=43,
            adapter_id="acme/support@7",
            content_id=SHA,
            alias="acme/support:prod",
            previous_adapter_id="acme/support@6",
            status=422,
            reasons=[Refusal("why", "missing")],
            why="it answers in the wrong language",
            share=0.25,
        ),
    ),
    (
        topics.ADAPTER_RESULTS,
        CommandResult(
            command_id="cmd-1",
            status=422,
            adapter_id="acme/support@7",
            content_id=SHA,
            alias="acme/support:prod",
            previous_adapter_id="acme/support@6",
            refusals=[Refusal("rank", "64 is above this fleet's limit of 16")],
            table="adapters",
            partition=3,
            offset=12,
        ),
    ),
    (
        topics.ADAPTER_RESULTS,
        CommandResult(
            command_id="cmd-8",
            status=202,
            adapter_id="acme/support@7",
            content_id=SHA,
            alias="acme/support:prod",
            previous_adapter_id="acme/support@6",
            refusals=[Refusal("alias", "none")],
            table="aliases",
            partition=3,
            offset=12,
            pending_adapter_id="acme/support@8",
        ),
    ),
    (
        topics.ADAPTER_RESULTS,
        CommandResult(
            command_id="cmd-8",
            status=200,
            adapter_id="acme/support@7",
            content_id=SHA,
            alias="acme/support:prod",
            previous_adapter_id="acme/support@6",
            refusals=[Refusal("alias", "none")],
            table="aliases",
            partition=3,
            offset=12,
            pending_adapter_id="acme/support@9",
            trial_adapter_id="acme/support@8",
            trial_share=0.25,
        ),
    ),
    (
        topics.ADAPTERS,
        AdapterRecord(
            adapter_id="acme/support@7",
            customer="acme",
            version=7,
            base_model_hash=OTHER_SHA,
            rank=16,
            alpha=32.0,
            target_modules=["q_proj", "v_proj"],
            size_bytes=9_830_400,
            weights_uri="s3://adapters/acme/support/7.safetensors",
            checksum=SHA,
            source_uri="s3://pipeline/acme/7/adapter_model.safetensors",
            source_checksum=OTHER_SHA,
            content_id=SHA,
            status=AdapterStatus.QUARANTINED,
            command_partition=6,
            command_offset=41,
            updated_unix_ms=AT,
        ),
    ),
    (
        topics.ADAPTERS,
        AdapterRecord(
            adapter_id="acme/support@7",
            customer="acme",
            version=7,
            base_model_hash=OTHER_SHA,
            rank=16,
            alpha=32.0,
            target_modules=["q_proj", "v_proj"],
            size_bytes=9_830_400,
            weights_uri="s3://adapters/acme/support/7.safetensors",
            checksum=SHA,
            source_uri="s3://pipeline/acme/7/adapter_model.safetensors",
            source_checksum=OTHER_SHA,
            content_id=SHA,
            status=AdapterStatus.QUARANTINED,
            command_partition=6,
            command_offset=41,
            updated_unix_ms=AT,
            why="it answers in the wrong language",
        ),
    ),
    (topics.ALIASES, AliasRecord("acme/support:prod", "acme", "acme/support@7", "acme/support@6", 6, 42, AT)),
    (
        topics.ALIASES,
        AliasRecord("acme/support:prod", "acme", "acme/support@7", "acme/support@6", 6, 42, AT, ["cmd-3"]),
    ),
    (
        topics.ALIASES,
        AliasRecord("acme/support:prod", "acme", "acme/support@7", "acme/support@6", 6, 43, AT, ["cmd-8"], FLIP),
    ),
    (
        topics.ALIASES,
        AliasRecord("acme/support:prod", "acme", "acme/support@7", "acme/support@6", 6, 44, AT, ["cmd-8"], TRY, TRIAL),
    ),
    (topics.REPLICAS, ReplicaClaim(5, "a8f0", 900, OTHER_SHA, "fp32/avx2/torch 2.15", AT)),
    (
        topics.REPLICAS,
        ReplicaBeat(
            replica=5,
            incarnation=77,
            start_offset=900,
            beat=61,
            status=ReplicaStatus.GONE,
            step=1234,
            load=LOAD,
            residency=Residency(["acme/support@7"], ["acme/support@6"], ["beta/qa@1"], 1.5, 0.5),
            base_hash=OTHER_SHA,
            numeric_class="fp32/avx2/torch 2.15",
            capacity_tokens=65_536,
            at_unix_ms=AT,
            mixed_steps=99,
            max_adapters_in_step=4,
            reason="engine crashed",
            tiers=TierReport(1, 2, 3, 4, 5, 6, 7, 8, 9, [Tier.RAM], 10, "ram: a load holds a file and is no more"),
        ),
    ),
    (
        topics.REPLICAS,
        ReplicaBeat(
            replica=5,
            incarnation=77,
            start_offset=900,
            beat=62,
            status=ReplicaStatus.GONE,
            step=1235,
            load=LOAD,
            residency=Residency(["acme/support@7"], ["acme/support@6"], ["beta/qa@1"], 1.5, 0.5),
            base_hash=OTHER_SHA,
            numeric_class="fp32/avx2/torch 2.15",
            capacity_tokens=65_536,
            at_unix_ms=AT,
            mixed_steps=99,
            max_adapters_in_step=4,
            reason="engine crashed",
            tiers=TierReport(1, 2, 3, 4, 5, 6, 7, 8, 9, [Tier.RAM], 10, "ram: a load holds a file and is no more"),
            answers=[Answer("cmd-5", Answered.IN_USE, "2 requests run with it"), Answer("cmd-4", Answered.DONE)],
            failed_loads=[FailedLoad("beta/qa@2", "no such file in the store", AT, lasting=True)],
        ),
    ),
    (
        topics.REPLICAS,
        ReplicaBeat(
            replica=5,
            incarnation=77,
            start_offset=900,
            beat=63,
            status=ReplicaStatus.GONE,
            step=1235,
            load=LOAD,
            residency=Residency(["acme/support@7"], ["acme/support@6"], ["beta/qa@1"], 1.5, 0.5),
            base_hash=OTHER_SHA,
            numeric_class="fp32/avx2/torch 2.15",
            capacity_tokens=65_536,
            at_unix_ms=AT,
            mixed_steps=99,
            max_adapters_in_step=4,
            reason="engine crashed",
            tiers=TierReport(1, 2, 3, 4, 5, 6, 7, 8, 9, [Tier.RAM], 10, "ram: a load holds a file and is no more", 12),
            answers=[Answer("cmd-5", Answered.IN_USE, "2 requests run with it"), Answer("cmd-4", Answered.DONE)],
            failed_loads=[FailedLoad("beta/qa@2", "no such file in the store", AT, lasting=True)],
        ),
    ),
    (topics.GATEWAYS, GatewayClaim(2, "b7e1", 12, AT)),
    (topics.GATEWAYS, GatewayBeat(2, 1 << 40, 8, AT, {"adapters": {0: 5, 7: 9}, "aliases": {}}, gone=True)),
    (topics.OWNER_PLANS, OwnerPlan("acme/support@7", 4, True, [1, 5], AT)),
    (topics.USAGE, Usage("acme", 2, 1 << 40, 3, 450, AT)),
    (topics.ADAPTER_STATS, AdapterStats("acme/support@7", AT, 120, 33.5, 0.75)),
    (topics.REPLICA_COMMANDS, Load("cmd-4", "acme/support@7")),
    (topics.REPLICA_COMMANDS, Unload("cmd-5", "acme/support@7")),
    (topics.REPLICA_COMMANDS, Unload("cmd-7", "acme/support@7", 60.0)),
    (topics.REPLICA_COMMANDS, Drain("cmd-6")),
    (
        topics.CUSTOMERS,
        Customer(
            "acme",
            [ApiKey(SHA, "lf-3b", Role.PIPELINE), ApiKey(OTHER_SHA, "lf-c0", Role.CUSTOMER)],
            8,
            2.5,
            AT,
            60,
            90_000,
            4_096,
            512,
        ),
    ),
    (
        topics.FINISHED,
        RequestFinished(
            request_id="req-1",
            at_unix_ms=AT,
            customer="acme",
            model="acme/support:prod",
            adapter="acme/support@7",
            content_id=SHA,
            tier=Tier.GPU,
            outcome=Outcome.OK,
            gateway=2,
            gateway_incarnation=1 << 40,
            replica=5,
            attempts=2,
            prompt_tokens=300,
            output_tokens=40,
            ttft_ms=81.25,
            tpot_ms=11.5,
            total_ms=541.0,
            detail="re-driven",
        ),
    ),
    (
        topics.FINISHED,
        AttemptFinished(
            request_id="req-1",
            attempt=1,
            at_unix_ms=AT,
            customer="acme",
            adapter="acme/support@7",
            content_id=SHA,
            slot=3,
            epoch=9,
            tier=Tier.RAM,
            reason=FinishReason.LENGTH,
            gateway=2,
            gateway_incarnation=1 << 40,
            replica=5,
            incarnation=77,
            prompt_tokens=300,
            first_position=12,
            output_tokens=28,
            queue_ms=1.5,
            load_ms=-1.0,
            first_token_ms=80.5,
            total_ms=400.0,
        ),
    ),
    (
        topics.CACHE_EVENTS,
        CacheEvent(AT, 5, 77, "acme/support@7", SHA, "load", Tier.GPU, Tier.RAM, 9_830_400, 3.25, "first request"),
    ),
]


def message_types(topic: Topic) -> tuple[Any, ...]:
    """The members of the topic's union, or its one type."""
    return get_args(topic.value) or (topic.value,)


def golden(topic: Topic, value: msgspec.Struct) -> Path:
    """Where the bytes of a value lie: its type's name, with a number from the type's second value on."""
    alike = [other for of, other in EXAMPLES if of is topic and type(other) is type(value)]
    number = [other is value for other in alike].index(True) + 1
    name = type(value).__name__ + (f"-{number}" if number > 1 else "")
    return GOLDEN / topic.name / f"{name}.{'bin' if topic.wire == 'msgpack' else 'json'}"


def write_missing() -> None:
    for topic, value in EXAMPLES:
        path = golden(topic, value)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(topic, value))
            print("wrote", path.relative_to(GOLDEN))


if __name__ == "__main__":
    write_missing()
