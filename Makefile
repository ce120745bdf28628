# Every target first makes .venv fit by itself (deploy/setup-env), so each works on a fresh clone.
# ARGS goes to the program behind a target: make run ARGS="--help", make test ARGS="-k wal".

ENV_PYTHON := .venv/bin/python
COMPILE := $(ENV_PYTHON) -m uv pip compile --universal --python-version 3.11 --no-header --no-emit-index-url --quiet \
    --annotation-style line

# As many as cores and memory allow (tests/conftest.py).
TEST_WORKERS ?= auto

.DEFAULT_GOAL := help
.PHONY: help run wheel test test-spark4 soak rck pyiceberg-suite check bench bench-spark lock clean service everything

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: service ## Start the service
	.venv/bin/lakefeed serve $(ARGS)

# A file's tests stay together, because they share servers and Spark; tests/conftest.py sets the order. TEST_WORKERS=0
# runs all in one process. Bytecode is written whatever the environment says: every process would compile the code anew.
test soak: export PYTHONDONTWRITEBYTECODE =
test: everything ## Run all tests
	$(ENV_PYTHON) -m pytest -n $(TEST_WORKERS) --dist loadfile $(ARGS)

# Needs Java 17 or 21, PyPI and Maven Central; says so and ends with 3 where they are not.
test-spark4: everything ## Run the Spark tests on Spark 4.1, in an environment of their own
	$(ENV_PYTHON) -m tests.spark4 $(ARGS)

# Random tests that the suite runs briefly. Seeds are printed: set CRASH_TEST_SEED, MODEL_SEED, SIMULATION_SEED, FUZZ_SEED, MIRROR_SEED,
# BAD_REQUESTS_SEED, PYICEBERG_SEED, PLANNED_FILTERS_SEED or DAMAGED_FILES_SEED to see a failure again.
soak: everything ## Search for defects of the data plane and the catalog for about two hours
	HYPOTHESIS_PROFILE=soak SIMULATION_SEEDS=$${SIMULATION_SEEDS:-10000} SIMULATION_SEED=$${SIMULATION_SEED:-random} MODEL_CASES=$${MODEL_CASES:-100000} MODEL_SEED=$${MODEL_SEED:-random} CRASH_TEST_ROUNDS=$${CRASH_TEST_ROUNDS:-10} \
	FUZZ_FRAMES=$${FUZZ_FRAMES:-100000} FUZZ_SEED=$${FUZZ_SEED:-random} AGED_COMMITS=$${AGED_COMMITS:-2000} SCHEMA_HISTORIES=$${SCHEMA_HISTORIES:-1000} \
	BAD_REQUESTS=$${BAD_REQUESTS:-30000} BAD_REQUESTS_SEED=$${BAD_REQUESTS_SEED:-random} \
	PYICEBERG_SAMPLES=$${PYICEBERG_SAMPLES:-5000} PYICEBERG_SEED=$${PYICEBERG_SEED:-random} PLANNED_FILTERS=$${PLANNED_FILTERS:-5000} \
	PLANNED_FILTERS_SEED=$${PLANNED_FILTERS_SEED:-random} DAMAGED_FILES=$${DAMAGED_FILES:-100000} DAMAGED_FILES_SEED=$${DAMAGED_FILES_SEED:-random} \
	MIRROR_MODES=all MIRROR_ROUNDS=$${MIRROR_ROUNDS:-20} MIRROR_SEED=$${MIRROR_SEED:-random} BACKFILL_SEED=$${BACKFILL_SEED:-random} \
	$(ENV_PYTHON) -m pytest --timeout=0 -s -v tests/model tests/simulation tests/crash tests/integration/test_data_plane_faults.py \
	tests/catalog/routes/test_bad_requests.py tests/catalog/metadata/test_updates_differential.py tests/pyiceberg tests/lakefeed/iceberg/test_manifests.py tests/writer/commit/test_expiring.py tests/writer/rows/test_schema_round_trip.py tests/spark/test_mirror_kills.py tests/spark/test_mirror_conflicts_spark.py tests/spark/test_mirror_upkeep_spark.py tests/spark/backfill/test_runs_spark.py $(ARGS)

# Needs Java 17, Maven and Maven Central, for Iceberg's own tests and client; says so and ends with 3 where they are not.
rck: everything ## Run Iceberg's REST compatibility kit against the catalog
	$(ENV_PYTHON) -m tests.rck $(ARGS)

# Needs PyPI at the first run, for PyIceberg's tests and what they import; says so and ends with 3 where it is not.
pyiceberg-suite: everything ## Run PyIceberg's own REST integration tests against the catalog
	$(ENV_PYTHON) -m tests.pyiceberg_suite $(ARGS)

check: everything ## Check format, style, types and import directions
	$(ENV_PYTHON) -m ruff format --check
	$(ENV_PYTHON) -m ruff check
	$(ENV_PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo

bench: everything ## Measure throughput and latency, of the catalog too
	$(ENV_PYTHON) -m tests.bench $(ARGS)
	$(ENV_PYTHON) -m tests.bench.catalog
	$(ENV_PYTHON) -m tests.bench.catalog --store postgres

bench-spark: everything ## Measure mirrors: merges, reads, following a live table
	$(ENV_PYTHON) -m tests.bench.spark $(ARGS)

# The service's versions are bound to those of everything, so that one .venv serves both.
lock: everything ## Write the lock files anew (ARGS=--upgrade for newer versions)
	$(ENV_PYTHON) -m pip install --quiet uv
	$(COMPILE) $(ARGS) --extra dev --group spark-s3 -o requirements-dev.lock pyproject.toml
	$(COMPILE) $(ARGS) -c requirements-dev.lock -o requirements.lock pyproject.toml

# What an earlier build left behind would go into the wheel.
wheel: service ## Build the project's wheel into dist/, for clusters
	rm -rf build dist/lakefeed-*.whl
	$(ENV_PYTHON) -m pip wheel --disable-pip-version-check --quiet --no-deps -w dist .

clean: ## Remove .venv and what tools left behind; data stays
	rm -rf .venv .spark4 .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

service everything:
	@deploy/setup-env $@
