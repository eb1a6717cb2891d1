# Every target sets up what it needs; a second run is fast.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-spark42 check docs wheel sim matrix stress bench clean
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SEEDS ?= 1000
COMMA := ,
SPARK42 := .venv-spark42
SPARK42_TESTS := \
	tests/spark/test_stream_source.py \
	tests/spark/test_crash_points.py \
	tests/spark/test_keyed_pipeline.py::test_counts_are_exact_over_epochs_and_restarts_with_any_parallelism_and_lost_copies \
	tests/spark/test_foreach_batch_sink.py::test_counts_of_a_stateful_query_are_written_once_per_change \
	tests/spark/test_stream_writer.py::test_complete_mode_writes_the_whole_result_each_time \
	tests/spark/test_stream_writer.py::test_a_query_stopped_in_the_middle_goes_on_exactly \
	tests/spark/test_dead_daemons.py::test_epochs_go_on_in_workers_of_another_daemon

help:
	@echo "make demo    336,776 real flights through a pipeline with state that is killed again and again, then an audit"
	@echo "make test    all tests, on real brokers and a real Spark"
	@echo "make test-spark42   some of them on PySpark 4.2, the oldest for Structured Streaming, in a venv of its own"
	@echo "make check   ruff, mypy, and the pages built strictly"
	@echo "make docs    the pages as a site, with the API and a search, in the folder site"
	@echo "make wheel   the wheel, in dist, tried in an environment of its own outside of this folder"
	@echo "make sim     the protocol against $(SEEDS) seeds of a simulated world (SEED=17 replays one)"
	@echo "make matrix  some of the tests on other versions of Spark, Kafka and Python, and a table of it"
	@echo "make stress  topics in motion for a minute, brokers and drivers in chaos for three, sinks bounced, 40 kills of a keyed job, sinks killed at every fact, what 200 epochs leave in each mode, the demo from the wheel alone"
	@echo "make bench   ours beside Flink, Kafka Streams and Spark on the same work, stateless and keyed"

setup: $(READY)

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "installing Tallystick and what it needs into $(1)"
	@$(1)/bin/pip install --quiet --disable-pip-version-check --editable $(2)
	@$(1)/bin/python -c 'from tallystick.host.java import java_home; java_home()' 2>/dev/null || $(1)/bin/pip install --quiet --disable-pip-version-check --editable '.[java]'
	@$(1)/bin/tallystick warm-up
	@touch $(1)/.ready
endef

$(READY): pyproject.toml
	$(call install,.venv,'.[test$(COMMA)check$(COMMA)docs]')

$(SPARK42)/.ready: pyproject.toml
	$(call install,$(SPARK42),'.[test]' 'pyspark==4.2.*')

demo: setup
	@$(BIN)/tallystick demo

test: setup
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-spark42: $(SPARK42)/.ready
	@CRASH_KILLS=TransactionCommitted,EpochReturned $(SPARK42)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(SPARK42_TESTS) $(ARGS)

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(MAKE) --no-print-directory docs

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: setup
	@$(BIN)/python -m tests.wheel

sim: setup
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

matrix: setup
	@$(BIN)/python -m tests.matrix $(ARGS)

stress: setup
	@STRESS_SECONDS=60 $(BIN)/python -m pytest tests/spark/test_topics_in_motion.py
	@$(BIN)/python -m tests.failover.chaos --seconds 180 --seed 1
	@SINK_BOUNCES=5 $(BIN)/python -m pytest tests/failover/test_bounces.py tests/failover/test_down_too_long.py
	@KEYED_KILLS=40 $(BIN)/python -m pytest tests/spark/test_keyed_kills.py -k go_on
	@CRASH_KILLS=all $(BIN)/python -m pytest tests/spark/test_crash_points.py
	@$(BIN)/python -m tests.spark.growth --epochs 200
	@SINK_KILLS=all $(BIN)/python -m pytest tests/spark/test_sinks_killed.py tests/spark/test_stream_writer.py -k "killed_ or dies_behind or counts_and"
	@WHEEL=1 $(BIN)/python -m pytest tests/test_wheel.py

bench: setup
	@$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf .venv $(SPARK42) .matrix site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
