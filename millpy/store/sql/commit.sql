-- The statements of a turn's transaction, except those that write result tables: store/postgres/results.py composes
-- these from the tables' columns.

-- name: hold_grants
-- The fence. Raises MW001, MW002, MW005. Always one row.
SELECT mill.hold_grants(%(graph_version)s::integer, %(intervals)s, %(sequencers)s, %(bundles)s, %(input_watermarks)s,
                        %(low_watermarks)s, %(oldest_works)s, %(floors)s);

-- name: check_slots
-- Runs after the last INSERT into a ring. Raises MW003. Always one row.
SELECT mill.check_slots(%(slots)s::integer[]);

-- name: advance_cursors
-- Moves cursors. Raises MW006 when one is missing, would move back, or would move past the last commit of its producer
-- (I3). Always one row.
WITH moved AS (
    UPDATE mill.cursors AS c SET seq = e.seq, watermark = e.watermark
      FROM unnest(%(consumers)s, %(producers)s, %(seqs)s, %(watermarks)s) AS e (consumer, producer, seq, watermark)
      JOIN mill.intervals AS p ON p.interval_id = e.producer AND p.bundle >= e.seq
     WHERE c.consumer = e.consumer AND c.producer = e.producer AND c.seq <= e.seq
    RETURNING 1
)
SELECT mill.check_cursors((SELECT count(*) FROM moved), cardinality(%(consumers)s));

-- name: append_deltas
-- Zero rows: nothing was sent.
INSERT INTO mill.deltas (slot, interval_id, bundle, part, bytes, document, counters, parks)
SELECT %(slot)s::smallint, interval_id, bundle, part, octet_length(document), document::json, counters::json, parks > 0
  FROM unnest(%(intervals)s, %(bundles)s, %(parts)s, %(documents)s, %(counters)s, %(parks)s)
    AS e (interval_id, bundle, part, document, counters, parks);

-- name: append_segments
-- Also moves the end of each subscription's chain of segments. Zero rows: nothing was sent.
WITH sent AS (
    SELECT * FROM unnest(%(subscriptions)s, %(producers)s, %(seqs)s, %(previous_seqs)s, %(watermarks)s, %(records)s,
                         %(ends)s, %(checksums)s, %(event_time_los)s, %(event_time_his)s, %(payloads)s)
        AS e (subscription_id, producer, seq, previous_seq, watermark, records, ends, checksums, lo, hi, payload)
), chained AS (
    INSERT INTO mill.last_segments (producer, subscription_id, seq) SELECT producer, subscription_id, seq FROM sent
    ON CONFLICT (producer, subscription_id) DO UPDATE SET seq = excluded.seq
)
INSERT INTO mill.segments (slot, subscription_id, producer, seq, previous_seq, watermark, records, ends, checksums,
                           event_time_lo, event_time_hi, payload)
SELECT %(slot)s::smallint, subscription_id, producer, seq, previous_seq, watermark, records::integer[], ends::bigint[],
       checksums::bigint[], lo, hi, payload
  FROM sent;

-- name: append_dedupe_runs
-- Zero rows: nothing was sent.
INSERT INTO mill.dedupe_runs (slot, interval_id, bundle, expires_at, clock, ids, times, whole)
SELECT %(slot)s::smallint, interval_id, bundle, expires_at, clock, ids, times, whole > 0
  FROM unnest(%(intervals)s, %(bundles)s, %(expires_ats)s, %(clocks)s, %(ids)s, %(times)s, %(wholes)s)
    AS e (interval_id, bundle, expires_at, clock, ids, times, whole);

-- name: append_expected_records
-- Zero rows: nothing was sent.
INSERT INTO mill.expected_records (dead_letter_id, bundle, computation, input, event_time, digest)
SELECT dead_letter_id, bundle, computation, input, event_time, sha256(payload)
  FROM unnest(%(letters)s, %(computations)s, %(inputs)s, %(event_times)s, %(payloads)s, %(bundles)s)
    AS e (dead_letter_id, computation, input, event_time, payload, bundle);

-- name: append_late_records
-- A record of a dead letter that an operator replays into its windows is requested at once: each expected record once for
-- each window. Of equal records, one is as good as the other. Those that the consumer had read before this commit were
-- in time, and an equal record that comes later is none of them: so this runs before the cursors move. Zero rows: nothing
-- was sent.
WITH sent AS (
    SELECT row_number() OVER () AS place, u.*
      FROM unnest(%(intervals)s, %(bundles)s, %(streams)s, %(computations)s, %(inputs)s, %(keys)s, %(event_times)s,
                  %(watermarks)s, %(window_starts)s, %(window_ends)s, %(payloads)s, %(wholes)s, %(retracts)s)
        AS u (interval_id, bundle, stream, computation, input, key, event_time, watermark, window_start, window_end, payload,
              whole, retracts)
), pairs AS (
    SELECT e.place, x.expected_id, x.dead_letter_id, d.requested_by, d.why, i.graph_id,
           dense_rank() OVER (PARTITION BY x.computation, x.input, x.event_time, x.digest, e.window_start, e.window_end
                                  ORDER BY e.place) AS nth_sent,
           dense_rank() OVER (PARTITION BY x.computation, x.input, x.event_time, x.digest, e.window_start, e.window_end
                                  ORDER BY x.expected_id) AS nth_expected
      FROM mill.expected_records AS x
      JOIN mill.dead_letters AS d USING (dead_letter_id)
      JOIN mill.intervals AS i ON i.interval_id = d.interval_id
      JOIN sent AS e ON e.computation = x.computation AND e.input = x.input AND e.event_time = x.event_time
                    AND sha256(e.payload) = x.digest AND NOT e.retracts AND e.window_start IS NOT NULL
                    AND ((d.interval_id, x.bundle) = (e.interval_id, e.bundle)
                         OR EXISTS (SELECT FROM mill.cursors AS k
                                     WHERE k.consumer = e.interval_id AND k.producer = d.interval_id AND k.seq < x.bundle))
     WHERE NOT EXISTS (SELECT FROM mill.late_records AS l
                        WHERE l.expected_id = x.expected_id
                          AND (l.window_start, l.window_end) = (e.window_start, e.window_end))
), asked AS (
    SELECT * FROM pairs WHERE nth_sent = nth_expected
), notified AS (
    SELECT pg_notify('millpy_' || graph_id, 'replay') FROM (SELECT DISTINCT graph_id FROM asked) AS graphs
)
INSERT INTO mill.late_records (interval_id, bundle, stream, computation, input, key, event_time, watermark,
                               window_start, window_end, payload, whole, retracts, state, into_window, requested_by, why,
                               dead_letter_id, expected_id)
SELECT e.interval_id, e.bundle, e.stream, e.computation, e.input, e.key, e.event_time, e.watermark, e.window_start,
       e.window_end, e.payload, e.whole > 0, e.retracts, CASE WHEN a.place IS NULL THEN 'open' ELSE 'requested' END,
       a.place IS NOT NULL, coalesce(a.requested_by, ''), coalesce(a.why, ''), a.dead_letter_id, a.expected_id
  FROM sent AS e LEFT JOIN asked AS a USING (place)
 WHERE (SELECT count(*) FROM notified) >= 0
 ORDER BY e.place;

-- name: append_dead_letters
-- Zero rows: nothing was sent.
INSERT INTO mill.dead_letters (interval_id, bundle, stream, computation, input, reason, detail, traceback,
                               source_position, key, event_time, wire, dedupe_id, payload, retracts)
SELECT * FROM unnest(%(intervals)s, %(bundles)s, %(streams)s, %(computations)s, %(inputs)s, %(reasons)s, %(details)s,
                     %(tracebacks)s, %(positions)s, %(keys)s, %(event_times)s, %(wires)s, %(ids)s, %(payloads)s,
                     %(retracts)s);

-- name: append_archive_files
-- Zero rows: nothing was sent.
INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo, event_time_hi,
                                partitions)
SELECT * FROM unnest(%(intervals)s, %(bundles)s, %(paths)s, %(counts)s, %(sizes)s, %(event_time_los)s, %(event_time_his)s,
                     %(partitions)s);

-- name: append_notices
-- Adds to the event of this kind and interval that has begun within a minute, or stores another one. Zero rows: nothing
-- was sent, or all is added to events.
WITH told AS (
    SELECT t.interval_id, t.kind, t.count, t.names, i.graph_id, c.name AS computation
      FROM unnest(%(intervals)s, %(kinds)s, %(counts)s, %(names)s::jsonb[]) AS t (interval_id, kind, count, names)
      JOIN mill.intervals AS i USING (interval_id)
      JOIN mill.computations AS c USING (computation_id)
), added AS (
    UPDATE mill.events AS e
       SET at = clock_timestamp(),
           detail = e.detail || jsonb_build_object(
               'count', (e.detail ->> 'count')::bigint + t.count,
               'names', (SELECT jsonb_agg(n.name ORDER BY n.place)
                           FROM (SELECT name, min(place) AS place
                                   FROM jsonb_array_elements_text(e.detail -> 'names' || t.names) WITH ORDINALITY AS x (name, place)
                                  GROUP BY name ORDER BY 2 LIMIT 10) AS n))
      FROM told AS t
     CROSS JOIN LATERAL (
           SELECT max(o.event_id) AS event_id
             FROM (SELECT n.event_id, n.kind, n.detail FROM mill.events AS n
                    WHERE n.graph_id = t.graph_id AND n.at > statement_timestamp() - interval '1 minute'
                   OFFSET 0) AS o  -- by the index on time, whatever the planner knows of kinds
            WHERE o.kind = t.kind AND o.detail ->> 'interval' = t.interval_id::text
              AND (o.detail ->> 'from')::timestamptz > statement_timestamp() - interval '1 minute') AS found
     WHERE e.event_id = found.event_id
    RETURNING t.interval_id, t.kind
)
INSERT INTO mill.events (graph_id, kind, detail)
SELECT graph_id, kind, jsonb_build_object('computation', computation, 'count', count, 'names', names,
                                          'from', clock_timestamp(), 'interval', interval_id)
  FROM told AS t
 WHERE NOT EXISTS (SELECT FROM added AS a WHERE (a.interval_id, a.kind) = (t.interval_id, t.kind));

-- name: read_slots
-- The current slot of each ring, by the ring's name. Always three rows.
SELECT slot FROM mill.epochs WHERE state = 'current' ORDER BY ring;

-- name: find_altered
-- Finds columns of a result table whose type differs from the deployed type. Zero rows: all types match.
SELECT e.name FROM unnest(%(names)s::text[], %(types)s::text[]) AS e (name, type)
  LEFT JOIN pg_attribute AS a ON a.attrelid = to_regclass(%(relation)s::text) AND a.attname = e.name
 WHERE a.atttypid IS DISTINCT FROM e.type::regtype;
