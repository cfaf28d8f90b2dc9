"""Mutants of `millpy/model`: keys, ids, watermarks, deltas."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "millpy/model/arrivals.py",
        "        column = arrived[0].bundle.keys",
        "        column = arrived[1].bundle.keys",
        killers=("tests/unit/model/test_record.py::test_nested_fields_are_aggregated",),
    ),
    Mutant(
        "millpy/model/arrivals.py",
        "        parts.append(np.array([code_of[key] for key in column.keys], np.int64)[column.codes])",
        "        pass",
        killers=("tests/unit/windowing/test_union.py::test_late_and_refused_records_are_those_of_their_input",),
    ),
    Mutant(
        "millpy/model/arrivals.py",
        "    if len(arrived) == 1:",
        "    if len(arrived) != 1:",
        killers=("tests/unit/windowing/test_union.py::test_late_and_refused_records_are_those_of_their_input",),
    ),
    Mutant(
        "millpy/model/delta.py",
        "            pending.extend(part.values())",
        "            pass",
        killers=("tests/property/test_delta.py::test_a_float_that_json_cannot_hold_is_refused_anywhere",),
    ),
    Mutant(
        "millpy/model/delta.py",
        "            values=[None if value is None else bytes(value[0]) for value in columns.value],",
        "            values=[None if value is not None else bytes(value[0]) for value in columns.value],",
        killers=("tests/unit/model/test_record.py::test_nested_fields_are_aggregated",),
    ),
    Mutant(
        "millpy/model/delta.py",
        "        _refuse_lost_floats(value)",
        "        pass",
        killers=("tests/property/test_delta.py::test_a_float_that_json_cannot_hold_is_refused_anywhere",),
    ),
    Mutant(
        "millpy/model/delta.py",
        '    if b"null" in encoded and value is not None:',
        '    if b"null" in encoded and value is None:',
        killers=("tests/property/test_delta.py::test_a_float_that_json_cannot_hold_is_refused_anywhere",),
    ),
    Mutant(
        "millpy/model/delta.py",
        '    values = [b"null" if value is None else b"[%b]" % value for value in entries.values]',
        '    values = [b"null" if value is not None else b"[%b]" % value for value in entries.values]',
        killers=("tests/unit/model/test_record.py::test_nested_fields_are_aggregated",),
    ),
    Mutant(
        "millpy/model/ids.py",
        "        bits = max(2 * count, self._ids_min).bit_length()",
        "        bits = min(2 * count, self._ids_min).bit_length()",
        killers=("tests/property/test_ids.py::test_filter_rules_out_most_unknown_ids",),
    ),
    Mutant(
        "millpy/model/ids.py",
        "        self._shift = np.uint64(64 - bits - _SPARSENESS_BITS)",
        "        self._shift = np.uint64(64 + bits - _SPARSENESS_BITS)",
        killers=("tests/property/test_ids.py::test_filter_rules_out_most_unknown_ids",),
    ),
    Mutant(
        "millpy/model/ids.py",
        "    first[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])",
        "    first[2:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])",
        killers=("tests/property/test_ids.py::test_ids_are_ordered_by_bytes_and_equal_ids_by_position",),
    ),
    Mutant(
        "millpy/model/keys.py",
        "            missing = {key: key_hash(key) for key, hashed in zip(keys, found, strict=True) if hashed is None}",
        "            missing = {key: key_hash(key) for key, hashed in zip(keys, found, strict=True) if hashed is not None}",
        killers=("tests/unit/model/test_keys.py::test_true_and_one_are_different_keys",),
    ),
    Mutant(
        "millpy/model/identity.py",
        "    return float(value) if abs(value) < 2**53 else {",
        "    return float(value) if value - value == 0.0 else {",
        killers=("tests/conformance/test_stored_description.py::test_deployed_graph_is_found_unchanged[extreme]",),
    ),
    Mutant(
        "millpy/model/deployment.py",
        "    if stored == FORMAT:",
        "    if stored:",
        killers=(
            "tests/unit/model/test_stored_format.py::test_description_of_a_newer_format_asks_for_a_newer_millpy",
            "tests/conformance/test_stored_description.py::test_description_of_another_format_is_refused_and_kept",
        ),
    ),
    Mutant(
        "millpy/windowing/window_spec.py",
        "        return {LATENESS: microseconds(self.allowed_lateness)}",
        "        return {LATENESS: 0}",
        killers=(
            "tests/unit/model/test_described_steps.py"
            "::test_parameter_that_is_compared_is_a_change[window-allowed_lateness]",
        ),
    ),
    Mutant(
        "millpy/windowing/aggregates/quantile.py",
        '"q": self.q, "accuracy": self.accuracy}',
        '"q": self.q}',
        killers=(
            "tests/unit/model/test_described_parts.py"
            "::test_each_parameter_that_changes_the_meaning_changes_the_description[Quantile]",
        ),
    ),
    Mutant(
        "millpy/model/taking_back.py",
        "if list(change.addition) in stored.get(TAKEN_BACK, ())]",
        "if str(change) in stored.get(TAKEN_BACK, ())]",
        killers=("tests/crash/test_versions.py::test_deployment_whose_workers_die_at_once_can_be_reverted",),
    ),
]
