"""Mutants of `millpy/injectors`: intake, dedupe, decoding, sources."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VALUES = "tests/fuzz/test_values.py::test_values_equal_those_of_the_reference"
LINES_OF_JSON, LINES_OF_CSV = (f"{VALUES}[ndjson-flat]",), (f"{VALUES}[csv-flat]",)

HEADS = ("tests/unit/formats/test_csv_heads.py",)
UNPIVOTED = ("tests/unit/formats/test_csv_unpivot.py",)
NAMED = ("tests/unit/sources/test_named_paths.py",)

MUTANTS = [
    Mutant(
        "millpy/ingest/dedupe.py",
        "            tiers.append(added)",
        "            pass",
        killers=("tests/unit/ingest/test_intake.py::test_duplicate_is_dropped_by_the_next_owner_too",),
        line="A message that is published again is dropped and counted",
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        "        same_hi = self.hi[at] == hi",
        "        same_hi = self.hi[at] != hi",
        killers=("tests/unit/ingest/test_intake.py::test_duplicate_is_dropped_by_the_next_owner_too",),
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        "    return pa.array([canonical_bytes(UUID(v) if kind is UUID else v) for v in values], pa.binary())",
        "    return pa.array([canonical_bytes(UUID(v) if kind is not UUID else v) for v in values], pa.binary())",
        killers=("tests/property/test_dedupe.py::test_ids_of_columns_equal_those_of_objects",),
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        "        again = (before >= self._floor) & (seen - before <= self._within_us)",
        "        again = (before >= self._floor) & (seen - before < self._within_us)",
        killers=("tests/unit/ingest/test_dedupe_horizon.py::test_an_id_seen_exactly_the_horizon_ago_is_a_duplicate",),
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        "        tiers = [old for old in self._tiers if old.newest >= horizon]",
        "        tiers = [old for old in self._tiers if old.newest > horizon]",
        killers=(
            "tests/unit/ingest/test_dedupe_horizon.py::test_a_tier_at_the_edge_of_the_horizon_outlives_new_tiers",
        ),
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        "    live = tier.seen >= horizon",
        "    live = tier.seen > horizon",
        killers=(
            "tests/unit/ingest/test_dedupe_horizon.py::test_an_id_at_the_edge_of_the_horizon_outlives_older_ids_of_its_tier",
            "tests/unit/ingest/test_dedupe_horizon.py::test_the_next_owner_and_a_renewed_run_know_an_id_at_the_edge",
        ),
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        "        if not len(self) or quiet_us <= self._within_us:",
        "        if not len(self) or quiet_us < self._within_us:",
        killers=(
            "tests/unit/ingest/test_dedupe_horizon.py::test_a_source_that_is_quiet_for_exactly_the_horizon_forgets_nothing",
        ),
    ),
    Mutant(
        "millpy/ingest/dedupe.py",
        'ids_of(tier.hi, tier.lo), times.astype("<i8").tobytes(), Instant(tier.newest + self._within_us), self.clock',
        'ids_of(tier.hi, tier.lo), times.astype("<i8").tobytes(), Instant(tier.newest + self._within_us - 1), self.clock',
        killers=("tests/unit/ingest/test_dedupe_horizon.py::test_a_run_is_kept_for_as_long_as_its_newest_id",),
    ),
    Mutant(
        "millpy/sources/mqtt/inbox.py",
        "        for index in [*sorted(special), len(published)]:",
        "        for index in [*special, len(published)]:",
        killers=(
            "tests/unit/sources/test_mqtt_inbox.py::test_retained_messages_are_acknowledged_in_the_order_received",
        ),
    ),
    Mutant(
        "millpy/ingest/text_columns.py",
        "        return pc.cast(column, pa.float64())\n",
        "        return pc.cast(pc.cast(column, pa.float32()), pa.float64())\n",
        killers=LINES_OF_CSV,
    ),
    Mutant(
        "millpy/formats/values.py",
        'return b"%d" % int(exact)\n',
        'return b"%d" % int(float(number))\n',
        killers=LINES_OF_CSV,
    ),
    Mutant("millpy/formats/values.py", "exact == exact.to_integral_value()", "True", killers=LINES_OF_CSV),
    Mutant(
        "millpy/ingest/decode.py",
        "dict(zip(header, cells, strict=True))",
        "dict(zip(header[-1:] + header[:-1], cells, strict=True))",
        killers=LINES_OF_CSV,
    ),
    Mutant(
        "millpy/ingest/decode.py",
        '= block.split(b"\\n")\n',
        '= block.split(b"\\n")[:-1]\n',
        killers=LINES_OF_JSON,
    ),
    Mutant(
        "millpy/ingest/timestamps.py",
        '"ms": 1_000, ',
        '"ms": 1_000_000, ',
        killers=(f"{VALUES}[ndjson-defaults]",),
    ),
    Mutant("millpy/ingest/timestamps.py", 'ord("+"), -1, 1)', 'ord("+"), 1, -1)', killers=LINES_OF_JSON),
    Mutant("millpy/ingest/timestamps.py", "* 10 ** (6 - fraction)", "* 10 ** (5 - fraction)", killers=LINES_OF_JSON),
    *(
        Mutant("millpy/formats/csv_rows.py", old, new, killers=killers)
        for old, new, killers in (
            ('b"\\n" * dialect.skip\n', 'b""\n', HEADS),
            ('+ b"\\n" * (1 + dialect.skip_below)', '+ b"\\n"', HEADS),
            ("if message.header is None and dialect.skip", "if dialect.skip", HEADS),
            ("            if cell not in self._value_nulls:\n", "            if cell:\n", UNPIVOTED),
            ('b"," if common else b""', 'b","', UNPIVOTED),
        )
    ),
    *(
        Mutant("millpy/sources/files/line_reader.py", old, new, killers=killers)
        for old, new, killers in (
            ('            self._header_line = self._header_line or b""\n', "", HEADS),
            ("        for _ in range(head.skip_below):\n", "        for _ in ():\n", HEADS),
            ("header=header, ending=ending)", "header=header)", NAMED),
        )
    ),
    Mutant(
        "millpy/sources/files/named_paths.py",
        "                place += 1\n            continue",
        "                break\n            continue",
        killers=NAMED,
    ),
    Mutant("millpy/ingest/dead_letters.py", "    if not found.payloads:", "    if False:", killers=HEADS),
    Mutant("millpy/formats/csv_rows.py", "UNCLOSED_MAX and not is_comment else", "UNCLOSED_MAX else", killers=HEADS),
]
