-- name: act_as_owner
-- Takes on the owner's role for this transaction, so that the owner owns what it creates. Zero rows: there are no
-- roles, or this role is the owner already or may not become it.
SELECT set_config('role', r.owner, true)
  FROM mill.roles AS r JOIN pg_roles AS o ON o.rolname = r.owner
 WHERE o.rolname <> current_user AND pg_has_role(o.oid, 'MEMBER');

-- name: may_deploy
-- Always one row.
SELECT has_table_privilege('mill.graphs', 'INSERT') AS may, current_user::text AS role;

-- name: read_roles
-- Zero rows: `millpy migrate --roles` has not run yet, or not since roles were renamed, or this is the copy of a database
-- on a server without them.
SELECT owner, worker, reader FROM mill.roles
 WHERE (SELECT count(*) FROM pg_roles WHERE rolname IN (owner, worker, reader)) = 3;

-- name: record_roles
-- Always one row.
INSERT INTO mill.roles (owner, worker, reader) VALUES (%(owner)s, %(worker)s, %(reader)s)
ON CONFLICT (alone) DO UPDATE SET owner = excluded.owner, worker = excluded.worker, reader = excluded.reader;

-- name: find_foreign
-- Finds millpy's objects that belong to another role than the owner, schemas first. Zero rows: there are none.
WITH spaces AS (
    SELECT n.oid, n.nspname, n.nspowner FROM pg_namespace AS n
     WHERE n.nspname IN ('mill', 'millpy')
        OR (n.nspname IN (SELECT g.name FROM mill.graphs AS g JOIN mill.result_tables AS t USING (graph_id))
            -- A graph cannot have these names, whatever mill.graphs says.
            AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('public', 'information_schema'))
)
SELECT kind, named FROM (
    SELECT 0 AS place, 'SCHEMA' AS kind, format('%%I', nspname) AS named, nspowner AS owner FROM spaces
     UNION ALL
    SELECT 1, CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, format('%%I.%%I', s.nspname, c.relname), c.relowner
      FROM pg_class AS c JOIN spaces AS s ON s.oid = c.relnamespace
     WHERE c.relkind IN ('r', 'p', 'v')
       AND (s.nspname IN ('mill', 'millpy')
            OR EXISTS (SELECT FROM mill.result_tables AS t JOIN mill.graphs AS g USING (graph_id)
                        WHERE g.name = s.nspname AND c.relname IN (t.name, t.name || '_status', t.name || '_live', t.name || '_history')))
     UNION ALL
    SELECT 2, 'ROUTINE', p.oid::regprocedure::text, p.proowner
      FROM pg_proc AS p JOIN spaces AS s ON s.oid = p.pronamespace WHERE s.nspname IN ('mill', 'millpy')
) AS found
 WHERE owner <> (SELECT oid FROM pg_roles WHERE rolname = %(owner)s)
 ORDER BY place, named;

-- name: find_ungranted
-- Finds result tables and histories that workers cannot write to, or not under row-level security: they are older than
-- the roles or their names; and whether they have a view. Zero rows: there are none.
SELECT g.name AS schema, t.name AS table, t.has_view
  FROM (SELECT graph_id, name, true AS has_view FROM mill.result_tables
         UNION ALL SELECT graph_id, name || '_history', false FROM mill.result_tables WHERE history <> '') AS t
  JOIN mill.graphs AS g USING (graph_id)
 WHERE to_regclass(format('%%I.%%I', g.name, t.name)) IS NOT NULL
   AND (NOT has_table_privilege(%(worker)s, format('%%I.%%I', g.name, t.name), 'INSERT')
        OR NOT EXISTS (SELECT FROM pg_policies AS p
                        WHERE (p.schemaname, p.tablename, p.policyname) = (g.name, t.name, %(policy)s)))
 ORDER BY 1, 2;

-- name: find_functions_of_views
-- Finds millpy's functions that millpy's views call, and the one that explains a watermark. Always at least one row.
SELECT DISTINCT format('%I.%I(%s)', n.nspname, p.proname, pg_get_function_identity_arguments(p.oid)) AS function
  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
 WHERE n.nspname IN ('mill', 'millpy')
   AND (p.proname IN ('explain_watermark', 'windows_by_key') OR EXISTS (
        SELECT FROM pg_depend AS d
          JOIN pg_rewrite AS r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
          JOIN pg_class AS c ON c.oid = r.ev_class
         WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid = p.oid
           AND c.relnamespace IN (to_regnamespace('mill'), to_regnamespace('millpy'))));
