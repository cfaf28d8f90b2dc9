"""Functions of triggers that find nothing in a worker's session, as `millpy doctor` names them."""

from __future__ import annotations

import pytest

from millpy.errors import PoisonError
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph, panes
from tests.conformance.test_doctor import found
from tests.conformance.test_users_tables import run

NAMED = [
    "INSERT INTO alarms_of_mine VALUES (NEW.device); RETURN NEW",
    "insert  into Alarms_Of_Mine values (NEW.device); return NEW",
    "UPDATE alarms_of_mine SET device = NEW.device; RETURN NEW",
    "IF EXISTS (SELECT FROM alarms_of_mine) THEN RETURN NEW; END IF; RETURN NULL",
    "PERFORM of_mine(); RETURN NEW",
    "NEW.label := of_mine(); RETURN NEW",
]
WELL = [
    "INSERT INTO public.alarms_of_mine VALUES (NEW.device); RETURN NEW",
    "-- INSERT INTO alarms_of_mine\n RETURN NEW",
    "PERFORM public.of_mine(), upper(NEW.device); RETURN NEW",
    "IF NEW.device IS DISTINCT FROM 'x' THEN PERFORM count(*) FROM generate_series(1, 2); END IF; RETURN NEW",
]


async def play(url: str, body: str, path: str = "") -> Owner:
    run(
        url,
        "CREATE TABLE public.alarms_of_mine (device text)",
        "CREATE FUNCTION public.of_mine() RETURNS text LANGUAGE sql AS 'SELECT NULL'",
        f"CREATE FUNCTION public.mine() RETURNS trigger LANGUAGE plpgsql {path} AS $$ BEGIN {body}; END $$",
    )
    async with PostgresStore(url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        run(url, "CREATE TRIGGER t BEFORE INSERT ON factory.sums_1m FOR EACH ROW EXECUTE FUNCTION public.mine()")
        await owner.register()
        await owner.claim()
        rows = panes(owner.deployment.table_ids["sums_1m"], ("a", 1.0, 0), first=True)
        await owner.commit(owner.checkpoint(owner.deployment.intervals_of("sums")[0], results=[rows]))
        return owner


@pytest.mark.parametrize("body", NAMED)
async def test_a_function_that_names_no_schema_fails_and_is_named(database_url: str, body: str) -> None:
    with pytest.raises(PoisonError):
        await play(database_url, body)

    assert "without its schema" in found(database_url)["trigger"][1]


@pytest.mark.parametrize("path", ["", "SET search_path = public"])
@pytest.mark.parametrize("body", WELL)
async def test_a_function_that_names_schemas_is_no_finding(database_url: str, body: str, path: str) -> None:
    await play(database_url, body, path)

    assert "trigger" not in found(database_url)


async def test_a_function_that_sets_its_own_path_is_no_finding(database_url: str) -> None:
    await play(database_url, NAMED[0], "SET search_path = public")

    assert "trigger" not in found(database_url)
