"""Counters as views read them, from the newest bundle alone, are those that all bundles add up to."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from millpy.model.checkpoint import Entries, Kind
from millpy.model.delta import decode_document
from millpy.store.postgres.deployment.migrate import migrate
from tests.conformance.store_builders import Owner, counters, entries
from tests.conformance.test_api import ran
from tests.conformance.test_views import fetch
from tests.databases import fresh_database

OF_ALL = "SELECT namespace, subkey, (value #>> '{}')::bigint FROM mill.entries WHERE kind = 'counter' ORDER BY 1, 2"
OF_NEWEST = "SELECT namespace, subkey, count FROM mill.counters ORDER BY 1, 2"
PARKED = {
    view: f"SELECT interval_id, namespace, key, subkey, fire_at, value::text FROM mill.{view} ORDER BY 1, 2, 3, 4"
    for view in ("entries WHERE kind = 'parked'", "parked_entries")
}
WHOLE = ({("consumed", "1"): 7, ("late", "1"): 2}, {("consumed", "1"): 9, ("late", "1"): 2})


@pytest.mark.parametrize("folds_after", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("knows", ["never", "always", "at first", "in the end"])
async def test_counters_are_exact_whether_or_not_a_bundle_has_all_of_them(
    owner: Owner, database_url: str, folds_after: int, knows: str
) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    changes = [
        counters(consumed=("1", 5), late=("1", 2)),
        counters(consumed=("1", 7)),
        counters(consumed=("1", 9)),
        (entries(Kind.STATE, "usual", ("a", 1)),),
    ]
    everything = [{("consumed", "1"): 5, ("late", "1"): 2}, *WHOLE, WHOLE[-1]]
    known = {"never": range(0), "always": range(4), "at first": range(2), "in the end": range(2, 4)}[knows]
    for number, (delta, counts) in enumerate(zip(changes, everything, strict=True)):
        given = counts if number in known else None
        await owner.commit(owner.checkpoint(interval, delta=delta, counters=given))
        if number + 1 == folds_after:
            await owner.fold(interval)

    assert fetch(database_url, OF_NEWEST) == [("consumed", "1", 9), ("late", "1", 2)] == fetch(database_url, OF_ALL)


@pytest.mark.parametrize("folds_after", [0, 1, 2])
async def test_a_counter_that_a_writer_no_longer_has_keeps_its_folded_count(
    owner: Owner, database_url: str, folds_after: int
) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    for number, (delta, counts) in enumerate(
        [(counters(old=("1", 3)), None), (counters(consumed=("1", 7)), {("consumed", "1"): 7})]
    ):
        await owner.commit(owner.checkpoint(interval, delta=delta, counters=counts))
        if number + 1 == folds_after:
            await owner.fold(interval)

    assert fetch(database_url, OF_NEWEST) == [("consumed", "1", 7), ("old", "1", 3)]


@pytest.mark.parametrize("folds_after", [0, 1, 2])
async def test_parked_keys_are_found_in_the_few_bundles_that_change_them(
    owner: Owner, database_url: str, folds_after: int
) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    parked = [("k", {"n": 1}, "0"), ("k", {"n": 2}, "1")]
    released: list[tuple[Entries, ...]] = [(entries(Kind.PARKED, "1", ("k", None, "0")),)]
    for number, delta in enumerate([(entries(Kind.PARKED, "1", *parked),), *released, counters(consumed=("1", 7))]):
        await owner.commit(owner.checkpoint(interval, delta=delta, counters={}))
        if number + 1 == folds_after:
            await owner.fold(interval)

    found, expected = (fetch(database_url, query) for query in PARKED.values())
    assert found == expected and len(found) == 1


KEEP = """
CREATE TABLE public.kept (interval_id bigint, bundle bigint, part integer, document text, counters text);
CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.kept VALUES (NEW.interval_id, NEW.bundle, NEW.part, NEW.document, NEW.counters);
    RETURN NULL;
END $$;
CREATE TRIGGER keep AFTER INSERT ON mill.deltas FOR EACH ROW EXECUTE FUNCTION public.keep();
"""


def test_each_bundle_of_a_graph_has_all_counters(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with fresh_database(postgres) as name:
        url = postgres.url(name)
        migrate(url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(KEEP)
        ran(tmp_path / "plant", url)
        kept = fetch(url, "SELECT interval_id, document, counters FROM public.kept ORDER BY interval_id, bundle, part")

    so_far: dict[int, dict[str, dict[str, int]]] = {}
    for interval, document, whole in kept:
        of_interval = so_far.setdefault(interval, {})
        for change in decode_document(document):
            if change.kind is Kind.COUNTER:
                counts = zip(change.subkeys, map(int, filter(None, change.values)), strict=True)
                of_interval.setdefault(change.namespace, {}).update(counts)
        assert json.loads(whole) == of_interval
    assert len(kept) > 3 and {"injected", "produced", "consumed", "written"} <= {
        name for counters in so_far.values() for name in counters
    }
