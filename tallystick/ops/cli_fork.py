"""`tallystick fork`: a changed program beside the running pipeline."""

from typing import Annotated

import typer

from tallystick.errors import OptionError
from tallystick.ops.cli_savepoint import Checkpoint, KafkaOptions, asking_kafka, errors_as_messages
from tallystick.ops.cli_topic import connected


def fork(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option("--to", help="A new, empty checkpoint folder.")],
    topics: Annotated[
        str,
        typer.Option(
            help="OLD=NEW,…: for each topic that the program writes to, dead letters too, an empty "
            "one; it is created if it does not exist."
        ),
    ],
    bootstrap_servers: Annotated[
        str, typer.Option(help="Of the cluster that the pipeline writes to: host:port,host:port.")
    ],
    kafka_options: KafkaOptions = None,
) -> None:
    """Make a checkpoint in which the program goes on beside the original, into other topics.

    The original runs on, and knows nothing of it. A start on the new checkpoint, of the same
    program or a changed one, has another name and consumer group, and is refused if it would write
    anywhere but to the new topics. `tallystick compare` says where the outputs differ.
    """
    from tallystick.ops import forks
    from tallystick.ops.cli_progress import epoch_bytes, watched
    from tallystick.storage.file_storage import shown

    with errors_as_messages(), connected(bootstrap_servers, kafka_options) as client:
        names = _pairs(topics)
        ask = asking_kafka(bootstrap_servers, kafka_options)
        assert ask is not None, "there are servers"
        with watched("copying and reading back") as work:
            work.expect(lambda: 3 * epoch_bytes(checkpoint, None))  # read, written, read back
            new, epoch = forks.fork(work.storage(checkpoint), work.storage(to), names, client, ask)
    typer.echo(
        f"{shown(to)} goes on after epoch {epoch}, under the name {new.name!r}. Start the program "
        f"on it, then compare:"
    )
    for original, topic in new.topics.items():
        typer.echo(
            f"  tallystick compare {original} {topic} --fork {shown(to)} "
            f"--bootstrap-servers {bootstrap_servers}"
        )


def _pairs(text: str) -> dict[str, str]:
    """Return the topics of `--topics`, new ones by those of the original."""
    names: dict[str, str] = {}
    for pair in text.split(","):
        original, _, new = pair.strip().partition("=")
        if not (original and new):
            raise OptionError(f"--topics {pair!r}: expected OLD=NEW, such as out=canary-out")
        if original in names:
            raise OptionError(f"--topics: {original!r} is named twice")
        names[original] = new
    return names
