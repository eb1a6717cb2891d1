"""`tallystick ui`: the page for operators, of a pipeline that runs elsewhere, or not at all."""

import os
from pathlib import Path
from typing import Annotated

import typer

from tallystick.errors import OptionError
from tallystick.ops.cli_savepoint import (
    Checkpoint,
    KafkaOptions,
    Servers,
    errors_as_messages,
    options_in,
)

TOKEN_VARIABLE = "TALLYSTICK_UI_TOKEN"
LOCAL = "127.0.0.1"


def ui(
    checkpoint: Checkpoint,
    bootstrap_servers: Servers = None,
    kafka_options: KafkaOptions = None,
    port: Annotated[int, typer.Option(help="To listen on.", min=1, max=65535)] = 4050,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. Any but 127.0.0.1 needs a token: that of the "
            f"environment variable {TOKEN_VARIABLE}, or one that is made and printed."
        ),
    ] = LOCAL,
) -> None:
    """Serve a page about a pipeline, from its checkpoint and Kafka, until Ctrl-C.

    Read-only; the pipeline may run meanwhile, or be dead. How long the parts of its epochs take
    only its own process knows: `Pipeline.start(ui_port=...)` shows them.
    """
    with errors_as_messages():
        try:
            from tallystick.ops.ui.page import CheckpointReader
            from tallystick.ops.ui.server import Server, Source, new_token
        except ModuleNotFoundError as error:
            raise OptionError(
                f"the page needs {error.name}: pip install 'tallystick[ui]'"
            ) from None
        options = None
        if bootstrap_servers is not None:
            given = {} if kafka_options is None else options_in(Path(kafka_options))
            options = {**given, "bootstrap.servers": bootstrap_servers}
        token = "" if host == LOCAL else os.environ.get(TOKEN_VARIABLE) or new_token()
        server = Server(Source(CheckpointReader(checkpoint, options).read), port, host, token)
    shown = f"?token={token}" if token and TOKEN_VARIABLE not in os.environ else ""
    typer.echo(f"http://{host}:{server.port}/{shown}")
    typer.echo("Ctrl-C stops it.", err=True)
    server.run()
