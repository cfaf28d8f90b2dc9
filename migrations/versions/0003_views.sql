-- Views and functions for operators. They are exact and live: folded rows overlaid by unfolded documents, in one
-- snapshot. Readers have no rights in schema mill: views read it with their owner's rights, and functions that only
-- read are SECURITY DEFINER. Functions that write have the rights of their caller.
CREATE SCHEMA millpy;

CREATE VIEW millpy.graphs AS
SELECT name AS graph, family, generation, name = family AS current, version, deployed_at FROM mill.graphs;

-- Each graph as deployed. `channel` is that on which its workers notify each other.
CREATE VIEW millpy.descriptions AS
SELECT name AS graph, 'millpy_' || graph_id AS channel, description FROM mill.graphs;

-- The status views of result tables read this. They have their caller's rights, so that row-level security holds there
-- too; therefore every role may read this view.
CREATE VIEW millpy.input_watermarks AS SELECT interval_id, input_watermark, horizon_floor FROM mill.intervals;
GRANT SELECT ON millpy.input_watermarks TO PUBLIC;

-- The entries of all unfolded delta documents, one row each.
CREATE VIEW mill.changes AS
SELECT d.interval_id, d.bundle, e.kind, e.namespace, c.key::text AS key, c.subkey,
       c.fire_at::bigint AS fire_at, nullif(c.value::text, 'null')::json AS value,  -- a tombstone is null
       d.counters IS NULL AS counts_in_part, d.parks
  FROM mill.intervals AS i
  JOIN mill.deltas AS d ON d.interval_id = i.interval_id AND d.bundle > i.folded_bundle
 CROSS JOIN LATERAL json_to_recordset(d.document) AS e
       (kind text, namespace text, key json, subkey json, value json, fire_at json)
 CROSS JOIN LATERAL ROWS FROM (json_array_elements(e.key), json_array_elements_text(e.subkey),
       json_array_elements(e.value), json_array_elements_text(e.fire_at)) AS c (key, subkey, value, fire_at);

-- The current value of every keyed entry.
CREATE VIEW mill.entries AS
SELECT interval_id, kind, namespace, key, subkey, fire_at, value
  FROM (SELECT DISTINCT ON (interval_id, kind, namespace, key, subkey) *
          FROM (SELECT interval_id, kind, namespace, key, subkey, fire_at, bundle, value::json AS value FROM mill.keyed
                 UNION ALL
                SELECT interval_id, kind, namespace, key, subkey, fire_at, bundle, value -> 0 FROM mill.changes) AS stored
         ORDER BY interval_id, kind, namespace, key, subkey, bundle DESC) AS newest
 WHERE value IS NOT NULL;

-- The current value of every counter, as mill.entries has it. The newest bundle of an interval has all of them, so that
-- the documents before it need not be read, of which a busy interval has thousands.
CREATE VIEW mill.counters AS
SELECT interval_id, namespace, subkey, count
  FROM (SELECT DISTINCT ON (interval_id, namespace, subkey) *
          FROM (SELECT interval_id, namespace, subkey, bundle, (value::json #>> '{}')::bigint AS count
                  FROM mill.keyed WHERE kind = 'counter'
                 UNION ALL
                SELECT i.interval_id, n.key, c.key, d.bundle, c.value::bigint
                  FROM mill.intervals AS i
                 CROSS JOIN LATERAL (SELECT u.bundle, u.counters FROM mill.deltas AS u
                                      WHERE u.interval_id = i.interval_id AND u.bundle > i.folded_bundle
                                        AND u.counters IS NOT NULL
                                      ORDER BY u.bundle DESC LIMIT 1) AS d
                 CROSS JOIN LATERAL json_each(d.counters) AS n
                 CROSS JOIN LATERAL json_each_text(n.value) AS c
                 UNION ALL
                SELECT interval_id, namespace, subkey, bundle, (value ->> 0)::bigint
                  FROM mill.changes WHERE kind = 'counter' AND counts_in_part) AS stored
         ORDER BY interval_id, namespace, subkey, bundle DESC) AS newest
 WHERE count IS NOT NULL;

-- The current value of every parked entry, as mill.entries has it.
CREATE VIEW mill.parked_entries AS
SELECT interval_id, namespace, key, subkey, fire_at, value
  FROM (SELECT DISTINCT ON (interval_id, namespace, key, subkey) *
          FROM (SELECT interval_id, namespace, key, subkey, fire_at, bundle, value::json AS value
                  FROM mill.keyed WHERE kind = 'parked'
                 UNION ALL
                SELECT interval_id, namespace, key, subkey, fire_at, bundle, value -> 0
                  FROM mill.changes WHERE kind = 'parked' AND parks) AS stored
         ORDER BY interval_id, namespace, key, subkey, bundle DESC) AS newest
 WHERE value IS NOT NULL;

-- All intervals, with their graph and computation, and a description for operators.
CREATE VIEW mill.places AS
SELECT g.name AS graph, c.name AS computation, c.kind, i.*,
       CASE WHEN c.kind = 'injector' THEN 'source partition ' || i.source_partition
            ELSE format('keys %s to %s', lpad(to_hex(i.key_lo), 8, '0'), lpad(to_hex(i.key_hi - 1), 8, '0'))
       END AS described
  FROM mill.intervals AS i
  JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id;

CREATE VIEW millpy.state AS
SELECT p.graph, p.computation, e.namespace AS cell, e.key, e.subkey, e.value::jsonb AS value, e.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'state';

CREATE VIEW millpy.timers AS
SELECT p.graph, p.computation, e.namespace AS time_domain, e.key, e.subkey AS timer, mill.moment(e.fire_at) AS fires_at,
       e.value::jsonb AS value, e.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'timer';

CREATE VIEW millpy.windows AS
SELECT p.graph, p.computation, e.key, mill.moment(split_part(e.subkey, '/', 1)::bigint) AS window_start,
       mill.moment(split_part(e.subkey, '/', 2)::bigint) AS window_end, mill.moment(e.fire_at) AS expires_at,
       e.value::jsonb AS value, e.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'window';

-- Open windows of a computation, those of one key together, in the order of an index: a page costs what it has, and the
-- deltas that are not folded, whatever number of windows there is. `place` is where a row is in this order; the rows
-- behind p_after are returned, at most p_rows, with those that are `gone` since they were folded.
CREATE FUNCTION millpy.windows_by_key(p_graph text, p_computation text, p_after text[], p_rows integer)
RETURNS TABLE (key text, window_start timestamptz, window_end timestamptz, expires_at timestamptz, value jsonb,
               gone boolean, place text[])
LANGUAGE sql VOLATILE ROWS 100 SET jit = off  -- as mill.account()
SET enable_bitmapscan = off SET enable_seqscan = off  -- the index has the order
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH places AS MATERIALIZED (
    SELECT p.interval_id, p.interval_id = p_after[1]::bigint AS begun FROM mill.places AS p
     WHERE p.graph = p_graph AND p.computation = p_computation AND p.interval_id >= coalesce(p_after[1]::bigint, 0)
), folded AS MATERIALIZED (
    SELECT p.interval_id, f.*
      FROM places AS p
     CROSS JOIN LATERAL (
           SELECT k.key, k.subkey, k.fire_at, k.bundle, k.value::json AS value, hashtextextended(k.key, 0) AS key_place,
                  hashtextextended(k.subkey, 0) AS subkey_place
             FROM mill.keyed AS k
            WHERE k.interval_id = p.interval_id AND k.kind = 'window'
              AND hashtextextended(k.key, 0) >= CASE WHEN p.begun THEN p_after[2]::bigint ELSE -9223372036854775808 END
              AND (p.begun IS NOT TRUE OR (hashtextextended(k.key, 0), hashtextextended(k.subkey, 0), k.key)
                                          > (p_after[2]::bigint, p_after[3]::bigint, p_after[4] COLLATE "C"))
            ORDER BY hashtextextended(k.key, 0), k.namespace, hashtextextended(k.subkey, 0), k.key
            LIMIT p_rows) AS f
), changed AS MATERIALIZED (
    SELECT c.interval_id, c.key COLLATE "C" AS key, c.subkey COLLATE "C" AS subkey, c.fire_at, c.bundle, c.value -> 0 AS value,
           hashtextextended(c.key COLLATE "C", 0) AS key_place, hashtextextended(c.subkey COLLATE "C", 0) AS subkey_place
      FROM mill.changes AS c
     WHERE c.kind = 'window' AND c.interval_id IN (SELECT p.interval_id FROM places AS p)
), stored AS (
    SELECT * FROM folded
     UNION ALL
    SELECT c.*
      FROM changed AS c
      JOIN places AS p USING (interval_id)
      LEFT JOIN (SELECT DISTINCT ON (f.interval_id) f.interval_id, f.key_place, f.subkey_place, f.key,
                        count(*) OVER (PARTITION BY f.interval_id) AS found
                   FROM folded AS f
                  ORDER BY f.interval_id, f.key_place DESC, f.subkey_place DESC, f.key DESC) AS last USING (interval_id)
     WHERE (p.begun IS NOT TRUE OR (c.key_place, c.subkey_place, c.key)
                                   > (p_after[2]::bigint, p_after[3]::bigint, p_after[4] COLLATE "C"))
       AND (last.found IS NULL OR last.found < p_rows
            OR (c.key_place, c.subkey_place, c.key) <= (last.key_place, last.subkey_place, last.key))
), newest AS (
    SELECT DISTINCT ON (interval_id, key_place, subkey_place, key, subkey) *
      FROM stored ORDER BY interval_id, key_place, subkey_place, key, subkey, bundle DESC
)
SELECT key, mill.moment(split_part(subkey, '/', 1)::bigint), mill.moment(split_part(subkey, '/', 2)::bigint),
       mill.moment(fire_at), value::jsonb, value IS NULL, ARRAY[interval_id::text, key_place::text, subkey_place::text, key]
  FROM newest ORDER BY interval_id, key_place, subkey_place, key, subkey LIMIT p_rows
$$;

-- The records that the joins of a graph keep: the log of each interval that has not expired, in bytes as stored. A log
-- has no ids. Its rows are needed until the input watermark has passed `needed_until`.
CREATE VIEW millpy.joins AS
SELECT p.graph, p.computation, p.described AS part, count(*) AS runs, sum(octet_length(r.times))::bigint AS bytes,
       mill.moment(p.input_watermark) AS input_watermark, mill.moment(max(r.expires_at)) AS needed_until, p.interval_id
  FROM mill.places AS p
 CROSS JOIN LATERAL (SELECT max(d.clock) AS clock FROM mill.dedupe_runs AS d WHERE d.interval_id = p.interval_id) AS latest
  JOIN mill.dedupe_runs AS r ON r.interval_id = p.interval_id AND r.expires_at >= latest.clock
 WHERE p.kind = 'stage' AND octet_length(r.ids) = 0 AND octet_length(r.times) > 0
 GROUP BY p.graph, p.computation, p.described, p.input_watermark, p.interval_id;

-- The lookup tables of a graph, as each live worker knows them. `version` is the one in use: of equal contents it is
-- equal. It is null while the first read has not succeeded, and the computations that need the table wait.
CREATE VIEW millpy.lookups AS
SELECT g.name AS graph, l.table_name, l.worker_id, l.version, l.rows, l.bytes, l.misfits, l.misfit, l.loaded_at,
       l.checked_at, l.refresh_s, l.failing_since, l.error, l.computations
  FROM mill.lookups AS l
  JOIN mill.workers AS w USING (worker_id)
  JOIN mill.graphs AS g USING (graph_id)
 WHERE mill.alive(w.lease_deadline, w.lease_s);

-- The versions that the last bundles saw, as they were committed with them. `unmatched` counts the records without a
-- row, whatever became of them.
CREATE VIEW millpy.lookup_versions AS
SELECT p.graph, p.computation, p.described AS part, e.subkey AS table_name, e.value ->> 'version' AS version,
       mill.moment((e.value ->> 'loaded_at_us')::bigint) AS loaded_at, (e.value ->> 'rows')::bigint AS rows,
       (SELECT coalesce(sum((k.value #>> '{}')::bigint), 0)::bigint FROM mill.entries AS k
         WHERE k.interval_id = e.interval_id AND k.kind = 'counter' AND k.namespace = 'unmatched') AS unmatched,
       p.interval_id
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'lookup';

-- Stored segments, records and bytes above the cursors, by subscription: counted from what is stored, not computed as
-- the difference of other counts.
CREATE VIEW mill.pending AS
SELECT u.subscription_id, coalesce(sum(found.segments), 0)::bigint AS segments,
       coalesce(sum(found.records), 0)::bigint AS records, coalesce(sum(found.bytes), 0)::bigint AS bytes
  FROM mill.subscriptions AS u
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.intervals AS p ON p.computation_id = s.producer_id
  JOIN mill.intervals AS c ON c.computation_id = u.consumer_id
  JOIN mill.cursors AS k ON k.consumer = c.interval_id AND k.producer = p.interval_id
  LEFT JOIN LATERAL (
       SELECT count(*) AS segments, sum(g.records[c.place + 1]) AS records,
              sum(g.ends[c.place + 1] - coalesce(g.ends[c.place], 0)) AS bytes
         FROM mill.segments AS g
        WHERE k.seq < p.bundle AND g.subscription_id = u.subscription_id AND g.producer = p.interval_id AND g.seq > k.seq
       ) AS found ON true
 GROUP BY u.subscription_id;

CREATE VIEW millpy.backlog AS
SELECT g.name AS graph, s.name AS stream, c.name AS consumer, u.key_fields, p.segments, p.records, p.bytes
  FROM mill.pending AS p
  JOIN mill.subscriptions AS u USING (subscription_id)
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.computations AS c ON c.computation_id = u.consumer_id
  JOIN mill.graphs AS g ON g.graph_id = u.graph_id;

-- The accounting (I8). Each number is counted independently, where the event happens; none is derived from the others.
--   a source partition   injected = accepted + duplicate + dead_lettered
--                        (the source counts the left side before decoding, the intake counts the right side)
--   a subscription       produced + added = filtered + consumed + late + dead_lettered + parked + pending
--                        (the left side is counted where records are created, by operators for `added` and `filtered`;
--                        the right side where records reach a step's state; parked and pending are counted as stored).
--                        `duplicate` is the part of the consumed records that a deduplicate step dropped.
--   a result table       produced = consumed: rows that were created, and rows that were given to the table
-- Counts that do not apply are null, and so are `parked`, `filtered` and `added` as long as they are zero.
-- It is a function with jit = off, because the planner overestimates the functions over documents and would compile the
-- query for longer than it runs. It is VOLATILE, so that it takes its snapshot after its locks: TRUNCATE empties a slot
-- of a ring for older snapshots too, and whatever was folded or consumed in between would be missing on both sides.
CREATE FUNCTION mill.account()
RETURNS TABLE (graph text, stream text, source_partition text, consumer text, key_fields text[], result_table text,
               injected bigint, accepted bigint, duplicate bigint, dead_lettered bigint, produced bigint, added bigint,
               filtered bigint, consumed bigint, late bigint, parked bigint, pending bigint, balanced boolean)
LANGUAGE sql VOLATILE ROWS 20 SET jit = off
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH counters AS MATERIALIZED (
    SELECT * FROM mill.counters
), parked AS MATERIALIZED (  -- not once for each subscription, as the next one
    SELECT namespace AS subscription, count(*) AS count FROM mill.parked_entries GROUP BY namespace
), waiting AS MATERIALIZED (
    SELECT subscription_id, records FROM mill.pending
), sources AS (
    SELECT p.graph, s.name AS stream, p.source_partition,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'injected'), 0)::bigint AS injected,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'accepted'), 0)::bigint AS accepted,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'duplicate'), 0)::bigint AS duplicate,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'dead_lettered'), 0)::bigint AS dead_lettered
      FROM mill.places AS p
      JOIN mill.streams AS s ON s.producer_id = p.computation_id
      LEFT JOIN counters AS k ON k.interval_id = p.interval_id AND k.subkey = s.name
     WHERE p.kind = 'injector'
     GROUP BY p.graph, s.name, p.interval_id, p.source_partition
), subscribed AS (
    SELECT g.name AS graph, s.name AS stream, c.name AS consumer, u.key_fields,
           sum(k.count) FILTER (WHERE k.namespace = 'duplicate')::bigint AS duplicate,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'produced'), 0)::bigint AS produced,
           sum(k.count) FILTER (WHERE k.namespace = 'added')::bigint AS added,
           sum(k.count) FILTER (WHERE k.namespace = 'filtered')::bigint AS filtered,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'consumed'), 0)::bigint AS consumed,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'late'), 0)::bigint AS late,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'dead_lettered'), 0)::bigint AS dead_lettered,
           max(q.count) AS parked, max(w.records) AS pending
      FROM mill.subscriptions AS u
      JOIN mill.streams AS s USING (stream_id)
      JOIN mill.computations AS c ON c.computation_id = u.consumer_id
      JOIN mill.graphs AS g ON g.graph_id = u.graph_id
      LEFT JOIN parked AS q ON q.subscription = u.subscription_id::text
      LEFT JOIN waiting AS w ON w.subscription_id = u.subscription_id
      LEFT JOIN counters AS k
        ON k.subkey = u.subscription_id::text
       AND k.namespace IN ('produced', 'added', 'filtered', 'consumed', 'late', 'dead_lettered', 'duplicate')
     GROUP BY g.name, s.name, c.name, u.subscription_id
), tables AS (
    SELECT g.name AS graph, s.name AS stream, t.name AS result_table,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'emitted'), 0)::bigint AS produced,
           coalesce(sum(k.count) FILTER (WHERE k.namespace = 'written'), 0)::bigint AS consumed
      FROM mill.result_tables AS t
      JOIN mill.streams AS s USING (stream_id)
      JOIN mill.graphs AS g ON g.graph_id = t.graph_id
      LEFT JOIN counters AS k ON k.subkey = t.table_id::text AND k.namespace IN ('emitted', 'written')
     GROUP BY g.name, s.name, t.table_id
)
SELECT graph, stream, source_partition, NULL::text AS consumer, NULL::text[] AS key_fields, NULL::text AS result_table,
       injected, accepted, duplicate, dead_lettered, NULL::bigint AS produced, NULL::bigint AS added,
       NULL::bigint AS filtered, NULL::bigint AS consumed, NULL::bigint AS late, NULL::bigint AS parked,
       NULL::bigint AS pending, injected = accepted + duplicate + dead_lettered AS balanced
  FROM sources
 UNION ALL
SELECT graph, stream, NULL, consumer, key_fields, NULL, NULL, NULL, duplicate, dead_lettered, produced, added, filtered,
       consumed, late, parked, pending,
       produced + coalesce(added, 0) = coalesce(filtered, 0) + consumed + late + dead_lettered + coalesce(parked, 0) + pending
  FROM subscribed
 UNION ALL
SELECT graph, stream, NULL, NULL, NULL, result_table, NULL, NULL, NULL, NULL, produced, NULL, NULL, consumed, NULL, NULL,
       NULL, produced = consumed
  FROM tables
$$;

CREATE VIEW millpy.accounting AS SELECT * FROM mill.account();

-- `infinity` is the end of the input, `-infinity` its beginning. `lag` is how far the low watermark is behind the
-- clock.
CREATE VIEW millpy.watermarks AS
SELECT p.graph, p.computation, p.interval_id, p.described AS part, p.worker_id,
       mill.alive(w.lease_deadline, w.lease_s) AS live, p.bundle,
       mill.moment(p.input_watermark) AS input_watermark, mill.moment(p.low_watermark) AS low_watermark,
       mill.moment(p.oldest_work) AS oldest_work,
       CASE WHEN abs(p.low_watermark) < 4611686018427387904 THEN clock_timestamp() - mill.moment(p.low_watermark) END AS lag
  FROM mill.places AS p
  JOIN mill.computations AS c USING (computation_id)
  LEFT JOIN mill.workers AS w USING (worker_id)
 ORDER BY p.graph, c.place, p.place;

CREATE VIEW millpy.workers AS
SELECT g.name AS graph, w.worker_id, w.host, w.pid, mill.alive(w.lease_deadline, w.lease_s) AS live, w.registered_at,
       w.lease_deadline, w.computations,
       (SELECT count(*) FROM mill.intervals AS i WHERE i.worker_id = w.worker_id) AS intervals,
       w.graph_version AS version, d.requested_at AS drain_requested_at, w.memory_bytes,
       w.turn_p50_s, w.turn_p99_s, w.commit_p50_s, w.commit_p99_s
  FROM mill.workers AS w
  JOIN mill.graphs AS g USING (graph_id)
  LEFT JOIN mill.drain_requests AS d USING (worker_id)
 ORDER BY g.name, w.registered_at;

-- Requests that a live worker drains: at the next renewal of its lease it gives its intervals to other workers, and ends
-- with status 0. Returns 1, or 0 if that is requested already or the graph has no such live worker.
CREATE FUNCTION millpy.drain_worker(p_graph text, p_worker uuid, p_why text DEFAULT '') RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH live AS (
        SELECT w.worker_id, w.graph_id FROM mill.workers AS w JOIN mill.graphs AS g USING (graph_id)
         WHERE g.name = p_graph AND w.worker_id = p_worker AND w.engine = 'workers' AND mill.alive(w.worker_id)
           FOR KEY SHARE OF w
    ), requested AS (
        INSERT INTO mill.drain_requests (worker_id) SELECT worker_id FROM live ON CONFLICT DO NOTHING RETURNING worker_id
    ), noted AS (
        INSERT INTO mill.events (graph_id, kind, detail)
        SELECT graph_id, 'drain_requested', jsonb_build_object('worker', worker_id, 'by', mill.actor(), 'why', p_why)
          FROM live JOIN requested USING (worker_id)
    ), notified AS (
        SELECT pg_notify('millpy_' || graph_id, 'drain') FROM live JOIN requested USING (worker_id)
    )
    SELECT count(*) FROM requested WHERE (SELECT count(*) FROM notified) >= 0
$$;

CREATE VIEW millpy.archive_files AS
SELECT p.graph, p.computation AS archive, f.path, f.records, f.bytes, mill.moment(f.event_time_lo) AS first_event_time,
       mill.moment(f.event_time_hi) AS last_event_time, f.partitions, f.archived_at
  FROM mill.archive_files AS f JOIN mill.places AS p USING (interval_id);

-- `pending` is the number of records that are stored and not archived yet.
CREATE VIEW millpy.archive AS
SELECT g.name AS graph, c.name AS archive, u.streams, coalesce(f.files, 0) AS files, coalesce(f.records, 0) AS records,
       coalesce(f.bytes, 0) AS bytes, mill.moment(f.event_time_lo) AS first_event_time,
       mill.moment(f.event_time_hi) AS last_event_time, f.archived_at, u.pending, u.pending_bytes,
       EXISTS (SELECT FROM mill.intervals AS i JOIN mill.workers AS w USING (worker_id)
                WHERE i.computation_id = c.computation_id AND mill.alive(w.lease_deadline, w.lease_s)) AS live
  FROM mill.computations AS c
  JOIN mill.graphs AS g USING (graph_id)
 CROSS JOIN LATERAL (
       SELECT array_agg(DISTINCT s.name) AS streams, sum(p.records)::bigint AS pending, sum(p.bytes)::bigint AS pending_bytes
         FROM mill.subscriptions AS u JOIN mill.streams AS s USING (stream_id) JOIN mill.pending AS p USING (subscription_id)
        WHERE u.consumer_id = c.computation_id) AS u
 CROSS JOIN LATERAL (
       SELECT count(*) AS files, sum(f.records)::bigint AS records, sum(f.bytes)::bigint AS bytes,
              min(f.event_time_lo) AS event_time_lo, max(f.event_time_hi) AS event_time_hi, max(f.archived_at) AS archived_at
         FROM mill.archive_files AS f JOIN mill.intervals AS i USING (interval_id)
        WHERE i.computation_id = c.computation_id) AS f
 WHERE c.kind = 'archive';

CREATE VIEW millpy.analytics AS
SELECT g.name AS graph, t.name AS result_table, a.batch, a.windows, a.updated_at
  FROM mill.analytics AS a JOIN mill.result_tables AS t USING (table_id) JOIN mill.graphs AS g USING (graph_id);

-- `completeness` compares a device's windows of an hour with those of the device that has most.
CREATE VIEW millpy.device_hours AS
SELECT g.name AS graph, t.name AS result_table, h.device, h.hour, h.windows,
       h.windows::double precision / max(h.windows) OVER (PARTITION BY h.table_id, h.bucket) AS completeness,
       h.measured, h.records, h.late, h.late::double precision / nullif(h.records, 0) AS late_share,
       h.mean, h.stddev, h.low, h.median, h.high, h.baseline, h.expected, h.scale, h.first_at, h.last_at
  FROM mill.device_hours AS h JOIN mill.result_tables AS t USING (table_id) JOIN mill.graphs AS g USING (graph_id);

CREATE VIEW millpy.device_anomalies AS
SELECT g.name AS graph, t.name AS result_table, d.device, d.window_start, d.window_end, d.pane_index, d.value, d.baseline,
       d.expected, d.scale, d.score, d.found_at
  FROM mill.device_anomalies AS d JOIN mill.result_tables AS t USING (table_id) JOIN mill.graphs AS g USING (graph_id);

-- The spread of all windows is that within the hours and that between them.
CREATE VIEW millpy.device_profiles AS
SELECT w.graph, w.result_table, w.device, count(*) AS hours, sum(w.windows)::bigint AS windows,
       sum(w.windows)::double precision / sum(w.windows / w.completeness) AS completeness,
       sum(w.records)::bigint AS records, sum(w.late)::bigint AS late,
       sum(w.late)::double precision / nullif(sum(w.records), 0)::double precision AS late_share,
       sum(w.mean * w.measured) / nullif(sum(w.measured), 0)::double precision AS mean,
       -- An hour with one value has no spread: that of such hours is between them alone.
       sqrt((coalesce(sum(w.stddev ^ 2 * (w.measured - 1)), 0) + sum((w.mean - w.whole) ^ 2 * w.measured))
            / nullif(sum(w.measured) - 1, 0)::double precision) AS stddev,
       min(w.low) AS low, max(w.high) AS high,
       (SELECT count(*) FROM millpy.device_anomalies AS d
         WHERE (d.graph, d.result_table, d.device) = (w.graph, w.result_table, w.device)) AS anomalies,
       min(w.first_at) AS first_at, max(w.last_at) AS last_at
  FROM (SELECT h.*, sum(h.mean * h.measured) OVER device / nullif(sum(h.measured) OVER device, 0)::double precision AS whole
          FROM millpy.device_hours AS h WINDOW device AS (PARTITION BY h.graph, h.result_table, h.device)) AS w
 GROUP BY w.graph, w.result_table, w.device;

CREATE VIEW millpy.result_tables AS
SELECT g.name AS graph, t.name, t.kind, c.name AS computation, t.key_columns, t.value_columns,
       t.allowed_lateness_us * interval '1 microsecond' AS allowed_lateness,
       make_interval(secs => t.retention_us / 1e6) AS retention, mill.moment(t.dropped_to) AS dropped_to
  FROM mill.result_tables AS t
  JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = t.graph_id;

-- The partitions of result tables with a retention: rows whose window_end or event_time is in [starts_at, ends_at). They
-- are dropped as a whole, when the watermark is past ends_at by the retention.
CREATE VIEW millpy.partitions AS
SELECT g.name AS graph, t.name AS result_table, mill.moment(p.range_lo) AS starts_at, mill.moment(p.range_hi) AS ends_at,
       format('mill.%I', p.name) AS relation,
       (SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class AS c
         WHERE c.relnamespace = 'mill'::regnamespace AND c.relname IN (p.name, p.name || '_history')) AS bytes
  FROM mill.partitions AS p
  JOIN mill.result_tables AS t USING (table_id)
  JOIN mill.graphs AS g USING (graph_id)
 ORDER BY g.name, t.name, p.range_lo;

CREATE VIEW millpy.audits AS
SELECT g.name AS graph, a.table_name AS result_table, mill.moment(a.hour) AS hour, a.engine, a.by_service, a.rows,
       a.differences, a.uncertain, a.examples, a.audited_at, a.corrected
  FROM mill.audits AS a JOIN mill.graphs AS g USING (graph_id);

CREATE VIEW millpy.events AS
SELECT g.name AS graph, e.at, e.kind, e.detail, e.event_id FROM mill.events AS e JOIN mill.graphs AS g USING (graph_id);

-- The entry that holds back an interval's watermark: its oldest window, timer, hold or parked record.
CREATE FUNCTION mill.oldest_entry(p_interval bigint)
RETURNS TABLE (kind text, namespace text, key text, subkey text, at bigint, over_at bigint, waiting bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT e.kind, e.namespace, e.key, e.subkey, at, e.fire_at,
           -- Of a window behind its end, the records that its trigger has not let out.
           CASE WHEN e.kind = 'window' AND e.value #>> '{firing,holds}' = 'true' THEN (e.value #>> '{firing,since}')::bigint END
      FROM mill.intervals AS i
      JOIN mill.entries AS e USING (interval_id)
     CROSS JOIN LATERAL (
           SELECT CASE WHEN e.kind = 'window' THEN coalesce(
                            -- Windows that combine the times of their records hold at them (timestamp_combiner.py).
                            (SELECT min(c.at) FROM unnest(ARRAY[(e.value ->> 'at')::bigint, (e.value ->> 'newest_at')::bigint,
                                                                split_part(e.subkey, '/', 2)::bigint - 1]) AS c (at)
                              WHERE c.at >= i.oldest_work), split_part(e.subkey, '/', 2)::bigint - 1)
                       WHEN e.kind = 'parked' OR e.namespace IN ('event', 'hold') THEN e.fire_at
                       -- A processing-time timer holds at the time of the record that set it.
                       ELSE coalesce(i.oldest_work, e.fire_at)
                  END AS at) AS held
     WHERE i.interval_id = p_interval AND e.kind IN ('window', 'timer', 'parked')
       -- A window that has emitted its on-time pane does not hold the watermark.
       AND NOT (e.kind = 'window' AND at < i.oldest_work)
       AND NOT (e.kind = 'window' AND coalesce(e.value #>> '{firing,passed}' = 'true', false)
                AND coalesce(e.value #>> '{firing,holds}', 'false') = 'false')
     ORDER BY at, e.key, e.subkey LIMIT 1
$$;

-- Why the watermark of a source partition is where it is: its newest record, what lies between, and whether that is as
-- it should be. Empty before the first record, and of a source with a watermark for each site.
CREATE FUNCTION mill.explain_source(p_interval bigint, p_watermark bigint) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('; its newest record is of %s and arrived at %s', mill.moment(t.newest), mill.moment(t.arrived))
           || CASE WHEN t.moved THEN format('; no record has arrived for %s, and the clock has moved the watermark', mill.duration(t.idle))
                   ELSE format(', and the watermark is %s behind it, the disorder bound', mill.duration(t.newest - p_watermark))
              END
           || CASE WHEN t.moved THEN ''
                   WHEN greatest(t.idle, 0) + greatest(t.delay, 0) <= greatest(2000000, (t.newest - p_watermark) / 2)
                   THEN '; nothing is wrong: this lag is max_disorder'
                   WHEN t.idle >= t.delay THEN format('; no record has arrived for %s', mill.duration(t.idle))
                   ELSE format('; it arrived %s after its event time', mill.duration(t.delay)) END
      FROM (SELECT (e.value ->> 'max_event_time')::bigint AS newest, (e.value ->> 'arrived_at')::bigint AS arrived,
                   (e.value ->> 'arrived_at')::bigint - (e.value ->> 'max_event_time')::bigint AS delay,
                   mill.instant(clock_timestamp()) - (e.value ->> 'arrived_at')::bigint AS idle,
                   -- Behind its newest record by less than the bound, and more than what a learned bound has changed.
                   p_watermark > (e.value ->> 'max_event_time')::bigint - coalesce(
                       (SELECT (d.value ->> 'bound')::bigint FROM mill.entries AS d WHERE d.interval_id = p_interval
                           AND d.kind = 'disorder' AND d.subkey = 'counted'), 0) AS moved
              FROM mill.entries AS e
             WHERE e.interval_id = p_interval AND e.kind = 'position' AND e.namespace = 'source') AS t
     WHERE abs(t.newest) < 4611686018427387904 AND abs(p_watermark) < 4611686018427387904
       AND NOT EXISTS (SELECT FROM mill.entries AS e WHERE e.interval_id = p_interval AND e.kind = 'site')
$$;

-- Walks upstream from a computation to what holds back its watermark. Returns one row per step, the cause in the last
-- one. `held_for` is how far the step's low watermark is behind the clock.
CREATE FUNCTION millpy.explain_watermark(p_graph text, p_computation text)
RETURNS TABLE (step integer, computation text, part text, input_watermark timestamptz, low_watermark timestamptz,
               held_by text, detail text, held_for interval)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here record;
    slowest record;
    entry record;
    next_interval bigint;
BEGIN
    SELECT p.interval_id INTO next_interval FROM mill.places AS p
     WHERE p.graph = p_graph AND p.computation = p_computation ORDER BY p.low_watermark, p.place LIMIT 1;
    IF next_interval IS NULL THEN
        RAISE EXCEPTION 'graph % has no computation %', p_graph, p_computation USING ERRCODE = 'no_data_found';
    END IF;
    step := 0;
    LOOP
        step := step + 1;
        SELECT p.*, mill.alive(w.lease_deadline, w.lease_s) AS live INTO here
          FROM mill.places AS p LEFT JOIN mill.workers AS w USING (worker_id) WHERE p.interval_id = next_interval;
        computation := here.computation;
        part := here.described;
        input_watermark := mill.moment(here.input_watermark);
        low_watermark := mill.moment(here.low_watermark);
        held_for := CASE WHEN abs(here.low_watermark) < 4611686018427387904
                         THEN clock_timestamp() - mill.moment(here.low_watermark) END;
        SELECT k.producer, k.seq, k.watermark, i.bundle, i.low_watermark AS published INTO slowest
          FROM mill.cursors AS k JOIN mill.intervals AS i ON i.interval_id = k.producer
         WHERE k.consumer = next_interval ORDER BY k.watermark, i.low_watermark, k.producer LIMIT 1;
        IF here.low_watermark >= 4611686018427387904 THEN
            held_by := 'nothing';
            detail := 'all input has ended';
        ELSIF NOT here.live THEN
            held_by := 'owner';
            detail := 'no live worker owns this interval';
        ELSIF slowest.producer IS NOT NULL AND here.oldest_work < here.input_watermark THEN
            SELECT * INTO entry FROM mill.oldest_entry(next_interval);
            held_by := coalesce(CASE WHEN entry.kind = 'timer' AND entry.namespace = 'hold' THEN 'hold'
                                     ELSE entry.kind END,
                                CASE WHEN EXISTS (SELECT FROM millpy.joins AS j WHERE j.interval_id = next_interval)
                                     THEN 'join' END, 'work');
            detail := CASE entry.kind
                WHEN 'window' THEN format('key %s, window %s to %s', entry.key, mill.moment(split_part(entry.subkey, '/', 1)::bigint),
                                          mill.moment(split_part(entry.subkey, '/', 2)::bigint))
                    || CASE WHEN entry.waiting IS NULL THEN ''
                            ELSE format(' has ended, but its trigger has not fired for %s records; it is over at %s',
                                        entry.waiting, mill.moment(entry.over_at)) END
                WHEN 'parked' THEN format('key %s is stopped by a failing record; its records since %s are parked (millpy parked list)',
                                          entry.key, mill.moment(entry.at))
                WHEN 'timer' THEN format('key %s, %s %s at %s', entry.key, entry.namespace, entry.subkey, mill.moment(entry.at))
                ELSE format(CASE held_by WHEN 'join'
                                 THEN 'a record of %s has no match yet, and waits until no later one can match it'
                                 ELSE 'oldest work at %s' END, mill.moment(here.oldest_work)) END;
        ELSIF slowest.producer IS NULL AND EXISTS (SELECT FROM mill.pauses AS s WHERE s.interval_id = next_interval) THEN
            held_by := 'pause';
            detail := (SELECT format('%s has been paused since %s: %s', here.described, s.paused_at, s.reason)
                         FROM mill.pauses AS s WHERE s.interval_id = next_interval);
        ELSIF slowest.producer IS NULL AND EXISTS (SELECT FROM mill.source_connections AS s WHERE s.interval_id = next_interval
                                                      AND s.worker_id = here.worker_id AND NOT s.connected) THEN
            held_by := 'disconnected';
            detail := (SELECT format('%s has no connection since %s, after %s failed attempts: %s', here.described, s.since, s.attempts, s.why)
                         FROM mill.source_connections AS s WHERE s.interval_id = next_interval)
                || coalesce(mill.explain_source(next_interval, here.low_watermark), '');
        ELSIF slowest.producer IS NULL THEN
            held_by := 'source';
            -- The newest record determines the watermark. millpy.fleet shows its device, and which devices are silent.
            detail := CASE WHEN here.low_watermark > -4611686018427387904
                           THEN format('%s has delivered nothing later than %s', here.described, mill.moment(here.low_watermark))
                           ELSE format('%s has not delivered any record yet', here.described) END
                || coalesce(mill.explain_source(next_interval, here.low_watermark), '')
                || coalesce((SELECT format('; the newest record is from %s, see millpy.fleet', e.key)
                               FROM mill.entries AS e WHERE e.interval_id = next_interval AND e.kind = 'fleet'
                              ORDER BY (e.value ->> 2)::bigint DESC LIMIT 1), '')
                || coalesce((SELECT format('; it waits for records up to %s s behind, learned with percentile %s',
                                           (e.value ->> 'bound')::bigint / 1e6::float8, e.value ->> 'percentile')
                               FROM mill.entries AS e WHERE e.interval_id = next_interval AND e.kind = 'disorder'
                                AND e.subkey = 'counted' AND e.value ->> 'percentile' IS NOT NULL), '')
                || coalesce((SELECT format('; site %s holds it back, with no record since %s, see millpy.site_watermarks',
                                           CASE e.subkey WHEN 'others' THEN 'beyond the bound' ELSE e.subkey END,
                                           mill.moment((e.value ->> 'arrived_at')::bigint))
                               FROM mill.entries AS e WHERE e.interval_id = next_interval AND e.kind = 'site'
                                AND e.subkey <> 'floor' ORDER BY (e.value ->> 'watermark')::bigint, e.subkey LIMIT 1), '');
        ELSIF EXISTS (SELECT FROM mill.lookups AS l WHERE l.worker_id = here.worker_id AND l.version IS NULL
                         AND here.computation = ANY (l.computations)) THEN
            held_by := 'lookup';
            detail := (SELECT format('table %s was not read yet: %s', l.table_name, coalesce(nullif(l.error, ''), 'no answer'))
                         FROM mill.lookups AS l WHERE l.worker_id = here.worker_id AND l.version IS NULL
                          AND here.computation = ANY (l.computations) ORDER BY l.table_name LIMIT 1);
        ELSIF slowest.published > slowest.watermark THEN
            held_by := 'backlog';
            detail := format('consumed up to bundle %s of %s, which has committed up to %s', slowest.seq,
                             (SELECT p.computation || ', ' || p.described FROM mill.places AS p WHERE p.interval_id = slowest.producer),
                             slowest.bundle);
        ELSE
            held_by := 'input';
            detail := (SELECT p.computation || ', ' || p.described FROM mill.places AS p WHERE p.interval_id = slowest.producer);
            next_interval := slowest.producer;
            RETURN NEXT;
            CONTINUE;
        END IF;
        RETURN NEXT;
        RETURN;
    END LOOP;
END $$;

-- As above, for a computation whose name is unique among the graphs.
CREATE FUNCTION millpy.explain_watermark(p_computation text)
RETURNS TABLE (step integer, computation text, part text, input_watermark timestamptz, low_watermark timestamptz,
               held_by text, detail text, held_for interval)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    graphs text[];
BEGIN
    SELECT array_agg(DISTINCT p.graph ORDER BY p.graph) INTO graphs FROM mill.places AS p WHERE p.computation = p_computation;
    IF graphs IS NULL THEN
        RAISE EXCEPTION 'no graph has a computation %', p_computation USING ERRCODE = 'no_data_found';
    ELSIF cardinality(graphs) > 1 THEN
        RAISE EXCEPTION 'graphs % have a computation %', array_to_string(graphs, ', '), p_computation
              USING ERRCODE = 'ambiguous_alias', HINT = 'name the graph: millpy.explain_watermark(graph, computation)';
    END IF;
    RETURN QUERY SELECT * FROM millpy.explain_watermark(graphs[1], p_computation);
END $$;

-- Bytes as text; escaped when they are not UTF-8. PostgreSQL refuses a block with EXCEPTION in a parallel plan.
CREATE FUNCTION mill.readable(p_bytes bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN convert_from(p_bytes, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire THEN
    RETURN encode(p_bytes, 'escape');
END $$;

-- Dead letters with their payloads, as received and as text.
-- `state` is open, requested (waiting for its replay), replayed or discarded. `attempts` counts failed replays.
CREATE VIEW millpy.dead_letters AS
SELECT g.name AS graph, d.computation, d.stream, d.reason, d.detail, d.source_position, d.key,
       mill.moment(d.event_time) AS event_time, mill.readable(d.payload) AS payload_text, d.payload, d.traceback,
       d.dead_lettered_at, d.dead_letter_id, d.state, d.state_at, d.attempts, d.corrected,
       d.stream <> '' AND (d.reason <> 'broken_file' OR d.corrected IS NOT NULL) AS replayable,
       d.retracts, d.into_window, d.requested_by, d.why
  FROM mill.dead_letters AS d
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id;

CREATE VIEW millpy.late_records AS
SELECT g.name AS graph, l.computation, l.stream, l.key, mill.moment(l.event_time) AS event_time,
       mill.moment(l.watermark) AS watermark, mill.moment(l.window_start) AS window_start,
       mill.moment(l.window_end) AS window_end, mill.readable(l.payload) AS payload_text, l.payload, l.recorded_at,
       l.late_record_id, l.state, l.state_at, l.attempts, l.whole AS replayable, l.retracts, l.into_window,
       l.requested_by, l.why, l.detail, l.dead_letter_id
  FROM mill.late_records AS l
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id;

-- The rows of finished windows that operators have changed.
CREATE VIEW millpy.corrections AS
SELECT g.name AS graph, c.table_name, c.key, mill.moment(c.window_start) AS window_start,
       mill.moment(c.window_end) AS window_end, c.why, c.requested_by, c.corrected_at, c.old_row, c.new_row,
       c.late_record_id, c.correction_id, c.recomputed, c.dead_letter_id
  FROM mill.corrections AS c JOIN mill.graphs AS g USING (graph_id);

-- The windows whose rows operators have changed, also those of which nobody knows any more who, when and why.
CREATE VIEW millpy.corrected_windows AS
SELECT g.name AS graph, c.table_name, c.key, mill.moment(c.window_start) AS window_start,
       mill.moment(c.window_end) AS window_end
  FROM (SELECT graph_id, table_name, key, window_start, window_end FROM mill.corrections
         UNION
        SELECT graph_id, table_name, key, window_start, window_end FROM mill.corrected_windows) AS c
  JOIN mill.graphs AS g USING (graph_id);

-- Dead letters and late records by cause: how many occurred (`seen`), how many of these were stored (`kept`; the others
-- are only counted), and how many were deleted by age (`expired`).
CREATE VIEW millpy.retention AS
SELECT graph, table_name, stream, computation, reason, sum(seen)::bigint AS seen, sum(kept)::bigint AS kept,
       sum(seen - kept)::bigint AS not_kept, sum(expired)::bigint AS expired
  FROM (SELECT g.name AS graph, e.namespace AS table_name, c.cause ->> 0 AS stream, c.cause ->> 1 AS computation,
               c.cause ->> 2 AS reason, (e.value ->> 0)::bigint AS seen, (e.value ->> 1)::bigint AS kept, 0 AS expired
          FROM mill.entries AS e
          JOIN mill.intervals AS i USING (interval_id)
          JOIN mill.graphs AS g ON g.graph_id = i.graph_id
         CROSS JOIN LATERAL (SELECT e.subkey::json AS cause) AS c
         WHERE e.kind = 'sample'
         UNION ALL
        SELECT g.name, x.table_name, x.stream, x.computation, x.reason, 0, 0, x.count
          FROM mill.expired AS x JOIN mill.graphs AS g USING (graph_id)) AS counted
 GROUP BY graph, table_name, stream, computation, reason;

-- Requests the replay of dead letters. Returns the number of requests. The owner of the interval that dead-lettered a
-- record processes it like any other record, and marks it in the same transaction: as replayed, or as open again when
-- it fails. A dead letter that is not a record (a timer, a result row, the rest of a broken file) cannot be replayed; the
-- last one may be corrected to be one. With p_into_window, a record that comes too late for a window is added to its
-- row, as by millpy.replay_into_window.
CREATE FUNCTION millpy.replay_dead_letters(p_ids bigint[], p_into_window boolean DEFAULT false, p_why text DEFAULT '')
RETURNS bigint LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH requested AS (
        UPDATE mill.dead_letters
           SET state = 'requested', state_at = now(), into_window = p_into_window, requested_by = mill.actor(),
               why = left(coalesce(p_why, ''), 1000)
         WHERE dead_letter_id = ANY (p_ids) AND state = 'open' AND stream <> ''
           AND (reason <> 'broken_file' OR corrected IS NOT NULL)
        RETURNING interval_id
    ), notified AS (
        SELECT pg_notify('millpy_' || graph_id, 'replay')
          FROM (SELECT DISTINCT i.graph_id FROM requested JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM requested WHERE (SELECT count(*) FROM notified) >= 0
$$;

-- Requests the replay of one dead letter with a corrected payload. The record keeps its dedupe id.
CREATE FUNCTION millpy.replay_dead_letter(p_id bigint, p_payload bytea, p_into_window boolean DEFAULT false,
                                          p_why text DEFAULT '')
RETURNS bigint LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE mill.dead_letters SET corrected = p_payload WHERE dead_letter_id = p_id AND state = 'open' AND stream <> '';
    SELECT millpy.replay_dead_letters(ARRAY[p_id], p_into_window, p_why)
$$;

-- Requests the replay of late records. Returns the number of requests. Only rows with `whole` can be replayed: a record
-- that is in one of its windows has no such row, and a record that missed several windows has one.
CREATE FUNCTION millpy.replay_late_records(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH requested AS (
        UPDATE mill.late_records
           SET state = 'requested', state_at = now(), into_window = false, requested_by = mill.actor(), why = '', detail = '',
               recomputed = NULL
         WHERE late_record_id = ANY (p_ids) AND state = 'open' AND whole
        RETURNING interval_id
    ), notified AS (
        SELECT pg_notify('millpy_' || graph_id, 'replay')
          FROM (SELECT DISTINCT i.graph_id FROM requested JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM requested WHERE (SELECT count(*) FROM notified) >= 0
$$;

-- Requests that late records are added to their finished windows. Returns the number of requests. The owner of the window
-- adds them to its row, and marks them in the same transaction: as replayed, or as open again, with the reason in
-- `detail`. Each row of a record that missed several windows is for its own window. p_recomputed has what an archive says
-- of the window of each record (`millpy late replay --into-window --archive`), where its row does not say enough.
CREATE FUNCTION millpy.replay_into_window(p_ids bigint[], p_why text DEFAULT '', p_recomputed jsonb[] DEFAULT NULL)
RETURNS bigint LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH asked AS (
        SELECT DISTINCT ON (id) id, recomputed FROM unnest(p_ids, p_recomputed) AS a (id, recomputed) ORDER BY id
    ), requested AS (
        UPDATE mill.late_records AS l
           SET state = 'requested', state_at = now(), into_window = true, requested_by = mill.actor(),
               why = left(coalesce(p_why, ''), 1000), detail = '', recomputed = a.recomputed
          FROM asked AS a
         WHERE l.late_record_id = a.id AND l.state = 'open' AND l.window_start IS NOT NULL
        RETURNING l.interval_id
    ), notified AS (
        SELECT pg_notify('millpy_' || graph_id, 'replay')
          FROM (SELECT DISTINCT i.graph_id FROM requested JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM requested WHERE (SELECT count(*) FROM notified) >= 0
$$;

-- Discards dead letters: they are still counted, and are deleted later. Waits for a replay that is being committed.
CREATE FUNCTION millpy.discard_dead_letters(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        UPDATE mill.dead_letters SET state = 'discarded', state_at = now()
         WHERE dead_letter_id = ANY (p_ids) AND state IN ('open', 'requested')
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

CREATE FUNCTION millpy.discard_late_records(p_ids bigint[]) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        UPDATE mill.late_records SET state = 'discarded', state_at = now()
         WHERE late_record_id = ANY (p_ids) AND state IN ('open', 'requested')
        RETURNING 1
    )
    SELECT count(*) FROM gone
$$;

-- Source partitions with their states and counts. A partition pauses when too many of its records become dead letters.
-- `connected` is what the worker that owns it said last: false without a live worker, null before its first word.
-- `connection_since` is since when the connection exists, or does not.
CREATE VIEW millpy.sources AS
SELECT p.graph, p.computation AS stream, p.source_partition,
       CASE WHEN s.interval_id IS NOT NULL THEN 'paused'
            WHEN p.low_watermark >= 4611686018427387904 THEN 'ended'
            WHEN mill.alive(w.lease_deadline, w.lease_s)
            THEN CASE WHEN c.worker_id = p.worker_id AND NOT c.connected THEN 'disconnected' ELSE 'running' END
            ELSE 'without a worker' END AS state,
       CASE WHEN mill.alive(w.lease_deadline, w.lease_s) THEN CASE WHEN c.worker_id = p.worker_id THEN c.connected END
            ELSE false END AS connected,
       c.since AS connection_since, CASE WHEN NOT c.connected THEN c.why END AS disconnected_because,
       CASE WHEN NOT c.connected THEN c.attempts END AS attempts,
       s.paused_at, s.reason AS paused_because, a.injected, a.accepted, a.duplicate, a.dead_lettered
  FROM mill.places AS p
  JOIN mill.account() AS a ON a.graph = p.graph AND a.stream = p.computation AND a.source_partition = p.source_partition
  LEFT JOIN mill.pauses AS s USING (interval_id)
  LEFT JOIN mill.source_connections AS c ON c.interval_id = p.interval_id
  LEFT JOIN mill.workers AS w ON w.worker_id = p.worker_id
 WHERE p.kind = 'injector';

-- The sinks, one row for each interval. A sink to SQL has no messages: its statement runs in the commits. `messages` are
-- committed and not known to be delivered; `waiting_since` is when the oldest of them was committed. `refused` are beside
-- them: the other side refuses them, or they wait behind one of their key.
CREATE VIEW millpy.sinks AS
SELECT p.graph, p.computation AS sink, p.described AS part,
       g.description -> 'computations' -> p.computation -> 'identity' ->> 'kind' AS kind,
       CASE WHEN NOT mill.alive(w.lease_deadline, w.lease_s) THEN 'without a worker'
            WHEN d.sequencer = i.sequencer AND NOT d.connected THEN 'disconnected' ELSE 'running' END AS state,
       coalesce(o.records, 0) AS messages, coalesce(o.bytes, 0) AS bytes, o.waiting_since, coalesce(d.delivered, 0) AS delivered,
       d.delivered_at, d.since AS connection_since, CASE WHEN NOT d.connected THEN d.why END AS disconnected_because,
       CASE WHEN NOT d.connected THEN d.attempts END AS attempts, m.refused, m.refused_bytes, m.refused_since,
       m.refused_because, m.parked_keys, p.interval_id
  FROM mill.places AS p
  JOIN mill.intervals AS i USING (interval_id)
  JOIN mill.graphs AS g ON g.graph_id = i.graph_id
  LEFT JOIN mill.deliveries AS d USING (interval_id)
  LEFT JOIN mill.workers AS w ON w.worker_id = i.worker_id
  LEFT JOIN LATERAL (SELECT greatest(max(x.position + x.records) - greatest(min(x.position), coalesce(d.delivered, 0)), 0) AS records,
                            sum(octet_length(x.payload))::bigint AS bytes, min(x.committed_at) AS waiting_since
                       FROM mill.outbox AS x WHERE x.interval_id = p.interval_id) AS o ON true
  LEFT JOIN LATERAL (SELECT count(*) AS refused, coalesce(sum(octet_length(r.payload)), 0)::bigint AS refused_bytes,
                            min(r.since) AS refused_since, count(*) FILTER (WHERE r.parked) AS parked_keys,
                            (array_agg(r.why ORDER BY r.position) FILTER (WHERE r.why <> ''))[1] AS refused_because
                       FROM mill.refused_messages AS r WHERE r.interval_id = p.interval_id) AS m ON true
 WHERE p.kind = 'sink';

-- The messages that the other side of a sink refuses, and those of their keys that wait behind them. The record is as
-- JSON. `number` is that of the message in its interval.
CREATE VIEW millpy.refused_messages AS
SELECT p.graph, p.computation AS sink, r.key, r.position AS number, r.attempts, r.since,
       CASE WHEN r.why = '' THEN 'waits behind a refused message' WHEN r.parked THEN 'parked' ELSE 'refused' END AS state,
       nullif(r.why, '') AS refused_because, mill.readable(r.record) AS record, p.interval_id
  FROM mill.refused_messages AS r JOIN mill.places AS p USING (interval_id);

-- Resumes the paused partitions of a source. Returns their number.
CREATE FUNCTION millpy.resume_source(p_graph text, p_stream text) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH resumed AS (
        DELETE FROM mill.pauses AS s USING mill.places AS p
         WHERE p.interval_id = s.interval_id AND p.graph = p_graph AND p.computation = p_stream
        RETURNING p.graph_id
    ), noted AS (
        INSERT INTO mill.events (graph_id, kind, detail)
        SELECT graph_id, 'resumed', jsonb_build_object('stream', p_stream, 'partitions', count(*), 'by', mill.actor()) FROM resumed GROUP BY graph_id
    ), notified AS (
        SELECT pg_notify('millpy_' || graph_id, 'resume') FROM (SELECT DISTINCT graph_id FROM resumed) AS graphs
    )
    SELECT count(*) FROM resumed WHERE (SELECT count(*) FROM notified) >= 0
$$;

-- The devices of every source: when each last sent a record, how far its clock or its connection is behind (`lag`), how
-- often it sends (`rate`, records per second over about the last minute), and how many of its records were duplicates,
-- late or dead-lettered. Counts of the last second may not be stored yet. `late` and `dead_letters` count the records
-- of all computations with the same key, and those that the source decoded and then dead-lettered itself.
CREATE FUNCTION mill.devices()
RETURNS TABLE (graph text, stream text, source_partition text, device text, key text, last_event_time timestamptz,
               lag interval, silent_since timestamptz, silent_for interval, rate double precision, records bigint,
               duplicates bigint, late bigint, dead_letters bigint)
LANGUAGE sql VOLATILE ROWS 1000 SET jit = off  -- as mill.account()
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH devices AS MATERIALIZED (
    SELECT p.graph_id, p.graph, p.computation AS stream, p.source_partition, string_to_array(e.namespace, ',') AS fields,
           e.key, e.value::jsonb AS value
      FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
     WHERE e.kind = 'fleet'
), keyed_alike AS (
    SELECT DISTINCT d.graph_id, d.stream, c.name AS computation
      FROM (SELECT DISTINCT graph_id, stream, fields FROM devices) AS d
      JOIN mill.streams AS s ON s.graph_id = d.graph_id AND s.name = d.stream
      JOIN mill.subscriptions AS u ON u.stream_id = s.stream_id AND u.key_fields = d.fields
      JOIN mill.computations AS c ON c.computation_id = u.consumer_id
), counted AS MATERIALIZED (  -- before the join, which would read all late records for each of the computations
    SELECT interval_id, stream, computation, key, count(*) AS count
      FROM mill.late_records WHERE state <> 'replayed' AND whole
     GROUP BY interval_id, stream, computation, key
), late AS (
    SELECT k.graph_id, k.stream, l.key, sum(l.count)::bigint AS count
      FROM counted AS l
      JOIN mill.intervals AS i USING (interval_id)
      JOIN keyed_alike AS k ON k.graph_id = i.graph_id AND k.stream = l.stream AND k.computation = l.computation
     GROUP BY k.graph_id, k.stream, l.key
), dead AS (
    SELECT i.graph_id, l.stream, l.key, count(*) AS count
      FROM mill.dead_letters AS l
      JOIN mill.intervals AS i USING (interval_id)
     WHERE l.key IS NOT NULL AND l.state <> 'replayed'
       AND (l.wire <> '' OR EXISTS (SELECT FROM keyed_alike AS k WHERE k.graph_id = i.graph_id AND k.stream = l.stream
                                                                  AND k.computation = l.computation))
     GROUP BY i.graph_id, l.stream, l.key
)
SELECT d.graph, d.stream, d.source_partition, d.key::jsonb #>> '{}', d.key, mill.moment((d.value ->> 2)::bigint),
       CASE WHEN (d.value ->> 2)::bigint > -4611686018427387904
            THEN mill.moment((d.value ->> 3)::bigint) - mill.moment((d.value ->> 2)::bigint) END,
       mill.moment((d.value ->> 3)::bigint), clock_timestamp() - mill.moment((d.value ->> 3)::bigint),
       -- Since the last write, either the device was silent or the last second is not written yet.
       (d.value ->> 4)::double precision
       * exp(-greatest(0, extract(epoch FROM clock_timestamp() - mill.moment((d.value ->> 5)::bigint)) - 1) / 60),
       (d.value ->> 0)::bigint, (d.value ->> 1)::bigint, coalesce(l.count, 0), coalesce(x.count, 0)
  FROM devices AS d
  LEFT JOIN late AS l ON (l.graph_id, l.stream, l.key) = (d.graph_id, d.stream, d.key)
  LEFT JOIN dead AS x ON (x.graph_id, x.stream, x.key) = (d.graph_id, d.stream, d.key)
$$;

CREATE VIEW millpy.fleet AS SELECT * FROM mill.devices();

-- The devices that are silent now by a `silent_after` step, with their last record (NULL for one that never sent any).
-- Such a step has these cells and the gauge "silent". It is found by its description first, so that only its intervals
-- are read.
CREATE FUNCTION mill.silent_devices()
RETURNS TABLE (graph text, computation text, device text, last_event_time timestamptz, key text)
LANGUAGE sql VOLATILE ROWS 100 SET jit = off  -- as mill.account()
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
WITH watched AS MATERIALIZED (
    SELECT p.graph, p.computation, p.interval_id
      FROM mill.graphs AS g
     CROSS JOIN LATERAL jsonb_each(g.description -> 'computations') AS c (name, described)
      JOIN mill.places AS p ON p.graph_id = g.graph_id AND p.computation = c.name
     WHERE c.described #> '{identity,cells}' @> '[["told"], ["pending"], ["roster"]]'
), found AS MATERIALIZED (
    SELECT w.*, e.kind, e.value
      FROM watched AS w
     CROSS JOIN LATERAL (SELECT n.kind, n.value FROM mill.entries AS n
                          WHERE n.interval_id = w.interval_id
                            AND (n.kind, n.namespace) IN (('counter', 'silent'), ('state', 'told'))) AS e
)
SELECT f.graph, f.computation,
       CASE WHEN starts_with(f.value ->> 0, '"') THEN (f.value ->> 0)::jsonb #>> '{}' ELSE f.value ->> 0 END,
       mill.moment((f.value ->> 1)::bigint), f.value ->> 0
  FROM found AS f
 WHERE f.kind = 'state' AND EXISTS (SELECT FROM found AS k WHERE k.interval_id = f.interval_id AND k.kind = 'counter')
 ORDER BY 1, 2, 4 NULLS FIRST, 5
$$;

CREATE VIEW millpy.silent_devices AS SELECT * FROM mill.silent_devices();

-- Keys that stopped at a failing record or timer, with the records that wait behind it.
CREATE VIEW millpy.parked AS
SELECT p.graph, p.computation, w.key, w.records, mill.moment(w.holds_at) AS holds_watermark_at,
       mill.moment((f.value ->> 'parked_at')::bigint) AS parked_at, f.value ->> 'reason' AS reason,
       f.value ->> 'detail' AS detail, CASE WHEN f.value -> 'timer' ->> 1 IS NULL AND f.value ->> 'lost' IS DISTINCT FROM 'true' THEN w.first_record END AS failing_record,
       f.value -> 'timer' ->> 1 AS failing_timer, f.value ->> 'traceback' AS traceback,
       EXISTS (SELECT FROM mill.releases AS r WHERE r.interval_id = p.interval_id AND r.key = w.key
                  AND r.ticket = (f.value ->> 'ticket')::bigint) AS requested,
       p.interval_id, (f.value ->> 'ticket')::bigint AS ticket
  FROM (SELECT interval_id, key, count(*) FILTER (WHERE namespace <> 'key') AS records,
               min(fire_at) FILTER (WHERE namespace <> 'key' AND fire_at < 4611686018427387904) AS holds_at,
               (array_agg(value -> 'record' ORDER BY subkey) FILTER (WHERE namespace <> 'key'))[1]::jsonb AS first_record
          FROM mill.parked_entries GROUP BY interval_id, key) AS w
  JOIN (SELECT interval_id, key, value FROM mill.parked_entries WHERE namespace = 'key') AS f
    USING (interval_id, key)
  JOIN mill.places AS p USING (interval_id)
 UNION ALL
SELECT p.graph, p.computation, m.key, m.records, NULL, m.since, 'refused', m.why,
       CASE WHEN t.record ~ '^\{' AND t.record !~ '\\u0000' THEN t.record::jsonb ELSE to_jsonb(t.record) END, NULL, '',
       EXISTS (SELECT FROM mill.releases AS r WHERE r.interval_id = p.interval_id AND r.key = m.key AND r.ticket = m.position),
       p.interval_id, m.position
  FROM (SELECT r.*, count(*) OVER (PARTITION BY r.interval_id, r.key) AS records FROM mill.refused_messages AS r) AS m
  JOIN mill.places AS p USING (interval_id)
 CROSS JOIN LATERAL (SELECT mill.readable(m.record) AS record) AS t
 WHERE m.parked;

CREATE FUNCTION mill.request_release(p_graph text, p_computation text, p_key text, p_discards boolean) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH requested AS (
        INSERT INTO mill.releases (interval_id, key, ticket, discards, requested_by)
        SELECT k.interval_id, k.key, k.ticket, p_discards, mill.actor()
          FROM millpy.parked AS k
         WHERE k.graph = p_graph AND k.computation = p_computation AND NOT k.requested
           AND (p_key IS NULL OR k.key = p_key OR k.key = to_json(p_key)::text)
        RETURNING interval_id
    ), notified AS (
        SELECT pg_notify('millpy_' || graph_id, 'release')
          FROM (SELECT DISTINCT i.graph_id FROM requested JOIN mill.intervals AS i USING (interval_id)) AS graphs
    )
    SELECT count(*) FROM requested WHERE (SELECT count(*) FROM notified) >= 0
$$;

-- Requests the release of a parked key, given as text or JSON, or of all parked keys of a computation. Returns the
-- number of keys.
CREATE FUNCTION millpy.release_parked(p_graph text, p_computation text, p_key text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$ SELECT mill.request_release(p_graph, p_computation, p_key, false) $$;

-- Requests the same, but without the record or timer at which the key stopped, which becomes a dead letter.
CREATE FUNCTION millpy.discard_parked(p_graph text, p_computation text, p_key text DEFAULT NULL) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$ SELECT mill.request_release(p_graph, p_computation, p_key, true) $$;

-- How far the records of a source partition lie behind the newest one (millpy/ingest/disorder.py): the weights of the
-- newest 131,072 or so, by the largest lag of their bucket. `share` is the share of the records with at most this lag; a
-- lag of NULL is more than 32 years.
CREATE VIEW mill.lags AS
SELECT interval_id, edge, weight, sum(weight) OVER (PARTITION BY interval_id ORDER BY edge)
       / sum(weight) OVER (PARTITION BY interval_id) AS share
  FROM (SELECT e.interval_id, (b.pair ->> 0)::bigint AS edge,
               sum((b.pair ->> 1)::numeric / CASE e.subkey WHEN 'learned' THEN 1024 ELSE 1 END) AS weight
          FROM mill.entries AS e
         CROSS JOIN LATERAL json_array_elements(CASE e.subkey WHEN 'learned' THEN e.value ELSE e.value -> 'block' END) AS b (pair)
         WHERE e.kind = 'disorder'
         GROUP BY e.interval_id, edge) AS buckets;

CREATE VIEW millpy.disorder_histogram AS
SELECT p.graph, p.computation AS stream, p.source_partition,
       CASE WHEN l.edge < 4611686018427387904 THEN make_interval(secs => l.edge / 1e6) END AS lag,
       round(l.weight, 3) AS records, l.share::double precision AS share
  FROM mill.lags AS l JOIN mill.places AS p USING (interval_id)
 WHERE p.kind = 'injector'
 ORDER BY p.graph, p.computation, p.source_partition, l.edge;

-- The quantiles of these lags, and counts since the beginning: records behind the watermark before them (`late`), those
-- that max_disorder alone would not have made late, and those beyond the bound at the time.
CREATE VIEW millpy.disorder AS
SELECT p.graph, p.computation AS stream, p.source_partition, (e.value ->> 'percentile')::double precision AS percentile,
       make_interval(secs => (e.value ->> 'max_disorder')::bigint / 1e6) AS max_disorder,
       make_interval(secs => (e.value ->> 'bound')::bigint / 1e6) AS bound, q.p50, q.p90, q.p99, q.p999,
       (e.value ->> 'records')::bigint AS records, (e.value ->> 'late')::bigint AS late,
       (e.value ->> 'late_by_percentile')::bigint AS late_by_percentile, (e.value ->> 'beyond')::bigint AS beyond_bound
  FROM mill.entries AS e
  JOIN mill.places AS p USING (interval_id)
  LEFT JOIN (
     SELECT interval_id, min(lag) FILTER (WHERE share >= 0.5) AS p50, min(lag) FILTER (WHERE share >= 0.9) AS p90,
            min(lag) FILTER (WHERE share >= 0.99) AS p99, min(lag) FILTER (WHERE share >= 0.999) AS p999
       FROM (SELECT interval_id, share,
                    CASE WHEN edge < 4611686018427387904 THEN make_interval(secs => edge / 1e6) END AS lag
               FROM mill.lags) AS h
      GROUP BY interval_id) AS q USING (interval_id)
 WHERE e.kind = 'disorder' AND e.subkey = 'counted' AND p.kind = 'injector'
 ORDER BY p.graph, p.computation, p.source_partition;

-- Records of a source with a zone whose local time came twice when clocks were set back (the first was taken), or was
-- skipped when they were set forward (it was read with the offset before the change).
CREATE VIEW millpy.local_times AS
SELECT p.graph, e.subkey AS stream, p.source_partition,
       coalesce(sum((e.value #>> '{}')::bigint) FILTER (WHERE e.namespace = 'repeated_times'), 0)::bigint AS repeated,
       coalesce(sum((e.value #>> '{}')::bigint) FILTER (WHERE e.namespace = 'skipped_times'), 0)::bigint AS skipped
  FROM mill.entries AS e
  JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'counter' AND e.namespace IN ('repeated_times', 'skipped_times')
 GROUP BY p.graph, e.subkey, p.source_partition
 ORDER BY p.graph, e.subkey, p.source_partition;

-- The name of the history of a result table, and the columns that name a window there. Both functions below have the
-- rights of their caller.
CREATE FUNCTION millpy.history_of(p_table regclass, OUT history regclass, OUT identity text[])
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT h.oid::regclass, array_agg(quote_ident(a.attname) ORDER BY k.place)
           FILTER (WHERE a.attname NOT IN ('pane_index', 'is_retraction'))
      INTO history, identity
      FROM pg_class AS t
      JOIN pg_class AS h ON h.relnamespace = t.relnamespace AND h.relname = t.relname || '_history'
      JOIN pg_constraint AS c ON c.conrelid = h.oid AND c.contype = 'p'
     CROSS JOIN LATERAL unnest(c.conkey) WITH ORDINALITY AS k (attnum, place)
      JOIN pg_attribute AS a ON a.attrelid = h.oid AND a.attnum = k.attnum
     WHERE t.oid = p_table GROUP BY h.oid HAVING bool_or(a.attname = 'is_retraction');
    IF history IS NULL THEN
        RAISE EXCEPTION '% has no history', p_table USING ERRCODE = 'undefined_table',
              HINT = 'write it with to_table(..., history=True)';
    END IF;
END $$;

-- The rows that a result table had at a time: the newest pane of each window by then, without those that were taken
-- back. The type of the argument names the table: SELECT * FROM millpy.as_of(NULL::factory.temperature_1h, '2026-11-20')
-- p_key has values of columns that name a window, such as {"device": "pump"}: only rows with these are read, by the index.
CREATE FUNCTION millpy.as_of(p_table anyelement, p_at timestamptz, p_key jsonb DEFAULT '{}') RETURNS SETOF anyelement
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    row_of regclass;
    found record;
    columns text;
    wanted text;
    unknown text;
BEGIN
    SELECT t.typrelid::regclass INTO row_of FROM pg_type AS t WHERE t.oid = pg_typeof(p_table) AND t.typrelid <> 0;
    IF row_of IS NULL THEN
        RAISE EXCEPTION '% is not the type of a table''s rows', pg_typeof(p_table) USING ERRCODE = 'datatype_mismatch',
              HINT = 'for example millpy.as_of(NULL::factory.temperature_1h, now() - interval ''1 hour'')';
    END IF;
    SELECT * INTO found FROM millpy.history_of(row_of);
    -- Columns that a user has added to the table are null: the history has none.
    SELECT string_agg(CASE WHEN h.attname IS NULL THEN format('NULL::%s', format_type(a.atttypid, a.atttypmod))
                           ELSE quote_ident(a.attname) END, ', ' ORDER BY a.attnum) INTO columns
      FROM pg_attribute AS a
      LEFT JOIN pg_attribute AS h ON h.attrelid = found.history AND h.attname = a.attname AND NOT h.attisdropped
     WHERE a.attrelid = row_of AND a.attnum > 0 AND NOT a.attisdropped;
    IF jsonb_typeof(p_key) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION '% is not a JSON object', p_key USING ERRCODE = 'invalid_parameter_value',
              HINT = 'for example {"device": "pump"}';
    END IF;
    SELECT string_agg(format(' AND %1$s = (jsonb_populate_record(NULL::%2$s, $2)).%1$s', quote_ident(name), found.history),
                      ''), min(name) FILTER (WHERE quote_ident(name) <> ALL (found.identity))
      INTO wanted, unknown FROM jsonb_object_keys(p_key) AS name;
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'windows of % are not named by %', row_of, quote_ident(unknown) USING ERRCODE = 'undefined_column',
              HINT = format('they are by %s', array_to_string(found.identity, ', '));
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT %1$s FROM (SELECT DISTINCT ON (%2$s) * FROM %3$s WHERE emitted_at <= $1 %5$s'
        ' ORDER BY %4$s, pane_index DESC, is_retraction DESC) AS newest WHERE NOT is_retraction',
        columns, array_to_string(found.identity, ', '), found.history,
        array_to_string(found.identity, ' DESC, ') || ' DESC',  -- the primary key backwards: without a sort
        wanted) USING p_at, p_key;
END $$;

-- The same rows as JSON, for a table that is named by text: SELECT * FROM millpy.as_of('factory.temperature_1h', now())
CREATE FUNCTION millpy.as_of(p_table text, p_at timestamptz, p_key jsonb DEFAULT '{}') RETURNS SETOF jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF to_regclass(p_table) IS NULL THEN
        RAISE EXCEPTION 'there is no table %', p_table USING ERRCODE = 'undefined_table',
              HINT = 'name it with its schema: factory.temperature_1h';
    END IF;
    PERFORM millpy.history_of(p_table::regclass);
    RETURN QUERY EXECUTE format(
        'SELECT to_jsonb(t.*) FROM millpy.as_of(NULL::%s, $1, $2) AS t', p_table::regclass) USING p_at, p_key;
END $$;

-- Deletes what the next p_rows_max panes and retractions after p_since have replaced, in order of their commits; those of
-- one commit together. A retraction replaces itself, too: no row is what its window has then. `trimmed_to` is the p_since
-- of the next call, and `finished` says that it has nothing to do yet.
CREATE FUNCTION millpy.trim_piece(p_table regclass, p_keep interval, p_rows_max integer, p_since timestamptz,
                                  OUT deleted bigint, OUT finished boolean, OUT trimmed_to timestamptz)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found record;
    same text;
BEGIN
    IF p_keep IS NULL OR p_keep < interval '0' THEN
        RAISE EXCEPTION 'a history cannot be kept for %', p_keep USING ERRCODE = 'invalid_parameter_value';
    ELSIF p_rows_max IS NULL OR p_rows_max < 1 THEN
        RAISE EXCEPTION 'cannot trim % rows at a time', p_rows_max USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT * INTO found FROM millpy.history_of(p_table);
    SELECT string_agg(format('o.%1$s = n.%1$s', name), ' AND ') INTO same FROM unnest(found.identity) AS name;
    -- While this waits for a lock, a switch may give the name to the table of another generation: that loses nothing.
    EXECUTE format(
        'WITH n AS MATERIALIZED ('
        '  SELECT %3$s, pane_index, is_retraction, emitted_at FROM %1$s'
        '   WHERE tableoid = ANY ($4) AND (pane_index > 0 OR is_retraction) AND emitted_at > $1 AND emitted_at < $2'
        '   ORDER BY emitted_at FETCH FIRST ($3) ROWS WITH TIES'
        '), gone AS ('
        '  DELETE FROM %1$s AS o USING n'
        '   WHERE o.tableoid = ANY ($4) AND %2$s AND (o.pane_index < n.pane_index OR (o.pane_index = n.pane_index AND n.is_retraction))'
        '  RETURNING 1'
        ') SELECT (SELECT count(*) FROM gone), count(*) < $3, coalesce(max(n.emitted_at), $1) FROM n',
        found.history, same, array_to_string(found.identity, ', '))
       INTO deleted, finished, trimmed_to USING p_since, now() - p_keep, p_rows_max,
             ARRAY(SELECT i.inhrelid FROM pg_inherits AS i WHERE i.inhparent = found.history) || found.history::oid;
END $$;

-- Deletes panes and retractions that `as_of` needs for no time in the last p_keep: what the first p_rows_max have replaced
-- that have replaced any. Returns their number: call it until that is 0. The newest pane of each window stays. After that,
-- the next calls may leave out what was committed before p_since, the beginning of the time that was kept.
CREATE FUNCTION millpy.trim_history(p_table regclass, p_keep interval, p_rows_max integer DEFAULT 10000,
                                    p_since timestamptz DEFAULT '-infinity') RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    piece record;
BEGIN
    LOOP
        SELECT * INTO piece FROM millpy.trim_piece(p_table, p_keep, p_rows_max, p_since);
        EXIT WHEN piece.deleted > 0 OR piece.finished;
        p_since := piece.trimmed_to;
    END LOOP;
    RETURN piece.deleted;
END $$;

-- The sites of a source with watermark_by (millpy/ingest/site_watermarks.py). The row without a site is the watermark that
-- the sites beyond the bound share; `records_beyond` counts their records.
CREATE VIEW millpy.site_watermarks AS
SELECT p.graph, p.computation AS stream, p.source_partition, nullif(e.subkey, 'others')::json #>> '{}' AS site,
       mill.moment(greatest(w.own, f.floor)) AS watermark,
       CASE WHEN abs(greatest(w.own, f.floor)) < 4611686018427387904
            THEN clock_timestamp() - mill.moment(greatest(w.own, f.floor)) END AS lag,
       mill.moment((e.value ->> 'max_event_time')::bigint) AS max_event_time,
       mill.moment((e.value ->> 'arrived_at')::bigint) AS last_arrived_at,
       coalesce((e.value ->> 'records')::bigint, 0) AS records_beyond
  FROM mill.entries AS e
  JOIN mill.places AS p USING (interval_id)
 CROSS JOIN LATERAL (SELECT coalesce((e.value ->> 'watermark')::bigint, -4611686018427387904) AS own) AS w
  LEFT JOIN (SELECT interval_id, (value #>> '{}')::bigint AS floor
               FROM mill.entries WHERE kind = 'site' AND namespace = 'source' AND subkey = 'floor') AS f USING (interval_id)
 WHERE e.kind = 'site' AND e.namespace = 'source' AND e.subkey <> 'floor'
 ORDER BY p.graph, p.computation, p.source_partition, w.own, e.subkey;

-- Changes values of a row of a finished window, and notes who did it, when, why, and both rows. Returns the new row.
-- p_window has the key columns, window_start and, if several windows start together, window_end; p_values the new values.
-- Results that other computations have computed from the window stay as they are: they need p_only_table, or corrections
-- of their own. Raises MW010 when the arguments do not fit.
CREATE FUNCTION millpy.correct(p_table text, p_window jsonb, p_values jsonb, p_why text, p_only_table boolean DEFAULT false)
RETURNS jsonb LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET extra_float_digits = 1 SET timezone = 'UTC' AS $$
DECLARE
    own regclass := to_regclass(p_table);
    found record;
    identity text[];
    settable text[];
    same text;
    wrong text;
    readers text;
    old_row jsonb;
    new_row jsonb;
    changes text;
    held integer;
    next_pane bigint;
BEGIN
    PERFORM mill.check_isolation();
    SELECT t.*, n.nspname, c.relname INTO found
      FROM pg_class AS c
      JOIN pg_namespace AS n ON n.oid = c.relnamespace
      JOIN mill.graphs AS g ON g.name = n.nspname
      JOIN mill.result_tables AS t ON t.graph_id = g.graph_id AND t.name = c.relname AND t.kind = 'windowed'
     WHERE c.oid = own;
    IF found IS NULL THEN
        RAISE EXCEPTION '% is no result table of windows', coalesce(p_table, 'NULL') USING ERRCODE = 'MW010',
              HINT = 'name it with its schema: factory.temperature_1h';
    ELSIF coalesce(trim(p_why), '') = '' OR length(p_why) > 1000 THEN
        RAISE EXCEPTION 'a correction needs a reason, of at most 1,000 characters' USING ERRCODE = 'MW010',
              HINT = 'millpy.corrections shows it';
    ELSIF jsonb_typeof(p_window) IS DISTINCT FROM 'object' OR jsonb_typeof(p_values) IS DISTINCT FROM 'object'
          OR p_values = '{}' THEN
        RAISE EXCEPTION 'a window and its values are JSON objects' USING ERRCODE = 'MW010',
              HINT = 'for example {"device": "pump", "window_start": "2026-11-20T10:00:00Z"} and {"mean": 21.5}';
    END IF;
    SELECT array_agg(c ->> 0) || '{window_start}' INTO identity FROM jsonb_array_elements(found.key_columns) AS c;
    SELECT array_agg(c ->> 0) INTO settable FROM jsonb_array_elements(found.value_columns) AS c
     WHERE c ->> 0 NOT IN ('pane_index', 'pane_timing', 'late_count', 'pane_on_time_index', 'pane_last');
    SELECT min(name) INTO wrong FROM unnest(identity) AS name WHERE p_window -> name IS NULL;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'the window has no %', quote_ident(wrong) USING ERRCODE = 'MW010',
              HINT = format('windows of %s are named by %s', own, array_to_string(identity, ', '));
    END IF;
    SELECT min(name) INTO wrong FROM jsonb_object_keys(p_window) AS name WHERE name <> ALL (identity || '{window_end}');
    IF wrong IS NULL THEN
        SELECT min(name) INTO wrong FROM jsonb_object_keys(p_values) AS name WHERE name <> ALL (settable);
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'column % of % cannot be given here', quote_ident(wrong), own USING ERRCODE = 'MW010',
              HINT = format('windows are named by %s, and have the values %s', array_to_string(identity, ', '),
                            array_to_string(settable, ', '));
    END IF;
    SELECT format('%s %L', a.attname, g.value #>> '{}') INTO wrong
      FROM jsonb_each(p_window || p_values) AS g (name, value)
      JOIN pg_attribute AS a ON a.attrelid = own AND a.attname = g.name
     WHERE CASE WHEN a.atttypid = 'timestamptz'::regtype AND jsonb_typeof(g.value) = 'string'
                THEN NOT mill.has_zone(g.value #>> '{}') END
     ORDER BY a.attnum LIMIT 1;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION '% has no time zone', wrong USING ERRCODE = 'MW010',
              HINT = 'add Z or an offset, as in 2026-11-20T10:00:00Z';
    END IF;
    SELECT string_agg(c.name, ', ' ORDER BY c.name) INTO readers
      FROM mill.subscriptions AS s JOIN mill.computations AS c ON c.computation_id = s.consumer_id
     WHERE s.stream_id = found.stream_id AND c.kind = 'stage';
    IF readers IS NOT NULL AND NOT p_only_table THEN
        RAISE EXCEPTION 'other results are computed from %: %', own, readers USING ERRCODE = 'MW010',
              HINT = 'add late records with `millpy late replay --into-window`, which consumers get as well; or correct each'
                     ' table with p_only_table => true';
    END IF;

    -- A switch or a deployment waits; for one that was first, this waits, and the table may have another name then.
    PERFORM FROM mill.graphs WHERE graph_id = found.graph_id AND name = found.nspname FOR NO KEY UPDATE;
    GET DIAGNOSTICS held = ROW_COUNT;
    IF held = 0 THEN
        RAISE EXCEPTION '% was switched to another table, or dropped, before the correction', p_table USING ERRCODE = 'MW010',
              HINT = 'nothing was changed: correct it again';
    END IF;
    SELECT string_agg(format('t.%1$I = (jsonb_populate_record(NULL::%2$s, $1)).%1$I', name, own), ' AND ') INTO same
      FROM jsonb_object_keys(p_window) AS name;
    BEGIN
        EXECUTE format('SELECT to_jsonb(t.*) FROM %s AS t WHERE %s FOR UPDATE', own, same) INTO STRICT old_row USING p_window;
    EXCEPTION
        WHEN no_data_found THEN
            RAISE EXCEPTION '% has no row for the window %', own, p_window USING ERRCODE = 'MW010';
        WHEN too_many_rows THEN
            RAISE EXCEPTION 'several windows start then' USING ERRCODE = 'MW010', HINT = 'add window_end';
    END;
    IF NOT EXISTS (SELECT FROM mill.intervals AS i, mill.instant((old_row ->> 'window_end')::timestamptz) AS ends
                    WHERE i.interval_id = (old_row ->> 'interval_id')::bigint
                      AND greatest(i.input_watermark - found.allowed_lateness_us, i.horizon_floor) >= ends
                      AND i.low_watermark >= ends) THEN
        RAISE EXCEPTION 'the window is still open: its next record would replace the correction'
              USING ERRCODE = 'MW010',
                    HINT = format('wait until is_final is true in %s_status', own);
    END IF;
    EXECUTE format('SELECT to_jsonb(jsonb_populate_record(t.*, $2)) FROM %s AS t WHERE %s', own, same)
       INTO new_row USING p_window, p_values;
    IF new_row = old_row AND old_row IN (
           SELECT c.new_row FROM mill.corrections AS c
            WHERE (c.graph_id, c.table_name) = (found.graph_id, found.name)
              AND (c.why, c.requested_by) = (p_why, mill.actor()) AND c.late_record_id IS NULL) THEN
        RETURN old_row;  -- the same request again, whose answer was lost
    END IF;
    next_pane := (old_row ->> 'pane_index')::bigint + 1;
    IF found.history <> '' THEN
        EXECUTE format('SELECT greatest($2, max(t.pane_index) + 1) FROM %I.%I AS t WHERE %s', found.nspname,
                       found.relname || '_history', same) INTO next_pane USING p_window, next_pane;
    END IF;
    SELECT string_agg(format('%1$I = (jsonb_populate_record(NULL::%2$s, $2)).%1$I', name, own), ', ') INTO changes
      FROM jsonb_object_keys(p_values) AS name;
    EXECUTE format('UPDATE %s AS t SET %s, pane_index = $3, emitted_at = now() WHERE %s RETURNING to_jsonb(t.*)', own, changes, same)
       INTO new_row USING p_window, p_values, next_pane;
    IF new_row IS NULL THEN
        RAISE EXCEPTION 'a trigger on % kept the row', own USING ERRCODE = 'MW010';
    END IF;
    IF found.history = 'retracting' THEN
        EXECUTE format('INSERT INTO %1$I.%2$I SELECT (jsonb_populate_record(NULL::%1$I.%2$I, to_jsonb(t.*)'
                       ' || jsonb_build_object(''is_retraction'', true, ''emitted_at'', now()))).* FROM %1$I.%2$I AS t WHERE %3$s'
                       ' ORDER BY t.pane_index DESC, t.is_retraction DESC LIMIT 1 ON CONFLICT DO NOTHING',
                       found.nspname, found.relname || '_history', same) USING p_window;
    END IF;
    IF found.history <> '' THEN
        EXECUTE format('INSERT INTO %1$I.%2$I SELECT (jsonb_populate_record(NULL::%1$I.%2$I, $1)).*', found.nspname,
                       found.relname || '_history') USING new_row || '{"is_retraction": false}';
    END IF;
    WITH made AS (
        INSERT INTO mill.corrections AS m
               (graph_id, table_name, key, window_start, window_end, old_row, new_row, why, requested_by)
        SELECT found.graph_id, found.name,
               CASE WHEN count(*) = 1 THEN min(part::text) ELSE jsonb_agg(part ORDER BY place)::text END,
               mill.instant((old_row ->> 'window_start')::timestamptz), mill.instant((old_row ->> 'window_end')::timestamptz),
               old_row, new_row, p_why, mill.actor()
          FROM jsonb_array_elements(found.key_columns) WITH ORDINALITY AS k (c, place)
         CROSS JOIN LATERAL (  -- a key has bytes as base64
               SELECT CASE WHEN c ->> 1 = 'bytea'
                           THEN to_jsonb(translate(encode((old_row ->> (c ->> 0))::bytea, 'base64'), E'\n', ''))
                           ELSE old_row -> (c ->> 0) END AS part) AS p
        RETURNING m.*
    )
    INSERT INTO mill.events (graph_id, kind, detail) SELECT graph_id, 'corrected', mill.correction(made) FROM made;
    RETURN new_row;
END $$;

-- The sources that read injected records: what waits, and the transactions that have injected and are still open. Their
-- records do not exist yet; nobody waits for them. The locks of a prepared transaction have no pid; one of them is that
-- on its own id.
CREATE VIEW millpy.injections AS
SELECT g.name AS graph, r.source, r.stream, w.waiting, w.oldest_at, r.waiting_max, r.read_number,
       t.open_transactions, t.open_since
  FROM mill.injection_readers AS r
  JOIN mill.graphs AS g USING (graph_id)
 CROSS JOIN LATERAL (
       SELECT count(*) AS waiting, min(i.injected_at) AS oldest_at FROM mill.injected_records AS i
        WHERE i.stream = r.stream AND NOT mill.has_read(r, i.number, i.xid)) AS w
 CROSS JOIN (
       SELECT count(*) AS open_transactions, min(CASE WHEN l.pid IS NOT NULL THEN a.xact_start ELSE (
                  SELECT p.prepared FROM pg_prepared_xacts AS p
                    JOIN pg_locks AS o ON o.locktype = 'transactionid' AND o.transactionid = p.transaction
                   WHERE o.pid IS NULL AND o.virtualtransaction = l.virtualtransaction) END) AS open_since
         FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a USING (pid)
        WHERE l.locktype = 'relation' AND l.relation = 'mill.injected_records'::regclass AND l.mode = 'RowExclusiveLock'
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND coalesce(a.application_name, '') NOT LIKE 'millpy %') AS t;

-- Injects a record into a stream, as part of the caller's transaction: it exists if, and only if, that commits. Returns
-- the record's number. Raises MW010 when no graph reads the stream, and MW011 when too many records wait.
CREATE FUNCTION millpy.inject(p_stream text, p_record jsonb, p_dedupe_id text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found_number bigint;
    own_xid xid8;
    readers record;
    room text := 'millpy.room_' || encode(sha256(convert_to(p_stream, 'UTF8')), 'hex');
    size integer;
    waiting bigint;
BEGIN
    SELECT count(*) AS number, bool_or(r.waits) AS wait, min(r.read_number) AS read, min(r.waiting_max) AS waiting_max
      INTO readers FROM mill.injection_readers AS r WHERE r.stream = p_stream;
    IF readers.number = 0 THEN
        RAISE EXCEPTION 'no graph reads the injected stream %', coalesce(quote_literal(p_stream), 'NULL')
              USING ERRCODE = 'MW010', HINT = 'deploy a graph with the source InjectedStream(…) of this name, or correct the name';
    END IF;
    IF p_record IS NULL OR jsonb_typeof(p_record) <> 'object' THEN
        RAISE EXCEPTION 'an injected record must be a JSON object, not %', coalesce(jsonb_typeof(p_record), 'NULL')
              USING ERRCODE = '22023', HINT = 'give one object for each record, such as to_jsonb(row)';
    END IF;
    size := octet_length(p_record::text) + coalesce(octet_length(p_dedupe_id), 0);
    IF size > 1000000 THEN
        RAISE EXCEPTION 'an injected record may have 1000000 bytes as text, not %', size
              USING ERRCODE = '22023', HINT = 'store what is large in a table, and inject its key';
    END IF;
    own_xid := pg_current_xact_id();  -- before the number is taken
    INSERT INTO mill.injected_records (stream, xid, bytes, dedupe_id, record)
    VALUES (p_stream, own_xid, size, p_dedupe_id, p_record) RETURNING number INTO found_number;
    -- Numbers are those of all streams, so the difference is an upper bound. Behind a count, it is one for as many numbers
    -- as there was room: the transaction counts again when they are used up, not for each of many records.
    IF found_number - readers.read > readers.waiting_max
       AND found_number > coalesce(nullif(current_setting(room, true), ''), '0')::bigint THEN
        SELECT count(*) INTO waiting
          FROM (SELECT FROM mill.injected_records AS i
                 WHERE i.stream = p_stream AND i.number > readers.read LIMIT readers.waiting_max + 1) AS counted;
        IF waiting > readers.waiting_max THEN
            RAISE EXCEPTION '% records wait in the injected stream %', readers.waiting_max, quote_literal(p_stream)
                  USING ERRCODE = 'MW011',
                        HINT = 'start a worker of each graph that reads it (millpy.injections), or raise waiting_max=';
        END IF;
        PERFORM set_config(room, (found_number + readers.waiting_max - waiting)::text, true);
    END IF;
    IF readers.wait THEN
        PERFORM pg_notify('millpy_injected', p_stream);
    END IF;
    RETURN found_number;
END $$;

-- Only roles with a grant may call the functions. PUBLIC may call those that only compute, because the status views
-- beside result tables run with their caller's rights.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mill, millpy FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mill.moment(bigint), mill.instant(timestamptz), mill.readable(bytea),
      mill.alive(timestamptz, double precision),
      millpy.as_of(anyelement, timestamptz, jsonb), millpy.as_of(text, timestamptz, jsonb), millpy.history_of(regclass)
   TO PUBLIC;
