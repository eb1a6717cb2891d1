"""What a person on a terminal sees of a command that takes its time, and what a pipe gets."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tallystick.__main__ import app
from tallystick.ops.cli_progress import checkpoint_bytes, epoch_bytes, savepoint_bytes
from tallystick.testing import EmbeddedKafka, jars
from tallystick.testing.process import free_ports
from tests.checkpoint_on_disk import Job

EPOCHS = 3
TALLYSTICK = (sys.executable, "-m", "tallystick")
WIDE = {"TERM": "xterm", "COLUMNS": "200"}


def process_on_a_terminal(
    words: list[str],
    env: Mapping[str, str] = {},
    until: Callable[[bytes], bool] = lambda _: False,
    exit_code: int = 0,
) -> tuple[str, str]:
    """Run the command in a process; return its output, and its errors as a terminal has them.

    Args:
        words: of the command.
        env: more of its environment.
        until: what is on the terminal when Ctrl-C is pressed.
        exit_code: what it ends with.
    """
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*TALLYSTICK, *words],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, **WIDE, **env},
    ) as process:
        os.close(theirs)
        shown, is_over = b"", False
        while chunk := read(ours):
            shown += chunk
            if not is_over and until(shown):
                is_over = True
                process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        output = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == exit_code, (output, shown)
    return output, shown.decode(errors="replace")


def read(terminal: int) -> bytes:
    """Return the next bytes; none when the other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def on_a_terminal(words: list[str], exit_code: int = 0) -> tuple[str, str]:
    """Call the command in this process; return the same as of a process."""
    ours, theirs = pty.openpty()
    with (
        ThreadPoolExecutor() as pool,
        redirect_stdout(io.StringIO()) as output,
        pytest.MonkeyPatch.context() as patch,
    ):
        reading = pool.submit(lambda: b"".join(iter(lambda: read(ours), b"")))
        for name, value in WIDE.items():
            patch.setenv(name, value)
        with open(theirs, "w") as terminal, redirect_stderr(terminal):
            with pytest.raises(SystemExit) as ended:
                app(words)
        shown = reading.result()
    os.close(ours)
    assert ended.value.code == exit_code, (output.getvalue(), shown)
    return output.getvalue(), shown.decode(errors="replace")


def on_a_pipe(words: list[str], exit_code: int = 0) -> str:
    """All that the same command writes where nobody watches."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == exit_code, done.output
    return done.output


def total_shown(shown: str) -> list[tuple[str, str]]:
    """How much was done, and of how much, each time that it changed."""
    return re.findall(r"([\d.]+)/([\d.]+) (?:bytes|KiB|MiB)", shown)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    Job(folder).run(EPOCHS)
    return folder


@pytest.fixture
def savepoint(checkpoint: Path) -> Path:
    folder = checkpoint.with_name("savepoint")
    on_a_pipe(["savepoint", "create", str(checkpoint), str(folder)])
    return folder


def test_sizes_are_those_of_the_files_that_are_read(checkpoint: Path, savepoint: Path) -> None:
    sizes = [path.stat().st_size for path in checkpoint.glob("keyed-state/*/*")]

    assert len(sizes) == EPOCHS
    assert checkpoint_bytes(str(checkpoint)) == sum(sizes)
    assert epoch_bytes(str(checkpoint), None) == sum(sizes)
    assert 0 < epoch_bytes(str(checkpoint), 0) < sum(sizes)
    assert savepoint_bytes(str(savepoint)) == sum(sizes)


@pytest.mark.parametrize(
    ("words", "what", "passes"),
    [
        (["inspect", "--verify", "CHECKPOINT"], "reading the checkpoint", 1),
        (["savepoint", "create", "CHECKPOINT", "NEW"], "copying and reading back", 3),
        (["savepoint", "restore", "SAVEPOINT", "NEW"], "copying", 2),
        (
            ["savepoint", "migrate", "SAVEPOINT", "NEW", "--max-parallelism", "256"],
            "rewriting state",
            3,
        ),
    ],
)
def test_a_terminal_sees_how_much_is_left_and_a_pipe_does_not(
    words: list[str], what: str, passes: int, checkpoint: Path, savepoint: Path, tmp_path: Path
) -> None:
    def place(number: int) -> list[str]:
        places = {"CHECKPOINT": checkpoint, "SAVEPOINT": savepoint, "NEW": tmp_path / f"n{number}"}
        return [str(places.get(word, word)) for word in words]

    output, shown = on_a_terminal(place(1))

    assert what in shown
    assert what not in output
    expected = passes * checkpoint_bytes(str(checkpoint))
    done = total_shown(shown)
    assert {float(total) for _, total in done} <= {expected, round(expected / 1024, 1)}
    if "migrate" not in words:  # which writes other files, of about the same size
        assert done[-1][0] == done[-1][1], shown
    assert done, shown
    assert what not in on_a_pipe(place(2))


def test_a_checkpoint_that_cannot_be_read_fails_as_ever(tmp_path: Path) -> None:
    """What is expected is found out before, and is not worth an error of its own."""
    _, shown = process_on_a_terminal(["inspect", "--verify", str(tmp_path)], exit_code=1)

    assert "holds no committed epoch" in shown
    assert "Traceback" not in shown


@pytest.mark.broker
def test_the_doctor_says_what_it_looks_at(
    checkpoint: Path, tallystick_kafka: EmbeddedKafka
) -> None:
    words = ["doctor", str(checkpoint), "--bootstrap-servers", tallystick_kafka.bootstrap_servers]
    output, shown = on_a_terminal(words, exit_code=2)  # Kafka has never heard of it

    assert "checking checkpoint" in shown
    done, total = total_shown(shown)[-1]
    assert done == total, shown
    assert "checking" not in output
    assert "error decision" in output
    assert "checking" not in on_a_pipe(words, exit_code=2)


@pytest.mark.broker
def test_a_recovery_says_what_it_does(
    tallystick_kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallystick_kafka.create_topic("recovered", 1)
    servers = tallystick_kafka.bootstrap_servers
    (tmp_path / "recovered_job.py").write_text(
        "import tallystick as ts\n"
        f"source = ts.KafkaSource({servers!r}, topics=['recovered'])\n"
        f"sink = ts.KafkaSink({servers!r}, topic='recovered')\n"
        "pipeline = ts.Pipeline('recovered').read(source).write(sink)\n"
    )
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "metadata").write_text('{"id": "recovered"}')
    monkeypatch.syspath_prepend(tmp_path)
    words = ["recover", "recovered_job:pipeline", "--checkpoint", str(tmp_path / "checkpoint")]

    output, shown = on_a_terminal(words)

    assert "fencing earlier runs" in shown
    assert "no epoch is committed yet" in output
    assert "fencing" not in on_a_pipe(words)


@pytest.mark.spark
def test_a_warm_up_says_what_it_waits_for() -> None:
    """A warm-up with compiled kernels still loads them, which takes seconds.

    A pipe gets nothing of it: `test_an_archive_is_made_once` in test_quick_start.py.
    """
    output, shown = process_on_a_terminal(["warm-up"])

    assert "compiling kernels (about 25 s at the first time)" in shown
    assert "kernels are compiled in" in output
    assert "about 25 s" not in output


class Mirror(SimpleHTTPRequestHandler):
    """Serves the jars of this machine's cache as Maven has them."""

    def translate_path(self, path: str) -> str:
        return str(jars.jar_folder(jars.chosen_version(None)) / path.rpartition("/")[2])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[str]:
    jars.kafka_classpath(jars.chosen_version(None))
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.broker
def test_a_download_of_kafka_says_how_many_jars_are_there(mirror: str, tmp_path: Path) -> None:
    """By Ivy, from a mirror; then the broker starts, and Ctrl-C ends it."""
    env = {"TALLYSTICK_CACHE": str(tmp_path / "cache"), "TALLYSTICK_MAVEN_URL": mirror}
    words = ["broker", "start", "--port", str(free_ports(1, "127.0.0.1")[0])]

    output, shown = process_on_a_terminal(words, env, until=lambda text: b"Ctrl-C stops it" in text)

    total = len(jars.locked_jars(jars.chosen_version(None)))
    assert "downloading Apache Kafka" in shown
    assert f"/{total}" in shown
    assert output.startswith("127.0.0.1:")
