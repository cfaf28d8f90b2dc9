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
