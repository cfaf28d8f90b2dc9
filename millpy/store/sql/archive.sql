-- name: find_archived
-- Finds the committed ones among some files of an interval. Zero rows: none is committed.
SELECT path FROM mill.archive_files WHERE interval_id = %(interval)s AND path = ANY (%(paths)s);

-- name: unlist_old_files
-- Moves files of hours before `before` from the manifest to the garbage. Always one row: their number.
WITH gone AS (
    DELETE FROM mill.archive_files
     WHERE (interval_id, bundle, path) IN (
           SELECT interval_id, bundle, path FROM mill.archive_files
            WHERE interval_id = ANY (%(intervals)s) AND split_part(path, '/hour=', 2) < %(before)s
            ORDER BY interval_id, bundle, path LIMIT %(rows_max)s)
    RETURNING interval_id, path
), added AS (
    INSERT INTO mill.archive_garbage (path, interval_id) SELECT path, interval_id FROM gone RETURNING 1
)
SELECT count(*) FROM added;

-- name: find_garbage
-- Finds files to delete, for the first time or once more. Zero rows: there is none.
SELECT interval_id, path FROM mill.archive_garbage
 WHERE interval_id = ANY (%(intervals)s)
   AND (deleted_at IS NULL OR deleted_at <= now() - make_interval(secs => %(settled_s)s))
 ORDER BY path LIMIT %(rows_max)s;

-- name: forget_garbage
-- Forgets files that are deleted, unless they have to be deleted once more. Zero rows: all of them are forgotten.
WITH gone AS (
    DELETE FROM mill.archive_garbage
     WHERE path = ANY (%(paths)s)
       AND (deleted_at <= now() - make_interval(secs => %(settled_s)s) OR %(settled_s)s::float8 = 0)
)
UPDATE mill.archive_garbage SET deleted_at = now()
 WHERE path = ANY (%(paths)s) AND deleted_at IS NULL AND %(settled_s)s::float8 > 0;

-- name: identify_database
-- What tells this database from all others. Always one row.
SELECT c.system_identifier::text || '/' || d.oid::text
  FROM pg_control_system() AS c CROSS JOIN pg_database AS d WHERE d.datname = current_database();

-- name: list_files
-- The files of an interval. Zero rows: there is none.
SELECT path FROM mill.archive_files WHERE interval_id = %(interval)s ORDER BY path;

-- name: replace_file
-- Lists another file in place of one, which becomes garbage. Zero rows: the sequencer is stale, or the file is not listed.
WITH held AS (
    SELECT interval_id FROM mill.intervals
     WHERE interval_id = %(interval)s AND sequencer = %(sequencer)s FOR NO KEY UPDATE
), gone AS (
    DELETE FROM mill.archive_files AS f USING held
     WHERE f.interval_id = held.interval_id AND f.path = %(path)s RETURNING f.*
), added AS (
    INSERT INTO mill.archive_garbage (path, interval_id) SELECT path, interval_id FROM gone
)
INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo, event_time_hi, partitions,
                                archived_at)
SELECT interval_id, bundle, %(new_path)s, %(records)s, %(bytes)s, event_time_lo, event_time_hi, partitions, archived_at
  FROM gone
RETURNING (SELECT records FROM gone);

-- name: find_small_files
-- The files of one hour of an interval in which nothing was archived of late, if two adjacent ones fit into one; `paths`
-- do not go with the file before, and those in `alone` with none. Zero rows: there is no such hour.
WITH placed AS (
    SELECT interval_id, regexp_replace(path, '/[^/]*$', '') AS folder, bundle, path, records, bytes, archived_at
      FROM mill.archive_files
     WHERE interval_id = ANY (%(intervals)s)
), beside AS (
    SELECT *, lag(path) OVER adjacent AS before, records + lag(records) OVER adjacent AS records_of_two,
           bytes + lag(bytes) OVER adjacent AS bytes_of_two
      FROM placed
    WINDOW adjacent AS (PARTITION BY interval_id, folder ORDER BY bundle, path)
), chosen AS (
    SELECT interval_id, folder
      FROM beside
     GROUP BY interval_id, folder
    HAVING max(archived_at) <= now() - make_interval(secs => %(after_s)s)
       AND bool_or(records_of_two <= %(records_max)s AND bytes_of_two <= %(bytes_max)s AND path <> ALL (%(paths)s)
                AND path <> ALL (%(alone)s) AND before <> ALL (%(alone)s))
     ORDER BY interval_id, folder
     LIMIT 1
)
SELECT interval_id, path, records, bytes FROM placed JOIN chosen USING (interval_id, folder) ORDER BY bundle, path;

-- name: merge_files
-- Lists one file in place of several of its interval, which become garbage: all or none of them. Zero rows: the sequencer
-- is stale, or one of the files is not listed.
WITH held AS (
    SELECT interval_id FROM mill.intervals
     WHERE interval_id = %(interval)s AND sequencer = %(sequencer)s FOR NO KEY UPDATE
), found AS (
    SELECT f.path FROM mill.archive_files AS f JOIN held USING (interval_id) WHERE f.path = ANY (%(paths)s) FOR UPDATE OF f
), gone AS (
    DELETE FROM mill.archive_files AS f USING held
     WHERE f.interval_id = held.interval_id AND f.path IN (SELECT path FROM found)
       AND (SELECT count(*) FROM found) = cardinality(%(paths)s)
    RETURNING f.*
), added AS (
    INSERT INTO mill.archive_garbage (path, interval_id) SELECT path, interval_id FROM gone
), ranges AS (
    SELECT partition, jsonb_build_array(min((seqs ->> 0)::bigint), max((seqs ->> 1)::bigint)) AS seqs
      FROM gone CROSS JOIN LATERAL jsonb_each(gone.partitions) AS e (partition, seqs)
     GROUP BY partition
)
INSERT INTO mill.archive_files (interval_id, bundle, path, records, bytes, event_time_lo, event_time_hi, partitions,
                                archived_at)
SELECT %(interval)s, min(bundle), %(new_path)s, sum(records), %(size)s, min(event_time_lo), max(event_time_hi),
       (SELECT jsonb_object_agg(partition, seqs) FROM ranges), max(archived_at)
  FROM gone
HAVING count(*) > 0
RETURNING records;
