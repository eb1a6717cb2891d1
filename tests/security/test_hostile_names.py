"""Names that become parts of paths, SQL or Kafka's ids: refused by name, or kept in their place."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tallystick as ts
from tallystick.api.kafka_sink import topology_of
from tallystick.epoch.transactional_ids import parse, transactional_id
from tallystick.epoch.two_phase import Owner, Place
from tallystick.errors import ManifestError, OptionError, StorageError
from tallystick.files.drafts import hidden_folder
from tallystick.files.folder import HIDDEN
from tallystick.postgres.names import NAME_BYTES_MAX, application_prefix, name_of
from tallystick.storage.file_storage import FileStorage
from tests.examples import drawn

SERVERS = "127.0.0.1:9"
KNOWN = [
    *("", " ", ".", "..", "...", "/", "//", "/etc/passwd", "../x", "a/../../x", "a/b", "~", "-rf"),
    *(
        "a\0b",
        "\0",
        "a\nb",
        "a\r\nb",
        "a\tb",
        "'",
        '"',
        "`id`",
        "$(id)",
        "%2e%2e",
        "%00",
        "\\..\\x",
    ),
    *("'; drop table orders; --", 'x"; drop table orders; --', "{}", "a,b", "a:b", "a b", "=x"),
    *("аdmin", "a\u202eb", "a\u200bb", "\ufeffa", "\ud800", "é", "ﬁ", "a" * 250, "a" * 40_000),
]
NAMES = st.sampled_from(KNOWN) | st.text(max_size=12)
PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def source(**settings: Any) -> ts.KafkaSource:
    return ts.KafkaSource(SERVERS, **({"topics": ["t"]} | settings))


def sink(**settings: Any) -> ts.KafkaSink:
    return ts.KafkaSink(SERVERS, **({"topic": "t"} | settings))


PLAIN_PLACES: dict[str, Callable[[str], Any]] = {
    "pipeline": ts.Pipeline,
    "uid of a stream": lambda name: ts.stream(source(), uid=name),
    "uid of a list": lambda name: ts.list_state(columns="n int", uid=name),
    "input": lambda name: ts.Pipeline("p").read(**{name: source(), "b": source()}),
    "topic read": lambda name: source(topics=[name]),
    "topic assigned": lambda name: source(topics=None, assignment={name: [0]}),
    "topic written": lambda name: sink(topic=name),
    "token topic": lambda name: sink(token_topic=name),
    "dead letters": lambda name: sink(dead_letter_topic=name),
    "uid of a sink": lambda name: topology_of([sink(uid=name)]),
}
TEXT_PLACES: dict[str, Callable[[str], Any]] = {
    "name of a sink": lambda name: sink(name=name),
    "prefix": lambda name: sink(transactional_id_prefix=name),
    "group": lambda name: source(group_id=name),
}


def shown_in(refusal: str, name: str) -> bool:
    """True if the message names the thing, as Python writes it; a long one in part."""
    return repr(name)[1:-1][:8] in refusal


def refusal_of(make: Callable[[str], Any], name: str) -> str:
    """Return the error that a place refuses a name with; "": it takes it."""
    try:
        make(name)
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", PLAIN_PLACES)
@drawn(150)
@given(name=NAMES)
def test_a_name_of_a_path_or_a_topic_is_plain_or_refused(place: str, name: str) -> None:
    if refusal := refusal_of(PLAIN_PLACES[place], name):
        assert shown_in(refusal, name)
        return
    assert set(name) <= PLAIN, name
    assert name not in (".", "..")
    assert len(name) <= 249
    assert name or place == "uid of a sink", "where an empty one is none"


@pytest.mark.parametrize("place", TEXT_PLACES)
@drawn(150)
@given(name=NAMES)
def test_a_part_of_an_id_can_be_seen_or_is_refused(place: str, name: str) -> None:
    if refusal := refusal_of(TEXT_PLACES[place], name):
        assert shown_in(refusal, name)
        return
    assert name.isprintable()
    assert len(name) <= 249
    assert name or place == "group", "an empty group is none"
    assert len(name.encode()) < 2**15, "Kafka's longest text"


@pytest.mark.parametrize("place", [*PLAIN_PLACES, *TEXT_PLACES])
def test_each_place_takes_a_usual_name_and_refuses_a_path(place: str) -> None:
    """So that the tests above refuse for the name, and not for something else."""
    make = (PLAIN_PLACES | TEXT_PLACES)[place]
    make("flights")

    if place in PLAIN_PLACES:
        with pytest.raises(OptionError):
            make("../flights")
    with pytest.raises(OptionError):
        make("fli\0ghts")


@drawn(300)
@given(NAMES, NAMES, NAMES.filter(lambda name: "\ud800" not in name))
def test_names_on_other_systems_keep_their_parts_apart(
    pipeline: str, uid: str, lineage: str
) -> None:
    """Also of an owner that a manifest names, which was never an argument."""
    owner = Owner(*(text.replace("\ud800", "") for text in (pipeline, uid, lineage)))
    top, *parts = hidden_folder(owner).split("/")
    name = name_of(Place(owner, 3, 1, 0, "abcdef"))

    assert (top, len(parts)) == (HIDDEN, 3)
    assert not {".", ".."} & set(parts)
    assert len(name.encode()) <= NAME_BYTES_MAX
    assert name.isascii()
    assert name.isprintable()
    assert not set("'\"\\") & set(name + application_prefix(owner))
    if pipeline and uid and "/" not in uid:
        parsed = parse(transactional_id(pipeline, uid, 5, 2))
        assert parsed is not None
        assert (parsed.prefix, parsed.sink, parsed.task, parsed.slot) == (pipeline, uid, 5, 2)


@drawn(200)
@given(NAMES, NAMES)
def test_no_path_leads_out_of_a_checkpoint(tmp_path_factory, one: str, other: str) -> None:
    """Whatever a file there says: nothing outside is read, written or removed."""
    home = tmp_path_factory.mktemp("home")
    (home / "outside").write_bytes(b"secret")
    storage = FileStorage(str(home / "checkpoint"))
    for path in (one, f"{one}/{other}", f"x/{one}", f"../{one}", f"{one}/../../outside"):
        try:
            storage.put(path, b"mine")
            assert storage.get(path) == b"mine"
            storage.names(path)
            storage.delete(path)
        except (ManifestError, OptionError, StorageError):
            continue
    assert (home / "outside").read_bytes() == b"secret"
    assert {path.name for path in home.iterdir()} <= {"outside", "checkpoint"}
    assert not Path("/etc/passwd").is_symlink()
    shutil.rmtree(home)
