"""Mutants of `millpy/runtime`: turns, routing, callbacks, timers, parking."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/runtime/worker.py",
        "            await self.owned.connect_again(failed)",
        "            await self.recover()",
        killers=("tests/unit/runtime/test_defective_sources.py::test_outage_of_a_source_delays_no_other_source[open]",),
    ),
    Mutant(
        "millpy/runtime/guarded_injector.py",
        "return bool(self._why) and self._setup.clock.monotonic() >= self._again_at",
        "return bool(self._why)",
        killers=("tests/unit/runtime/test_defective_sources.py::test_source_that_has_failed_is_due_after_the_pause",),
    ),
    Mutant(
        "millpy/runtime/guarded_injector.py",
        "        await asyncio.wait([self._opening], timeout=OPENING_AWAITED_S)",
        "        await asyncio.wait([self._opening])",
        killers=("tests/unit/runtime/test_defective_sources.py::test_source_that_opens_slowly_delays_no_other_source",),
    ),
    Mutant(
        "millpy/runtime/guarded_injector.py",
        "given = await self._in_time(self.injector.take())",
        "given = await self.injector.take()",
        killers=(
            "tests/unit/runtime/test_defective_sources.py::test_call_that_does_not_return_delays_its_source_only[take]",
        ),
    ),
    Mutant(
        "millpy/ingest/intake.py",
        "                self.notes[name] = note",
        "                self.notes.setdefault(name, note)",
        killers=(
            "tests/unit/runtime/test_defective_sources.py::test_source_that_is_connected_again_gets_what_it_has_noted",
        ),
    ),
    Mutant(
        "millpy/ingest/intake.py",
        "                self.notes.pop(name, None)",
        '                self.notes[name] = b""',
        killers=(
            "tests/unit/runtime/test_defective_sources.py::test_source_that_is_connected_again_gets_what_it_has_noted",
        ),
    ),
    Mutant(
        "millpy/runtime/outbox_drain.py",
        "        self._report_silence()\n",
        "",
        killers=(
            "tests/unit/runtime/test_outbox_drain.py::test_a_call_that_does_not_return_is_reported_and_left_alone[send]",
        ),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "            to_release.extend([i for i in mine if i in held][-1:])",
        "            to_release.extend(mine[-1:])",
        killers=(
            "tests/unit/runtime/test_balance.py::test_worker_that_holds_none_of_its_intervals_releases_none",
            "tests/unit/runtime/test_balance.py::test_only_free_intervals_are_claimed_and_only_held_ones_released",
        ),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "            to_release.extend([i for i in mine if i in held][share_up:])",
        "            to_release.extend([i for i in mine if i not in held][share_up:])",
        killers=("tests/unit/runtime/test_balance.py::test_surplus_goes_to_a_worker_that_joins",),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "        to_claim.extend(free[: max(0, share_up - len(mine))])",
        "        to_claim.extend(free[: min(0, share_up - len(mine))])",
        killers=("tests/unit/runtime/test_balance.py::test_a_worker_alone_claims_everything",),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "        counts = {worker: sum(1 for i in intervals if owners.get(i) == worker) for worker in eligible if worker != me}",
        "        counts = {worker: sum(1 for i in intervals if owners.get(i) == worker) for worker in eligible if worker == me}",
        killers=("tests/unit/runtime/test_balance.py::test_balancing_reaches_fair_shares_and_then_moves_nothing",),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "        free = [i for i in intervals if owners.get(i) is None and i not in held]",
        "        free = [i for i in intervals if owners.get(i) is None and i in held]",
        killers=("tests/unit/runtime/test_balance.py::test_a_worker_alone_claims_everything",),
    ),
    Mutant(
        "millpy/operators/deduplicate.py",
        "            place, mine = arrival.bundle.input, accepted[start : start + len(part)]",
        "            place, mine = arrival.bundle.input, accepted[start : start - len(part)]",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_in_any_bundles_restarts_and_changes",
        ),
    ),
    Mutant(
        "millpy/operators/deduplicate.py",
        "        if not late.any():",
        "        if late.any():",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_in_any_bundles_restarts_and_changes",
        ),
    ),
    Mutant(
        "millpy/operators/deduplicate.py",
        "        if outlet.table_id is not None:",
        "        if outlet.table_id is None:",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_in_any_bundles_restarts_and_changes",
        ),
    ),
    Mutant(
        "millpy/operators/deduplicate.py",
        "        result.late.append(self._late_rows(arrival, records.take(rows), rows, watermarks[rows]))",
        "        pass",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_in_any_bundles_restarts_and_changes",
        ),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "selected.append(part if len(keep) == part.count",
        "selected.append(part if len(keep) != part.count",
        killers=("tests/unit/runtime/test_poison_filter.py::test_refused_result_rows_become_dead_letters",),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "keep = [place - places.start for place in places if place < upto and place not in refused]",
        "keep = [place - places.start for place in places if place < upto and place in refused]",
        killers=("tests/unit/runtime/test_poison_filter.py::test_refused_result_rows_become_dead_letters",),
    ),
    Mutant(
        "millpy/hosting/isolation.py",
        "        if self.seen <= self.upto and not any(start <= place < self.seen for place in self.refused):",
        "        if self.seen <= self.upto and not any(start < place < self.seen for place in self.refused):",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "        middle = (passes + fails) // 2",
        "        middle = (passes - fails) // 2",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "    if error is not None:",
        "    if error is None:",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "    isolation.refused[fails - 1] = blamed",
        "    isolation.refused[fails - 2] = blamed",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "    isolation.refused[fails - 1] = blamed",
        "    isolation.refused[fails + 1] = blamed",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/poison_filter.py",
        "    start = 0",
        "    start = 1",
        killers=("tests/unit/runtime/test_poison_filter.py::test_refused_result_rows_become_dead_letters",),
    ),
    Mutant(
        "millpy/operators/map.py",
        "                    refused.setdefault(row, error)",
        "                    pass",
        killers=("tests/unit/operators/test_stateless.py::test_a_map_may_only_move_event_times_forward",),
    ),
    Mutant(
        "millpy/operators/map.py",
        "            if naive or pa.types.is_string(field.type) or pa.types.is_string(values.type):",
        "            if naive and pa.types.is_string(field.type) or pa.types.is_string(values.type):",
        killers=("tests/unit/operators/test_stateless.py::test_columns_of_a_wrong_shape_are_a_program_error",),
    ),
    Mutant(
        "millpy/operators/map.py",
        "        if self._read is not None:",
        "        if self._read is None:",
        killers=("tests/unit/operators/test_stateless.py::test_functions_of_columns_equal_functions_of_records",),
    ),
    Mutant(
        "millpy/operators/map.py",
        '        return {**super().identity(), "event_time": self._event_time}',
        '        return {**super().identity(), "event_time": None}',
        killers=("tests/unit/operators/test_stateless.py::test_a_graph_shows_the_operators_of_a_subscription",),
    ),
    Mutant(
        "millpy/operators/parking.py",
        "        inputs=[row.input for _, _, mine in released for row, _ in mine] + inputs,",
        "        inputs=[row.input for _, _, mine in released for row, _ in mine] - inputs,",
        killers=(
            "tests/unit/operators/test_keyed_records.py::test_discarding_a_record_that_could_not_wait_discards_no_other",
        ),
    ),
    Mutant(
        "millpy/operators/parking.py",
        "        places[code_of[key]][:0] = range(start, start + len(mine))",
        "        places[code_of[key]][:0] = range(start, start - len(mine))",
        killers=(
            "tests/unit/operators/test_keyed_records.py::test_discarding_a_record_that_could_not_wait_discards_no_other",
        ),
    ),
    Mutant(
        "millpy/operators/parking.py",
        "        watermarks=[Instant(row.waiting.watermark) for _, _, mine in released for row, _ in mine] + rows.watermarks,",
        "        watermarks=[Instant(row.waiting.watermark) for _, _, mine in released for row, _ in mine] - rows.watermarks,",
        killers=(
            "tests/unit/operators/test_keyed_records.py::test_discarding_a_record_that_could_not_wait_discards_no_other",
        ),
    ),
    Mutant(
        "millpy/hosting/routing.py",
        "        return [(used[0], records, keys)]",
        "        return [(used[1], records, keys)]",
        killers=("tests/crash/test_memory_engine.py::test_results_do_not_depend_on_where_computations_run",),
    ),
    Mutant(
        "millpy/hosting/routing.py",
        "        rows.setdefault(owners[code], []).append(row)",
        "        pass",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/hosting/routing.py",
        "    if passed is None:",
        "    if passed is not None:",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/hosting/host.py",
        "            runs = self._state.load_dedupe_runs(grant) if of.keeps_runs else ()",
        "            runs = ()",
        killers=("tests/unit/hosting/test_host.py::test_ids_survive_a_crash",),
    ),
    Mutant(
        "millpy/hosting/host.py",
        "        quiet = frozenset(sources)",
        "        quiet = frozenset(taken)",
        killers=("tests/unit/hosting/test_host.py::test_a_source_that_is_not_fed_is_idle",),
    ),
    Mutant(
        "millpy/hosting/host.py",
        "        self._turns += 1\n        inbox = TurnInput(\n            ClockReading.certain(now_us),",
        "        inbox = TurnInput(\n            ClockReading.certain(now_us),",
        killers=("tests/property/test_hosting.py::test_intervals_hosted_singly_commit_the_same",),
    ),
    Mutant(
        "millpy/hosting/host.py",
        "            self.restart()\n            raise",
        "            raise",
        killers=(
            "tests/unit/hosting/test_host.py"
            "::test_a_refused_value_raises_and_the_next_bundle_continues_from_the_last_commit",
        ),
    ),
    Mutant(
        "millpy/hosting/step.py",
        "            deliveries[interval_id].extend(decoded)",
        "            pass",
        killers=("tests/property/test_hosting.py::test_intervals_hosted_singly_commit_the_same",),
    ),
    Mutant(
        "millpy/hosting/step.py",
        "segments[place + 1].seq != segment.seq",
        "segments[place + 1].seq == segment.seq",
        killers=("tests/unit/runtime/test_step.py::test_segments_that_exceed_a_turn_are_consumed_once",),
    ),
    Mutant(
        "millpy/ingest/intake.py",
        "            self._handed_over = taken.total\n",
        "",
        killers=("tests/unit/ingest/test_intake.py::test_records_are_counted_by_the_count_of_a_source_that_has_one",),
    ),
    Mutant(
        "millpy/ingest/intake.py",
        "            self._state(taken.watermark)\n",
        "            self._source.watermark = taken.watermark\n",
        killers=("tests/unit/hosting/test_host.py::test_a_watermark_does_not_move_back",),
    ),
    Mutant(
        "millpy/hosting/interval_state.py",
        "            self.counters[(what, of)] = self.counters.get((what, of), 0) + records",
        "            self.counters[(what, of)] = self.counters.get((what, of), 0) - records",
        killers=(
            "tests/unit/runtime/test_late_worker.py::test_a_refused_record_after_an_unstored_position_rejects_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/owned_interval.py",
        " if bundle <= self.committed_bundle]",
        "]",
        killers=(
            "tests/unit/runtime/test_expired_windows.py::test_windows_that_expire_in_a_turn_in_flight_keep_their_rows",
        ),
    ),
    Mutant(
        "millpy/runtime/owned_interval.py",
        "        self.unfolded.append((bundle, size))",
        "        pass",
        killers=("tests/unit/runtime/test_worker.py::test_a_bundle_that_was_in_flight_during_a_fold_is_folded_later",),
    ),
    Mutant(
        "millpy/computation.py",
        "        return self.event_time_us < self.input_watermark_us if self._late is None else self._late",
        "        return self.event_time_us <= self.input_watermark_us if self._late is None else self._late",
        killers=(
            "tests/unit/operators/test_keyed_records.py"
            "::test_a_record_at_the_watermark_is_not_late_and_the_one_before_it_is",
        ),
    ),
    Mutant(
        "millpy/operators/parking.py",
        "        late = self.waiting.event_time < self.waiting.watermark",
        "        late = self.waiting.event_time <= self.waiting.watermark",
        killers=("tests/property/test_parking.py::test_a_record_at_the_watermark_is_parked_in_time_and_holds_it",),
    ),
    Mutant(
        "millpy/runtime/worker.py",
        "        return stop.is_set() or self.context.lease.drain_requested",
        "        return stop.is_set()",
        killers=("tests/crash/test_drain.py::test_a_drain_is_for_one_worker_of_those_with_one_stop",),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "        await self._store.notify(self._context.graph_id)  # first: pages show a takeover, and opening may take minutes\n",
        "",
        killers=("tests/crash/test_takeover_notice.py::test_a_takeover_in_an_idle_graph_is_notified",),
    ),
    Mutant(
        "millpy/runtime/turn_latencies.py",
        "if newest - SLICES < number <= newest",
        "if number <= newest",
        killers=("tests/unit/runtime/test_turn_latencies.py::test_only_the_last_minute_counts",),
    ),
    Mutant(
        "millpy/runtime/lease.py",
        "        self._lease.renewed(attempt_started)",
        "        self._lease.renewed(self._clock.monotonic())",
        killers=(
            "tests/unit/runtime/test_lease.py::test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt",
        ),
    ),
    Mutant(
        "millpy/runtime/lease.py",
        "        self._trusted_until = attempt_started + self._limits.lease_ttl_s - self._limits.lease_margin_s",
        "        self._trusted_until = attempt_started + self._limits.lease_ttl_s",
        killers=(
            "tests/unit/runtime/test_lease.py::test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt",
        ),
    ),
    Mutant(
        "millpy/runtime/lease.py",
        "        return self._clock.monotonic() < self._trusted_until",
        "        return self._clock.monotonic() <= self._trusted_until",
        killers=(
            "tests/unit/runtime/test_lease.py::test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt",
        ),
    ),
    Mutant(
        "millpy/runtime/lease.py",
        "            if self.expired:\n",
        "            if False:\n",
        killers=("tests/unit/runtime/test_trust.py::test_lease_that_has_expired_is_not_waited_for",),
    ),
    Mutant(
        "millpy/runtime/lease.py",
        "            if self._clock.monotonic() >= ends_at:",
        "            if self._clock.monotonic() >= ends_at + 5.0:",
        killers=("tests/unit/runtime/test_trust.py::test_missing_heartbeat_is_waited_for_at_most_a_lease",),
    ),
    Mutant(
        "millpy/runtime/worker.py",
        "            self._gap_seen = True\n",
        "            pass\n",
        killers=("tests/unit/runtime/test_step.py::test_a_gap_that_stays_ends_the_worker",),
    ),
    Mutant(
        "millpy/runtime/worker.py",
        "        self._gap_seen = False\n        return worked",
        "        return worked",
        killers=("tests/unit/runtime/test_step.py::test_a_gap_that_is_gone_when_read_again_loses_nothing",),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "bytes_max=self._limits.unfolded_bytes_max, progressed=self._lease.progressed\n",
        "bytes_max=self._limits.unfolded_bytes_max, progressed=None\n",
        killers=("tests/unit/runtime/test_trust.py::test_worker_that_folds_for_long_while_leaving_keeps_its_lease",),
    ),
    Mutant(
        "millpy/runtime/pauses.py",
        "            gc.freeze()",
        "            pass",
        killers=("tests/unit/runtime/test_pauses.py::test_objects_of_a_slow_collection_are_frozen",),
    ),
    Mutant(
        "millpy/runtime/turn.py",
        "        await self._context.lease.await_trust()\n        await self.commit(turn, stepped)",
        "        await self.commit(turn, stepped)",
        killers=("tests/unit/runtime/test_trust.py::test_late_heartbeat_is_waited_for_without_a_recovery",),
    ),
    Mutant(
        "millpy/runtime/turn.py",
        "        if over:  # take",
        "        if False:  # take",
        killers=("tests/unit/runtime/test_worker.py::test_a_worker_with_too_much_state_to_fold_takes_no_input",),
    ),
    Mutant(
        "millpy/hosting/takes.py",
        'unarchived=unarchived or ("lookup" if work.tables else "")',
        "unarchived=unarchived",
        killers=("tests/unit/runtime/test_lookups.py::test_the_take_of_a_lookup_says_that_its_table_is_not_archived",),
    ),
]
