"""Somebody else's keys, names and numbers."""

import base64
from urllib.parse import quote

from tests.gateway.attacks.target import CHATS, MALLORY, VICTIM, Attack, Got, Target, all_are
from tests.gateway.rig import ACME, OPERATOR, PIPELINE


async def keys(target: Target) -> Got:
    wrong = ["", "lf-nobody", VICTIM[:-1], VICTIM + "x", VICTIM.upper(), "*", "' OR 1=1 --", "x" * 6000, "\u00e9"]
    got = [(await target.ask(CHATS, target.chat(), key))[0] for key in wrong]
    ways = [
        {"Authorization": f"Basic {base64.b64encode(f'x:{MALLORY}'.encode()).decode()}"},
        {"Authorization": MALLORY},
        {"Cookie": f"key={MALLORY}"},
        {"X-Api-Key": MALLORY},
    ]
    got += [(await target.ask(CHATS, target.chat(), "", headers=way))[0] for way in ways]
    got.append((await target.ask(f"{CHATS}?api_key={MALLORY}", target.chat(), ""))[0])
    return all_are(got, 401)


async def roles(target: Target) -> Got:
    got = [(await target.ask(CHATS, target.chat(), key))[0] for key in (OPERATOR, PIPELINE)]
    got.append((await target.ask(CHATS, target.chat(), headers={"x-lorafleet-replica": "0"}))[0])
    inside = ("adapters", "replicas", "customers", "customers/victim/keys")
    got += [(await target.ask(f"/internal/{path}", None, internal=True))[0] for path in inside]
    return all_are(got, 403, 404, 405)


async def names(target: Target) -> Got:
    """Foreign, absent and nonsense must be one answer."""
    foreign = ["victim/secret:prod", "victim/secret@1", "victim/secret", "d" * 64]
    absent = ["victim/nothing:prod", "victim/secret@2", "nobody/x:prod", "mallory/x:prod", "x/../victim/secret:prod"]
    said = set()
    for name in foreign + absent:
        for path, body in ((CHATS, target.chat(model=name)), (f"/v1/models/{quote(name, safe='')}", None)):
            code, _, told = await target.ask(path, body)
            said.add((code, told["error"]["message"].replace(name, "NAME"), told["error"]["code"]))
    _, _, listed = await target.ask("/v1/models", None)
    seen = [model["id"] for model in listed["data"]]
    return Got(
        f"{', '.join(sorted({str(code) for code, *_ in said}))}: {len(said)} answer for {len(foreign + absent)} names; "
        f"{len(seen)} model listed",
        len(said) == 1 and {code for code, *_ in said} == {404} and seen == [target.model],
    )


async def guessed(target: Target) -> Got:
    ids = [f"victim/secret@{number}" for number in range(1, 60)] + [f"victim/v{number}:prod" for number in range(60)]
    got = [(await target.ask(CHATS, target.chat(model=name)))[0] for name in ids]
    return all_are(got, 404)


async def borrowed_prefix(target: Target) -> Got:
    """What another customer's prompt left in the prefix cache must not show in the attacker's usage."""
    long = target.chat("the victim's long prompt " * 40)
    await target.ask(CHATS, long, ACME)
    _, _, own = await target.ask(CHATS, long, ACME)
    _, _, told = await target.ask(CHATS, long)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (own, told)]
    return Got(f"{cached[1]} cached tokens (its owner: {cached[0]})", cached[1] == 0)


ATTACKS = [
    Attack("foreign keys", "no key, wrong ones, and right ones where no key belongs", keys),
    Attack("foreign keys", "keys of another role; internal addresses with a customer's key", roles),
    Attack("guessed ids", "another customer's alias, adapter and content id beside absent ones", names),
    Attack("guessed ids", "119 guessed adapter versions and labels", guessed),
    Attack("guessed ids", "another customer's prompt, for its prefix cache", borrowed_prefix),
]
