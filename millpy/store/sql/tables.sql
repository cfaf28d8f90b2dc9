-- name: look_at_table
-- Reads what has to be so for the changes of a table, and what its publication has of it. Before version 16, that names
-- generated columns, too, which are not in the log. One identifies the table and its place in the publication: another one
-- means that either was made anew. Behind it are the columns of the replica identities of its partitions, NULL if all are
-- FULL, and the table or partition that is unlogged, if any. Zero rows: there is no such table.
SELECT current_setting('wal_level'), pg_is_in_recovery(), c.relkind = 'p',
       (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute AS a
         WHERE a.attrelid = c.oid AND a.attname = ANY (p.attnames)
           AND (a.attgenerated = '' OR current_setting('server_version_num')::integer >= 160000)),
       p.rowfilter IS NOT NULL,
       (SELECT array_remove(ARRAY[CASE WHEN o.pubinsert THEN 'insert' END, CASE WHEN o.pubupdate THEN 'update' END,
                                  CASE WHEN o.pubdelete THEN 'delete' END, CASE WHEN o.pubtruncate THEN 'truncate' END],
                            NULL)
          FROM pg_publication AS o WHERE o.pubname = %(publication)s),
       (SELECT concat_ws('/', c.oid, o.oid, coalesce(
                  (SELECT min(r.oid) FROM pg_publication_rel AS r
                    WHERE r.prpubid = o.oid
                      AND (r.prrelid = c.oid OR r.prrelid IN (SELECT a.relid FROM pg_partition_ancestors(c.oid) AS a))),
                  (SELECT s.oid FROM pg_publication_namespace AS s
                    WHERE s.pnpubid = o.oid AND s.pnnspid = c.relnamespace)))
          FROM pg_publication AS o WHERE o.pubname = %(publication)s),
       (SELECT array_agg(DISTINCT a.attname::text)
          FROM pg_partition_tree(c.oid) AS t
          JOIN pg_class AS r ON r.oid = t.relid AND r.relkind = 'r'
          JOIN pg_index AS i
            ON i.indrelid = r.oid
           AND CASE r.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
          JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum = ANY (i.indkey::int2[])),
       (SELECT min(r.oid::regclass::text)
          FROM pg_class AS r
         WHERE r.relkind = 'r' AND r.relpersistence <> 'p'
           AND r.oid IN (SELECT c.oid UNION ALL SELECT t.relid FROM pg_partition_tree(c.oid) AS t))
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
  LEFT JOIN pg_publication_tables AS p
    ON p.pubname = %(publication)s AND p.schemaname = n.nspname AND p.tablename = c.relname
 WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p');

-- name: look_at_identity
-- Reads what would forbid to publish a table: without a replica identity, the server refuses to update and delete rows of
-- a table that is published, and with a virtual column in the identity, too, as virtual columns are never published. The
-- first one names the table, or the partition, without an identity; the last one says whether its publication is there
-- already, and has updates or deletes. Always one row.
SELECT min(r.oid::regclass::text) FILTER (WHERE r.relreplident <> 'f' AND NOT EXISTS (
           SELECT FROM pg_index AS i
            WHERE i.indrelid = r.oid AND i.indisvalid AND i.indimmediate
              AND CASE r.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END)),
       coalesce(bool_or(r.relreplident = 'f' AND EXISTS (
           SELECT FROM pg_attribute AS a WHERE a.attrelid = r.oid AND a.attgenerated = 'v' AND NOT a.attisdropped)), false),
       EXISTS (SELECT FROM pg_publication AS o WHERE o.pubname = %(publication)s AND (o.pubupdate OR o.pubdelete))
  FROM pg_class AS r
 WHERE r.relkind = 'r' AND r.oid IN (
       SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = %(schema)s AND c.relname = %(table)s
        UNION ALL
       SELECT p.relid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
        CROSS JOIN pg_partition_tree(c.oid) AS p
        WHERE n.nspname = %(schema)s AND c.relname = %(table)s);

-- name: find_unpublished_identity
-- Finds publications that lack a generated column of the replica identity of a table, or of a partition of it: from version
-- 18 on, the server refuses to update or delete its rows then. Zero rows: all can be changed.
SELECT o.pubname::text, r.oid::regclass::text, a.attname::text, a.attgenerated = 'v'
  FROM pg_class AS c
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (SELECT c.oid UNION SELECT t.relid FROM pg_partition_tree(c.oid) AS t) AS p (oid)
  JOIN pg_class AS r ON r.oid = p.oid AND r.relkind = 'r'
  JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attgenerated <> '' AND NOT a.attisdropped
 CROSS JOIN pg_publication AS o
 WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND current_setting('server_version_num')::integer >= 180000
   AND (o.pubupdate OR o.pubdelete)
   AND (r.relreplident = 'f' OR EXISTS (
        SELECT FROM pg_index AS i
         WHERE i.indrelid = r.oid AND a.attnum = ANY (i.indkey::int2[])
           AND CASE r.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END))
   AND EXISTS (
       SELECT FROM (SELECT r.oid UNION SELECT x.relid FROM pg_partition_ancestors(r.oid) AS x) AS u (oid)
         JOIN pg_class AS f ON f.oid = u.oid
         LEFT JOIN pg_publication_rel AS l ON l.prpubid = o.oid AND l.prrelid = u.oid
        WHERE (l.oid IS NOT NULL OR o.puballtables OR EXISTS (
               SELECT FROM pg_publication_namespace AS s WHERE s.pnpubid = o.oid AND s.pnnspid = f.relnamespace))
          AND NOT CASE WHEN l.prattrs IS NULL THEN a.attgenerated = 's' AND to_jsonb(o) ->> 'pubgencols' = 's'
                       ELSE a.attnum = ANY (l.prattrs::int2[]) END)
 ORDER BY 1, 2, 3 LIMIT 1;

-- name: look_at_polled_table
-- Reads the columns of a table that is polled. Zero rows: there is no such table.
SELECT (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute AS a
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p');

-- name: look_at_rights_on_table
-- Reads what a role, or this one, may do with a table: read it, read each column, see all rows, follow changes and publish
-- the table; the last three may be rights of a role that logs in as its member. Also reads whether the source has a slot,
-- or may get one, and whether somebody reads that. Zero rows: there is no such table, or no such role.
SELECT r.rolname::text,
       has_schema_privilege(r.oid, n.oid, 'USAGE') AND has_table_privilege(r.oid, c.oid, 'SELECT'),
       has_schema_privilege(r.oid, n.oid, 'USAGE') AND NOT EXISTS (
           SELECT FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                                           AND NOT has_column_privilege(r.oid, c.oid, a.attnum, 'SELECT')),
       NOT c.relrowsecurity OR r.rolsuper OR m.may_see,
       r.rolsuper OR m.may_follow,
       r.rolsuper OR m.may_publish,
       s.is_there OR s.taken < current_setting('max_replication_slots')::integer,
       s.is_active
  FROM pg_roles AS r CROSS JOIN pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (
       SELECT coalesce(bool_or(m.rolreplication), false) AS may_follow,
              coalesce(bool_or(m.rolbypassrls OR NOT c.relforcerowsecurity AND pg_has_role(m.oid, c.relowner, 'USAGE')),
                       false) AS may_see,
              coalesce(bool_or(pg_has_role(m.oid, c.relowner, 'USAGE')
                               AND has_database_privilege(m.oid, current_database(), 'CREATE')), false) AS may_publish
         FROM pg_roles AS m WHERE NOT m.rolsuper AND pg_has_role(m.oid, r.oid, 'MEMBER')) AS m
 CROSS JOIN (
       SELECT count(*) AS taken, coalesce(bool_or(starts_with(s.slot_name, %(slot)s)), false) AS is_there,
              coalesce(bool_or(s.active AND starts_with(s.slot_name, %(slot)s)), false) AS is_active
         FROM pg_replication_slots AS s) AS s
 WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND r.rolname = coalesce(%(role)s::text, current_user);

-- name: look_at_key
-- Reads a column, if one is given, and those of the primary key: the type without a size, the collation, and the schema of
-- the operators that compare its values in the order of ORDER BY. Zero rows: the table has neither.
WITH RECURSIVE key AS (
    SELECT k.place, a.attname, a.atttypid, a.attcollation
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     CROSS JOIN LATERAL (
           SELECT 0 AS place, a.attnum FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attname = %(column)s
            UNION ALL
           SELECT u.place, u.attnum FROM pg_index AS i
            CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS u (attnum, place)
            WHERE i.indrelid = c.oid AND i.indisprimary AND u.place <= i.indnkeyatts) AS k (place, attnum)
      JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.attnum AND a.attnum > 0 AND NOT a.attisdropped
     WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p')
), base AS (
    SELECT k.place, k.atttypid AS type FROM key AS k
     UNION ALL
    SELECT b.place, t.typbasetype FROM base AS b JOIN pg_type AS t ON t.oid = b.type WHERE t.typtype = 'd'
)
SELECT k.attname::text, format_type(k.atttypid, -1), quote_ident(cn.nspname) || '.' || quote_ident(co.collname),
       coalesce((SELECT pn.nspname::text FROM base AS b
                   JOIN pg_opclass AS c ON c.opcintype = b.type AND c.opcdefault
                   JOIN pg_am AS m ON m.oid = c.opcmethod AND m.amname = 'btree'
                   JOIN pg_amop AS o ON o.amopfamily = c.opcfamily AND o.amopstrategy = 5
                    AND o.amoplefttype = c.opcintype AND o.amoprighttype = c.opcintype
                   JOIN pg_operator AS p ON p.oid = o.amopopr
                   JOIN pg_namespace AS pn ON pn.oid = p.oprnamespace
                  WHERE b.place = k.place LIMIT 1), 'pg_catalog')
  FROM key AS k
  LEFT JOIN pg_collation AS co ON co.oid = k.attcollation
  LEFT JOIN pg_namespace AS cn ON cn.oid = co.collnamespace
 ORDER BY k.place;

-- name: look_at_slot
-- Reads a replication slot: whose it is, if not ours; whether it is lost; where it begins, which is NULL while a session
-- creates it, and the log ends; and, from version 17 on, why it is lost. Zero rows: there is none of this name.
SELECT CASE WHEN s.database IS NULL THEN 'a standby'
            WHEN s.database <> current_database() THEN 'database ' || s.database
            WHEN s.plugin <> 'pgoutput' THEN 'plug-in ' || s.plugin
            ELSE ''
       END,
       coalesce(s.wal_status, '') = 'lost',
       (s.confirmed_flush_lsn - '0/0'::pg_lsn)::bigint,
       (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint,
       coalesce(to_jsonb(s) ->> 'invalidation_reason', 'wal_removed')
  FROM pg_replication_slots AS s WHERE s.slot_name = %(slot)s;

-- name: create_slot
-- Always one row: where the slot begins. It waits for the transactions that are open.
SELECT (lsn - '0/0'::pg_lsn)::bigint FROM pg_create_logical_replication_slot(%(slot)s, 'pgoutput');

-- name: look_at_type
-- Reads what a type is made of. Zero rows: the type is gone.
SELECT t.typtype::text, t.typcategory::text, t.typbasetype::bigint, t.typelem::bigint, t.typdelim::text
  FROM pg_type AS t WHERE t.oid = %(type_oid)s;

-- name: read_snapshot
-- Always one row: what this transaction sees, the position of the log behind it, and a time before it, in µs.
SELECT pg_current_snapshot()::text, (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint,
       (extract(epoch FROM statement_timestamp()) * 1000000)::bigint;

-- name: flush_log
-- Always one row: where a message is in the log that is on the disk, with all before it, when this has committed. Nobody
-- reads the message. The setting is that of this transaction, so it does not wait for standbys.
SELECT pg_logical_emit_message(true, 'millpy', set_config('synchronous_commit', 'local', true));

-- name: find_open
-- Finds those of some transactions that are still open or prepared, and the oldest of them; a role that may not see the
-- sessions of others does not see since when. Zero rows: none is.
SELECT count(*), (array_agg(coalesce('that of pid ' || a.pid, 'the prepared one ' || quote_literal(p.gid))
                            ORDER BY coalesce(a.xact_start, p.prepared)))[1],
       coalesce(min(coalesce(a.xact_start, p.prepared))::text, 'a time that only pg_read_all_stats may see')
  FROM unnest(string_to_array(pg_current_snapshot()::text, ':')) WITH ORDINALITY AS s (part, place)
 CROSS JOIN LATERAL unnest(string_to_array(nullif(s.part, ''), ',')) AS o (xid)
  LEFT JOIN pg_stat_activity AS a ON a.backend_xid = o.xid::xid8::xid
  LEFT JOIN pg_prepared_xacts AS p ON p.transaction = o.xid::xid8::xid
 WHERE s.place = 3 AND o.xid = ANY (string_to_array(%(open)s, ',')) HAVING count(*) > 0;

-- name: end_reader_of_slot
-- Ends the session of an owner that has lost its interval. Zero rows: there is none.
SELECT pg_terminate_backend(s.active_pid) FROM pg_replication_slots AS s
 WHERE s.slot_name = %(slot)s AND s.active_pid IS NOT NULL;

-- name: look_at_reader_of_slot
-- Finds what reads a slot. Zero rows: nothing does.
SELECT s.active_pid FROM pg_replication_slots AS s WHERE s.slot_name = %(slot)s AND s.active;

-- name: note_slot
-- Notes the slot of a source, so that it is dropped with the source. Zero rows: it is noted.
INSERT INTO mill.table_slots (graph_id, source, slot)
SELECT g.graph_id, %(source)s, %(slot)s FROM mill.graphs AS g
 WHERE g.generation = %(generation)s
   AND g.family || CASE WHEN g.generation = 1 THEN '' ELSE '_' || g.generation END = %(graph)s
ON CONFLICT DO NOTHING;

-- name: find_unused_slots
-- Finds the slots of sources that are gone. Zero rows: there are none.
SELECT s.slot_name::text FROM pg_replication_slots AS s
 WHERE s.database = current_database() AND s.slot_name LIKE 'millpy\_own\_%%' AND NOT s.active
   AND NOT EXISTS (SELECT FROM mill.table_slots AS t WHERE t.slot = s.slot_name);

-- name: drop_slot
-- Zero rows: it is gone, or read.
SELECT pg_drop_replication_slot(s.slot_name) FROM pg_replication_slots AS s
 WHERE s.slot_name = %(slot)s AND NOT s.active;

-- name: look_at_slots
-- Reads how much of the log is kept by the slots of sources in this database, and by all others that nobody reads.
-- Zero rows: there is no such slot. A slot that is lost keeps neither log nor rows.
SELECT s.slot_name::text AS slot, o.is_source, t.source, g.name AS graph, s.active,
       coalesce(s.wal_status, 'lost') AS wal_status,
       coalesce(pg_current_wal_lsn() - s.restart_lsn, 0)::bigint AS bytes, s.xmin IS NOT NULL AS keeps_rows
  FROM pg_replication_slots AS s
  LEFT JOIN mill.table_slots AS t ON t.slot = s.slot_name
  LEFT JOIN mill.graphs AS g USING (graph_id)
 CROSS JOIN LATERAL (
    SELECT coalesce(s.database = current_database() AND s.slot_name LIKE 'millpy\_own\_%', false)
 ) AS o (is_source)
 WHERE NOT pg_is_in_recovery() AND (o.is_source OR NOT s.active AND s.wal_status IS DISTINCT FROM 'lost')
 ORDER BY 1;
