# The only list of developer commands. Needs Python 3.11 or newer and make; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
EXTRAS := mqtt,http,kafka,s3,spark,service,api,traces,embedded,dev
PYTEST := $(BIN)/python -m pytest
# Whether pytest was killed, or ran no test: `.ci/run` asks.
NOTED = [ $$status -le 1 ] || echo "ERROR pytest ended with $$status" >> "$${MILLPY_FAILURES:-/dev/null}"
PROSE := millpy services migrations tests docs examples benchmarks compose .ci *.md mkdocs.yml Makefile pyproject.toml
# What depends on the server's version; `make test` has all on one.
STORE_TESTS := postgres_commit postgres_results postgres_store histories rights roles schema search_path statements views windowed_tables

.DEFAULT_GOAL := help
.PHONY: help setup check lint format types unit test test-sampled api-fuzz docs docs-setup store-suite oldest accounting crash crash-auditor crash-long crash-spark crash-spark-kafka deploy-matrix foreign-settings trigger-matrix sizes fuzz sim mutants plant ui-test ui-tour feeds feeds-modes feeds-audit feeds-backfill feeds-spark compose-test demo ci clean \
        bench-w1 bench-w1-dedupe bench-w1-sliding bench-w1-session bench-w1-early bench-join bench-formats bench-late bench-w2 bench-w2b bench-w3 bench-http bench-kafka bench-outbox bench-cdc bench-w4 bench-w5 bench-spark bench-spark-run bench-scores bench-api bench-page bench-soak

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install millpy with all that tests and the demonstration need

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "millpy needs Python 3.11 or newer; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

check: lint types unit ## format, lint, types, unit and property tests: before every commit

lint: $(STAMP) ## formatting, rules, layers, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell $(PROSE)

format: $(STAMP) ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP) ## mypy --strict over millpy/ and services/; over tests/, that every name exists
	$(BIN)/mypy millpy services tests

unit: $(STAMP) ## unit and property tests
	$(PYTEST) -q tests/unit tests/property

# One process runs all tests of Spark, so that one Java starts; it runs beside the others, which mostly wait.
# `make ui-test` runs those of the page, with one world and one browser for all.
test: $(STAMP) ## all tests, four at a time: most wait for leases and servers; of some with many cases, a sample
	@mkdir -p build; $(PYTEST) -q --durations=10 tests/spark > build/spark-tests.log 2>&1 & spark=$$!; \
	CASES=sampled $(PYTEST) -q -n 4 --dist worksteal --durations=25 --ignore=tests/spark --ignore=tests/ui; others=$$?; \
	wait $$spark; spark=$$?; cat build/spark-tests.log; \
	for status in $$others $$spark; do $(NOTED); done; exit $$((others | spark))

test-sampled: $(STAMP) ## all cases of the tests of which `make test` runs a sample
	$(PYTEST) -q -n 4 --dist worksteal -m sampled --ignore=tests/spark --ignore=tests/ui

docs-setup: $(DOCS_STAMP) ## install what the documentation needs

docs: $(DOCS_STAMP) ## the documentation as a site, in build/site/index.html; a warning is a failure
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

store-suite: $(STAMP) ## the store's tests; MILLPY_TEST_POSTGRES=16, 18 or system15 chooses the server
	$(PYTEST) -q -n 4 $(STORE_TESTS:%=tests/conformance/test_%.py)

oldest: ## fast tests with the oldest packages that pyproject.toml accepts, in a .venv of their own; PYTHON= chooses the Python
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct \
		--editable '.[$(EXTRAS)]'
	.venv-oldest/bin/python -m pytest -q -n 4 --dist worksteal tests/unit tests/property tests/conformance tests/mistakes

crash: $(STAMP) ## the crash matrix: every fault, on real processes and a real PostgreSQL; ONLY="words of a case's name" JOBS=2
	$(BIN)/python -m tests.crash.matrix --jobs $(or $(JOBS),2) --only $(ONLY)

accounting: $(STAMP) ## records lost and doubled at every place, seen by the accounting, whole: about five minutes
	ACCOUNTING=whole $(PYTEST) -q -n 3 tests/crash/test_accounting.py

deploy-matrix: $(STAMP) ## live changes over every window, aggregate and stored form, whole: about ten minutes
	DEPLOY_MATRIX=whole $(PYTEST) -q -n 3 tests/crash/test_deploy_matrix.py

trigger-matrix: $(STAMP) ## users' triggers of every kind on every kind of result table, whole: some minutes
	TRIGGER_MATRIX=whole $(PYTEST) -q -n 3 tests/conformance/test_users_triggers.py

sizes: $(STAMP) ## turns at 0.5, 1 and 3 times every limit, and a database that refuses by size, whole: about five minutes
	SIZES=whole $(PYTEST) -q -n 3 tests/crash/test_sizes.py tests/crash/test_sizes_grid.py tests/crash/test_refused_by_size.py

foreign-settings: $(STAMP) ## each setting that a DBA may have made, singly, for the database and for the role: two minutes
	FOREIGN_SETTINGS=whole $(PYTEST) -q tests/conformance/test_foreign_servers.py

# Each file takes the whole time: a process for each of the five.
fuzz: $(STAMP) ## an hour of payloads as nobody should send them; MINUTES=n for less
	FUZZ_MINUTES=$(or $(MINUTES),60) $(PYTEST) -q -n 5 --dist loadfile tests/fuzz

api-fuzz: $(STAMP) ## requests made from the API's OpenAPI document, half by schemathesis: no 5xx; MINUTES=5
	$(PYTHON) -m venv build/schemathesis && build/schemathesis/bin/pip install -q 'schemathesis>=4,<5'
	FUZZ_MINUTES=$(or $(MINUTES),5) $(PYTEST) -q tests/fuzz/test_api_fuzz.py
	$(BIN)/python -m tests.fuzz.api_run --schemathesis build/schemathesis/bin/schemathesis --minutes $(or $(MINUTES),5)

crash-long: $(STAMP) ## random SIGKILLs of three workers under a steady load; MINUTES=10 KILLS=200 RATE=5000
	$(BIN)/python -m tests.crash.long_run --minutes $(or $(MINUTES),10) --kills $(or $(KILLS),200) --rate $(or $(RATE),5000)

crash-auditor: $(STAMP) ## services.auditor killed at each step of its loop: every hour is audited, every difference one event
	$(BIN)/python -m tests.crash.auditor_run

crash-spark: $(STAMP) ## random faults of a Spark stream, worker, archiver and PostgreSQL; do their results agree? MINUTES=10
	$(BIN)/python -m tests.crash.spark_run --minutes $(or $(MINUTES),10)

crash-spark-kafka: $(STAMP) ## kills of a Spark stream over Kafka, and of the broker; are its tables a worker's? MINUTES=3
	$(BIN)/python -m tests.crash.spark_kafka_run --minutes $(or $(MINUTES),3)

sim: $(STAMP) ## the simulator: SEEDS=10000 runs, or SEED=n to replay one
	$(BIN)/python -m millpy.testing.simulator $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),2000))

mutants: $(STAMP) ## break the kernel in every listed way, and see the tests named beside it notice; ONLY="words", JOBS=n
	$(BIN)/python -m tests.mutants.run --only "$(ONLY)" --jobs $(or $(JOBS),2)

feeds: $(STAMP) ## the recorded feeds through mosquitto, workers killed meanwhile, against tables computed without us
	$(BIN)/python -m tests.feeds.whole_feeds

feeds-backfill: $(STAMP) ## half of each recorded feed on Spark, the rest on workers, all of them killed: five minutes
	$(BIN)/python -m tests.feeds.through_backfill

feeds-modes: $(STAMP) ## the recorded feeds as files, their windows in each mode, against the same tables: two minutes
	FEED_MODES=all $(PYTEST) -q -n 2 tests/feeds/test_feeds.py -k every_mode

feeds-audit: $(STAMP) ## the recorded feeds through killed workers; audits find nothing, and then each falsified row: up to half an hour
	$(BIN)/python -m tests.feeds.through_audit

feeds-spark: $(STAMP) ## the recorded feeds as Spark batches and streams, against the same tables: five minutes
	$(BIN)/python -m tests.feeds.through_spark

newest-clients: $(STAMP) ## the MQTT source with the newest aiomqtt and paho-mqtt of the package index, whatever the pins say
	rm -rf build/newest-clients && $(BIN)/pip install -q --upgrade --target build/newest-clients aiomqtt paho-mqtt
	PYTHONPATH=build/newest-clients $(BIN)/python -m pytest -q tests/unit/sources/test_mqtt*.py tests/conformance/test_mqtt*.py

plant: $(STAMP) ## a day in the plant: 3,000 devices in 12 dialects, whatever happens meanwhile, against an oracle: ten minutes; DEVICES=n HOUR_S=n
	$(BIN)/python -m tests.plant --devices $(or $(DEVICES),3000) --hour-s $(or $(HOUR_S),10)

ui-test: $(STAMP) ## the page in a real browser, beside two workers; pictures of all views in build/ui/; needs chromium
	$(BIN)/python -m tests.ui.run; status=$$?; $(NOTED); exit $$status

ui-tour: $(STAMP) ## take the pictures of docs/page.md again; needs chromium
	$(BIN)/python -m tests.ui.tour

compose-test: $(STAMP) ## the stack of compose/ in containers, each part killed under load, against an oracle; needs Docker
	$(BIN)/python -m tests.compose.run_stack

demo: $(STAMP) ## broker, database, two workers, one of them killed; every window checked
	$(BIN)/python -m examples.demo

bench-w1: $(STAMP) ## file to exactly-once windows
	$(BIN)/python -m benchmarks.w1_windows

bench-w1-dedupe: $(STAMP) ## the same with dedupe ids on
	$(BIN)/python -m benchmarks.w1_windows --dedupe

bench-w1-sliding: $(STAMP) ## the same with sliding windows, four a record
	$(BIN)/python -m benchmarks.w1_windows --windows sliding

bench-w1-session: $(STAMP) ## the same with session windows
	$(BIN)/python -m benchmarks.w1_windows --windows session

bench-w1-early: $(STAMP) ## the same with early panes every second, against W1 in turns
	$(BIN)/python -m benchmarks.w1_early

bench-join: $(STAMP) ## two files of a million records, interval join into a table
	$(BIN)/python -m benchmarks.join

bench-formats: $(STAMP) ## payload formats: records a CPU second that become records, by format
	$(BIN)/python -m benchmarks.formats

bench-late: $(STAMP) ## ten million closed windows that wait for late records
	$(BIN)/python -m benchmarks.late

bench-w2: $(STAMP) ## latency from publish to visible in SQL
	$(BIN)/python -m benchmarks.w2_latency

bench-w2b: $(STAMP) ## how far the low watermark is behind the clock, after one stage and after three
	$(BIN)/python -m benchmarks.w2b_watermark_lag

bench-w3: $(STAMP) ## MQTT to exactly-once windows, against a bare client
	$(BIN)/python -m benchmarks.w3_mqtt

bench-http: $(STAMP) ## HTTP to exactly-once windows: 50 clients, each answered after the commit
	$(BIN)/python -m benchmarks.http_posts

bench-kafka: $(STAMP) ## Kafka to windows, against a consumer that does nothing
	$(BIN)/python -m benchmarks.kafka

bench-outbox: $(STAMP) ## records into a Kafka topic, exactly once: rate and latency
	$(BIN)/python -m benchmarks.outbox

bench-cdc: $(STAMP) ## changes of a table under pgbench's updates, by logical decoding, against a recount
	$(BIN)/python -m benchmarks.cdc

bench-w4: $(STAMP) ## a Computation in Python over 100,000 keys
	$(BIN)/python -m benchmarks.w4_state

bench-w5: $(STAMP) ## time to recover from SIGKILL
	$(BIN)/python -m benchmarks.w5_recovery

bench-spark: $(STAMP) ## our Spark data source against Spark's JDBC reader, on one result table
	$(BIN)/python -m benchmarks.spark_read

bench-spark-run: $(STAMP) ## W1 and W4 as Spark batches from an archive, W1 as a stream, against a worker
	$(BIN)/python -m benchmarks.spark_run

bench-scores: $(STAMP) ## the report's scores on the recorded feeds, with faults put in: outliers, precision, recall
	$(BIN)/python -m benchmarks.scores

bench-api: $(STAMP) ## W2 beside 200 viewers of the API, and each list on 100,000 devices and ten million rows
	$(BIN)/python -m benchmarks.api

bench-page: $(STAMP) ## the page in a browser on 100,000 devices and ten million rows: when each view is painted and whole
	$(BIN)/python -m benchmarks.page

bench-soak: $(STAMP) ## 20 minutes: does the database stop growing?
	$(BIN)/python -m benchmarks.soak

ci: ## what CI runs
	.ci/run

clean: ## remove .venv and caches
	rm -rf $(VENV) .venv-oldest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
