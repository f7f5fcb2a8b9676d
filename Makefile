# Everything that a developer or a CI does here. `make help` explains.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/installed
PEERS := $(VENV)-peers
ARGS ?=
MINUTES ?= 10
DB ?= sqlite

# What a developer's shell may hold and the tests must not meet. DATABASE_URL stays: it chooses the database.
unexport DJANGO_SETTINGS_MODULE PYTHONPATH PYTEST_ADDOPTS

.DEFAULT_GOAL := help
.PHONY: help install test test-sqlite test-postgres test-e2e coverage prove explore mutate soak test-tasks test-brokers test-wheel test-tutorial test-api-fuzz messages screenshots bench bench-drain bench-pickup bench-start bench-heartbeat bench-slices bench-idle bench-checkpoint bench-recovery bench-million bench-peers bench-report bench-admin bench-rest lint format wheel demo serve clean

help:  ## Explain the targets
	@echo "Usage: make TARGET [PYTHON=python3.13] [DATABASE_URL=postgresql://…] [ARGS='-k lease']"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## Make the virtual environment .venv with everything pinned in requirements.txt

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "durable_jobs needs Python 3.11 or later; name one with PYTHON=…"; exit 1; }
	@echo "Installing what the demo and the tests need into $(VENV): once, a minute or two."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt --editable .
	@touch $@

test: install  ## Run every test, on SQLite and on PostgreSQL (its own, or DATABASE_URL) side by side; once, where no database matters
	@$(PY) -m tests.side_by_side $(ARGS)

test-sqlite: install  ## Run the tests on SQLite only (ARGS go to pytest)
	env -u DATABASE_URL $(PY) -m pytest $(ARGS)

test-postgres: install  ## Run the tests on PostgreSQL only (ARGS go to pytest)
ifneq ($(filter postgres% pgsql% psql%,$(DATABASE_URL)),)
	$(PY) -m pytest $(ARGS)
else
	$(PY) -m tests.postgres run -- $(PY) -m pytest $(ARGS)
endif

test-e2e: install  ## Drive the screens in Chromium (installed when missing, as root), and check them with axe-core
	env -u DATABASE_URL $(PY) -m pytest --ds=tests.e2e.settings tests/e2e $(ARGS)

screenshots: install  ## Take the pictures in docs/img, light and dark
	env -u DATABASE_URL SCREENSHOTS=1 $(PY) -m pytest --ds=tests.e2e.settings tests/e2e/test_screenshots.py

bench-admin: install  ## Time the screens over 1,000,000 jobs on PostgreSQL, and redrive 20,000 at once
	$(PY) -m tests.postgres run -- $(PY) -m benchmarks.admin $(ARGS)

bench: bench-drain bench-pickup bench-start bench-heartbeat bench-slices bench-idle bench-checkpoint bench-recovery  ## Measure speed on PostgreSQL and SQLite, against bare SQL in the same run

bench-drain: install  ## How many no-op jobs a second, against the bare statements on the same table
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.drain $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.drain $(ARGS)

bench-pickup: install  ## From the commit of a start to the first line of its step, by an idle worker
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.pickup $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.pickup $(ARGS)

bench-start: install  ## Starts a second: one by one, 10,000 at once, eight clients
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.start $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.start $(ARGS)

bench-heartbeat: install  ## Renew 1,000 leases in one statement
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.heartbeat $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.heartbeat $(ARGS)

bench-slices: install  ## Rows a second through a BatchKind, against a plain loop
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.slices $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.slices $(ARGS)

bench-idle: install  ## Memory and processor of a worker with nothing to do, against a bare django.setup()
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.idle $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.idle $(ARGS)

bench-checkpoint: install  ## What a checkpoint costs, alone and with a write of the project
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.checkpoint $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.checkpoint $(ARGS)

bench-recovery: install  ## Cancel to stopped, kill to resumed, work done again (ARGS=--default-lease: with a lease of a minute, too)
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.recovery $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.recovery $(ARGS)

bench-peers: install  ## Procrastinate, pgqueuer, django-tasks-db, Celery on Redis (redis-server) and durable_jobs, in turns
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/peers/requirements.txt
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.peers --python $(PEERS)/bin/python $(ARGS)
	env -u DATABASE_URL $(PY) -m benchmarks.peers --python $(PEERS)/bin/python $(ARGS)

bench-report: install  ## Print what benchmarks/results holds, as the tables of docs/performance.md
	@$(PY) -m benchmarks.report

bench-million: install  ## A drain beside a million finished, scheduled, foreign and unknown jobs, and an old snapshot
	$(PY) -m tests.postgres run --durable -- $(PY) -m benchmarks.million $(ARGS)

prove: install  ## Prove repair, cancel and the crowd with the default leases, and 100,000 random acts against the state chart (40 minutes)
	env -u DATABASE_URL DURABLE_JOBS_PROVE=1 $(PY) -m pytest tests/operate tests/model $(ARGS)
ifneq ($(filter postgres% pgsql% psql%,$(DATABASE_URL)),)
	DURABLE_JOBS_PROVE=1 $(PY) -m pytest tests/operate tests/model $(ARGS)
else
	DURABLE_JOBS_PROVE=1 $(PY) -m tests.postgres run -- $(PY) -m pytest tests/operate tests/model $(ARGS)
endif
	DURABLE_JOBS_PROVE=1 $(PY) -m tests.postgres run -- $(PY) -m pytest tests/brokers/test_losses.py -k away $(ARGS)

explore: export DURABLE_JOBS_EXPLORE = 1
explore: install  ## Play every order of the statements of two and three actors (DURABLE_JOBS_EXPLORE_MOST=20: so many of each scene)
	env -u DATABASE_URL $(PY) -m pytest tests/explorer $(ARGS)
ifneq ($(filter postgres% pgsql% psql%,$(DATABASE_URL)),)
	$(PY) -m pytest tests/explorer $(ARGS)
else
	$(PY) -m tests.postgres run -- $(PY) -m pytest tests/explorer $(ARGS)
endif

coverage: install  ## Run every test on both databases and tell which branches of the package none has taken (20 minutes)
	env -u DATABASE_URL $(PY) -m tests.covered $(ARGS)

test-tasks: install  ## Run the tests of the tasks' backend on this Django and, where a Python 3.12 is, on Django 6
	env -u DATABASE_URL $(PY) -m tests.tasks $(ARGS)

mutate: install  ## Change the core a little, many times: do the tests notice? (ARGS: --sample 400, --part 3/8, --module store)
	env -u DATABASE_URL $(PY) -m tests.mutation $(ARGS)
	env -u DATABASE_URL $(PY) -m tests.postgres run -- $(PY) -m tests.mutation $(ARGS)

soak: install  ## Kill workers at random and check what is left (MINUTES=10 DB=sqlite|postgres; ARGS: --seed 7, --report FILE)
	env -u DATABASE_URL $(PY) -m tests.soak --minutes $(MINUTES) --database $(DB) $(ARGS)

test-brokers: install  ## Run on Redis, RabbitMQ, PgBouncer (Debian's, installed when missing, as root) and on three hosts, one of them cut off
	@env -u DATABASE_URL $(PY) -m tests.brokers $(ARGS)

test-wheel: install  ## Build the package, check it as an index would, and use it in new projects: oldest and newest Python and Django, both databases
	env -u DATABASE_URL $(PY) -m tests.wheel_smoke

test-tutorial: install  ## Follow docs/tutorial.md to the letter in an empty folder, by this Python and the newest (ARGS='--python python3.13')
	env -u DATABASE_URL $(PY) -m tests.tutorial $(ARGS)

test-api-fuzz: install  ## Ask the REST API whatever its schema allows and forbids, as operator and as viewer (ARGS: --examples 50)
	env -u DATABASE_URL $(PY) -m tests.api_fuzz $(ARGS)

bench-rest: install  ## Time the REST API over a million jobs on PostgreSQL (ARGS: --jobs 100000)
ifneq ($(filter postgres% pgsql% psql%,$(DATABASE_URL)),)
	$(PY) -m benchmarks.rest $(ARGS)
else
	$(PY) -m tests.postgres run -- $(PY) -m benchmarks.rest $(ARGS)
endif

lint: install  ## Check style, types and missing migrations (needs no network)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	env -u DATABASE_URL DJANGO_SETTINGS_MODULE=tests.settings $(PY) manage.py makemigrations --check --dry-run

messages: install  ## Find the texts of the screens, and compile their translations (needs GNU gettext)
	cd durable_jobs && $(abspath $(PY)) -P -m django makemessages --all --no-wrap --add-location=never
	cd durable_jobs && $(abspath $(PY)) -P -m django compilemessages

format: install  ## Put the code into the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: install  ## Build wheel and source distribution into dist/
	rm -rf build dist
	$(PY) -m build

demo: install  ## Import 28,000 airports, kill the worker in the middle, show how another finishes
	@$(PY) manage.py demo $(ARGS)

serve: install  ## Start the demo site and a worker, and print address and login (ARGS=8001: another port)
	@$(PY) manage.py serve $(ARGS)

clean:  ## Remove the environment, what was built, and the demo's data
	rm -rf $(VENV) $(PEERS) .venv-django6 build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo .serve media
	rm -f *.sqlite3 *.sqlite3-* .coverage .coverage.*
	find . -name __pycache__ -prune -exec rm -rf {} +
