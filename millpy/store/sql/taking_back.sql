-- The deletions of a rollback, in the transaction that raises the version and holds all headers of the graph.

-- name: read_gone_intervals
-- Reads the intervals of some computations. Zero rows: they have none.
SELECT i.interval_id FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
 WHERE i.graph_id = %(graph_id)s AND c.name = ANY (%(names)s) ORDER BY i.interval_id;

-- name: forget_ends
-- Deletes the chain ends of subscriptions of these computations. Zero rows: nothing was written for them.
DELETE FROM mill.last_segments AS l USING mill.subscriptions AS u, mill.computations AS c
 WHERE u.subscription_id = l.subscription_id AND c.computation_id = u.consumer_id
   AND c.graph_id = %(graph_id)s AND c.name = ANY (%(names)s);

-- name: forget_computations
-- Also deletes their intervals, streams, subscriptions and the catalog entries of their tables. Zero rows: there are
-- none.
DELETE FROM mill.computations WHERE graph_id = %(graph_id)s AND name = ANY (%(names)s);

-- name: forget_streams
-- Zero rows: there are none.
DELETE FROM mill.streams WHERE graph_id = %(graph_id)s AND name = ANY (%(names)s);

-- name: forget_tables
-- Also forgets what is known of their rows: another table of the name has other ones. Zero rows: there are none.
WITH corrections AS (
    DELETE FROM mill.corrections WHERE graph_id = %(graph_id)s AND table_name = ANY (%(names)s)
), corrected AS (
    DELETE FROM mill.corrected_windows WHERE graph_id = %(graph_id)s AND table_name = ANY (%(names)s)
), audits AS (
    DELETE FROM mill.audits WHERE graph_id = %(graph_id)s AND table_name = ANY (%(names)s)
)
DELETE FROM mill.result_tables WHERE graph_id = %(graph_id)s AND name = ANY (%(names)s);

-- name: forget_cells
-- Zero rows: no key has any of the cells.
DELETE FROM mill.keyed WHERE interval_id = %(interval)s AND kind = 'state' AND namespace = ANY (%(names)s);

-- name: shorten_windows
-- Keeps only the first accumulators of each window. Zero rows: no window has more.
UPDATE mill.keyed AS k
   SET value = jsonb_set(
           jsonb_set(k.value::jsonb, '{values}', jsonb_path_query_array(
               k.value::jsonb -> 'values', '$[0 to $last]', jsonb_build_object('last', %(accumulators)s::integer - 1))),
           '{kept,values}', jsonb_path_query_array(coalesce(k.value::jsonb #> '{kept,values}', '[]'),
               '$[0 to $last]', jsonb_build_object('last', %(accumulators)s::integer - 1)), false)::text
 WHERE k.interval_id = %(interval)s AND k.kind = 'window'
   AND jsonb_array_length(k.value::jsonb -> 'values') > %(accumulators)s::integer;

-- name: shorten_parked
-- Removes fields from parked records, which are objects (`names` are kept), or arrays in field order (the first are).
-- Zero rows: no record is parked.
UPDATE mill.keyed AS k
   SET value = jsonb_set(k.value::jsonb, '{record}', CASE jsonb_typeof(k.value::jsonb -> 'record')
           WHEN 'array' THEN jsonb_path_query_array(
               k.value::jsonb -> 'record', '$[0 to $last]', jsonb_build_object('last', %(kept)s::integer - 1))
           ELSE (SELECT coalesce(jsonb_object_agg(e.key, e.value), '{}')
                   FROM jsonb_each(k.value::jsonb -> 'record') AS e WHERE e.key = ANY (%(names)s::text[])) END)::text
  FROM mill.subscriptions AS u JOIN mill.streams AS s USING (stream_id)
  JOIN mill.intervals AS i ON i.computation_id = u.consumer_id
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s AND k.interval_id = i.interval_id AND k.kind = 'parked'
   AND k.namespace = u.subscription_id::text;

-- name: read_schema
-- Reads the Arrow schema of a stream. Always one row.
SELECT c.encoded FROM mill.streams AS s JOIN mill.schemas AS c USING (schema_id)
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s;

-- name: read_segments
-- Reads the segments of all subscriptions of a stream, in every slot. Zero rows: nothing was written.
SELECT g.slot, g.subscription_id, g.producer, g.seq, g.records, g.ends, g.checksums, g.payload
  FROM mill.segments AS g JOIN mill.subscriptions AS u USING (subscription_id) JOIN mill.streams AS s USING (stream_id)
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s;

-- name: change_segment
-- Always one row.
UPDATE mill.segments SET ends = %(slice_ends)s, checksums = %(slice_checksums)s, payload = %(payload)s
 WHERE slot = %(slot)s AND subscription_id = %(subscription)s AND producer = %(producer)s AND seq = %(seq)s;

-- name: read_join_logs
-- Reads the logs of rows that consumers of a stream keep, in every slot; runs of ids have ids. Zero rows: nothing was
-- written.
SELECT r.slot, r.interval_id, r.bundle, r.times
  FROM mill.dedupe_runs AS r JOIN mill.intervals AS i USING (interval_id)
 WHERE i.graph_id = %(graph_id)s AND octet_length(r.ids) = 0 AND octet_length(r.times) > 0
   AND EXISTS (SELECT FROM mill.subscriptions AS u JOIN mill.streams AS s USING (stream_id)
                WHERE u.consumer_id = i.computation_id AND s.graph_id = %(graph_id)s AND s.name = %(stream)s);

-- name: change_join_log
-- Always one row.
UPDATE mill.dedupe_runs SET times = %(log)s
 WHERE slot = %(slot)s AND interval_id = %(interval)s AND bundle = %(bundle)s;

-- name: read_consumers_of
-- Reads the computations that consume a stream. Zero rows: the stream has no consumers.
SELECT DISTINCT c.name FROM mill.subscriptions AS u JOIN mill.streams AS s USING (stream_id)
  JOIN mill.computations AS c ON c.computation_id = u.consumer_id
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s;
