# Every target sets up what it needs; a second run is fast.
.DEFAULT_GOAL := help
.PHONY: help setup demo test classes check docs docs-version screenshots wheel sim matrix release version stress campaign peers bench clean fuzz audit sbom image
SHELL := /bin/bash
# Where an environment forbids bytecode, each process would compile the modules that it imports: 0.6 s.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready-with-tools
SEEDS ?= 1000
HOURS ?= 1
SECONDS ?= 60
KILLS ?= 6
PIP := $(BIN)/pip --disable-pip-version-check --quiet
WITH_TOOLS := --editable '.[test,check,docs]' --editable tools
WITH_JAVA := --editable '.[java]' --editable tools
# uv takes a third of pip's time. Where it cannot be had or finds no index, pip does the same. Both leave modules to be compiled where they are imported. The words to install are in variables: `call` would divide them at commas.
install = { $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(PIP) install --no-compile $(1); }

help:
	@echo "make demo    336,776 real flights through a pipeline with state that is killed again and again, then an audit"
	@echo "make test    the tests, on real brokers and a real Spark, but for the long ones of tests/long.txt"
	@echo "make check   ruff, mypy, and the pages built strictly"
	@echo "make docs    the pages as a site, with the API and a search, in the folder site"
	@echo "make docs-version   the pages of this version, beside those of others, as a commit on the branch gh-pages, which you push"
	@echo "make screenshots   the pictures of the page in docs/images, from real pipelines (needs chromium-driver)"
	@echo "make wheel   the wheels of Tallystick and of its tools, in dist, tried in an environment of their own outside of this folder"
	@echo "make release   what would be published: sdists and wheels in dist, looked at by twine, installed in bare environments; says what a release lacks"
	@echo "make version   writes VERSION=0.2.0 to all places"
	@echo "make audit   known vulnerabilities of what the wheels need, from the database of OSV"
	@echo "make image   follows deploy/Dockerfile without a container runtime, and runs the image (needs root, debootstrap)"
	@echo "make sbom    what the wheels need, as installed here, in dist, in CycloneDX's format"
	@echo "make sim     the protocol against $(SEEDS) seeds of a simulated world (SEED=17 replays one)"
	@echo "make classes   what each process of the tests would make for itself: the archive of classes that its JVM maps, and the bytecode of its modules"
	@echo "make fuzz    damaged bytes for every decoder of outside bytes, for $(SECONDS) seconds (ARGS=--bounds: with checks of indices)"
	@echo "make matrix  some of the tests on other versions of Spark, Kafka and Python, and a table of it"
	@echo "make stress  the long tests, all examples of properties, topics in motion for a minute, brokers and drivers in chaos for three, sinks bounced, 40 kills of a keyed job, sinks killed at every fact, 300 random queries beside Spark, what 200 epochs leave in each mode, the demo from the wheel by pip, pipx and uvx, the image"
	@echo "make campaign  programs of ours under random faults for HOURS=1, from SEED=1 on; each run is noted in proof/runs.ndjson"
	@echo "make peers   Tallystick, Flink and Kafka Streams under the same KILLS=6 of SEED=1 (needs Maven; ARGS='--seeds 3': more schedules); noted in proof/peers.ndjson"
	@echo "make bench   ours beside Flink, Kafka Streams and Spark on the same work, stateless and keyed"

setup: $(READY)

$(READY): pyproject.toml tools/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Tallystick and what it needs into .venv"
	@$(PIP) install uv==0.13.9 || true
	@$(call install,$(WITH_TOOLS))
	@$(BIN)/python -c 'from tallystick.host.java import java_home; java_home()' 2>/dev/null || $(call install,$(WITH_JAVA))
	@$(BIN)/tallystick warm-up
	@touch $(READY)

demo: setup
	@$(BIN)/tallystick demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder -m "not long" $(ARGS)

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(MAKE) --no-print-directory docs

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict   # with --quiet no warning would count

docs-version: setup
	@NO_MKDOCS_2_WARNING=1 PATH="$(BIN):$$PATH" mike deploy --update-aliases "$$($(BIN)/tallystick --version | grep -oE "[0-9]+\.[0-9]+" | head -1)" latest
	@PATH="$(BIN):$$PATH" mike set-default latest

screenshots: setup
	@SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/spark/test_operators_page.py tests/spark/test_page_of_event_time.py

wheel: setup
	@$(BIN)/python -m tests.wheel

release: setup
	@$(BIN)/python -m tests.release

version: setup
	@$(BIN)/python -m tests.release version $(VERSION)

audit: setup
	@$(BIN)/python -m tests.dependencies audit

image: setup
	@$(BIN)/python -m tests.image

sbom: setup
	@$(BIN)/python -m tests.dependencies sbom

sim: setup
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(if $(SEED),--seed $(SEED))

classes: setup
	@$(BIN)/python -m tests.spark.jvm
	@tests=$$($(BIN)/python -m pytest --collect-only --quiet) || { echo "$$tests" | tail -n 50; exit 1; }   # compiles modules

fuzz: setup
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

matrix: setup
	@$(BIN)/python -m tests.matrix $(ARGS)

stress: setup
	@$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m long
	@STRESS_SECONDS=60 $(BIN)/python -m pytest tests/spark/test_topics_in_motion.py
	@$(BIN)/python -m tests.failover.chaos --seconds 180 --seed 1
	@SINK_BOUNCES=5 $(BIN)/python -m pytest tests/failover/test_bounces.py tests/failover/test_down_too_long.py
	@KEYED_KILLS=40 $(BIN)/python -m pytest tests/spark/test_keyed_kills.py -k go_on
	@KEYED_KILLS=3 $(BIN)/python -m pytest tests/spark/test_keyed_kills.py tests/spark/test_table_kills.py -k "over_kills and not go_on"
	@RANDOM_QUERIES=300 $(BIN)/python -m pytest tests/differential/test_random_queries_as_spark.py
	@EXAMPLES=all $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m hypothesis
	@CRASH_KILLS=all $(BIN)/python -m pytest tests/spark/test_crash_points.py
	@$(BIN)/python -m tests.spark.growth --epochs 200
	@SINK_KILLS=all $(BIN)/python -m pytest tests/spark/test_tables_killed.py tests/spark/test_sinks_killed.py -k "killed_ or dies_behind or counts_and or tables_agree"
	@WHEEL=1 $(BIN)/python -m pytest tests/test_wheel.py
	@$(MAKE) --no-print-directory image
	@WORLDS=200 JOIN_EXAMPLES=100 $(BIN)/python -m pytest --numprocesses 2 tests/simulation/test_simulation.py tests/simulation/test_digests.py tests/state/test_range_join.py

campaign: setup
	@$(BIN)/python -m tests.campaign --hours $(HOURS) --seed $(or $(SEED),1); code=$$?; \
	$(BIN)/python -m tests.generated_pages; exit $$code

peers: setup
	@$(BIN)/python -m benchmarks.kills --seed $(or $(SEED),1) --kills $(KILLS) $(ARGS); code=$$?; \
	$(BIN)/python -m tests.generated_pages; exit $$code

bench: setup
	@$(BIN)/python benchmarks/run.py $(ARGS)

clean:
	rm -rf .venv .matrix site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
