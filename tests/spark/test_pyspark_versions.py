"""What a PySpark is too old for is refused by name; `make matrix` runs this on old ones too."""

import importlib
import sys
from collections.abc import Callable
from unittest.mock import Mock

import pyspark
import pytest
from pyspark.sql import SparkSession

import tallystick as ts
import tallystick.spark
from tallystick.spark import PYSPARK_VERSION, streaming

OLDEST = streaming.PYSPARK_VERSION_MIN


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> str:
    """A PySpark that has no sources in Python as we need them: the real one if it is."""
    if PYSPARK_VERSION >= OLDEST:
        monkeypatch.setattr(streaming, "PYSPARK_VERSION", (4, 1))
    return pyspark.__version__


def test_a_source_is_refused_where_pyspark_is_too_old(old: str) -> None:
    spark = Mock(spec=SparkSession)

    with pytest.raises(ts.OptionError) as caught:
        ts.register(spark)

    assert str(caught.value) == (
        'register(spark), for format("tallystick"), is for queries of your own, and these '
        f"need PySpark 4.2 or later; {old} is installed. Run `pip install 'pyspark>=4.2,<5'`, or "
        "write the query as a Pipeline, which needs 3.5 or later"
    )
    assert not spark.mock_calls


def test_foreach_batch_is_refused_where_pyspark_is_too_old(old: str) -> None:
    sink = ts.KafkaSink("localhost:9092", topic="copy")

    with pytest.raises(ts.OptionError, match=r"foreachBatch\(KafkaSink\(…\)\) .* 4\.2 or later; "):
        sink(Mock(), 0)


def test_a_batch_is_refused_where_pyspark_is_too_old(old: str) -> None:
    rows = Mock()

    with pytest.raises(ts.OptionError, match=r"KafkaSink\.write is for .* 4\.2 or later; "):
        ts.KafkaSink("localhost:9092", topic="copy").write(rows)

    assert not rows.mock_calls


@pytest.fixture
def imported_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Import `tallystick.spark` once more, as if PySpark were of another version."""

    def again(version: str) -> object:
        monkeypatch.setattr(pyspark, "__version__", version)
        monkeypatch.delitem(sys.modules, "tallystick.spark", raising=False)
        return importlib.import_module("tallystick.spark")

    monkeypatch.setattr(tallystick, "spark", tallystick.spark)  # the import sets it: put it back
    monkeypatch.setitem(sys.modules, "tallystick.spark", tallystick.spark)
    return again


@pytest.mark.parametrize("version", ["3.5.0", "4.2.0", "4.10.0.dev1", "5.0.0"])
def test_a_pyspark_that_will_do_is_taken(
    imported_again: Callable[[str], object], version: str
) -> None:
    assert imported_again(version) is not None


def test_a_pyspark_that_nothing_works_with_is_refused_at_the_import(
    imported_again: Callable[[str], object],
) -> None:
    with pytest.raises(ts.OptionError, match=r"PySpark 3\.4\.4 is installed.*needs 3\.5 or later"):
        imported_again("3.4.4")


def test_the_version_that_is_installed_is_what_counts_after_that() -> None:
    assert sys.modules["tallystick.spark"] is tallystick.spark
    assert tallystick.spark.PYSPARK_VERSION == PYSPARK_VERSION


def test_every_public_name_can_be_imported() -> None:
    """Also where PySpark has no StatefulProcessor: that is 3.5."""
    assert {name for name in ts.__all__ if getattr(ts, name, None) is None} == set()
