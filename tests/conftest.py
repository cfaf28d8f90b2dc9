"""Fixtures of every test: its own migrated database, a broker, and checks that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio

from millpy.embedded import EmbeddedBroker, EmbeddedPostgres, mosquitto_program
from tests.collector import freeze_for_good
from tests.commands import logging_as_it_was
from tests.databases import fresh_database, make_template, memory_directory
from tests.kafka_server import NONE as NO_KAFKA
from tests.kafka_server import KafkaServer, NoKafkaError
from tests.s3_server import S3Server

# A pause of the machine is no failure: the default is 200 ms for an example.
hypothesis.settings.register_profile("no deadline", hypothesis.settings(deadline=None))
hypothesis.settings.load_profile("no deadline")
hypothesis.settings.register_profile(
    "any failure", phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.shrink]
)

SETTINGS = {"max_prepared_transactions": "4"}
"""What tests of changes of tables, and of prepared transactions, need; nothing else depends on it."""


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server for the session. MILLPY_TEST_POSTGRES = 16, 18 (default; from the wheel) or system15 (Debian's)."""
    version = os.environ.get("MILLPY_TEST_POSTGRES", "18")
    with memory_directory(tmp_path_factory.mktemp("postgres")) as directory:
        with EmbeddedPostgres(directory, version=version, tcp=True, settings=SETTINGS) as server:
            make_template(server)
            yield server
        server.kill()  # its directory is removed now


@pytest.fixture
def empty_database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """URL of a fresh database without our tables."""
    with fresh_database(postgres, "template1") as name:
        yield postgres.url(name)


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """URL of a fresh migrated database, reached only through the connections that the test makes."""
    with fresh_database(postgres) as name:
        yield postgres.url(name)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """mosquitto on a free port with persistent sessions: `host`, `port`, `kill()`, `stop()`, `start()`."""
    with running_broker(tmp_path, save_always=True) as embedded:
        yield embedded


@pytest.fixture
def quick_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """It saves its sessions when it is stopped, not at each message."""
    with running_broker(tmp_path, save_always=False) as embedded:
        yield embedded


@contextmanager
def running_broker(place: Path, *, save_always: bool) -> Iterator[EmbeddedBroker]:
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed")
    with EmbeddedBroker(place / "broker", save_always=save_always) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server for the session."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_login(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server; this process and its children have the credentials."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def bucket(s3_login: S3Server) -> str:
    """URL of a new bucket; this process and its children have the credentials."""
    return s3_login.new_bucket()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A Kafka broker for the session: `address`, `kill()`, `start()`. Each test creates its own topics."""
    server = KafkaServer(tmp_path_factory.mktemp("kafka") / "broker", quick=True)
    try:
        server.start()
    except NoKafkaError as error:
        pytest.skip(f"{NO_KAFKA}: {error}")
    yield server
    server.kill()  # it will not be read again


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Restore logging, because a command that a test runs in this process configures it."""
    with logging_as_it_was():
        yield


@pytest.fixture(autouse=True)
def _strict_about_tasks(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_no_leaked_tasks")


@pytest_asyncio.fixture
async def _no_leaked_tasks() -> AsyncIterator[None]:
    """A task that outlives its test is a fault of the code or of the test."""
    before = asyncio.all_tasks()
    yield
    leaked = asyncio.all_tasks() - before - {asyncio.current_task()}
    for task in leaked:
        task.cancel()
    assert not leaked, f"leaked tasks: {leaked}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every n-th case of a test that is marked as sampled, where CASES=sampled: in `make test`."""
    if os.environ.get("CASES") != "sampled":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set()
    for of_test in cases.values():
        of_test.sort(key=lambda case: tuple(case.callspec.indices.values()))  # type: ignore[attr-defined]  # shuffled
        every = of_test[0].get_closest_marker("sampled").kwargs["every"]  # type: ignore[union-attr]
        left_out.update(case for place, case in enumerate(of_test) if place % every)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Let no scan for cycles include the tests themselves."""
    freeze_for_good()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI has installed everything (MILLPY_CI=1), a skipped test is a failure."""
    report = yield
    if report.skipped and ("recorded feeds" in str(report.longrepr) or NO_KAFKA in str(report.longrepr)):
        return report  # these cannot be installed everywhere; everything else can
    if os.environ.get("MILLPY_CI") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but MILLPY_CI=1 says that nothing is missing: {report.longrepr}"
    return report


FAILURES = os.environ.get("MILLPY_FAILURES")  # a file: `.ci/run` shows it last, whatever became of the run


def _add_failure(text: str) -> None:
    if FAILURES and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(FAILURES).open("a") as file:
            file.write(text.rstrip() + "\n\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep each failure at once: after an error of pytest itself, nothing else tells it."""
    if report.failed:
        _add_failure(f"FAILED {report.nodeid} ({report.when})\n{report.longreprtext[-3_000:]}")


def pytest_internalerror(excrepr: object) -> None:
    """Keep an error of pytest itself."""
    _add_failure(f"ERROR of pytest itself\n{str(excrepr)[-3_000:]}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Keep each file that cannot be imported."""
    if report.failed:
        _add_failure(f"ERROR {report.nodeid} is not collected\n{report.longreprtext[-3_000:]}")
