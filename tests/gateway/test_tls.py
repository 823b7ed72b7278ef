"""The public port with a certificate: made here, believed by the clients of the test alone."""

import ssl
import subprocess
from pathlib import Path

import httpx
import httpx2
import openai
import pytest

from gateway.tls import Tls
from streams.bus.errors import SettingsError
from tests.gateway.rig import ACME, Rig
from tests.stack import Stack, wait_until

Pair = tuple[Path, Path]


def made(folder: Path, name: str) -> Pair:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(tmp_path_factory.mktemp("tls"), "ours")


def env(cert: object = "", key: object = "") -> dict[str, str]:
    return {"GATEWAY_TLS_CERT": str(cert), "GATEWAY_TLS_KEY": str(key)}


def test_both_or_neither(pair: Pair) -> None:
    assert Tls.from_env({}) is None
    assert Tls.from_env(env()) is None
    assert Tls.from_env(env(*pair)) == Tls(*pair)
    with pytest.raises(SettingsError, match="GATEWAY_TLS_KEY is missing"):
        Tls.from_env(env(cert=pair[0]))
    with pytest.raises(SettingsError, match="GATEWAY_TLS_CERT is missing"):
        Tls.from_env(env(key=pair[1]))


def test_what_cannot_be_used_is_named(pair: Pair, tmp_path: Path) -> None:
    cert, key = pair
    other, other_key = made(tmp_path, "other")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", str(key), "-out", str(locked), "-passout", "pass:x"],
        check=True,
        capture_output=True,
    )
    (broken := tmp_path / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (binary := tmp_path / "cert.der").write_bytes(bytes(range(256)))
    for found, named in (
        (env(tmp_path / "none", key), f"GATEWAY_TLS_CERT={tmp_path}/none cannot be read: No such file"),
        (env(cert, tmp_path), f"GATEWAY_TLS_KEY={tmp_path} cannot be read: Is a directory"),
        (env(key, key), f"GATEWAY_TLS_CERT={key} holds no certificate"),
        (env(cert, cert), f"GATEWAY_TLS_KEY={cert} holds no private key"),
        (env(binary, key), f"GATEWAY_TLS_CERT={binary} cannot be read: it is no text"),
        (env(cert, other_key), f"GATEWAY_TLS_KEY={other_key} and GATEWAY_TLS_CERT={cert}: key values mismatch"),
        (env(broken, key), f"GATEWAY_TLS_KEY={key} and GATEWAY_TLS_CERT={broken}: "),
        (env(cert, locked), f"GATEWAY_TLS_KEY={locked} is locked with a passphrase"),
    ):
        with pytest.raises(SettingsError) as refused:
            Tls.from_env(found)
        assert str(refused.value).startswith(named)
        assert "PRIVATE KEY-----" not in str(refused.value)
    assert other != cert


@pytest.mark.real
async def test_chats_stream_through_it(rig: Rig, stack: Stack, pair: Pair) -> None:
    door = rig.gateway(stack.ports.allot("tls-public"), stack.ports.allot("tls-internal"), env=env(*pair))
    rig.ready(door.child, rig.worker())
    door.sees(1)  # the internal port speaks plainly
    trusting = ssl.create_default_context(cafile=str(pair[0]))
    async with (
        httpx2.AsyncClient(verify=trusting) as web,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=ACME, http_client=web, max_retries=0) as client,
    ):
        chunks = await client.chat.completions.create(
            model=rig.model.name, messages=[{"role": "user", "content": "hello"}], max_tokens=20, stream=True
        )
        assert "".join([c.choices[0].delta.content or "" async for c in chunks]) == rig.answer("hello", 20)
        with pytest.raises(httpx2.HTTPError):
            await web.get(f"{door.url.replace('https', 'http')}/healthz")
    async with httpx.AsyncClient() as doubting:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await doubting.get(f"{door.url}/healthz")
    old = ssl.create_default_context(cafile=str(pair[0]))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with httpx.AsyncClient(verify=old) as older:
        assert (await older.get(f"{door.url}/healthz")).status_code == 200
    assert "PRIVATE KEY" not in door.child.output()


@pytest.mark.real
def test_a_gateway_that_cannot_use_them_says_so_and_ends(rig: Rig, stack: Stack, pair: Pair) -> None:
    door = rig.gateway(stack.ports.allot("tls-none"), stack.ports.allot("tls-none-i"), env=env(pair[0], "/nowhere"))
    wait_until(lambda: door.child.returncode() is not None, 20, "its end")
    assert door.child.returncode() == 2
    said = [line for line in door.child.output().splitlines() if line]
    assert said[-1].startswith("gateway: GATEWAY_TLS_KEY=/nowhere cannot be read")
