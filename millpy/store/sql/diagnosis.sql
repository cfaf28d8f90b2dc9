-- The queries of `millpy doctor`. They need no special rights: a value that the role may not read is null.

-- name: look_at_server
-- Reads version, settings, connections and this role. Always one row.
SELECT current_setting('server_version_num')::integer AS version,
       current_setting('fsync') AS fsync,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_standby_names') AS synchronous_standby_names,
       current_setting('max_connections')::integer AS max_connections,
       current_setting('superuser_reserved_connections')::integer AS reserved_connections,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')::integer AS connections,
       pg_size_bytes(current_setting('max_wal_size')) AS wal_bytes_max,
       extract(epoch FROM current_setting('checkpoint_timeout')::interval)::double precision AS checkpoint_s,
       current_setting('autovacuum') AS autovacuum,
       pg_database_size(current_database()) AS database_bytes,
       current_setting('is_superuser') AS is_superuser,
       current_user::text AS role,
       pg_backend_pid() AS backend_pid,
       inet_server_addr()::text AS address,
       coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false) AS encrypted,
       extract(epoch FROM clock_timestamp())::double precision AS server_time,
       pg_is_in_recovery() AS in_recovery,
       CASE WHEN pg_has_role(current_user, 'pg_read_all_settings', 'MEMBER')
            THEN current_setting('data_directory') END AS data_directory,
       EXISTS (SELECT FROM pg_class WHERE relname = 'alembic_version' AND relnamespace = to_regnamespace('mill')) AS migrated;

-- name: look_at_settings
-- Finds defaults of this database and role that change how sessions behave. Zero rows: all have the expected value.
SELECT name, reset_val AS value FROM pg_settings
 WHERE (name = 'default_transaction_isolation' AND reset_val <> 'read committed')
    OR (name = 'default_transaction_read_only' AND reset_val <> 'off')
    OR (name = 'row_security' AND reset_val <> 'on')
    OR (name = 'session_replication_role' AND reset_val <> 'origin')
    OR (name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_session_timeout') AND reset_val <> '0')
 ORDER BY name;

-- name: look_for_old_snapshots
-- Finds what keeps old rows from being vacuumed, oldest first. In another database that is only what has an id: each
-- snapshot here knows it as open. Zero rows: nothing has done so for longer than a minute.
SELECT 'session' AS kind, pid::text AS name, usename::text AS role, application_name AS application, state,
       extract(epoch FROM clock_timestamp() - xact_start)::double precision AS age_s
  FROM pg_stat_activity
 WHERE xact_start < clock_timestamp() - interval '1 minute'
       AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL AND datname = current_database())
       AND backend_type = 'client backend'
 UNION ALL
SELECT 'prepared transaction', gid, owner::text, '', 'prepared in database ' || database,
       extract(epoch FROM clock_timestamp() - prepared)::double precision
  FROM pg_prepared_xacts
 ORDER BY age_s DESC;

-- name: look_at_workers
-- Reads workers and the number of intervals that each owns. Zero rows: no worker has run, or all have left.
SELECT g.name AS graph, w.worker_id::text AS worker, w.host, w.pid,
       mill.alive(w.lease_deadline, w.lease_s) AS live,
       extract(epoch FROM w.lease_deadline - clock_timestamp())::double precision AS lease_left_s,
       (SELECT count(*) FROM mill.intervals AS i WHERE i.worker_id = w.worker_id)::integer AS intervals
  FROM mill.workers AS w JOIN mill.graphs AS g USING (graph_id)
 ORDER BY g.name, w.registered_at;

-- name: look_at_clocks
-- Reads the latest report of each live worker that does not follow the database's clock. Zero rows: all workers follow
-- it.
SELECT g.name AS graph, w.worker_id::text AS worker, w.host, said.kind, (said.detail ->> 'ahead_s')::double precision AS ahead_s,
       extract(epoch FROM clock_timestamp() - said.at)::double precision AS since_s
  FROM mill.workers AS w
  JOIN mill.graphs AS g USING (graph_id)
 CROSS JOIN LATERAL (SELECT e.kind, e.detail, e.at FROM mill.events AS e
                      WHERE e.graph_id = w.graph_id AND e.detail ->> 'worker' = w.worker_id::text
                        AND e.kind IN ('clock_agrees', 'clock_doubted', 'clock_followed', 'clock_refused', 'clock_settled')
                      ORDER BY e.event_id DESC LIMIT 1) AS said
 WHERE mill.alive(w.lease_deadline, w.lease_s) AND said.kind IN ('clock_refused', 'clock_doubted')
 ORDER BY g.name, w.registered_at;

-- name: look_at_graphs
-- Reads each graph with its intervals without an owner and its unfolded deltas, apart from archives. Zero rows: no graph
-- is deployed.
SELECT g.name AS graph, g.generation, g.name <> g.family AS beside, count(*)::integer AS intervals,
       count(*) FILTER (WHERE NOT mill.alive(w.lease_deadline, w.lease_s))::integer AS ownerless,
       bool_and(i.low_watermark >= 4611686018427387904) AS finished,
       coalesce(sum(d.bytes), 0)::bigint AS unfolded_bytes
  FROM mill.graphs AS g
  JOIN mill.intervals AS i USING (graph_id)
  JOIN mill.computations AS c ON c.computation_id = i.computation_id AND c.kind <> 'archive'
  LEFT JOIN mill.workers AS w ON w.worker_id = i.worker_id
  LEFT JOIN LATERAL (SELECT sum(d.bytes) AS bytes FROM mill.deltas AS d
                      WHERE d.interval_id = i.interval_id AND d.bundle > i.folded_bundle) AS d ON true
 GROUP BY g.graph_id ORDER BY g.name;

-- name: look_at_rings
-- Reads each ring: the number of slots in use, and the oldest slot that is still needed. Always three rows.
SELECT e.ring, count(*) FILTER (WHERE e.state <> 'free')::integer AS taken, count(*)::integer AS slots,
       count(to_regclass(format('mill.%I', e.ring || '_' || e.slot)))::integer AS partitions,
       sum(pg_total_relation_size(to_regclass(format('mill.%I', e.ring || '_' || e.slot))))::bigint AS bytes,
       (array_agg(e.slot ORDER BY e.started_at) FILTER (WHERE n.needed))[1]::integer AS oldest_needed,
       extract(epoch FROM clock_timestamp() - min(e.started_at) FILTER (WHERE n.needed))::double precision AS oldest_needed_s
  FROM mill.epochs AS e
  LEFT JOIN LATERAL (SELECT NOT mill.unneeded(e.ring, e.slot) AS needed WHERE e.state = 'filled') AS n ON true
 GROUP BY e.ring ORDER BY e.ring;

-- name: look_who_needs_segments
-- Finds the consumers that have not read all segments of a slot. Zero rows: the slot is not needed.
SELECT DISTINCT g.name AS graph, c.name AS computation
  FROM mill.subscriptions AS u
  JOIN mill.streams AS t ON t.stream_id = u.stream_id
  JOIN mill.intervals AS p ON p.computation_id = t.producer_id
  JOIN mill.intervals AS i ON i.computation_id = u.consumer_id
  JOIN mill.cursors AS k ON k.consumer = i.interval_id AND k.producer = p.interval_id
  JOIN mill.computations AS c ON c.computation_id = u.consumer_id
  JOIN mill.graphs AS g ON g.graph_id = c.graph_id
 WHERE EXISTS (SELECT FROM mill.segments AS s WHERE s.slot = %(slot)s AND s.subscription_id = u.subscription_id
                  AND s.producer = p.interval_id AND s.seq > k.seq)
 ORDER BY 1, 2;

-- name: look_who_needs_deltas
-- Finds the computations with unfolded deltas in a slot. Zero rows: the slot is not needed.
SELECT DISTINCT g.name AS graph, c.name AS computation
  FROM mill.intervals AS i
  JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = c.graph_id
 WHERE EXISTS (SELECT FROM mill.deltas AS d
                WHERE d.slot = %(slot)s AND d.interval_id = i.interval_id AND d.bundle > i.folded_bundle)
 ORDER BY 1, 2;

-- name: look_who_needs_dedupe_runs
-- Finds the sources whose dedupe ids in a slot have not expired. Zero rows: the slot is not needed.
SELECT DISTINCT g.name AS graph, c.name AS computation
  FROM mill.intervals AS i
  JOIN mill.computations AS c USING (computation_id)
  JOIN mill.graphs AS g ON g.graph_id = c.graph_id
 CROSS JOIN LATERAL (SELECT max(r.clock) AS clock, max(r.bundle) FILTER (WHERE r.whole) AS whole
                       FROM mill.dedupe_runs AS r WHERE r.interval_id = i.interval_id) AS latest
 WHERE EXISTS (SELECT FROM mill.dedupe_runs AS r
                WHERE r.slot = %(slot)s AND r.interval_id = i.interval_id AND r.expires_at >= latest.clock
                  AND r.bundle >= coalesce(latest.whole, 0))
 ORDER BY 1, 2;

-- name: look_at_joins
-- Reads each join with buffered records: their bytes as stored, and how far its slowest producer is behind the fastest
-- one. Zero rows: no join keeps records.
SELECT j.graph, j.computation, sum(j.bytes)::bigint AS bytes, max(k.apart_s) AS apart_s,
       (array_agg(k.slowest ORDER BY k.apart_s DESC))[1] AS slowest
  FROM millpy.joins AS j
 CROSS JOIN LATERAL (
       SELECT (least(max(c.watermark), 4611686018427387904) - min(c.watermark)) / 1e6::double precision AS apart_s,
              (array_agg(p.computation ORDER BY c.watermark))[1] AS slowest
         FROM mill.cursors AS c JOIN mill.places AS p ON p.interval_id = c.producer
        WHERE c.consumer = j.interval_id) AS k
 GROUP BY j.graph, j.computation ORDER BY 1, 2;

-- name: look_at_lookups
-- Reads each lookup table, over the live workers: the newest version, and the longest failure. Zero rows: there is none.
SELECT l.graph, l.table_name, count(*) AS workers, count(*) FILTER (WHERE l.version IS NULL) AS waiting,
       max(l.rows) AS rows, max(l.bytes) AS bytes, max(l.misfits) AS misfits, min(nullif(l.misfit, '')) AS misfit,
       min(l.loaded_at) AS loaded_at, min(array_to_string(l.computations, ', ')) AS computations,
       min(nullif(l.error, '')) AS error,
       extract(epoch FROM clock_timestamp() - min(l.failing_since))::double precision AS failing_s
  FROM millpy.lookups AS l GROUP BY l.graph, l.table_name ORDER BY 1, 2;

-- name: look_at_sinks
-- Reads the sinks with an outbox: what waits, for how long, what is not connected, and what is refused. Zero rows: there is none.
SELECT s.graph, s.sink, sum(s.messages)::bigint AS messages, sum(s.bytes)::bigint AS bytes,
       extract(epoch FROM clock_timestamp() - min(s.waiting_since))::double precision AS waits_s,
       count(*) FILTER (WHERE s.state = 'disconnected') AS disconnected,
       min(s.connection_since) FILTER (WHERE s.state = 'disconnected') AT TIME ZONE 'UTC' AS since,
       sum(s.attempts) FILTER (WHERE s.state = 'disconnected')::bigint AS attempts,
       min(s.disconnected_because) FILTER (WHERE s.state = 'disconnected') AS why, sum(s.refused)::bigint AS refused,
       min(s.refused_since) AT TIME ZONE 'UTC' AS refused_since, min(s.refused_because) AS refused_because,
       sum(s.parked_keys)::bigint AS parked_keys
  FROM millpy.sinks AS s WHERE s.kind = 'outbox' GROUP BY s.graph, s.sink ORDER BY 1, 2;

-- name: look_at_window_triggers
-- Reads the triggers of windowed steps that are not the default. Zero rows: all windows fire at their end.
SELECT g.name AS graph, c.name AS computation, c.described #> '{identity,trigger}' AS trigger,
       (c.described #>> '{settings,allowed_lateness_us}')::bigint AS allowed_lateness_us
  FROM mill.graphs AS g
 CROSS JOIN LATERAL jsonb_each(g.description -> 'computations') AS c (name, described)
 WHERE c.described #>> '{identity,kind}' = 'window'
   AND c.described #> '{identity,trigger}' <> '{"kind": "after_watermark"}'
 ORDER BY 1, 2;

-- name: look_at_held_windows
-- Finds the windowed steps of which windows hold the low watermark after their end, because their triggers have not
-- fired. It reads only intervals whose low watermark is behind their input. Zero rows: no window does.
SELECT p.graph, p.computation, count(*)::bigint AS windows, sum(f.records)::bigint AS records,
       max(least(p.input_watermark, f.over_at) - f.ends_at) / 1e6::double precision AS held_s,
       mill.moment(max(f.over_at))::text AS over_at
  FROM mill.places AS p
 CROSS JOIN LATERAL (
       SELECT split_part(e.subkey, '/', 2)::bigint AS ends_at, e.fire_at AS over_at,
              coalesce((e.value #>> '{firing,since}')::bigint, 0) AS records
         FROM mill.entries AS e
        WHERE e.interval_id = p.interval_id AND e.kind = 'window' AND e.value #>> '{firing,holds}' = 'true') AS f
 WHERE p.kind = 'stage' AND p.oldest_work < p.input_watermark
 GROUP BY p.graph, p.computation ORDER BY 1, 2;

-- name: look_at_open_windows
-- Counts the stored windows of each windowed step, up to a million of an interval, and those of them that end after its
-- low watermark. Zero rows: no step has windows.
SELECT g.name AS graph, c.name AS computation,
       g.description #> ARRAY['computations', c.name, 'identity'] AS identity,
       sum(f.windows)::bigint AS windows, sum(f.unfired)::bigint AS unfired
  FROM mill.graphs AS g
  JOIN mill.computations AS c USING (graph_id)
  JOIN mill.intervals AS i USING (computation_id)
 CROSS JOIN LATERAL (
       SELECT count(*) AS windows, count(*) FILTER (WHERE w.ends_at > i.low_watermark) AS unfired
         FROM (SELECT split_part(k.subkey, '/', 2)::bigint AS ends_at FROM mill.keyed AS k
                WHERE k.interval_id = i.interval_id AND k.kind = 'window' LIMIT 1000000) AS w) AS f
 WHERE g.description #>> ARRAY['computations', c.name, 'identity', 'kind'] = 'window'
 GROUP BY 1, 2, 3 ORDER BY 1, 2;

-- name: look_at_rights
-- Reads the rights of this role. Always one row. The catalog answers everyone; to_regclass() needs USAGE on the schema.
SELECT has_database_privilege(current_database(), 'CREATE') AS may_create_schemas,
       coalesce(has_schema_privilege(to_regnamespace('mill'), 'USAGE'), false) AS may_use_mill,
       coalesce((SELECT has_table_privilege(c.oid, 'UPDATE') FROM pg_class AS c
                  WHERE c.relname = 'intervals' AND c.relnamespace = to_regnamespace('mill')), false) AS may_commit,
       coalesce((SELECT has_table_privilege(c.oid, 'INSERT') FROM pg_class AS c
                  WHERE c.relname = 'deltas' AND c.relnamespace = to_regnamespace('mill')), false) AS may_append,
       coalesce(has_schema_privilege(to_regnamespace('millpy'), 'USAGE'), false) AS may_read_views,
       pg_has_role(current_user, (SELECT nspowner FROM pg_namespace WHERE nspname = 'mill'), 'MEMBER') AS is_owner;

-- name: look_at_logins
-- Finds the logins that run workers here now. Zero rows: this role can see none.
SELECT DISTINCT a.usename::text AS login, r.rolsuper AS superuser,
       pg_has_role(a.usesysid, (SELECT nspowner FROM pg_namespace WHERE nspname = 'mill'), 'MEMBER') AS owns
  FROM pg_stat_activity AS a JOIN pg_roles AS r ON r.oid = a.usesysid
 WHERE a.datname = current_database() AND a.application_name = 'millpy commit' ORDER BY 1;

-- name: look_at_result_tables
-- Tells whether each result table and history exists, and whether the worker's role can write to it (null without
-- roles). Zero rows: there are no result tables.
SELECT g.name AS graph, t.name AS table, c.oid IS NOT NULL AS found,
       has_table_privilege(w.oid, c.oid, 'INSERT') AND has_table_privilege(w.oid, c.oid, 'UPDATE')
       AND has_table_privilege(w.oid, c.oid, 'DELETE') AND has_table_privilege(w.oid, c.oid, 'SELECT') AS granted,
       NOT c.relrowsecurity OR w.rolsuper OR w.rolbypassrls OR pg_has_role(w.oid, c.relowner, 'MEMBER') OR EXISTS (
           SELECT FROM pg_policy AS p
            WHERE p.polrelid = c.oid AND p.polcmd = '*' AND p.polpermissive AND p.polroles && ARRAY[w.oid, 0::oid]) AS let_in
  FROM (SELECT graph_id, name FROM mill.result_tables
         UNION ALL SELECT graph_id, name || '_history' FROM mill.result_tables WHERE history <> '') AS t
  JOIN mill.graphs AS g USING (graph_id)
  LEFT JOIN pg_class AS c ON c.oid = to_regclass(format('%I.%I', g.name, t.name))
  LEFT JOIN pg_roles AS w ON w.rolname = (SELECT worker FROM mill.roles)
 ORDER BY 1, 2;

-- name: look_at_triggers
-- Finds functions of users' triggers on result tables that set no search_path and, as far as their text shows, name a
-- table or function without its schema: the search_path of a worker's connection does not lead to it. Zero rows: there
-- are none.
SELECT DISTINCT format('%I.%I', g.name, t.name) AS table, f.oid::regproc::text AS function, named.name[1] AS name
  FROM (SELECT graph_id, name FROM mill.result_tables
         UNION ALL SELECT graph_id, name || '_history' FROM mill.result_tables WHERE history <> '') AS t
  JOIN mill.graphs AS g USING (graph_id)
  JOIN pg_trigger AS r ON r.tgrelid = to_regclass(format('%I.%I', g.name, t.name)) AND NOT r.tgisinternal
  JOIN pg_proc AS f ON f.oid = r.tgfoid
  JOIN pg_language AS l ON l.oid = f.prolang AND l.lanname IN ('plpgsql', 'sql')
 CROSS JOIN LATERAL regexp_matches(
       regexp_replace(f.prosrc, '[-]{2}[^\n]*', '', 'g'),
       '(?:^|[^\w.])(?:insert\s+into|update|delete\s+from|from|join|perform|:=|select(?!\s+from\M)|call)\s+"?([a-z_]\w*)"?(?!\s*\.|\w)',
       'gi') AS named (name)
 WHERE NOT coalesce(f.proconfig::text LIKE '%search_path=%', false)
   AND lower(named.name[1]) IN (
       SELECT relname::text FROM pg_class WHERE relnamespace NOT IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace)
       UNION ALL
       SELECT proname::text FROM pg_proc WHERE pronamespace <> 'pg_catalog'::regnamespace)
   AND NOT EXISTS (SELECT FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relname = lower(named.name[1]))
   AND NOT EXISTS (SELECT FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = lower(named.name[1]))
 ORDER BY 1, 2, 3;

-- name: look_at_dead_letters
-- Counts dead letters and late records of the last hour by stream, most first, without those that were replayed or
-- discarded; and those since the beginning that were not stored. Zero rows: there were none. An index on time serves
-- statement_timestamp(); clock_timestamp() may change from row to row, so that all rows would be read.
SELECT kind, graph, stream, count(*)::bigint AS count,
       (SELECT coalesce(sum(r.not_kept), 0)::bigint FROM millpy.retention AS r
         WHERE r.graph = found.graph AND r.stream = found.stream
           AND r.table_name = CASE kind WHEN 'dead letter' THEN 'dead_letters' ELSE 'late_records' END) AS not_kept
  FROM (SELECT 'dead letter' AS kind, graph, stream FROM millpy.dead_letters
         WHERE dead_lettered_at > statement_timestamp() - interval '1 hour' AND state IN ('open', 'requested')
         UNION ALL
        SELECT 'late record', graph, stream FROM millpy.late_records
         WHERE recorded_at > statement_timestamp() - interval '1 hour' AND state IN ('open', 'requested')) AS found
 GROUP BY kind, graph, stream ORDER BY count DESC;

-- name: look_at_standstills
-- Finds paused sources and computations with parked keys, with one of the reasons, and generations that Spark computes
-- without a live driver. Zero rows: nothing is paused or parked, or waits for a driver.
SELECT 'source' AS kind, graph, stream AS name, count(*)::bigint AS count, min(paused_because) AS reason
  FROM millpy.sources WHERE state = 'paused' GROUP BY graph, stream
 UNION ALL
SELECT 'keys', graph, computation, count(*)::bigint, min(detail) FROM millpy.parked GROUP BY graph, computation
 UNION ALL
SELECT 'engine', g.name, '', 1, '' FROM mill.graphs AS g
 WHERE g.engine = 'spark' AND NOT EXISTS (SELECT FROM mill.workers AS w
                                           WHERE w.graph_id = g.graph_id AND w.engine = 'spark'
                                              AND mill.alive(w.lease_deadline, w.lease_s))
 ORDER BY kind DESC, graph, name;

-- name: look_at_balance
-- Finds where the accounting does not add up (I8). Zero rows: it adds up everywhere.
SELECT graph, stream, coalesce(consumer, source_partition, result_table) AS part FROM millpy.accounting WHERE NOT balanced;

-- name: look_at_archives
-- Reads each archive, what waits for it, and why its place cannot be written, if that was the last news. Zero rows: no
-- graph has an archive.
SELECT a.graph, a.archive, a.pending, a.pending_bytes, a.live, last.why
  FROM millpy.archive AS a
  LEFT JOIN LATERAL (SELECT CASE e.kind WHEN 'archives_held' THEN e.detail ->> 'why' END AS why FROM millpy.events AS e
                      WHERE e.graph = a.graph AND e.kind IN ('archives_held', 'archives_resumed')
                      ORDER BY e.at DESC LIMIT 1) AS last ON true
 ORDER BY a.graph, a.archive;

-- name: look_at_refused_results
-- Finds the result tables and sinks that a live worker waits for, because they refuse its turns. It tells that again
-- after an hour at most, unless another worker writes the table now. Zero rows: none does.
SELECT last.graph, last.refused, last.detail ->> 'since' AS since, (last.detail ->> 'attempts')::bigint AS attempts,
       last.detail ->> 'why' AS why, last.detail ->> 'hint' AS hint
  FROM (SELECT DISTINCT ON (e.graph, e.detail ->> 'table', e.detail ->> 'worker')
               e.graph, e.detail ->> 'table' AS refused, e.detail ->> 'worker' AS worker, e.kind, e.detail
          FROM millpy.events AS e
         WHERE e.kind IN ('results_refused', 'results_written') AND e.at > statement_timestamp() - interval '90 min'
         ORDER BY e.graph, e.detail ->> 'table', e.detail ->> 'worker', e.event_id DESC) AS last
  JOIN millpy.workers AS w ON w.worker_id::text = last.worker AND w.live
 WHERE last.kind = 'results_refused' ORDER BY last.graph, last.refused, since;

-- name: look_at_disorder
-- Reads each source partition that learns its disorder bound. `within` is the share of its newest records that
-- max_disorder covers, with the whole of the bucket in which max_disorder is. Zero rows: no source has a percentile.
SELECT d.graph, d.stream, d.source_partition, d.percentile, d.max_disorder::text AS max_disorder, d.records,
       d.late_by_percentile,
       coalesce(max(h.share) FILTER (WHERE h.lag <= d.max_disorder * 1.125 + interval '1 ms'), 0) AS within
  FROM millpy.disorder AS d
  LEFT JOIN millpy.disorder_histogram AS h USING (graph, stream, source_partition)
 WHERE d.percentile IS NOT NULL
 GROUP BY d.graph, d.stream, d.source_partition, d.percentile, d.max_disorder, d.records, d.late_by_percentile
 ORDER BY d.graph, d.stream, d.source_partition;

-- name: look_at_sites
-- Reads each source partition with watermarks by site: its number of sites, the records of those beyond the bound, and
-- the sites that have been silent for `after_s` while another one was not. `silent_most` is the longest silent.
-- Zero rows: no source has watermarks by site.
SELECT s.graph, s.stream, s.source_partition, count(s.site) AS sites, sum(s.records_beyond)::bigint AS records_beyond,
       count(*) FILTER (WHERE s.silent) AS silent,
       (array_agg(s.site ORDER BY s.last_arrived_at, s.site) FILTER (WHERE s.silent))[1] AS silent_most,
       (min(s.last_arrived_at) FILTER (WHERE s.silent))::text AS silent_since
  FROM (SELECT w.*, w.watermark < 'infinity' AND w.last_arrived_at < clock_timestamp() - make_interval(secs => %(after_s)s)
                    AND max(w.last_arrived_at) OVER source >= clock_timestamp() - make_interval(secs => %(after_s)s) AS silent
          FROM millpy.site_watermarks AS w WINDOW source AS (PARTITION BY w.graph, w.stream, w.source_partition)) AS s
 GROUP BY s.graph, s.stream, s.source_partition
 ORDER BY s.graph, s.stream, s.source_partition;

-- name: look_at_units
-- Reads each source partition whose newest record is of the first year of the epoch. Zero rows: there is none.
SELECT p.graph, p.computation AS stream, p.source_partition, (e.value ->> 'newest_event_time')::bigint AS newest_event_time,
       (e.value ->> 'arrived_at')::bigint AS arrived_at
  FROM mill.entries AS e JOIN mill.places AS p USING (interval_id)
 WHERE e.kind = 'position' AND e.namespace = 'source'
   AND (e.value ->> 'newest_event_time')::bigint BETWEEN 1 AND 31622400000000
 ORDER BY p.graph, p.computation, p.source_partition;

-- name: look_at_audits
-- Sums up the audited hours of each result table. `behind_s` is how much event time has become final since the newest
-- hour that a service has audited; null if the table has ended, or only commands have audited it. Zero rows: there were
-- no audits.
SELECT a.graph, a.result_table, a.hours, a.differences, a.hours_that_differ, a.first_hour,
       CASE WHEN isfinite(w.low_watermark) THEN
            extract(epoch FROM w.low_watermark - r.allowed_lateness - interval '1 hour' - a.newest)::float8 END AS behind_s
  FROM (SELECT graph, result_table, count(*)::bigint AS hours, sum(differences)::bigint AS differences,
               count(*) FILTER (WHERE differences > 0)::bigint AS hours_that_differ,
               min(hour) FILTER (WHERE differences > 0)::text AS first_hour,
               max(hour) FILTER (WHERE by_service) AS newest
          FROM millpy.audits GROUP BY graph, result_table) AS a
  JOIN millpy.result_tables AS r ON r.graph = a.graph AND r.name = a.result_table
 CROSS JOIN LATERAL (SELECT min(low_watermark) AS low_watermark FROM millpy.watermarks
                      WHERE graph = a.graph AND computation = r.computation) AS w
 ORDER BY a.graph, a.result_table;
