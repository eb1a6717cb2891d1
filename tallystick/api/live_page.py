"""`Pipeline.start(ui_port=...)`: the page about a run, served by the run's process."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tallystick.api.kafka_sink import KafkaSink
from tallystick.api.kafka_source import KafkaSource
from tallystick.errors import OptionError
from tallystick.options.table import plain_client_options
from tallystick.pipeline.topology import OutputTopology
from tallystick.run.driver import Listener

if TYPE_CHECKING:
    from tallystick.ops.ui.live_run import LiveRun


def open_live_page(
    port: int,
    checkpoint: str,
    sources: Sequence[KafkaSource],
    topology: OutputTopology,
    trigger: Mapping[str, Any] | None,
    listener: Listener | None,
) -> "LiveRun":
    """Serve a page about a run, before its start.

    Args:
        port: of this machine.
        checkpoint: the pipeline's.
        sources: what it reads.
        topology: what it writes; where none is of Kafka, the source's cluster is asked.
        trigger: when epochs begin.
        listener: the user's.

    Returns:
        The listener of the run, which is to be shown its query.

    Raises:
        OptionError: the port is taken, or the extra `tallystick[ui]` is missing.
    """
    try:
        from tallystick.ops.ui.live_page import open_page
        from tallystick.ops.ui.live_run import LiveRun
    except ModuleNotFoundError as error:
        raise ui_is_missing(error) from None
    live = LiveRun(listener, trigger, topology.dead_letter_topic or "")
    open_page(port, checkpoint, connection_of(sources, topology), live)
    return live


def connection_of(sources: Sequence[KafkaSource], topology: OutputTopology) -> dict[str, str]:
    """Return the client options of the cluster that the page asks about a pipeline.

    The cluster of the deciding sink; else of another Kafka sink, or of the first source.

    Args:
        sources: what it reads.
        topology: what it writes.
    """
    ends = (*(sink for _, sink in topology.by_uid), *sources)
    end = next(candidate for candidate in ends if isinstance(candidate, KafkaSink | KafkaSource))
    options = {
        name: value for name, value in end.options.items() if name.startswith("kafka.")
    }  # a source has other options too
    return plain_client_options(end.bootstrap_servers, options)


def ui_is_missing(error: ModuleNotFoundError) -> OptionError:
    """Return the error for a library of the page that is not installed."""
    return OptionError(f"the page needs {error.name}: pip install 'tallystick[ui]'")
