"""Mutants of `millpy/runtime`: turns, routing, callbacks, timers, parking."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/runtime/balance.py",
        "            give_up.extend([i for i in mine if i in held][-1:])",
        "            give_up.extend(mine[-1:])",
        killers=(
            "tests/unit/runtime/test_balance.py::test_worker_that_holds_none_of_its_intervals_gives_none_up",
            "tests/unit/runtime/test_balance.py"
            "::test_whatever_is_stored_and_held_only_free_intervals_are_claimed_and_only_held_ones_given_up",
        ),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "            give_up.extend([i for i in mine if i in held][share_up:])",
        "            give_up.extend([i for i in mine if i not in held][share_up:])",
        killers=("tests/unit/runtime/test_balance.py::test_surplus_goes_to_a_worker_that_joins",),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "        claim.extend(free[: max(0, share_up - len(mine))])",
        "        claim.extend(free[: min(0, share_up - len(mine))])",
        killers=("tests/unit/runtime/test_balance.py::test_a_worker_alone_claims_everything",),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "        counts = {worker: sum(1 for i in intervals if owners.get(i) == worker) for worker in eligible if worker != me}",
        "        counts = {worker: sum(1 for i in intervals if owners.get(i) == worker) for worker in eligible if worker == me}",
        killers=("tests/unit/runtime/test_balance.py::test_balancing_ends_in_fair_shares_and_then_moves_nothing",),
    ),
    Mutant(
        "millpy/runtime/balance.py",
        "        free = [i for i in intervals if owners.get(i) is None and i not in held]",
        "        free = [i for i in intervals if owners.get(i) is None and i in held]",
        killers=("tests/unit/runtime/test_balance.py::test_a_worker_alone_claims_everything",),
    ),
    Mutant(
        "millpy/runtime/deduplicate.py",
        "            place, mine = arrival.bundle.input, accepted[start : start + len(part)]",
        "            place, mine = arrival.bundle.input, accepted[start : start - len(part)]",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_whatever_the_bundles_and_restarts",
        ),
    ),
    Mutant(
        "millpy/runtime/deduplicate.py",
        "        if not late.any():",
        "        if late.any():",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_whatever_the_bundles_and_restarts",
        ),
    ),
    Mutant(
        "millpy/runtime/deduplicate.py",
        "        if outlet.table_id is not None:",
        "        if outlet.table_id is None:",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_whatever_the_bundles_and_restarts",
        ),
    ),
    Mutant(
        "millpy/runtime/deduplicate.py",
        "        result.late.append(self._late_rows(arrival, records.take(rows), rows, watermarks[rows]))",
        "        pass",
        killers=(
            "tests/property/test_deduplicate.py::test_the_first_of_each_id_passes_whatever_the_bundles_and_restarts",
        ),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "selected.append(part if len(keep) == part.count",
        "selected.append(part if len(keep) != part.count",
        killers=("tests/unit/runtime/test_isolation.py::test_refused_result_rows_become_dead_letters",),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "keep = [place - places.start for place in places if place < upto and place not in refused]",
        "keep = [place - places.start for place in places if place < upto and place in refused]",
        killers=("tests/unit/runtime/test_isolation.py::test_refused_result_rows_become_dead_letters",),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "        if self.seen <= self.upto and not any(start <= place < self.seen for place in self.refused):",
        "        if self.seen <= self.upto and not any(start < place < self.seen for place in self.refused):",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "        middle = (passes + fails) // 2",
        "        middle = (passes - fails) // 2",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "    if error is not None:",
        "    if error is None:",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "    isolation.refused[fails - 1] = blamed",
        "    isolation.refused[fails - 2] = blamed",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "    isolation.refused[fails - 1] = blamed",
        "    isolation.refused[fails + 1] = blamed",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/isolation.py",
        "    start = 0",
        "    start = 1",
        killers=("tests/unit/runtime/test_isolation.py::test_refused_result_rows_become_dead_letters",),
    ),
    Mutant(
        "millpy/runtime/mapping.py",
        "                    refused.setdefault(row, error)",
        "                    pass",
        killers=("tests/unit/runtime/test_operators.py::test_a_map_may_move_an_event_time_forward_only",),
    ),
    Mutant(
        "millpy/runtime/mapping.py",
        "            if naive or pa.types.is_string(field.type) or pa.types.is_string(values.type):",
        "            if naive and pa.types.is_string(field.type) or pa.types.is_string(values.type):",
        killers=("tests/unit/runtime/test_operators.py::test_columns_of_another_shape_are_a_mistake_in_the_program",),
    ),
    Mutant(
        "millpy/runtime/mapping.py",
        "        if self._read is not None:",
        "        if self._read is None:",
        killers=("tests/unit/runtime/test_operators.py::test_functions_of_columns_do_what_those_of_records_do",),
    ),
    Mutant(
        "millpy/runtime/mapping.py",
        '        return super().meaning() + (f" at {self._event_time}" if self._event_time is not None else "")',
        '        return super().meaning() - (f" at {self._event_time}" if self._event_time is not None else "")',
        killers=("tests/unit/runtime/test_operators.py::test_a_graph_shows_what_a_subscription_goes_through",),
    ),
    Mutant(
        "millpy/runtime/parking.py",
        "        inputs=[row.input for _, _, mine in released for row, _ in mine] + inputs,",
        "        inputs=[row.input for _, _, mine in released for row, _ in mine] - inputs,",
        killers=(
            "tests/unit/runtime/test_keyed_records.py::test_discarding_a_record_that_could_not_wait_gives_up_no_other",
        ),
    ),
    Mutant(
        "millpy/runtime/parking.py",
        "        places[code_of[key]][:0] = range(start, start + len(mine))",
        "        places[code_of[key]][:0] = range(start, start - len(mine))",
        killers=(
            "tests/unit/runtime/test_keyed_records.py::test_discarding_a_record_that_could_not_wait_gives_up_no_other",
        ),
    ),
    Mutant(
        "millpy/runtime/parking.py",
        "        watermarks=[Instant(row.waiting.watermark) for _, _, mine in released for row, _ in mine] + rows.watermarks,",
        "        watermarks=[Instant(row.waiting.watermark) for _, _, mine in released for row, _ in mine] - rows.watermarks,",
        killers=(
            "tests/unit/runtime/test_keyed_records.py::test_discarding_a_record_that_could_not_wait_gives_up_no_other",
        ),
    ),
    Mutant(
        "millpy/runtime/routing.py",
        "        return [(used[0], records, keys)]",
        "        return [(used[1], records, keys)]",
        killers=("tests/crash/test_memory_engine.py::test_results_do_not_depend_on_where_computations_run",),
    ),
    Mutant(
        "millpy/runtime/routing.py",
        "        rows.setdefault(owners[code], []).append(row)",
        "        pass",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/routing.py",
        "    if passed is None:",
        "    if passed is not None:",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/soft_state.py",
        "            self.counters[(what, of)] = self.counters.get((what, of), 0) + records",
        "            self.counters[(what, of)] = self.counters.get((what, of), 0) - records",
        killers=(
            "tests/unit/runtime/test_comes_back.py::test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself",
        ),
    ),
    Mutant(
        "millpy/runtime/soft_state.py",
        "        self.unfolded.append((bundle, size))",
        "        pass",
        killers=("tests/unit/runtime/test_worker.py::test_a_bundle_that_was_in_flight_during_a_fold_is_folded_later",),
    ),
    Mutant(
        "millpy/computation.py",
        "        return self.event_time_us < self.input_watermark_us if self._late is None else self._late",
        "        return self.event_time_us <= self.input_watermark_us if self._late is None else self._late",
        killers=(
            "tests/unit/runtime/test_keyed_records.py"
            "::test_a_record_at_the_watermark_is_not_late_and_the_one_before_it_is",
        ),
    ),
    Mutant(
        "millpy/runtime/parking.py",
        "        late = self.waiting.event_time < self.waiting.watermark",
        "        late = self.waiting.event_time <= self.waiting.watermark",
        killers=("tests/property/test_parking.py::test_a_record_at_the_watermark_is_parked_in_time_and_holds_it",),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "            self._lease.renewed(attempt_started)",
        "            self._lease.renewed(self._clock.monotonic())",
        killers=(
            "tests/unit/runtime/test_ownership.py"
            "::test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt_not_from_its_answer",
        ),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "        self._trusted_until = attempt_started + self._limits.lease_ttl_s - self._limits.lease_margin_s",
        "        self._trusted_until = attempt_started + self._limits.lease_ttl_s",
        killers=(
            "tests/unit/runtime/test_ownership.py"
            "::test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt_not_from_its_answer",
        ),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "        return self._clock.monotonic() < self._trusted_until",
        "        return self._clock.monotonic() <= self._trusted_until",
        killers=(
            "tests/unit/runtime/test_ownership.py"
            "::test_trust_ends_a_margin_before_the_lease_counted_from_the_attempt_not_from_its_answer",
        ),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "            if self.expired:\n",
        "            if False:\n",
        killers=("tests/unit/runtime/test_trust.py::test_lease_that_has_expired_is_not_waited_for",),
    ),
    Mutant(
        "millpy/runtime/ownership.py",
        "            if self._clock.monotonic() >= ends_at:",
        "            if self._clock.monotonic() >= ends_at + 5.0:",
        killers=(
            "tests/unit/runtime/test_trust.py"
            "::test_heart_that_does_not_beat_is_waited_for_no_longer_than_a_lease_lasts",
        ),
    ),
    Mutant(
        "millpy/runtime/holdings.py",
        "progressed=self._lease.progressed\n",
        "progressed=None\n",
        killers=("tests/unit/runtime/test_trust.py::test_worker_that_leaves_and_folds_for_long_keeps_its_lease",),
    ),
    Mutant(
        "millpy/runtime/pauses.py",
        "            gc.freeze()",
        "            pass",
        killers=("tests/unit/runtime/test_pauses.py::test_what_takes_long_to_look_through_is_looked_through_once",),
    ),
]
