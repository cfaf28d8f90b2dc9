-- name: lock_deployment
-- Serializes the deployments and switches of a graph's generations. Only roles that may change these rows can hold
-- this up. Zero rows: the graph was never deployed.
SELECT graph_id FROM mill.graphs WHERE family = %(name)s ORDER BY graph_id FOR NO KEY UPDATE;

-- name: lock_names
-- Serializes the registration of new graphs and generations: each needs a name that is free now and after a switch.
LOCK TABLE mill.graphs IN SHARE ROW EXCLUSIVE MODE;

-- name: read_graph
-- Zero rows: the graph was never deployed.
SELECT graph_id, name, version, description FROM mill.graphs
 WHERE family = %(family)s AND generation = %(generation)s;

-- name: insert_graph
-- Always one row.
INSERT INTO mill.graphs (name, family, generation, description)
VALUES (%(name)s, %(family)s, %(generation)s, %(description)s::text::jsonb)
RETURNING graph_id, version;

-- name: insert_computation
-- Always one row.
INSERT INTO mill.computations (graph_id, name, kind, place)
VALUES (%(graph_id)s, %(name)s, %(kind)s, %(place)s)
RETURNING computation_id;

-- name: insert_intervals
-- Always at least one row.
INSERT INTO mill.intervals (graph_id, computation_id, graph_version, place, key_lo, key_hi, source_partition)
SELECT %(graph_id)s, %(computation_id)s, %(graph_version)s, e.place, e.key_lo, e.key_hi, e.source_partition
  FROM unnest(%(places)s, %(key_los)s, %(key_his)s, %(partitions)s) AS e (place, key_lo, key_hi, source_partition)
 ORDER BY e.place;

-- name: insert_schema
-- Zero rows: the schema is stored already.
INSERT INTO mill.schemas (encoded, digest) VALUES (%(encoded)s, %(digest)s) ON CONFLICT (digest) DO NOTHING;

-- name: insert_stream
-- Always one row.
INSERT INTO mill.streams (graph_id, name, producer_id, schema_id)
SELECT %(graph_id)s, %(name)s, c.computation_id, s.schema_id
  FROM mill.computations AS c CROSS JOIN mill.schemas AS s
 WHERE c.graph_id = %(graph_id)s AND c.name = %(producer)s AND s.digest = %(digest)s;

-- name: insert_subscription
-- Always one row.
INSERT INTO mill.subscriptions (graph_id, stream_id, consumer_id, input, key_fields)
SELECT %(graph_id)s, s.stream_id, c.computation_id, %(input)s, %(key_fields)s
  FROM mill.streams AS s CROSS JOIN mill.computations AS c
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s AND c.graph_id = %(graph_id)s AND c.name = %(consumer)s;

-- name: insert_cursors
-- Adds a cursor for each pair of a consumer and a producer interval that a subscription joins. Zero rows: the graph
-- has no subscription.
INSERT INTO mill.cursors (consumer, producer)
SELECT DISTINCT c.interval_id, p.interval_id
  FROM mill.subscriptions AS u
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.intervals AS p ON p.computation_id = s.producer_id
  JOIN mill.intervals AS c ON c.computation_id = u.consumer_id
 WHERE u.graph_id = %(graph_id)s
ON CONFLICT DO NOTHING;

-- name: lock_intervals
-- Waits for the commits in flight. Locks in the same order as they do. Zero rows: the graph has no computation.
SELECT interval_id FROM mill.intervals WHERE graph_id = %(graph_id)s ORDER BY interval_id FOR UPDATE;

-- name: raise_version
-- Fences off every worker that knows an earlier version of the graph, and takes its intervals away. Always one row.
WITH raised AS (
    UPDATE mill.graphs SET version = version + 1, description = %(description)s::text::jsonb, deployed_at = now()
     WHERE graph_id = %(graph_id)s RETURNING graph_id, version
), fenced AS (
    UPDATE mill.intervals AS i SET graph_version = r.version, worker_id = NULL, sequencer = i.sequencer + 1
      FROM raised AS r WHERE i.graph_id = r.graph_id
)
SELECT version FROM raised;

-- name: read_injector
-- Reads an injector's id, its number of intervals, and the watermark that all of them have published. Always one row.
SELECT c.computation_id, count(*) AS places, min(i.low_watermark) AS published
  FROM mill.computations AS c JOIN mill.intervals AS i USING (computation_id)
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s GROUP BY c.computation_id;

-- name: join_intervals
-- New producers join at the watermark that their stream has published (I5). Zero rows: there are no new producers.
UPDATE mill.intervals
   SET joined = true, input_watermark = %(published)s::bigint, low_watermark = %(published)s::bigint
 WHERE computation_id = %(computation_id)s AND place >= %(first_place)s::integer;

-- name: join_cursors
-- Consumers read new producers from the watermark that the consumers have reached (I5). Zero rows: the new producers
-- have no consumers.
UPDATE mill.cursors AS k SET watermark = c.input_watermark
  FROM mill.intervals AS c, mill.intervals AS p
 WHERE k.consumer = c.interval_id AND k.producer = p.interval_id
   AND p.computation_id = %(computation_id)s AND p.place >= %(first_place)s::integer;

-- name: read_marks
-- Reads when a change of each computation takes effect, in µs: the server's clock, or its watermark if that is later
-- (`model/changed_meaning.py`). Zero rows: the graph has no computation.
SELECT c.name, greatest(mill.instant(clock_timestamp()),
                        max(i.input_watermark) FILTER (WHERE i.input_watermark < 4611686018427387904))
  FROM mill.computations AS c JOIN mill.intervals AS i USING (computation_id)
 WHERE c.graph_id = %(graph_id)s GROUP BY c.name;

-- name: read_watermark_to_join
-- Reads the latest watermark that the steps which are to read one more stream have reached. Always one row.
SELECT max(i.input_watermark) FROM mill.computations AS c JOIN mill.intervals AS i USING (computation_id)
 WHERE c.graph_id = %(graph_id)s AND c.name = ANY (%(consumer_names)s);

-- name: begin_united_source
-- A new source begins at the watermark of the steps that read it beside others (I5). Always at least one row.
UPDATE mill.intervals AS i
   SET input_watermark = greatest(i.input_watermark, %(reached)s::bigint),
       low_watermark = greatest(i.low_watermark, %(reached)s::bigint)
  FROM mill.computations AS c
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s AND i.computation_id = c.computation_id;

-- name: join_united_cursors
-- A step reads one more stream behind everything that its producers have committed (I3, I5). Zero rows: it reads these
-- producers already.
INSERT INTO mill.cursors (consumer, producer, seq, watermark)
SELECT DISTINCT c.interval_id, p.interval_id, p.bundle, p.low_watermark
  FROM mill.streams AS s
  JOIN mill.intervals AS p ON p.computation_id = s.producer_id
 CROSS JOIN (SELECT i.interval_id FROM mill.computations AS n JOIN mill.intervals AS i USING (computation_id)
              WHERE n.graph_id = %(graph_id)s AND n.name = %(consumer)s) AS c
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s
ON CONFLICT DO NOTHING;

-- name: read_behind
-- Finds a producer whose watermark is behind that of a step which is to read it. Zero rows: there is none.
SELECT mill.moment(p.low_watermark)::text, mill.moment(c.input_watermark)::text
  FROM mill.cursors AS k
  JOIN mill.intervals AS c ON c.interval_id = k.consumer
  JOIN mill.intervals AS p ON p.interval_id = k.producer
  JOIN mill.computations AS n ON n.computation_id = c.computation_id
  JOIN mill.streams AS s ON s.producer_id = p.computation_id
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s AND n.name = %(consumer)s AND n.graph_id = s.graph_id
   AND p.low_watermark < c.input_watermark
 ORDER BY p.low_watermark LIMIT 1;

-- name: read_reached
-- Reads the watermark that each computation has reached, as text: records before it have been judged. Zero rows: the
-- graph has no computation.
SELECT c.name, mill.moment(min(CASE c.kind WHEN 'injector' THEN i.low_watermark ELSE i.input_watermark END))::text
  FROM mill.computations AS c JOIN mill.intervals AS i USING (computation_id)
 WHERE c.graph_id = %(graph_id)s GROUP BY c.name;

-- name: raise_watermark_floors
-- The windows that are over stay over when the allowed lateness grows, and the ids that a deduplicate step has
-- forgotten stay forgotten (I9). An end that is set back sets a floor itself. Zero rows: all intervals have ended.
UPDATE mill.intervals AS i SET horizon_floor = greatest(i.horizon_floor, i.input_watermark - %(before_us)s::bigint)
  FROM mill.computations AS c
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s AND i.computation_id = c.computation_id
   AND i.input_watermark < 4611686018427387904;

-- name: raise_id_floors
-- The ids that are forgotten stay forgotten when the dedupe horizon grows (I9). Zero rows: the source has no ids.
UPDATE mill.intervals AS i SET horizon_floor = greatest(i.horizon_floor, latest.clock - %(before_us)s::bigint)
  FROM mill.computations AS c
  JOIN mill.intervals AS p USING (computation_id)
 CROSS JOIN LATERAL (SELECT max(r.clock) AS clock FROM mill.dedupe_runs AS r WHERE r.interval_id = p.interval_id) AS latest
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s AND i.interval_id = p.interval_id
   AND latest.clock < 4611686018427387904;

-- name: keep_runs_longer
-- Keeps the runs that have not expired until the longer horizon has passed. Zero rows: there are none.
UPDATE mill.dedupe_runs AS r SET expires_at = r.expires_at + %(longer_us)s::bigint
  FROM mill.computations AS c
  JOIN mill.intervals AS p USING (computation_id)
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s AND r.interval_id = p.interval_id
   AND r.expires_at >= (SELECT max(n.clock) FROM mill.dedupe_runs AS n WHERE n.interval_id = p.interval_id);

-- name: change_table_lateness
-- Zero rows: the computation has no result table.
UPDATE mill.result_tables AS t SET allowed_lateness_us = %(allowed_lateness_us)s::bigint
  FROM mill.computations AS c
 WHERE c.graph_id = %(graph_id)s AND c.name = %(computation)s AND t.computation_id = c.computation_id;

-- name: place_computation
-- Always one row.
UPDATE mill.computations SET place = %(place)s WHERE graph_id = %(graph_id)s AND name = %(computation)s;

-- name: change_schema
-- Always one row.
UPDATE mill.streams SET schema_id = (SELECT schema_id FROM mill.schemas WHERE digest = %(digest)s)
 WHERE graph_id = %(graph_id)s AND name = %(name)s;

-- name: join_consumer_cursors
-- A new consumer starts behind everything that its producers have committed, with their watermarks at these positions
-- (I3, I5). Zero rows: the computation is an injector.
INSERT INTO mill.cursors (consumer, producer, seq, watermark)
SELECT DISTINCT c.interval_id, p.interval_id, p.bundle, p.low_watermark
  FROM mill.computations AS n
  JOIN mill.intervals AS c USING (computation_id)
  JOIN mill.subscriptions AS u ON u.consumer_id = n.computation_id
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.intervals AS p ON p.computation_id = s.producer_id
 WHERE n.graph_id = %(graph_id)s AND n.name = %(computation)s;

-- name: join_consumer_intervals
-- A new consumer has no pending work, so it publishes its input watermark (I5). Zero rows: the computation is an
-- injector.
UPDATE mill.intervals AS i SET input_watermark = k.watermark, low_watermark = k.watermark
  FROM (SELECT n.consumer, min(n.watermark) AS watermark FROM mill.cursors AS n
          JOIN mill.intervals AS c ON c.interval_id = n.consumer
          JOIN mill.computations AS m USING (computation_id)
         WHERE m.graph_id = %(graph_id)s AND m.name = %(computation)s GROUP BY n.consumer) AS k
 WHERE i.interval_id = k.consumer;

-- name: change_result_table
-- Always one row.
UPDATE mill.result_tables SET value_columns = %(value_columns)s::text::jsonb
 WHERE graph_id = %(graph_id)s AND name = %(name)s;

-- name: change_retention
-- Always one row.
UPDATE mill.result_tables SET retention_us = %(retention_us)s::bigint, partition_us = %(partition_us)s::bigint
 WHERE graph_id = %(graph_id)s AND name = %(name)s;

-- name: read_columns
-- Reads the columns of a graph's table or view, in order. Zero rows: the relation does not exist.
SELECT a.attname FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = %(relation)s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum;

-- name: read_comments
-- Reads the comments on relations of a graph, and those on their columns. Zero rows: there are none.
SELECT c.relname, a.attname, d.description
  FROM pg_description AS d JOIN pg_class AS c ON c.oid = d.objoid AND d.classoid = 'pg_class'::regclass
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = d.objsubid AND d.objsubid > 0
 WHERE n.nspname = %(schema)s AND c.relname = ANY (%(relations)s::text[]);

-- name: insert_result_table
-- Always one row.
INSERT INTO mill.result_tables (graph_id, name, kind, computation_id, stream_id, key_columns, value_columns,
                                allowed_lateness_us, history, retention_us, partition_us)
SELECT %(graph_id)s, %(name)s, %(kind)s, c.computation_id, s.stream_id, %(key_columns)s::text::jsonb,
       %(value_columns)s::text::jsonb, %(allowed_lateness_us)s, %(history)s, %(retention_us)s::bigint,
       %(partition_us)s::bigint
  FROM mill.streams AS s CROSS JOIN mill.computations AS c
 WHERE s.graph_id = %(graph_id)s AND s.name = %(stream)s AND c.graph_id = %(graph_id)s AND c.name = %(computation)s;

-- name: find_relations
-- Finds names that are taken already in a graph's schema. Zero rows: all names are free.
SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = ANY (%(names)s);

-- name: read_intervals
-- Zero rows: the graph has no computation.
SELECT i.interval_id, c.name AS computation, i.place, i.key_lo, i.key_hi, i.source_partition, i.joined
  FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
 WHERE i.graph_id = %(graph_id)s ORDER BY c.place, i.place;

-- name: read_secret
-- Reads the secret from which a graph's names at brokers are derived. Always one row.
SELECT secret::text FROM mill.graphs WHERE graph_id = %(graph_id)s;

-- name: read_subscriptions
-- Zero rows: no stream is consumed.
SELECT u.subscription_id, s.name AS stream, c.name AS consumer, u.input
  FROM mill.subscriptions AS u
  JOIN mill.streams AS s USING (stream_id)
  JOIN mill.computations AS c ON c.computation_id = u.consumer_id
 WHERE u.graph_id = %(graph_id)s;

-- name: read_result_tables
-- Zero rows: the graph has no result table.
SELECT table_id, name, kind, key_columns, value_columns FROM mill.result_tables WHERE graph_id = %(graph_id)s;

-- name: read_revision
-- Reads the newest migration that has run, and the digest of all that have: tables of before have none. Zero rows: no
-- migration has run.
SELECT version_num, to_jsonb(v) ->> 'build' AS build FROM mill.alembic_version AS v;

-- name: read_headers_of
-- Reads the headers of a computation's intervals. Zero rows: the computation does not exist.
SELECT i.interval_id, i.sequencer, i.bundle FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
 WHERE i.graph_id = %(graph_id)s AND c.name = %(computation)s ORDER BY i.interval_id;

-- name: read_state
-- Reads all folded cells of an interval, key by key. Zero rows: the interval has no state.
SELECT key_hash, key, namespace, subkey, value FROM mill.keyed
 WHERE interval_id = %(interval)s AND kind = 'state' ORDER BY key_hash, key, namespace, subkey;

-- name: delete_state
-- Deletes all cells of some keys. Zero rows: the keys have no cells.
DELETE FROM mill.keyed AS k USING unnest(%(key_hashes)s, %(keys)s) AS gone (key_hash, key)
 WHERE k.interval_id = %(interval)s AND hashtextextended(k.key, 0) = hashtextextended(gone.key COLLATE "C", 0)
   AND k.key = gone.key COLLATE "C" AND k.kind = 'state' AND k.key_hash = gone.key_hash;

-- name: insert_state
-- Adds the cells that hold from the next bundle on. Zero rows: all cells have their defaults.
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
SELECT %(interval)s, 'state', e.namespace, e.key, e.subkey, e.key_hash, 4611686018427387904, %(bundle)s, e.value
  FROM unnest(%(key_hashes)s, %(keys)s, %(namespaces)s, %(subkeys)s, %(documents)s)
    AS e (key_hash, key, namespace, subkey, value);
