"""All that a store promises: mix `StoreSuite` into a test class that has a `world` fixture."""

from __future__ import annotations

from tests.conformance.store_change_suite import ChangeSuite
from tests.conformance.store_commit_suite import FenceSuite, ResultSuite
from tests.conformance.store_generation_suite import GenerationSuite
from tests.conformance.store_history_suite import HistorySuite
from tests.conformance.store_neighbor_suite import NeighborSuite
from tests.conformance.store_outbox_suite import OutboxSuite
from tests.conformance.store_ownership_suite import OwnershipSuite
from tests.conformance.store_polling_suite import PollSuite, RetentionSuite
from tests.conformance.store_reading_suite import DedupeSuite, KeyedSuite
from tests.conformance.store_request_suite import RequestSuite


class StoreSuite(
    OwnershipSuite,
    ChangeSuite,
    GenerationSuite,
    FenceSuite,
    ResultSuite,
    HistorySuite,
    KeyedSuite,
    DedupeSuite,
    NeighborSuite,
    PollSuite,
    RetentionSuite,
    RequestSuite,
    OutboxSuite,
):
    """The suite that MemoryStore and PostgresStore both must pass."""
