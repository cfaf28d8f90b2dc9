-- Operators' requests: replays of dead letters and late records, paused sources, releases of parked keys.

-- name: read_requests
-- Reads the requests for these intervals, oldest first: at most rows_max of each table, about bytes_max in all. Zero
-- rows: there are none.
WITH asked AS (
    (SELECT 'dead_letters' AS table_name, d.dead_letter_id AS id, d.interval_id, d.stream, d.computation,
            coalesce(d.corrected, d.payload) AS payload, d.input, d.wire, d.source_position, d.event_time, d.dedupe_id,
            d.retracts, d.into_window, 0 AS more_bytes
       FROM mill.dead_letters AS d
      WHERE d.state = 'requested' AND d.interval_id = ANY (%(intervals)s)
      ORDER BY d.dead_letter_id LIMIT %(rows_max)s::integer)
     UNION ALL
    (SELECT 'late_records', l.late_record_id, l.interval_id, l.stream, l.computation, l.payload, l.input, '', '', l.event_time,
            NULL, l.retracts, l.into_window, coalesce(octet_length(l.recomputed::text), 0)
       FROM mill.late_records AS l
      WHERE l.state = 'requested' AND l.interval_id = ANY (%(intervals)s)
      ORDER BY l.late_record_id LIMIT %(rows_max)s::integer)
), measured AS (
    SELECT a.*, sum(s.bytes) OVER (ORDER BY a.table_name, a.id) - s.bytes AS before
      FROM asked AS a CROSS JOIN LATERAL (SELECT octet_length(a.payload) + a.more_bytes AS bytes) AS s
)
SELECT table_name, id, interval_id, stream, computation, payload, input, wire, source_position, event_time, dedupe_id,
       retracts, into_window
  FROM measured WHERE before < %(bytes_max)s::bigint ORDER BY table_name, into_window, id;

-- name: read_past_windows
-- Reads the finished windows that late records are to be added to, and their result table; NULL if there is none. A
-- window whose row is still to be copied from another generation waits. Zero rows: the requests were withdrawn, or wait.
SELECT l.late_record_id, l.key, l.window_start, l.window_end, l.whole, t.table_id,
       (l.recomputed -> 'values')::text AS recomputed
  FROM mill.late_records AS l
  JOIN mill.intervals AS i USING (interval_id)
  LEFT JOIN mill.result_tables AS t ON t.computation_id = i.computation_id AND t.kind = 'windowed'
 WHERE l.late_record_id = ANY (%(letters)s) AND l.into_window AND l.window_start IS NOT NULL
   AND NOT coalesce(t.copied_to < l.window_end AND l.window_end <= t.copied_until, false);

-- name: read_dropped_to
-- Reads the times up to which partitions of result tables were dropped. Zero rows: none was.
SELECT table_id, dropped_to FROM mill.result_tables WHERE table_id = ANY (%(tables)s) AND dropped_to IS NOT NULL;

-- name: read_pauses
-- Reads which of these intervals are paused. Zero rows: none is paused.
SELECT interval_id FROM mill.pauses WHERE interval_id = ANY (%(intervals)s);

-- name: settle_dead_letters
-- Records the outcome of replays; a null reason means success. Raises MW007 when a request is gone. Always one row.
WITH settled AS (
    UPDATE mill.dead_letters AS d
       SET state = CASE WHEN e.reason IS NULL THEN 'replayed' ELSE 'open' END, state_at = now(), bundle = e.bundle,
           attempts = d.attempts + (e.reason IS NOT NULL)::integer, reason = coalesce(e.reason, d.reason),
           detail = coalesce(e.detail, d.detail), traceback = coalesce(e.traceback, d.traceback),
           event_time = coalesce(e.event_time, d.event_time), dedupe_id = coalesce(d.dedupe_id, e.dedupe_id)
      FROM unnest(%(letters)s, %(intervals)s, %(bundles)s, %(reasons)s, %(details)s, %(tracebacks)s, %(event_times)s, %(ids)s)
        AS e (dead_letter_id, interval_id, bundle, reason, detail, traceback, event_time, dedupe_id)
     WHERE d.dead_letter_id = e.dead_letter_id AND d.interval_id = e.interval_id AND d.state = 'requested'
    RETURNING 1
)
SELECT mill.check_settled((SELECT count(*) FROM settled), cardinality(%(letters)s));

-- name: settle_late_records
-- The same for late records; a watermark means that the record is late again by it. Always one row.
WITH settled AS (
    UPDATE mill.late_records AS l
       SET state = CASE WHEN e.watermark IS NULL THEN 'replayed' ELSE 'open' END, state_at = now(), bundle = e.bundle,
           attempts = l.attempts + (e.watermark IS NOT NULL)::integer,
           watermark = CASE WHEN l.into_window THEN l.watermark ELSE coalesce(e.watermark, l.watermark) END,
           detail = e.detail, recomputed = NULL
      FROM unnest(%(letters)s, %(intervals)s, %(bundles)s, %(watermarks)s, %(details)s)
        AS e (late_record_id, interval_id, bundle, watermark, detail)
     WHERE l.late_record_id = e.late_record_id AND l.interval_id = e.interval_id AND l.state = 'requested'
    RETURNING 1
)
SELECT mill.check_settled((SELECT count(*) FROM settled), cardinality(%(letters)s));

-- name: append_pauses
-- Also writes an event for operators. Zero rows: nothing was sent.
WITH sent AS (
    SELECT * FROM unnest(%(intervals)s, %(bundles)s, %(reasons)s) AS e (interval_id, bundle, reason)
), said AS (
    INSERT INTO mill.events (graph_id, kind, detail)
    SELECT p.graph_id, 'paused', jsonb_build_object('stream', p.computation, 'partition', p.source_partition, 'reason', s.reason)
      FROM sent AS s JOIN mill.places AS p USING (interval_id)
)
INSERT INTO mill.pauses (interval_id, bundle, reason)
SELECT interval_id, bundle, reason FROM sent
ON CONFLICT (interval_id) DO UPDATE SET bundle = excluded.bundle, reason = excluded.reason, paused_at = now();

-- name: forget_dead_letters
-- Deletes the oldest dead letters and late records beyond their age, which it counts in mill.expired, and those
-- settled long ago; at most rows_max of each. now_us is the worker's guarded time: if the server's clock decided, a
-- jump ahead would delete everything. Returns the number of deleted rows. Always one row.
WITH bounds AS MATERIALIZED (
    SELECT mill.moment(%(now_us)s) - make_interval(secs => %(kept_s)s) AS kept,
           mill.moment(%(now_us)s) - make_interval(secs => %(settled_kept_s)s) AS settled
), old_letters AS (
    SELECT dead_letter_id AS id, true AS counts FROM (
        SELECT dead_letter_id FROM mill.dead_letters WHERE dead_lettered_at < (SELECT kept FROM bounds) AND state <> 'requested'
         ORDER BY dead_lettered_at LIMIT %(rows_max)s::integer FOR UPDATE SKIP LOCKED) AS aged
     UNION ALL
    SELECT dead_letter_id, false FROM (
        SELECT dead_letter_id FROM mill.dead_letters
         WHERE state IN ('replayed', 'discarded') AND state_at < (SELECT settled FROM bounds)
           AND dead_lettered_at >= (SELECT kept FROM bounds)
         ORDER BY state_at LIMIT %(rows_max)s::integer FOR UPDATE SKIP LOCKED) AS settled
), old_late AS (
    SELECT late_record_id AS id, true AS counts FROM (
        SELECT late_record_id FROM mill.late_records WHERE recorded_at < (SELECT kept FROM bounds) AND state <> 'requested'
         ORDER BY recorded_at LIMIT %(rows_max)s::integer FOR UPDATE SKIP LOCKED) AS aged
     UNION ALL
    SELECT late_record_id, false FROM (
        SELECT late_record_id FROM mill.late_records
         WHERE state IN ('replayed', 'discarded') AND state_at < (SELECT settled FROM bounds)
           AND recorded_at >= (SELECT kept FROM bounds)
         ORDER BY state_at LIMIT %(rows_max)s::integer FOR UPDATE SKIP LOCKED) AS settled
), gone_letters AS (
    DELETE FROM mill.dead_letters AS d USING old_letters AS o WHERE d.dead_letter_id = o.id
    RETURNING d.interval_id, 'dead_letters' AS table_name, d.stream, d.computation, d.reason, o.counts
), gone_late AS (
    DELETE FROM mill.late_records AS l USING old_late AS o WHERE l.late_record_id = o.id
    RETURNING l.interval_id, 'late_records' AS table_name, l.stream, l.computation, 'late' AS reason, o.counts
), gone AS (
    SELECT * FROM gone_letters UNION ALL SELECT * FROM gone_late
), noted AS (
    INSERT INTO mill.expired AS x (graph_id, table_name, stream, computation, reason, count)
    SELECT i.graph_id, table_name, stream, computation, reason, count(*) FROM gone JOIN mill.intervals AS i USING (interval_id)
     WHERE counts GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
    ON CONFLICT (graph_id, table_name, stream, computation, reason) DO UPDATE SET count = x.count + excluded.count
)
SELECT count(*) FROM gone;

-- name: forget_events
-- The same for events. Returns the number of deleted rows. Always one row.
WITH old AS (
    SELECT event_id FROM mill.events WHERE at < mill.moment(%(now_us)s) - make_interval(secs => %(kept_s)s)
     ORDER BY at LIMIT %(rows_max)s::integer FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM mill.events AS d USING old WHERE d.event_id = old.event_id RETURNING d.graph_id, d.kind
), noted AS (
    INSERT INTO mill.expired AS x (graph_id, table_name, stream, computation, reason, count)
    SELECT graph_id, 'events', '', '', kind, count(*) FROM gone GROUP BY 1, 5 ORDER BY 1, 5
    ON CONFLICT (graph_id, table_name, stream, computation, reason) DO UPDATE SET count = x.count + excluded.count
)
SELECT count(*) FROM gone;

-- name: forget_corrections
-- The same for corrections, which live as long as events; their windows stay, until the partition with their rows is dropped.
-- Returns the number of deleted rows. Always one row.
WITH old AS (
    SELECT correction_id FROM mill.corrections WHERE corrected_at < mill.moment(%(now_us)s) - make_interval(secs => %(kept_s)s)
     ORDER BY corrected_at LIMIT %(rows_max)s::integer FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM mill.corrections AS d USING old WHERE d.correction_id = old.correction_id
    RETURNING d.graph_id, d.table_name, d.key, d.window_start, d.window_end
), kept AS (
    INSERT INTO mill.corrected_windows (graph_id, table_name, key, window_start, window_end)
    SELECT DISTINCT g.graph_id, g.table_name, g.key, g.window_start, g.window_end
      FROM gone AS g JOIN mill.result_tables AS t ON t.graph_id = g.graph_id AND t.name = g.table_name
     WHERE g.window_end >= coalesce(t.dropped_to, g.window_end)
        ON CONFLICT DO NOTHING
)
SELECT count(*) FROM gone;

-- name: read_releases
-- Reads requests to release parked keys, oldest first. Zero rows: there are none.
SELECT release_id, interval_id, key, ticket, discards
  FROM mill.releases WHERE interval_id = ANY (%(intervals)s)
 ORDER BY release_id + 0  -- not by the primary key, which has the requests for all others, too
 LIMIT %(rows_max)s::integer;

-- name: forget_releases
-- Deletes requests in the commit that executes them. Zero rows: they were withdrawn.
DELETE FROM mill.releases WHERE release_id = ANY (%(release_ids)s);
