"""What happened, in lines that a person can read."""

from functools import singledispatch
from typing import Any

from gateway.flight import Deliver, End, SendCancel, SendSubmit
from schemas.adapters import AdapterRecord
from schemas.gateways import GatewayBeat, GatewayClaim
from schemas.replicas import ReplicaBeat, ReplicaClaim
from schemas.requests import Cancel, Submit
from schemas.tokens import Admitted, Finished, Rejected, TokenBatch, Tokens
from workers.inbox import Admit, Reject, Stop


@singledispatch
def told(value: Any) -> str:
    """One line for a record, action or act."""
    return str(value)


@told.register
def _(value: Submit) -> str:
    to, by = f"{value.replica}:{value.incarnation}", f"{value.gateway}:{value.gateway_incarnation}"
    what = value.adapter or "base"
    return f"Submit {value.request_id}/{value.attempt} {by} -> {to} {what} from {len(value.generated)}"


@told.register
def _(value: Cancel) -> str:
    return f"Cancel {value.request_id}/{value.attempt} of {value.gateway}:{value.gateway_incarnation}"


@told.register
def _(value: TokenBatch) -> str:
    by, to = f"{value.replica}:{value.incarnation}", f"{value.gateway}:{value.gateway_incarnation}"
    load = f"{value.load.tokens_in_flight} in flight at {value.load.read_offset}"
    return f"{by} -> {to} ({load}) " + ", ".join(told(event) for event in value.events)


@told.register
def _(value: Admitted) -> str:
    return f"Admitted {value.request_id}/{value.attempt}"


@told.register
def _(value: Tokens) -> str:
    return f"Tokens {value.request_id}/{value.attempt} {value.position}+{len(value.ids)}"


@told.register
def _(value: Finished) -> str:
    return f"Finished {value.request_id}/{value.attempt} {value.length} {value.reason}"


@told.register
def _(value: Rejected) -> str:
    return f"Rejected {value.request_id}/{value.attempt} {value.reason}"


@told.register(ReplicaClaim)
@told.register(GatewayClaim)
def _(value: ReplicaClaim | GatewayClaim) -> str:
    return f"Claim by {value.nonce} from {value.start_offset}"


@told.register(ReplicaBeat)
@told.register(GatewayBeat)
def _(value: ReplicaBeat | GatewayBeat) -> str:
    return f"Beat {value.beat} of {value.incarnation} {getattr(value, 'status', '')} {getattr(value, 'reason', '')}"


@told.register
def _(value: AdapterRecord) -> str:
    return f"{value.adapter_id} {value.status}"


@told.register
def _(value: SendSubmit) -> str:
    return f"sends {told(value.submit)}"


@told.register
def _(value: SendCancel) -> str:
    return f"sends {told(value.cancel)} to {value.replica}"


@told.register
def _(value: Deliver) -> str:
    return f"delivers {len(value.ids)} of {value.request_id}"


@told.register
def _(value: End) -> str:
    return f"ends {value.request_id}: {value.outcome} {value.finish} {value.detail}"


@told.register
def _(value: Admit) -> str:
    return f"admits {value.submit.request_id}/{value.submit.attempt}"


@told.register
def _(value: Reject) -> str:
    return f"rejects {value.submit.request_id}/{value.submit.attempt}: {value.reason} {value.detail}"


@told.register
def _(value: Stop) -> str:
    return f"stops {value.request_id}/{value.attempt}: {value.reason}"
