"""The faults. Each changes the world at one moment; `heal` ends those that last."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal

from millpy.errors import GraphError
from millpy.hosting.failpoints import Failpoint
from millpy.model.checkpoint import RecordTableName
from millpy.testing.simulation.broker import Broker
from millpy.testing.simulation.deployments import next_reset, next_shape
from millpy.testing.simulation.graphs import NAME, SITES
from millpy.testing.simulation.lookup_table import TABLE, put_table
from millpy.testing.simulation.repairs import add_late, correct_row, drop_old_rows
from millpy.testing.simulation.schedule import POINTS, ScheduledFault

if TYPE_CHECKING:
    from millpy.model.deployment import Deployment
    from millpy.store.memory.store import MemoryStore
    from millpy.testing.simulation.machine import Machine
    from millpy.testing.simulation.world import World

Inject = Callable[["World", "Machine", ScheduledFault], bool]
LANDINGS: tuple[Literal["before", "later", "delayed", "never"], ...] = ("before", "later", "delayed", "never")


def inject(world: World, fault: ScheduledFault) -> bool:
    """Carry out a fault; return False if it takes effect later, or has no target."""
    victims = [machine for machine in world.machines if machine.worker is not None]
    if not victims:
        return False
    victim = victims[int(fault.pick * len(victims))]
    world.say(f"fault {fault.kind} {victim.name} {fault.size}")
    return FAULTS[fault.kind](world, victim, fault)


def heal(world: World) -> None:
    """End every fault that lasts."""
    world.say("faults end")
    world.armed.clear()
    faults = world.database.faults
    faults.land_lost_commits()
    faults.forget()
    faults.drop_lost_commits()
    for machine in world.machines:
        machine.process.frozen = False
        machine.process.slow = 1
        machine.process.heartbeat.blocked = False
        machine.store.dies = None
    world.trouble.lasts = False
    world.other_side.is_sound = True
    for broker in world.sessions():
        if not broker.up:
            broker.come_back()


def freeze(world: World, machine: Machine, size: float) -> None:
    """Stop a machine for up to three leases, unnoticed by broker and database."""
    machine.process.frozen = True

    def thaw() -> None:
        machine.process.frozen = False

    world.clock.call_at(world.clock.monotonic() + 0.05 + size * 3 * world.limits.lease_ttl_s, thaw)


def _crash(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    victim.process.doomed = True
    world.loop.reap(victim.process)
    world.ended(victim)
    return True


def _at_point(action: str, points: Sequence[Failpoint]) -> Inject:
    def arm(world: World, victim: Machine, fault: ScheduledFault) -> bool:
        world.armed.append((points[int(fault.pick * len(points))], action, fault.size))
        return False

    return arm


def _crash_in_doubt(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    landing = LANDINGS[int(fault.size * len(LANDINGS))]
    world.database.faults.lose_answer_of_next_commit(landing, store=victim.store)
    victim.store.dies = victim.die
    _resolve_later(world, fault)
    return True


def _answer_lost(landing: Literal["before", "later", "delayed", "never"]) -> Inject:
    def lose(world: World, victim: Machine, fault: ScheduledFault) -> bool:
        world.database.faults.lose_answer_of_next_commit(landing, store=victim.store)
        _resolve_later(world, fault)
        return True

    return lose


def _resolve_later(world: World, fault: ScheduledFault) -> None:
    """Let a commit in flight succeed after a while, or roll it back."""

    def resolve() -> None:
        if fault.pick < 0.7:
            world.database.faults.land_lost_commits()
        else:
            world.database.faults.drop_lost_commits()

    for times in (1, 2, 4):  # the answer may not be lost yet at the first time
        world.clock.call_at(world.clock.monotonic() + times * (0.02 + fault.size), resolve)


def _freeze(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    freeze(world, victim, fault.size)
    return True


def _slow(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    victim.process.slow = 2 + int(fault.size * 6)
    world.clock.call_at(world.clock.monotonic() + 1.0, lambda: setattr(victim.process, "slow", 1))
    return True


def _lease_lost(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    registered = world.database.workers.get(victim.worker_id)
    if registered is None:
        return False
    registered.expires_at = world.server.now_us()
    return _heartbeat_stops(world, victim, fault)  # so the worker learns of it late


def _heartbeat_stops(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    victim.process.heartbeat.blocked = True
    span = (0.5 + fault.size * 2) * world.limits.lease_ttl_s
    world.clock.call_at(world.clock.monotonic() + span, lambda: setattr(victim.process.heartbeat, "blocked", False))
    return True


def _connections_lost(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    store = None if fault.size < 0.3 else victim.store
    world.database.faults.lose_connections(1 + int(fault.size * 4), store=store)
    return True


def _some_partition(world: World, fault: ScheduledFault) -> str:
    partitions = list(world.brokers[1])
    return partitions[int(fault.pick * 997) % len(partitions)]


def _some_session(world: World, victim: Machine, fault: ScheduledFault) -> Broker:
    return world.brokers[victim.generation][_some_partition(world, fault)]


def _broker_away(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    partition = _some_partition(world, fault)
    sessions = [named[partition] for named in world.brokers.values()]
    if world.schedule.shape.feed == "file" or not sessions[0].up:
        return False
    for broker in sessions:
        broker.go_away()

    def back() -> None:
        for broker in sessions:
            if not broker.up:
                broker.come_back()

    world.clock.call_at(world.clock.monotonic() + 0.1 + fault.size * 3, back)
    return True


def _broker_redelivers(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    return _some_session(world, victim, fault).redeliver(1 + int(fault.size * 8)) > 0


def _broker_shuffles(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    if world.schedule.shape.idle or world.schedule.shape.feed != "topic":
        return False  # readings of such worlds must not be late
    broker = _some_session(world, victim, fault)
    broker.shuffles = True
    return broker.shuffle() > 1


def _wall_jumps(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    victim.clock.jump((fault.size - 0.5) * 600)
    return True


def _clock_drifts(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    victim.clock.drift(1 + (fault.size - 0.5) * 0.02)
    return True


def _server_jumps(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    world.server.jump((fault.size - 0.5) * 4 * world.limits.lease_ttl_s)
    return True


def _far_s(fault: ScheduledFault) -> float:
    """Return a time between a second and ten years, in either direction."""
    return float(10 ** (fault.pick * 997 % 1 * 8.5)) * (1 if fault.size * 997 % 1 < 0.6 else -1)


def _steps(*, server: bool, wall: bool) -> Inject:
    def step(world: World, victim: Machine, fault: ScheduledFault) -> bool:
        far_s = _far_s(fault)

        def both(seconds: float) -> None:
            if server:
                world.step_server(seconds)
            if wall:
                victim.clock.jump(seconds)

        both(far_s)
        if fault.size < 0.6:
            world.clock.call_at(world.clock.monotonic() + 0.2 + fault.size * 5, lambda: both(-far_s))
        return True

    return step


def _fold(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Make all intervals of a machine due for folding."""
    assert victim.worker is not None
    intervals = victim.worker.owned.intervals.values()
    for interval in intervals:
        interval.unfolded_since = float("-inf")
    return any(interval.unfolded_bytes for interval in intervals)


def _rings_turn(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Turn all rings."""
    for ring in (world.database.segments, world.database.deltas, world.database.dedupe_runs):
        ring.turn(world.server.now_us(), epoch_s=0.0, epoch_bytes=1)
    return True


def _join(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    simulated = world.generations[victim.generation]
    if len(simulated.machines(world.machines)) > simulated.workers:
        return False
    world.spawn(simulated)
    return True


def _leave(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    victim.stop.set()
    return True


def _rows_deleted(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    if "fixed" not in world.schedule.shape.branches or "corrections" in world.schedule.features:
        return False  # a late record must not be added to a window whose row a user has deleted
    graph = world.generations[victim.generation].history.deployed.deployment.name
    rows = world.database.rows("per_window", graph)
    if not rows:
        return False
    gone = rows[int(fault.pick * len(rows))]["window_start"]
    world.database.delete_rows("per_window", lambda row: row["window_start"] == gone, graph)
    return True


def _trouble_pauses(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Stop the failures of Computations for a while."""
    if not world.trouble.lasts or not {"parks", "rejects"} & set(world.schedule.shape.branches):
        return False
    world.trouble.lasts = False

    def again() -> None:
        world.trouble.lasts = not world.is_healed

    world.clock.call_at(world.clock.monotonic() + 0.1 + fault.size, again)
    return True


def _parked(world: World) -> list[tuple[int, bytes, int]]:
    """Return (interval, key, ticket) of every parked key."""
    return [
        (observed.interval_id, json.dumps(key).encode(), value["ticket"])
        for simulated in world.generations.values()
        for observed in simulated.history.intervals_of("parks")
        for (kind, namespace, key, _), (value, _) in observed.keyed.items()
        if kind == "parked" and namespace == "key"
    ]


def _released(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Request the release of a parked key, or of its discarding; sometimes twice."""
    if not (parked := _parked(world)):
        return False
    chosen = parked[int(fault.pick * len(parked))]
    for _ in range(1 + (fault.size < 0.3)):
        world.database.requests.release(*chosen, discard=fault.size > 0.6)
    return True


def release_all(world: World) -> None:
    """Request the release of every parked key that has no request yet."""
    asked = {(release.interval_id, release.key, release.ticket) for release in world.database.requests.releases}
    for parking in _parked(world):
        if parking not in asked:
            world.database.requests.release(*parking)


def _replayed(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Replay late records and dead letters: corrected rubbish, and records that a Computation rejected."""
    found: list[tuple[RecordTableName, int, bytes | None]] = []
    for number, (_, _, letter) in enumerate(world.database.dead_letters, start=1):
        if letter.payload in world.feed.corrections:
            found.append(("dead_letters", number, world.feed.corrections[letter.payload]))
        elif letter.computation == "rejects":
            found.append(("dead_letters", number, None))
    rows = 0
    for _, _, late in world.database.late_records:
        if late.computation == "per_window":
            found += [("late_records", rows + place, None) for place in range(1, len(late) + 1)]
        rows += len(late)
    asked = 0
    for place in range(1 + int(fault.size * 4)):
        if found:
            table, number, corrected = found[(int(fault.pick * 997) + place) % len(found)]
            asked += world.database.requests.replay(table, number, corrected)
    return asked > 0


def _table_changes(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Give the table of the lookup its next content; sometimes one key has two rows for a while."""
    world.content += 1
    put_table(world.database, world.content, SITES)
    if fault.size < 0.2:
        rows = world.database.lookup_tables[TABLE]
        world.database.lookup_tables[TABLE] = rows + b"\n" + rows.partition(b"\n")[0]
        world.clock.call_at(
            world.clock.monotonic() + fault.pick, lambda: put_table(world.database, world.content, SITES)
        )
    return True


def _table_goes(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Drop the table of the lookup for a while."""
    world.database.lookup_tables.pop(TABLE, None)
    world.clock.call_at(world.clock.monotonic() + fault.size, lambda: put_table(world.database, world.content, SITES))
    return True


def _switch(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    switch(world, fault.pick, fault.size)
    return False


def switch(world: World, pick: float, size: float) -> None:
    """Run the command that switches to the other generation; sometimes end it early, as an impatient user."""
    if len(world.generations) < 2:
        return
    generation = next(n for n, s in world.generations.items() if s.history.deployed.deployment.name != NAME)

    async def switch_once() -> None:
        store = world.store_type(world.database)
        await store.open()
        if await store.switch(NAME, generation):
            world.say(f"generation {generation} is current")
            world.count_fault("switch")

    process = world.run_command(switch_once)
    if pick < 0.25:
        world.clock.call_at(world.clock.monotonic() + size * 0.1, lambda: world.end_command(process))


def _changed(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    change(world, fault.pick, fault.size)
    return False


def change(world: World, pick: float, size: float) -> None:
    """Run the command that deploys a change of the graph; sometimes end it early, as an impatient user."""
    simulated = world.generations[1]
    if (shape := next_shape(simulated.shape, pick, size * 997 % 1)) is not None:
        spec = simulated.propose(shape)
        _deploy(world, size, lambda store: store.deploy(spec, on_purpose=True))


def _reset(world: World, victim: Machine, fault: ScheduledFault) -> bool:
    """Run the command that lets a computation begin anew; sometimes end it early, as an impatient user."""
    simulated = world.generations[1]
    if (name := next_reset(simulated.shape, fault.pick)) is not None:
        spec = simulated.propose(simulated.shape)
        _deploy(world, fault.size, lambda store: store.reset(spec, [name]))
    return False


def _deploy(world: World, size: float, work: Callable[[MemoryStore], Coroutine[Any, Any, Deployment]]) -> None:
    async def deploy_once() -> None:
        store = world.store_type(world.database)
        await store.open()
        try:
            await work(store)
        except GraphError as refused:  # another deployment came before it, or every source has ended
            world.say(f"refused: {refused}")

    process = world.run_command(deploy_once)
    if size < 0.25:
        world.clock.call_at(world.clock.monotonic() + size * 0.2, lambda: world.end_command(process))


FAULTS: dict[str, Inject] = {
    "crash": _crash,
    "crash_at": _at_point("crash", POINTS),
    "crash_in_doubt": _crash_in_doubt,
    "freeze": _freeze,
    "freeze_at": _at_point("freeze", (*POINTS, *([Failpoint.BEFORE_COMMIT] * 8))),
    "slow": _slow,
    "lease_lost": _lease_lost,
    "heartbeat_stops": _heartbeat_stops,
    "answer_lost_before": _answer_lost("before"),
    "answer_lost_later": _answer_lost("later"),
    "answer_lost_delayed": _answer_lost("delayed"),
    "answer_lost_never": _answer_lost("never"),
    "connections_lost": _connections_lost,
    "broker_away": _broker_away,
    "broker_redelivers": _broker_redelivers,
    "broker_shuffles": _broker_shuffles,
    "wall_jumps": _wall_jumps,
    "clock_drifts": _clock_drifts,
    "server_jumps": _server_jumps,
    "wall_steps": _steps(server=False, wall=True),
    "server_steps": _steps(server=True, wall=False),
    "machine_steps": _steps(server=True, wall=True),
    "fold": _fold,
    "rings_turn": _rings_turn,
    "join": _join,
    "leave": _leave,
    "rows_deleted": _rows_deleted,
    "trouble_pauses": _trouble_pauses,
    "released": _released,
    "replayed": _replayed,
    "table_changes": _table_changes,
    "table_goes": _table_goes,
    "switch": _switch,
    "changed": _changed,
    "reset": _reset,
    "switch_at": _at_point("switch", (Failpoint.AFTER_FENCE,)),
    "added_late": add_late,
    "corrected": correct_row,
    "rows_dropped": drop_old_rows,
    "change_at": _at_point("change", (Failpoint.AFTER_FENCE, Failpoint.AFTER_STEP, Failpoint.AFTER_COMMIT)),
}
