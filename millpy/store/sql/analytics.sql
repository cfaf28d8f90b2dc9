-- What Spark makes of the windows of result tables.

-- name: find_analyzed_tables
-- The tables of windows of a graph by its present name, and how far the intervals are that write each. Zero rows: the
-- graph is not deployed, or has no windows.
SELECT t.table_id, t.name, array_agg(i.bundle ORDER BY i.interval_id) AS bundles
  FROM mill.result_tables AS t
  JOIN mill.graphs AS g USING (graph_id)
  JOIN mill.intervals AS i USING (computation_id)
 WHERE g.name = %(graph)s AND t.kind = 'windowed'
 GROUP BY t.table_id
 ORDER BY t.name;

-- name: reset_analytics
-- Removes rows that come from another checkpoint, or from other settings. Zero rows: there are none.
DELETE FROM mill.analytics WHERE table_id = %(table_id)s AND query <> %(query)s RETURNING batch;

-- name: seize_analytics
-- Makes the caller the only driver of a table. Never zero rows.
INSERT INTO mill.analytics AS a (table_id, query, epoch) VALUES (%(table_id)s, %(query)s, 1)
ON CONFLICT (table_id) DO UPDATE SET epoch = a.epoch + 1
RETURNING epoch, batch;

-- name: advance_analytics
-- The fence of a commit. Zero rows: another driver has the table, or the batch is not the next one.
UPDATE mill.analytics SET batch = %(batch)s, windows = windows + %(count)s, updated_at = now()
 WHERE table_id = %(table_id)s AND query = %(query)s AND epoch = %(epoch)s AND batch = %(batch)s - 1
RETURNING batch;

-- name: read_analytics
-- Zero rows: the table was dropped.
SELECT query, epoch, batch FROM mill.analytics WHERE table_id = %(table_id)s;

-- name: find_analytics_files
-- Zero rows: no batch with rows is committed.
SELECT name, level, start_us, end_us FROM mill.analytics_files WHERE table_id = %(table_id)s ORDER BY name;

-- name: replace_analytics_files
-- Changes the manifest. Zero rows: the batch has no rows.
WITH gone AS (
    DELETE FROM mill.analytics_files WHERE table_id = %(table_id)s AND name = ANY (%(names)s)
)
INSERT INTO mill.analytics_files (table_id, name, level, start_us, end_us)
SELECT %(table_id)s::integer, r.name, r.level, r.start_us, r.end_us
  FROM jsonb_to_recordset(%(document)s::text::jsonb) AS r (name text, level integer, start_us bigint, end_us bigint)
RETURNING name;

-- name: put_device_hours
-- Zero rows: the document has none.
INSERT INTO mill.device_hours (table_id, device, bucket, hour, windows, measured, records, late, mean, stddev, low, median,
                               high, baseline, expected, scale, first_at, last_at)
SELECT %(table_id)s::integer, r.device, r.bucket, r.hour, r.windows, r.measured, r.records, r.late, r.mean, r.stddev, r.low,
       r.median, r.high, r.baseline, r.expected, r.scale, r.first_at, r.last_at
  FROM jsonb_to_recordset(%(document)s::text::jsonb) AS r (
       device text, bucket bigint, hour timestamptz, windows bigint, measured bigint, records bigint, late bigint,
       mean double precision, stddev double precision, low double precision, median double precision,
       high double precision, baseline text, expected double precision, scale double precision, first_at timestamptz,
       last_at timestamptz)
ON CONFLICT (table_id, device, bucket) DO UPDATE
   SET windows = excluded.windows, measured = excluded.measured, records = excluded.records, late = excluded.late,
       mean = excluded.mean, stddev = excluded.stddev, low = excluded.low, median = excluded.median, high = excluded.high,
       baseline = excluded.baseline, expected = excluded.expected, scale = excluded.scale, first_at = excluded.first_at,
       last_at = excluded.last_at;

-- name: put_device_anomalies
-- A window whose newest pane is no outlier has a null score, and goes. Zero rows: the document has none.
WITH given AS (
    SELECT r.*
      FROM jsonb_to_recordset(%(document)s::text::jsonb) AS r (
           device text, window_start timestamptz, window_end timestamptz, pane_index bigint, value double precision,
           baseline text, expected double precision, scale double precision, score double precision)
), gone AS (
    DELETE FROM mill.device_anomalies AS a
     USING given AS r
     WHERE a.table_id = %(table_id)s AND r.score IS NULL
       AND (a.device, a.window_start, a.window_end) = (r.device, r.window_start, r.window_end)
)
INSERT INTO mill.device_anomalies (table_id, device, window_start, window_end, pane_index, value, baseline, expected, scale,
                                   score)
SELECT %(table_id)s::integer, r.device, r.window_start, r.window_end, r.pane_index, r.value, r.baseline, r.expected, r.scale, r.score
  FROM given AS r
 WHERE r.score IS NOT NULL
ON CONFLICT (table_id, device, window_start, window_end) DO UPDATE
   SET pane_index = excluded.pane_index, value = excluded.value, baseline = excluded.baseline,
       expected = excluded.expected, scale = excluded.scale, score = excluded.score, found_at = excluded.found_at;

-- name: expire_device_hours
-- Zero rows: none is that old.
DELETE FROM mill.device_hours WHERE table_id = %(table_id)s AND hour < to_timestamp(%(oldest)s::bigint / 1000000);

-- name: expire_device_anomalies
-- Zero rows: none is that old.
DELETE FROM mill.device_anomalies WHERE table_id = %(table_id)s AND window_start < to_timestamp(%(oldest)s::bigint / 1000000);
