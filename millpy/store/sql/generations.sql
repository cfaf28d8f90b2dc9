-- name: read_generations
-- Reads all generations of a graph with their watermarks and live workers, oldest first. Zero rows: the graph was
-- never deployed.
SELECT g.graph_id, g.name, g.generation, g.version,
       (SELECT coalesce(min(i.low_watermark), -4611686018427387904) FROM mill.intervals AS i WHERE i.graph_id = g.graph_id),
       (SELECT count(*) FROM mill.workers AS w WHERE w.graph_id = g.graph_id AND mill.alive(w.worker_id))
  FROM mill.graphs AS g WHERE g.family = %(family)s ORDER BY g.generation;

-- name: read_family
-- Zero rows: no graph has this name.
SELECT family FROM mill.graphs WHERE name = %(name)s;

-- name: find_claimed_names
-- Finds names that graphs of other families have, or would get at a switch. Zero rows: the names are free.
SELECT found.name FROM (
    SELECT o.name FROM mill.graphs AS o WHERE o.family <> %(family)s
     UNION
    SELECT o.family || '_' || o.generation FROM mill.graphs AS o
     WHERE o.family <> %(family)s AND EXISTS (SELECT FROM mill.graphs AS n WHERE n.family = o.family AND n.generation > 1)
) AS found
 WHERE found.name = ANY (%(names)s) ORDER BY found.name;

-- name: fence_graph
-- Fences off every worker of a graph, which itself does not change. Always one row.
WITH raised AS (
    UPDATE mill.graphs SET version = version + 1 WHERE graph_id = %(graph_id)s RETURNING graph_id, version
), fenced AS (
    UPDATE mill.intervals AS i SET graph_version = r.version, worker_id = NULL, sequencer = i.sequencer + 1
      FROM raised AS r WHERE i.graph_id = r.graph_id
)
SELECT version FROM raised;

-- name: read_actor
-- Always one row.
SELECT mill.actor();

-- name: rename_graph
-- Always one row.
UPDATE mill.graphs SET name = %(name)s WHERE graph_id = %(graph_id)s;

-- name: read_table_names
-- Each history comes behind its table. Zero rows: the graph has no result table.
SELECT t.name || n.ending AS name
  FROM mill.result_tables AS t CROSS JOIN unnest(ARRAY['', '_history']) AS n (ending)
 WHERE t.graph_id = %(graph_id)s AND (n.ending = '' OR t.history <> '') ORDER BY 1;

-- name: find_tables
-- Zero rows: the graph has no result table.
SELECT t.table_id FROM mill.result_tables AS t JOIN mill.graphs AS g USING (graph_id) WHERE g.name = %(name)s;

-- name: find_readers
-- Finds users' views and rules that read some relations of a schema, or name the type of their rows, as
-- millpy.as_of(NULL::factory.temperature_1h, …) does. Zero rows: there are none.
WITH ours AS (
    SELECT c.oid, c.reltype FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = %(schema)s AND c.relname = ANY (%(names)s)
)
SELECT DISTINCT v.oid::regclass::text
  FROM pg_depend AS d
  JOIN pg_rewrite AS r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
  JOIN pg_class AS v ON v.oid = r.ev_class
 WHERE ((d.refclassid = 'pg_class'::regclass AND d.refobjid IN (SELECT oid FROM ours))
     OR (d.refclassid = 'pg_type'::regclass AND d.refobjid IN (SELECT reltype FROM ours)))
   AND v.oid NOT IN (SELECT oid FROM ours)
 ORDER BY 1;

-- name: find_extras
-- Finds users' objects on some tables, and objects that depend on them. Zero rows: there are none.
WITH ours AS (
    SELECT c.oid, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = %(schema)s AND c.relname = ANY (%(names)s)
)
SELECT relname, what, name FROM (
    SELECT o.relname, 'index' AS what, x.relname AS name
      FROM ours AS o JOIN pg_index AS i ON i.indrelid = o.oid JOIN pg_class AS x ON x.oid = i.indexrelid
     WHERE NOT i.indisprimary
     UNION ALL
    SELECT o.relname, 'trigger', t.tgname FROM ours AS o JOIN pg_trigger AS t ON t.tgrelid = o.oid WHERE NOT t.tgisinternal
     UNION ALL
    SELECT o.relname, 'constraint', k.conname
      FROM ours AS o JOIN pg_constraint AS k ON k.conrelid = o.oid WHERE k.contype IN ('c', 'f', 'x')
     UNION ALL
    SELECT o.relname, 'foreign key', format('%%s (%%s)', k.conname, k.conrelid::regclass)
      FROM ours AS o JOIN pg_constraint AS k ON k.confrelid = o.oid WHERE k.contype = 'f' AND k.conrelid <> o.oid
     UNION ALL
    SELECT o.relname, 'publication', p.pubname
      FROM ours AS o JOIN pg_publication_rel AS r ON r.prrelid = o.oid JOIN pg_publication AS p ON p.oid = r.prpubid
     UNION ALL
    SELECT o.relname, 'statistics', s.stxname FROM ours AS o JOIN pg_statistic_ext AS s ON s.stxrelid = o.oid
     UNION ALL
    SELECT o.relname, 'rule', r.rulename FROM ours AS o JOIN pg_rewrite AS r ON r.ev_class = o.oid WHERE r.rulename <> '_RETURN'
     UNION ALL
    SELECT DISTINCT o.relname, 'function', d.objid::regprocedure::text
      FROM ours AS o JOIN pg_depend AS d ON d.refclassid = 'pg_class'::regclass AND d.refobjid = o.oid
     WHERE d.classid = 'pg_proc'::regclass
) AS found
 ORDER BY 1, 2, 3;

-- name: read_schema_grants
-- Reads rights on a schema, without its owner's. Zero rows: there are none.
SELECT a.grantee::regrole::text, a.grantee = 0, a.privilege_type, a.is_grantable
  FROM pg_namespace AS n CROSS JOIN LATERAL aclexplode(n.nspacl) AS a
 WHERE n.nspname = %(schema)s AND a.grantee <> n.nspowner;

-- name: read_grants
-- Reads rights on some relations and their columns (empty: the whole relation), without their owner's. Zero rows:
-- there are none.
WITH ours AS (
    SELECT c.* FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = %(schema)s AND c.relname = ANY (%(names)s)
)
SELECT o.relname, a.grantee::regrole::text, a.grantee = 0, a.privilege_type, a.is_grantable, '' AS column
  FROM ours AS o CROSS JOIN LATERAL (SELECT o.relacl AS acl, o.relowner AS owner) AS held
 CROSS JOIN LATERAL aclexplode(held.acl) AS a WHERE a.grantee <> held.owner
 UNION ALL
SELECT o.relname, a.grantee::regrole::text, a.grantee = 0, a.privilege_type, a.is_grantable, t.attname
  FROM ours AS o JOIN pg_attribute AS t ON t.attrelid = o.oid AND t.attnum > 0 AND NOT t.attisdropped
 CROSS JOIN LATERAL aclexplode(t.attacl) AS a WHERE a.grantee <> o.relowner;

-- name: read_guards
-- Reads the row-level security of some relations. Zero rows: the relations do not exist.
SELECT c.relname, c.relrowsecurity, c.relforcerowsecurity
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = ANY (%(names)s);

-- name: read_policies
-- Zero rows: there are none.
SELECT tablename, policyname, permissive, roles::text[], cmd, qual, with_check FROM pg_policies
 WHERE schemaname = %(schema)s AND tablename = ANY (%(names)s);

-- name: hold_graph
-- Waits for workers that register, and keeps others from registering until the end of this transaction. Zero rows: the
-- graph is gone.
SELECT graph_id FROM mill.graphs WHERE name = %(name)s FOR UPDATE;

-- name: forget_state
-- Zero rows: the interval has no folded rows.
DELETE FROM mill.keyed WHERE interval_id = %(interval)s;

-- name: forget_intervals
-- Deletes the data of intervals that is not deleted with their own rows. Rows in the rings stay until their slots
-- are emptied. Zero rows: no release was requested.
WITH c AS (
    DELETE FROM mill.cursors WHERE consumer = ANY (%(intervals)s) OR producer = ANY (%(intervals)s)
), s AS (
    DELETE FROM mill.last_segments WHERE producer = ANY (%(intervals)s)
), d AS (
    DELETE FROM mill.dead_letters WHERE interval_id = ANY (%(intervals)s)
), l AS (
    DELETE FROM mill.late_records WHERE interval_id = ANY (%(intervals)s)
), p AS (
    DELETE FROM mill.pauses WHERE interval_id = ANY (%(intervals)s)
), f AS (
    DELETE FROM mill.archive_files WHERE interval_id = ANY (%(intervals)s)
), g AS (
    DELETE FROM mill.archive_garbage WHERE interval_id = ANY (%(intervals)s)
), q AS (
    DELETE FROM mill.source_states WHERE interval_id = ANY (%(intervals)s)
)
DELETE FROM mill.releases WHERE interval_id = ANY (%(intervals)s);

-- name: forget_graph
-- Also deletes what refers to the graph's row. Always one row.
DELETE FROM mill.graphs WHERE graph_id = %(graph_id)s;

-- name: count_open_records
-- Counts dead letters and late records of a graph that are not settled, and messages that are not delivered. Always
-- one row.
SELECT (SELECT count(*) FROM mill.dead_letters AS d JOIN mill.intervals AS i USING (interval_id)
         WHERE i.graph_id = %(graph_id)s AND d.state IN ('open', 'requested')),
       (SELECT count(*) FROM mill.late_records AS l JOIN mill.intervals AS i USING (interval_id)
         WHERE i.graph_id = %(graph_id)s AND l.state IN ('open', 'requested')),
       (SELECT coalesce(sum(s.messages + s.refused), 0)::bigint FROM millpy.sinks AS s JOIN mill.intervals AS i USING (interval_id)
         WHERE i.graph_id = %(graph_id)s);

-- name: read_partitions
-- Reads a graph's source streams, their source partitions, and the kind of each source. Zero rows: the graph
-- has no source.
SELECT c.name, p.partition, c.computation #>> '{identity,source,kind}'
  FROM mill.graphs AS g
 CROSS JOIN LATERAL jsonb_each(g.description -> 'computations') AS c (name, computation)
 CROSS JOIN LATERAL jsonb_array_elements_text(c.computation -> 'partitions') AS p (partition)
 WHERE g.graph_id = %(graph_id)s AND c.computation ->> 'kind' = 'injector' ORDER BY c.name, p.partition;
