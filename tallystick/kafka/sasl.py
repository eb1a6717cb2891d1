"""The client's half of a SASL login: PLAIN, SCRAM, OAUTHBEARER and Kerberos.

Each mechanism is a generator: it yields what the client sends, and is sent what the broker answers.
A `ValueError` says that an answer is wrong.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Generator, Iterable

from tallystick.errors import OptionError

Conversation = Generator[bytes, bytes, None]

SCRAM_ITERATIONS_MIN = 4096
SCRAM_ITERATIONS_MAX = 1_000_000
"""More would keep a client busy for seconds at a broker's word."""
SCRAM_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
SERVER_FIRST = re.compile(rb"r=([^,]+),s=([A-Za-z0-9+/=]+),i=([0-9]{1,9})(?:,.*)?")
QUALITY_AUTHENTICATION = b"\x01"
"""Kafka offers neither integrity nor confidentiality below SASL (RFC 4752, section 3.1)."""


def conversation(
    mechanism: str,
    *,
    host: str,
    username: str,
    password: str,
    kerberos_service_name: str,
    token: str = "",
    extensions: Iterable[tuple[str, str]] = (),
) -> Conversation:
    """Begin a login with the broker at `host`.

    Args:
        mechanism: one of `config.SASL_MECHANISMS`.
        host: the broker's name, which Kerberos knows it by.
        username: of PLAIN and SCRAM.
        password: of PLAIN and SCRAM.
        kerberos_service_name: the primary of the broker's principal.
        token: of OAUTHBEARER.
        extensions: of OAUTHBEARER, name and value.
    """
    if mechanism == "PLAIN":
        return plain(username, password)
    if mechanism in SCRAM_HASHES:
        return scram(SCRAM_HASHES[mechanism], username, password)
    if mechanism == "OAUTHBEARER":
        return oauth_bearer(token, extensions)
    return kerberos(f"{kerberos_service_name}@{host}")


def plain(username: str, password: str) -> Conversation:
    """Send name and password as they are (RFC 4616)."""
    yield f"\0{username}\0{password}".encode()


def scram(hash_name: str, username: str, password: str) -> Conversation:
    """Prove that the password is known, and let the broker prove the same (RFC 5802, RFC 7677).

    Raises:
        ValueError: the broker repeats another nonce, asks for a proof from which the password can
            be guessed, or does not know the password.
    """
    name = username.replace("=", "=3D").replace(",", "=2C")
    nonce = secrets.token_hex(16).encode()
    client_first = b"n=%b,r=%b" % (name.encode(), nonce)
    server_first = yield b"n,," + client_first
    parts = SERVER_FIRST.fullmatch(server_first)
    if parts is None:
        raise ValueError("the first message is not one of SCRAM")
    both_nonces, salt, iterations = parts[1], base64.b64decode(parts[2]), int(parts[3])
    if not both_nonces.startswith(nonce) or both_nonces == nonce:
        raise ValueError("the nonce does not begin with ours")
    if not SCRAM_ITERATIONS_MIN <= iterations <= SCRAM_ITERATIONS_MAX:
        raise ValueError(
            f"{iterations} iterations, expected {SCRAM_ITERATIONS_MIN} to {SCRAM_ITERATIONS_MAX}"
        )
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    stored_key = hashlib.new(hash_name, client_key).digest()
    without_proof = b"c=biws,r=" + both_nonces
    conversation_so_far = b",".join([client_first, server_first, without_proof])
    signature = hmac.digest(stored_key, conversation_so_far, hash_name)
    proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
    server_final = yield without_proof + b",p=" + base64.b64encode(proof)
    server_key = hmac.digest(salted, b"Server Key", hash_name)
    expected = base64.b64encode(hmac.digest(server_key, conversation_so_far, hash_name))
    if not hmac.compare_digest(server_final.partition(b",")[0], b"v=" + expected):
        raise ValueError("the signature is wrong: the broker does not know the password")


def oauth_bearer(token: str, extensions: Iterable[tuple[str, str]]) -> Conversation:
    """Send a token (RFC 7628); a broker that refuses it says why, and is answered with a byte."""
    pairs = "".join(f"\x01{name}={value}" for name, value in extensions)
    reason = yield f"n,,\x01auth=Bearer {token}{pairs}\x01\x01".encode()
    if reason:
        yield b"\x01"


def kerberos(service: str) -> Conversation:
    """Log in with the ticket of this process (RFC 4752); needs the package `gssapi`.

    Raises:
        OptionError: the package is missing.
        ValueError: the broker wants a layer of Kerberos' own below Kafka.
    """
    try:
        import gssapi  # needs Kerberos' own libraries
    except (ImportError, OSError) as error:
        raise OptionError(
            f"sasl.mechanism GSSAPI needs the Python package gssapi: pip install gssapi ({error})."
        ) from None
    target = gssapi.Name(service, name_type=gssapi.NameType.hostbased_service)
    context = gssapi.SecurityContext(
        name=target.canonicalize(gssapi.MechType.kerberos), usage="initiate"
    )
    answer = None
    while not context.complete:
        answer = yield context.step(answer) or b""
    offer = context.unwrap(answer).message
    if not offer[0] & QUALITY_AUTHENTICATION[0]:
        raise ValueError("the broker does not offer Kerberos without a layer of its own")
    reply = QUALITY_AUTHENTICATION + offer[1:] + service.encode()
    yield context.wrap(reply, False).message
