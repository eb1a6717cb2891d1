"""Writes tallystick/kafka/messages.json from the message schemas in a kafka-clients jar.

    python -m tests.kafka.message_schemas PATH/kafka-clients-4.3.0.jar

Kept of each schema is what a codec needs: names, types, versions. The jar of the embedded broker
has them under common/message; a test compares.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

TARGET = Path(__file__).parents[2] / "tallystick" / "kafka" / "messages.json"
APIS = """
AddOffsetsToTxn AddPartitionsToTxn ApiVersions CreateTopics DeleteRecords
DeleteTopics DescribeConfigs DescribeGroups DescribeProducers DescribeQuorum
DescribeTransactions EndTxn Fetch FindCoordinator InitProducerId ListGroups
ListOffsets ListTransactions Metadata OffsetCommit OffsetFetch Produce
SaslAuthenticate SaslHandshake TxnOffsetCommit
"""
COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*')
ORIGIN = (
    "Made by tests/kafka/message_schemas.py from the message schemas of Apache Kafka 4.3.0 "
    "(clients/src/main/resources/common/message), Apache License 2.0; see NOTICE of Apache Kafka."
)
KEPT = ("type", "versions", "nullableVersions", "taggedVersions", "tag", "default", "ignorable")


def schemas(jar: Path) -> dict[str, Any]:
    """Return the schemas of all APIs that we speak, and of the headers of their messages."""
    with ZipFile(jar) as archive:
        return {"origin": ORIGIN} | {api: _api(archive, api) for api in sorted(APIS.split())}


def text_of(schemas_by_api: dict[str, Any]) -> str:
    """Return the file: a line for each request and response."""
    lines = []
    for name, schema in schemas_by_api.items():
        if name == "origin":
            lines.append(f'"origin": {json.dumps(schema)}')
            continue
        parts = ",\n  ".join(
            f"{json.dumps(key)}: {json.dumps(part)}" for key, part in schema.items()
        )
        lines.append(f"{json.dumps(name)}: {{\n  {parts}}}")
    return "{" + ",\n".join(lines) + "}\n"


def _api(archive: ZipFile, api: str) -> dict[str, Any]:
    request, response = (
        _read(archive, f"common/message/{api}{kind}.json") for kind in ("Request", "Response")
    )
    low, _, high = request["validVersions"].partition("-")
    newest = int(high or low) - bool(request.get("latestVersionUnstable"))
    return {
        "key": request["apiKey"],
        "versions": [int(low), newest],
        "flexible": request["flexibleVersions"],
        "request": _fields(request["fields"], _structs(request)),
        "response": _fields(response["fields"], _structs(response)),
    }


def _read(archive: ZipFile, name: str) -> Any:
    text = archive.read(name).decode()
    return json.loads(COMMENT.sub(lambda match: match[1] or "", text))


def _structs(schema: Any) -> dict[str, Any]:
    return {struct["name"]: struct["fields"] for struct in schema.get("commonStructs", ())}


def _fields(fields: Any, structs: dict[str, Any]) -> list[dict[str, Any]]:
    return [_field(field, structs) for field in fields]


def _field(field: Any, structs: dict[str, Any]) -> dict[str, Any]:
    kept = {"name": field["name"]} | {key: field[key] for key in KEPT if key in field}
    parts = field.get("fields") or structs.get(field["type"].removeprefix("[]"))
    return kept | ({"fields": _fields(parts, structs)} if parts else {})


if __name__ == "__main__":
    TARGET.write_text(text_of(schemas(Path(sys.argv[1]))))
