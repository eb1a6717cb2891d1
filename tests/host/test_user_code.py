"""Errors of users' code keep the step, the records, the user's line; printed, they come first."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

from tallystick.errors import FunctionError, OptionError
from tallystick.host.excepthook import lines_of
from tallystick.host.origin import Place, place_to_be_set
from tallystick.host.user_code import (
    UserCall,
    UserLine,
    calling_user,
    function_error,
    is_users,
    taken_call,
    user_lines,
)

ROWS = pa.RecordBatch.from_pydict({"id": [1], "dep_delay": [2.5]})


def test_the_innermost_call_of_a_users_code_counts() -> None:
    def call_both() -> None:
        with calling_user("process 'outer'"), calling_user("map_batches inner", ROWS):
            raise KeyError("dep_dely")

    with place_to_be_set() as rows_come_from:
        rows_come_from(lambda _, row: Place(f"flights-1 offsets 0 to 99 ({row})"))
        with pytest.raises(KeyError) as caught:
            call_both()
    call = taken_call(caught.value)
    assert call == UserCall(
        "map_batches inner", "flights-1 offsets 0 to 99 (-1)", ("id", "dep_delay")
    )
    assert taken_call(caught.value) == UserCall(), "the user's error is as it was"
    assert user_lines(caught.value.__traceback__)[-1].file == __file__


@pytest.mark.parametrize(
    ("file", "is_one"),
    [
        ("/home/me/late.py", True),
        ("<stdin>", True),
        ("/tmp/ipykernel_12/3.py", True),
        (pa.__file__, False),
        (textwrap.__file__, False),
        ("pyarrow/table.pxi", False),
        ("<frozen importlib._bootstrap>", False),
        (str(Path(__file__).parents[2] / "tallystick" / "errors.py"), False),
        ("/spark/python/lib/pyspark.zip/pyspark/worker.py", False),
    ],
)
def test_a_users_file_is_told_from_those_of_libraries(file: str, is_one: bool) -> None:
    assert is_users(file) is is_one


def test_the_message_says_all_in_one_line_and_the_class_stays() -> None:
    call = UserCall("map_batches late", "flights-1 offsets 0 to 99", ("id", "dep_delay"))
    lines = [UserLine("/home/me/late.py", 7, "late")]
    error = function_error("KeyError", "'dep_dely'", call, lines, KeyError("dep_dely"))
    assert str(error) == (
        "map_batches late, flights-1 offsets 0 to 99: KeyError: 'dep_dely' (late.py:7); "
        "columns: id, dep_delay"
    )
    assert isinstance(error, KeyError)
    assert error.args == ("dep_dely",)
    assert error.__notes__ == ["  /home/me/late.py:7 in late"]
    assert repr(error).startswith('KeyError("map_batches late')


class FinalError(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


def test_a_class_without_subclasses_keeps_its_name() -> None:
    error = function_error("FinalError", "x", UserCall(), [], FinalError("x"))
    assert (type(error).__name__, str(error)) == ("FinalError", "FinalError: x")
    assert isinstance(error, FunctionError)


def test_a_text_of_many_lines_is_cut_and_its_first_line_leads() -> None:
    error = function_error("ValueError", "\n".join(map(str, range(90))), UserCall(), [])
    assert len(lines_of(error, None)) <= 6
    assert lines_of(error, None)[0] == "ValueError: 0"


def run(text: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 1
    return done.stderr.splitlines()


PROGRAM = """
    import tallystick as ts
    ts.Pipeline("no blanks please")
"""


def test_a_program_that_an_error_ends_prints_the_message_first_and_no_frame_of_ours() -> None:
    lines = run(PROGRAM)
    assert lines[0].startswith("OptionError: pipeline name 'no blanks please'")
    assert lines[1:] == [
        "  <string>:3 in <module>",
        "  (TALLYSTICK_TRACEBACKS=full shows all frames)",
    ]
    whole = run(PROGRAM, TALLYSTICK_TRACEBACKS="full")
    assert whole[0] == "Traceback (most recent call last):"
    assert any("pipeline.py" in line for line in whole)


def test_other_errors_and_other_hooks_are_left_alone() -> None:
    assert run("import tallystick\n1 / 0")[0] == "Traceback (most recent call last):"
    own = "import sys\nsys.excepthook = lambda *e: print('mine', file=sys.stderr)\n"
    assert run(own + textwrap.dedent(PROGRAM)) == ["mine"]


def test_a_notebook_shows_the_same_lines() -> None:
    try:
        raise OptionError("a mistake")
    except OptionError as error:
        lines = error._render_traceback_()  # type: ignore[attr-defined]
    assert lines[0] == "OptionError: a mistake"
    assert "test_user_code.py" in lines[1]


def test_an_error_of_ours_that_ended_a_query_of_sparks_is_printed_so_too() -> None:
    lines = run(
        """
        import tallystick, tallystick.spark.jobs
        from pyspark.errors import StreamingQueryException
        text = "[FAILED] ...\\ntallystick.errors.RecordError: flights-1, offset 3"
        raise StreamingQueryException(text + ": no JSON\\n\\tat org.apache.spark.X\\n" * 50)
        """
    )
    assert lines[0] == "RecordError: flights-1, offset 3: no JSON"
    assert len(lines) == 3
