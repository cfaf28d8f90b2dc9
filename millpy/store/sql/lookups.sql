-- name: report_lookup_table
-- Stores what a worker knows of a lookup table. Zero rows: the worker is not registered.
INSERT INTO mill.lookups AS l (worker_id, table_name, refresh_s, computations, version, rows, bytes, misfits, misfit, loaded_at,
                               checked_at, failing_since, error)
SELECT w.worker_id, %(table_name)s, %(refresh_s)s, %(computations)s, %(version)s, %(rows)s, %(bytes)s, %(misfits)s, %(misfit)s,
       mill.moment(%(loaded_at)s), clock_timestamp(), CASE WHEN %(error)s::text <> '' THEN clock_timestamp() END, %(error)s
  FROM mill.workers AS w WHERE w.worker_id = %(worker_id)s
ON CONFLICT (worker_id, table_name) DO UPDATE
   SET refresh_s = excluded.refresh_s, computations = excluded.computations, version = excluded.version, rows = excluded.rows, bytes = excluded.bytes,
       misfits = excluded.misfits, misfit = excluded.misfit, loaded_at = excluded.loaded_at,
       checked_at = excluded.checked_at, error = excluded.error,
       failing_since = CASE WHEN excluded.error <> '' THEN coalesce(l.failing_since, excluded.failing_since) END;
