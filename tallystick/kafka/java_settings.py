"""The settings of Kafka's Java client that have no field here: each one by name, with the reason.

People come with what worked in Spark's connector, so no name of the Java client's is merely unknown
(`tests/kafka/test_java_settings.py` has all of them, of Kafka 4.3). A setting that no row depends
on is passed over with a warning; one that would change something is refused.
"""

import difflib
import logging
from collections.abc import Collection, Mapping
from functools import cache

from tallystick.errors import OptionError

logger = logging.getLogger(__name__)

TUNES_JAVA = "it tunes the inside of a Java client"
NO_MEMBERS = "nothing joins a group; positions are in the checkpoint"
TOKEN_AT_LOGIN = "a token is asked for when a login needs one, and kept for most of its lifetime"
TOKEN_AS_IT_IS = "the token is handed on as it is, and the brokers check it"
TICKET_OF_SYSTEM = "tickets are the system's: renew them there, or name a KRB5_CLIENT_KTNAME"
SYSTEM_LEVEL = "every codec has one level here; the sink's compression chooses the codec"
ASKED_AGAIN = (
    "where no known broker answers, those of kafka.bootstrap.servers are asked again, always"
)
IN_TURN = "batches of rows without a key go to the partitions in turn"


def _by_name(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each name, of lists of names by their reason."""
    return {name: reason for reason, names in names_by_reason.items() for name in names.split()}


PASSED_OVER = _by_name(
    {
        TUNES_JAVA: """
            batch.size buffer.memory check.crcs client.dns.lookup client.rack
            connections.max.idle.ms default.api.timeout.ms enable.metrics.push fetch.max.bytes
            fetch.max.wait.ms fetch.min.bytes linger.ms max.block.ms
            max.in.flight.requests.per.connection max.partition.fetch.bytes max.poll.records
            metadata.max.age.ms metadata.max.idle.ms metrics.num.samples metrics.recording.level
            metrics.sample.window.ms receive.buffer.bytes reconnect.backoff.max.ms
            reconnect.backoff.ms retries retry.backoff.max.ms retry.backoff.ms send.buffer.bytes
            socket.connection.setup.timeout.max.ms
        """,
        NO_MEMBERS: """
            auto.commit.interval.ms group.remote.assignor heartbeat.interval.ms
            max.poll.interval.ms partition.assignment.strategy rebalance.timeout.ms
            session.timeout.ms
        """,
        ASKED_AGAIN: "metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy",
        SYSTEM_LEVEL: "compression.gzip.level compression.lz4.level compression.zstd.level",
        IN_TURN: """
            partitioner.adaptive.partitioning.enable partitioner.availability.timeout.ms
        """,
        TICKET_OF_SYSTEM: """
            sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin
            sasl.kerberos.ticket.renew.jitter sasl.kerberos.ticket.renew.window.factor
        """,
        TOKEN_AT_LOGIN: """
            sasl.login.connect.timeout.ms sasl.login.read.timeout.ms
            sasl.login.refresh.buffer.seconds sasl.login.refresh.min.period.seconds
            sasl.login.refresh.window.factor sasl.login.refresh.window.jitter
            sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms
        """,
        TOKEN_AS_IT_IS: """
            sasl.oauthbearer.clock.skew.seconds sasl.oauthbearer.expected.audience
            sasl.oauthbearer.expected.issuer sasl.oauthbearer.jwks.endpoint.refresh.ms
            sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms
            sasl.oauthbearer.jwks.endpoint.retry.backoff.ms sasl.oauthbearer.jwks.endpoint.url
            sasl.oauthbearer.scope.claim.name sasl.oauthbearer.sub.claim.name
        """,
    }
)
"""Settings that no row depends on, and why they have no effect."""

OAUTH = "org.apache.kafka.common.security.oauthbearer"
ONE_VALUE: Mapping[str, tuple[tuple[str, ...], str]] = {
    "acks": (("all", "-1"), "with less, rows may be lost; KafkaSink(guarantee=...) is for that"),
    "allow.auto.create.topics": (("false",), "create topics before they are read"),
    "enable.auto.commit": (("false",), "see commit.offsets.on.checkpoint, an option of the source"),
    "enable.idempotence": (("true",), "without it, a request sent again writes rows twice"),
    "exclude.internal.topics": (("true",), "read one by its name, in subscribe"),
    "isolation.level": (("read_committed",), "rows of open and aborted transactions do not count"),
    "sasl.login.callback.handler.class": (
        (
            f"{OAUTH}.OAuthBearerLoginCallbackHandler",
            f"{OAUTH}.secured.OAuthBearerLoginCallbackHandler",
        ),
        "no other Java class has its like here",
    ),
    "partitioner.ignore.keys": (("false",), "to place rows yourself, make a column partition"),
}
"""Settings that always have one value here, which may be written down; and why no other."""

NO_CLASS = "no Java class can run here"
READ_TOKEN = (
    "have the token written to a file, and name that in kafka.sasl.oauthbearer.token.endpoint.url"
)
OPENSSL_DOES_IT = (
    "TLS is OpenSSL's here, not Java's: set it there, in the file that OPENSSL_CONF names"
)
TLS_VERSIONS = "connections use TLS 1.2 or later, as OpenSSL is set up"
SHARE_GROUPS = "share groups have no positions to go on from: read a topic, by subscribe"
CLAIMS = """
    algorithm claim.aud claim.exp.seconds claim.iss claim.jti.include claim.nbf.seconds claim.sub
    file private.key.file private.key.passphrase template.file
"""
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (f"sasl.oauthbearer.assertion.{claim}" for claim in CLAIMS.split()), READ_TOKEN
    ),
    **_by_name(
        {
            "that is librdkafka's name; use kafka.sasl.oauthbearer.token.endpoint.url, and "
            "clientId=, clientSecret= and extension_NAME= in kafka.sasl.jaas.config": """
                sasl.oauthbearer.client.id sasl.oauthbearer.client.secret
                sasl.oauthbearer.extensions sasl.oauthbearer.method
            """,
            f"{NO_CLASS}; for OAUTHBEARER {READ_TOKEN}": """
                sasl.oauthbearer.jwt.retriever.class sasl.oauthbearer.jwt.validator.class
            """,
            f"{NO_CLASS}; log in by kafka.sasl.jaas.config": """
                sasl.client.callback.handler.class sasl.login.class
            """,
            OPENSSL_DOES_IT: """
                security.providers ssl.cipher.suites ssl.keymanager.algorithm ssl.provider
                ssl.secure.random.implementation ssl.trustmanager.algorithm
            """,
        }
    ),
    "sasl.oauthbearer.header.urlencode": (
        f"id and secret go as they are, as Kafka's clients do by default; or {READ_TOKEN}"
    ),
    "ssl.engine.factory.class": (
        f"{NO_CLASS}; certificates go to kafka.ssl.truststore.location and .keystore.location"
    ),
    "ssl.protocol": TLS_VERSIONS,
    "ssl.enabled.protocols": TLS_VERSIONS,
    "ssl.truststore.password": "PEM trust stores have no password",
    "ssl.keystore.password": "PEM key stores have none; a key's own goes to kafka.ssl.key.password",
    "ssl.ca.location": "that is librdkafka's name; use kafka.ssl.truststore.location",
    "ssl.certificate.location": "that is librdkafka's name; use kafka.ssl.keystore.location",
    "sasl.mechanisms": "that is librdkafka's name; use kafka.sasl.mechanism",
    "transactional.id": "Tallystick makes it, from transactional_id_prefix and the pipeline's name",
    "transaction.timeout.ms": "it is KafkaSink(transaction_timeout_ms=...)",
    "transaction.two.phase.commit.enable": (
        "transactions keep a timeout, so that none holds up readers for ever: set "
        "KafkaSink(transaction_timeout_ms=...)"
    ),
    "compression.type": "use KafkaSink(compression=...)",
    "max.request.size": "use KafkaSink(batch_bytes=...)",
    "partitioner.class": "rows are placed by key as Kafka's clients do, or by a column partition",
    "auto.offset.reset": "use startingOffsets",
    "group.id": "it is for reading: an option of the source, or KafkaSource(group_id=...)",
    "group.instance.id": f"{NO_MEMBERS}; use kafka.group.id to show them",
    "group.protocol": f"{NO_MEMBERS}; use kafka.group.id to show them",
    "share.acknowledgement.mode": SHARE_GROUPS,
    "share.acquire.mode": SHARE_GROUPS,
    "interceptor.classes": f"{NO_CLASS}; use a step of the pipeline",
    "metric.reporters": f"{NO_CLASS}; use tallystick.ops.metrics.serve",
    "config.providers": f"{NO_CLASS}; read the secret in your program, and set it as a value",
    "internal.throw.on.fetch.stable.offset.unsupported": (
        "it is a switch inside Kafka Streams; remove it"
    ),
    "key.deserializer": "keys are bytes, as in Spark's connector; cast the column",
    "value.deserializer": "use value.format, or cast the column",
    "key.serializer": "keys are bytes or text; make the column so",
    "value.serializer": "use value.format=json, or make the column value",
}
"""Names that people will try, and what to do instead."""


def check_without_field(option: str, text: str, known: Collection[str]) -> None:
    """Check a setting without a field: accept the allowed value, warn of no effect, or refuse.

    Args:
        option: its name, without `kafka.`.
        text: its value, which no message shows unless it is one of `ONE_VALUE`: it may be a secret.
        known: the names that could have been meant.

    Raises:
        OptionError: it is refused, or unknown.
    """
    if option in ONE_VALUE:
        allowed, reason = ONE_VALUE[option]
        if text.strip().casefold() not in map(str.casefold, allowed):
            raise OptionError(
                f"kafka.{option} is {text!r}: it must be one of {', '.join(allowed)}: {reason}."
            )
    elif option in PASSED_OVER:
        say_passed_over(f"kafka.{option}", PASSED_OVER[option])
    elif option in REFUSED:
        raise OptionError(f"kafka.{option} is not supported: {REFUSED[option]}.")
    else:
        near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
        also = f" Did you mean kafka.{near[0]}?" if near else ""
        raise OptionError(f"kafka.{option} is no option that Tallystick knows.{also}")


@cache
def say_passed_over(name: str, reason: str) -> None:
    """Log once in a process that a setting has no effect."""
    logger.warning("%s has no effect: %s. Leave it out", name, reason)
