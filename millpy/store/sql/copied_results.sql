-- name: read_closed_end
-- Reads up to which end the windows of a result table are finished in each of its intervals: over, and none of their
-- panes waits. NULL: its computation has no
-- intervals. Always one row.
SELECT min(least(greatest(i.input_watermark - t.allowed_lateness_us, i.horizon_floor), i.low_watermark))
  FROM mill.result_tables AS t JOIN mill.intervals AS i USING (computation_id)
 WHERE t.graph_id = %(graph_id)s AND t.name = %(name)s;

-- name: close_windows
-- The windows of a new step that end by those that are copied are over. Always one row for each interval.
UPDATE mill.intervals AS i SET horizon_floor = greatest(i.horizon_floor, %(closed_end)s::bigint)
  FROM mill.computations AS c
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s AND i.computation_id = c.computation_id;

-- name: begin_copy
-- Always one row.
UPDATE mill.result_tables
   SET copied_from = %(copied_from)s::integer, copied_until = %(closed_end)s::bigint, copied_to = %(copied_to)s::bigint
 WHERE graph_id = %(graph_id)s AND name = %(name)s;

-- name: count_copies
-- Counts the result tables of a graph to which rows are copied, or were. Always one row.
SELECT count(*) FROM mill.result_tables WHERE graph_id = %(graph_id)s AND copied_until IS NOT NULL;

-- name: read_next_copy
-- Reads the next table of a graph to which rows are to be copied, and locks its row, so that two processes do not copy
-- the same rows. `source` is NULL if the earlier generation was dropped. Zero rows: all are copied.
SELECT t.table_id, t.name, g.name AS target, o.name AS source, t.copied_until, t.copied_to, t.partition_us IS NOT NULL,
       (SELECT min(i.interval_id) FROM mill.intervals AS i WHERE i.computation_id = t.computation_id),
       o.description
  FROM mill.result_tables AS t JOIN mill.graphs AS g USING (graph_id) LEFT JOIN mill.graphs AS o ON o.graph_id = t.copied_from
 WHERE t.graph_id = %(graph_id)s AND t.copied_to < t.copied_until ORDER BY t.name LIMIT 1 FOR UPDATE OF t;

-- name: read_copies_left
-- Reads the tables of a graph to which rows are still to be copied. Zero rows: all are copied.
SELECT t.name, t.copied_until, o.description
  FROM mill.result_tables AS t JOIN mill.graphs AS o ON o.graph_id = t.copied_from
 WHERE t.graph_id = %(graph_id)s AND t.copied_to < t.copied_until ORDER BY t.name;

-- name: advance_copy
-- Always one row.
UPDATE mill.result_tables SET copied_to = %(copied_to)s::bigint WHERE table_id = %(table_id)s;
