"""A Java trust store out of a PEM bundle, without Java's keytool (a trimmed runtime lacks it)."""

import hashlib
import re
import ssl
import struct
from pathlib import Path

PASSWORD = "changeit"  # Java's own default: the store holds public certificates only
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def java_truststore(bundle: Path, target: Path) -> list[str]:
    """Write the certificates of a PEM bundle as a JKS file; return Java's options to use it."""
    certificates = CERTIFICATE.findall(bundle.read_text(errors="replace"))
    data = struct.pack(">III", 0xFEEDFEED, 2, len(certificates))  # magic, version, entries
    for number, certificate in enumerate(certificates):
        der = ssl.PEM_cert_to_DER_cert(certificate)
        alias = b"%d" % number
        data += struct.pack(">IH", 2, len(alias)) + alias  # 2: a trusted certificate
        data += struct.pack(">QH", 0, 5) + b"X.509" + struct.pack(">I", len(der)) + der
    salt = PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite"  # the format asks for it
    target.write_bytes(data + hashlib.sha1(salt + data).digest())
    return [
        f"-Djavax.net.ssl.trustStore={target}",
        "-Djavax.net.ssl.trustStoreType=JKS",
        f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
    ]
