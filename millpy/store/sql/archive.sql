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
-- Finds files to delete. Zero rows: there is none.
SELECT interval_id, path FROM mill.archive_garbage WHERE interval_id = ANY (%(intervals)s) ORDER BY path LIMIT %(rows_max)s;

-- name: forget_garbage
-- Forgets files that are deleted. Zero rows: another archiver has forgotten them.
DELETE FROM mill.archive_garbage WHERE path = ANY (%(paths)s);

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
