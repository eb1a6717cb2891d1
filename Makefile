# Every target sets up what it needs; a second run is fast.
.DEFAULT_GOAL := help
.PHONY: help setup demo test check sim stress bench clean
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SEEDS ?= 1000

help:
	@echo "make demo    336,776 real flights through a pipeline with state that is killed again and again, then an audit"
	@echo "make test    all tests, on real brokers and a real Spark"
	@echo "make check   ruff and mypy"
	@echo "make sim     the protocol against $(SEEDS) seeds of a simulated world (SEED=17 replays one)"
	@echo "make stress  topics in motion for a minute, brokers and drivers in chaos for three, sinks bounced, 40 kills of a keyed job, sinks killed at every fact, what 200 epochs leave in each mode"
	@echo "make bench   ours beside Flink, Kafka Streams and Spark on the same work, stateless and keyed"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Tallystick and what it needs into .venv"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,check]'
	@$(BIN)/python -c 'from tallystick.java import java_home; java_home()' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[java]'
	@$(BIN)/python -m tallystick.kernel_cache
	@touch $(READY)

demo: setup
	@$(BIN)/tallystick demo

test: setup
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

sim: setup
	@$(BIN)/python -m tallystick.sim --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

stress: setup
	@STRESS_SECONDS=60 $(BIN)/python -m pytest tests/spark/test_topics_in_motion.py
	@$(BIN)/python -m tests.failover.chaos --seconds 180 --seed 1
	@SINK_BOUNCES=5 $(BIN)/python -m pytest tests/failover/test_bounces.py tests/failover/test_down_too_long.py
	@KEYED_KILLS=40 $(BIN)/python -m pytest tests/spark/test_keyed_kills.py -k go_on
	@CRASH_KILLS=all $(BIN)/python -m pytest tests/spark/test_crash_points.py
	@$(BIN)/python -m tests.spark.growth --epochs 200
	@SINK_KILLS=all $(BIN)/python -m pytest tests/spark/test_sinks_killed.py tests/spark/test_stream_writer.py -k "killed_ or dies_behind or counts_and"

bench: setup
	@$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
