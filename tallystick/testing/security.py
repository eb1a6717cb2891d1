"""SASL_SSL with SCRAM-SHA-512 and access control lists for the embedded Kafka.

Passwords here are those of throw-away clusters on this machine; still they appear in no `repr`.
The controllers talk PLAINTEXT among themselves, which is why ANONYMOUS is a super user: no
other process can reach their listener as anyone.
"""

import datetime
import importlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tallystick.errors import OptionError

SUPER_USER = "admin"
PROTOCOL = "SASL_SSL"
MECHANISM = "SCRAM-SHA-512"
VALID_FOR = datetime.timedelta(days=30)
PLAIN_TEXT = re.compile(r"[A-Za-z0-9._~-]+")
"""Names and passwords without what the many formats they pass through would have to escape."""

ResourceType = Literal["TOPIC", "GROUP", "TRANSACTIONAL_ID", "CLUSTER"]


@dataclass(frozen=True, slots=True)
class Security:
    """The users of the embedded Kafka.

    Args:
        users: Name -> password. `admin` must be among them; it may do everything, and the brokers
            themselves log in as it. The others may do what `create_acls` grants them.

    Raises:
        OptionError: `admin` is missing, or a name or password is not of A-Z a-z 0-9 . _ ~ -
    """

    users: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        if SUPER_USER not in self.users:
            raise OptionError(
                f"Security(users=...) names {sorted(self.users)}: the user {SUPER_USER!r} is "
                f"missing, as which the brokers log in. Add it."
            )
        for user, password in self.users.items():
            if not (PLAIN_TEXT.fullmatch(user) and PLAIN_TEXT.fullmatch(password)):
                raise OptionError(
                    f"Security(users=...): the name or password of user {user!r} has other "
                    f"characters than A-Z a-z 0-9 . _ ~ - ; choose one without."
                )

    def __repr__(self) -> str:
        return f"Security(users={sorted(self.users)})"

    def login(self, user: str) -> str:
        """Return the `sasl.jaas.config` of a user."""
        return (
            "org.apache.kafka.common.security.scram.ScramLoginModule required "
            f'username="{user}" password="{self.password(user)}";'
        )

    def password(self, user: str) -> str:
        """Return the password of a user.

        Raises:
            OptionError: There is no such user.
        """
        if user not in self.users:
            raise OptionError(f"the embedded Kafka has no user {user!r}, only {sorted(self.users)}")
        return self.users[user]

    def format_arguments(self) -> list[str]:
        """Return the arguments by which `StorageTool format` creates the users."""
        return [
            argument
            for user, password in self.users.items()
            for argument in ("--add-scram", f"{MECHANISM}=[name={user},password={password}]")
        ]


@dataclass(frozen=True, slots=True)
class Stores:
    """The PEM files of a cluster: a certificate authority of its own, and the brokers' key."""

    truststore: Path
    keystore: Path


def broker_properties(security: Security, stores: Stores) -> dict[str, str]:
    """Return the part of `server.properties` that turns security on, without the listeners."""
    return {
        "listener.security.protocol.map": f"{PROTOCOL}:{PROTOCOL},CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": PROTOCOL,
        "sasl.mechanism.inter.broker.protocol": MECHANISM,
        "sasl.enabled.mechanisms": MECHANISM,
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": security.login(SUPER_USER),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(stores.keystore),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(stores.truststore),
        "ssl.client.auth": "none",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{SUPER_USER};User:ANONYMOUS",
        "allow.everyone.if.no.acl.found": "false",
    }


def client_options(security: Security, stores: Stores, user: str) -> dict[str, str]:
    """Return a user's options under the names of Kafka's Java client."""
    return {
        "security.protocol": PROTOCOL,
        "sasl.mechanism": MECHANISM,
        "sasl.jaas.config": security.login(user),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(stores.truststore),
    }


def confluent_options(security: Security, stores: Stores, user: str) -> dict[str, str]:
    """Return a user's options under the names of librdkafka, as confluent-kafka takes them."""
    return {
        "security.protocol": PROTOCOL,
        "sasl.mechanism": MECHANISM,
        "sasl.username": user,
        "sasl.password": security.password(user),
        "ssl.ca.location": str(stores.truststore),
    }


@dataclass(frozen=True, slots=True)
class Grant:
    """An entry of the access control list: a user may do an operation, from any host.

    Args:
        user: The user's name, without `User:`.
        resource: The kind of resource.
        name: The resource's name; ignored for CLUSTER.
        operation: READ, WRITE, DESCRIBE, DESCRIBE_CONFIGS, ... as Kafka names them.
        prefixed: `name` is a prefix of the names of all resources that are meant.
    """

    user: str
    resource: ResourceType
    name: str
    operation: str
    prefixed: bool = False


def create_acls(options: Mapping[str, Any], grants: Iterable[Grant]) -> None:
    """Grant rights, and return when the brokers know them.

    Args:
        options: Of confluent-kafka, of a user who may alter the cluster:
            `kafka.confluent_options()`.
        grants: What to allow.

    Raises:
        OptionError: The package confluent-kafka is missing.
    """
    admin_module = _require("confluent_kafka.admin", "confluent-kafka")
    bindings = [_binding(admin_module, grant) for grant in grants]
    client = admin_module.AdminClient(dict(options))  # its answers are lost once it is collected
    for future in client.create_acls(bindings).values():
        future.result()


def _binding(admin: ModuleType, grant: Grant) -> Any:
    cluster = grant.resource == "CLUSTER"
    return admin.AclBinding(
        admin.ResourceType["BROKER" if cluster else grant.resource],
        "kafka-cluster" if cluster else grant.name,
        admin.ResourcePatternType["PREFIXED" if grant.prefixed else "LITERAL"],
        f"User:{grant.user}",
        "*",
        admin.AclOperation[grant.operation],
        admin.AclPermissionType["ALLOW"],
    )


def create_stores(directory: Path, host: str) -> Stores:
    """Make a certificate authority, and a key with a certificate for `host` and localhost.

    Raises:
        OptionError: The package cryptography is missing.
    """
    x509 = _require("cryptography.x509", "cryptography")
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))]
    )
    authority_key, broker_key = _new_key(), _new_key()
    authority = _certificate("Tallystick test CA", authority_key, None, authority_key)
    certificate = _certificate("localhost", broker_key, authority, authority_key, names)
    stores = Stores(directory / "ca.pem", directory / "broker.pem")
    stores.truststore.write_bytes(_pem(authority))
    stores.keystore.touch(mode=0o600)
    stores.keystore.write_bytes(_private_pem(broker_key) + _pem(certificate))
    return stores


def _new_key() -> Any:
    ec = _require("cryptography.hazmat.primitives.asymmetric.ec", "cryptography")
    return ec.generate_private_key(ec.SECP256R1())


def _certificate(name: str, key: Any, issuer: Any, issuer_key: Any, names: Any = None) -> Any:
    x509 = _require("cryptography.x509", "cryptography")
    hashes = _require("cryptography.hazmat.primitives.hashes", "cryptography")
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(certificate: Any) -> bytes:
    serialization = _require("cryptography.hazmat.primitives.serialization", "cryptography")
    data: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return data


def _private_pem(key: Any) -> bytes:
    serialization = _require("cryptography.hazmat.primitives.serialization", "cryptography")
    data: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,  # the only format that Kafka reads
        serialization.NoEncryption(),
    )
    return data


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"security on the embedded Kafka needs the package {package}, which is not installed: "
            f"run `pip install {package}`."
        ) from error
