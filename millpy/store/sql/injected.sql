-- name: register_injection_readers
-- Adds the sources of a graph that read injected records. They read what is injected from now on. Zero rows: the graph
-- has none, or no new one.
INSERT INTO mill.injection_readers (graph_id, source, stream, read_number)
SELECT g.graph_id, c.name, c.described #>> '{identity,source,stream}',
       coalesce(pg_sequence_last_value('mill.injected_records_number_seq'), 0)
  FROM mill.graphs AS g
 CROSS JOIN LATERAL jsonb_each(g.description -> 'computations') AS c (name, described)
 WHERE g.graph_id = %(graph_id)s AND c.described #>> '{identity,source,kind}' = 'injected_stream'
ON CONFLICT DO NOTHING;

-- name: forget_injection_readers
-- Deletes the readers of sources that a graph does not have any more, except those that it is about to have again. Zero
-- rows: there are none.
DELETE FROM mill.injection_readers AS r USING mill.graphs AS g
 WHERE g.graph_id = %(graph_id)s AND r.graph_id = g.graph_id
   AND NOT g.description -> 'computations' ? r.source AND r.source <> ALL (%(kept)s);

-- name: open_injected
-- Reads where a source begins that has committed no position. Zero rows: the graph is not deployed, or was dropped.
UPDATE mill.injection_readers AS r SET waiting_max = %(waiting_max)s, waits = true
  FROM mill.graphs AS g
 WHERE g.graph_id = r.graph_id AND r.source = %(source)s AND r.stream = %(stream)s
   AND g.generation = %(generation)s
   AND g.family || CASE WHEN g.generation = 1 THEN '' ELSE '_' || g.generation END = %(graph)s
RETURNING r.graph_id, r.read_number, r.open_xids::text, r.rest_xids::text, r.rest_after;

-- name: read_injected
-- Reads the next unread records in the order of their numbers: what is left of a page that was cut first, alone. Only
-- the first row has the snapshot, which says which transactions were open, and an id that is greater than all that were
-- given when it was taken: of those from its xmax on, a snapshot names none. `found` counts those up to `records_max`
-- before the bound on bytes. Zero rows: nothing is new, or nothing is left of that page.
-- Each record is in one part, so that nothing is joined by number: of a table that was empty at its last VACUUM, the
-- planner expects one row, and would look for it among all that have come since, for each of them.
-- A part without transactions must say so itself: else it is found out for each record that waits for another reader.
WITH unread AS (
    (SELECT i.number, i.bytes, i.injected_at, i.dedupe_id, i.record
       FROM mill.injected_records AS i
      WHERE %(rest)s = '{}' AND i.stream = %(stream)s AND i.number > %(last)s ORDER BY i.number LIMIT %(records_max)s)
    UNION ALL
    (SELECT i.number, i.bytes, i.injected_at, i.dedupe_id, i.record
       FROM unnest(%(open)s::int8multirange) AS o
       JOIN mill.injected_records AS i ON i.xid >= lower(o)::text::xid8 AND i.xid < upper(o)::text::xid8
      WHERE %(rest)s = '{}' AND %(open)s <> '{}' AND i.stream = %(stream)s AND i.number <= %(last)s
      ORDER BY i.number LIMIT %(records_max)s)
    UNION ALL
    (SELECT i.number, i.bytes, i.injected_at, i.dedupe_id, i.record
       FROM unnest(%(rest)s::int8multirange) AS o
       JOIN mill.injected_records AS i ON i.xid >= lower(o)::text::xid8 AND i.xid < upper(o)::text::xid8
      WHERE %(rest)s <> '{}' AND i.stream = %(stream)s AND i.number > %(after)s AND i.number <= %(last)s
      ORDER BY i.number LIMIT %(records_max)s)
), page AS (
    SELECT u.number, u.injected_at, u.dedupe_id, u.record, sum(u.bytes) OVER rows_before - u.bytes AS bytes_before,
           row_number() OVER rows_before AS place, count(*) OVER () AS found
      FROM (SELECT * FROM unread ORDER BY number LIMIT %(records_max)s) AS u
    WINDOW rows_before AS (ORDER BY u.number)
)
SELECT number, convert_to(record::text, 'UTF8'), dedupe_id, (extract(epoch FROM injected_at) * 1000000)::bigint,
       CASE WHEN place = 1 THEN pg_current_snapshot()::text END,
       CASE WHEN place = 1 THEN pg_current_xact_id()::text::bigint END, found
  FROM page WHERE bytes_before < %(bytes_max)s ORDER BY number;

-- name: lock_injection_readers
-- Serializes what the sources of one stream note and delete. Zero rows: there are no sources any more.
SELECT FROM mill.injection_readers WHERE stream = %(stream)s ORDER BY graph_id, source FOR NO KEY UPDATE;

-- name: note_injected
-- Notes what a source has committed. Zero rows: the source is gone, or another worker has noted more.
UPDATE mill.injection_readers
   SET read_number = %(last)s, open_xids = %(open)s::int8multirange, rest_xids = %(rest)s::int8multirange,
       rest_after = %(after)s
 WHERE graph_id = %(graph_id)s AND source = %(source)s AND read_number <= %(last)s;

-- name: delete_injected
-- Deletes those of some records that every source of their stream has committed. Zero rows: others have not read them.
DELETE FROM mill.injected_records AS i
 WHERE i.stream = %(stream)s AND i.number = ANY (%(numbers)s)
   AND NOT EXISTS (SELECT FROM mill.injection_readers AS r
                    WHERE r.stream = i.stream AND NOT mill.has_read(r, i.number, i.xid));

-- name: delete_all_injected
-- The same of all records of a stream: after a takeover, when an owner has died before it deleted what it had committed.
DELETE FROM mill.injected_records AS i
 WHERE i.stream = %(stream)s
   AND NOT EXISTS (SELECT FROM mill.injection_readers AS r
                    WHERE r.stream = i.stream AND NOT mill.has_read(r, i.number, i.xid));

-- name: sleep_or_wake
-- Says whether a source waits for a notification. Zero rows: the source is gone.
UPDATE mill.injection_readers SET waits = %(asleep)s WHERE graph_id = %(graph_id)s AND source = %(source)s;

-- name: look_at_injections
-- Reads what waits for each source of injected records. Zero rows: no graph reads any.
SELECT i.graph, i.source, i.stream, i.waiting, i.waiting_max, i.open_transactions,
       extract(epoch FROM clock_timestamp() - i.oldest_at)::double precision AS oldest_s,
       extract(epoch FROM clock_timestamp() - i.open_since)::double precision AS open_s
  FROM millpy.injections AS i ORDER BY 1, 2;
