-- name: turn_ring
-- Returns true when a new epoch has begun. Always one row.
SELECT mill.turn_ring(%(ring)s, %(epoch_s)s, %(epoch_bytes)s);

-- name: find_unneeded_slots
-- Finds filled slots that are no longer needed. Zero rows: there are none.
SELECT ring, slot FROM mill.epochs WHERE state = 'filled' AND mill.unneeded(ring, slot) ORDER BY ring, started_at;

-- name: free_slot
-- Returns true when the slot is empty now. Fails with 55P03 when writers or readers hold a lock. Always one row.
SELECT mill.free_slot(%(ring)s, %(slot)s);

-- name: make_partitions
-- Makes partitions for rows of these times. Returns all ranges of the table. Zero rows: the table was dropped.
SELECT range_lo, range_hi FROM mill.make_partitions(%(table_id)s, %(instants)s);

-- name: drop_partitions
-- Drops partitions that are older than the table's retention. Always one row.
SELECT dropped, kept_because FROM mill.drop_partitions(%(table_id)s);

-- name: look_at_references
-- Finds foreign keys to result tables with a retention, and to their histories, and whether the owner of the result table
-- may look for rows that refer to it. Zero rows: there are none.
SELECT c.confrelid::regclass::text AS result_table, c.conrelid::regclass::text AS referring, c.conname::text AS name,
       has_table_privilege(r.relowner, c.conrelid, 'SELECT') AS is_read, r.relowner::regrole::text AS owner
  FROM mill.result_tables AS t
  JOIN mill.graphs AS g USING (graph_id)
 CROSS JOIN (VALUES (''), ('_history')) AS e (ending)
  JOIN pg_constraint AS c
    ON c.contype = 'f' AND c.conparentid = 0 AND c.confrelid = to_regclass(quote_ident(g.name) || '.' || quote_ident(t.name || e.ending))
  JOIN pg_class AS r ON r.oid = c.confrelid
 WHERE t.retention_us IS NOT NULL
 ORDER BY 1, 2, 3;

-- name: read_backlog
-- Counts records and bytes above the cursors by producing computation, from the stored slices; those of some consumers
-- are left out.
SELECT p.name, coalesce(sum(pending.records), 0)::bigint AS records, coalesce(sum(pending.bytes), 0)::bigint AS bytes
  FROM mill.computations AS p
  JOIN mill.streams AS t ON t.producer_id = p.computation_id
  JOIN mill.subscriptions AS u ON u.stream_id = t.stream_id
  JOIN mill.intervals AS i ON i.computation_id = p.computation_id
  JOIN mill.intervals AS c ON c.computation_id = u.consumer_id
  JOIN mill.computations AS n ON n.computation_id = u.consumer_id AND n.name <> ALL (%(without)s)
  JOIN mill.cursors AS k ON k.consumer = c.interval_id AND k.producer = i.interval_id
  LEFT JOIN LATERAL (
       SELECT sum(s.records[c.place + 1]) AS records,
              sum(s.ends[c.place + 1] - coalesce(s.ends[c.place], 0)) AS bytes
         FROM mill.segments AS s
        WHERE k.seq < i.bundle AND s.subscription_id = u.subscription_id AND s.producer = i.interval_id AND s.seq > k.seq
       ) AS pending ON true
 WHERE p.graph_id = %(graph_id)s
 GROUP BY p.name;

-- name: read_finished
-- Tells whether every interval has reached the end, its outbox is delivered, and no replay or release is requested;
-- those of some computations are left out. Always one row.
SELECT coalesce(bool_and(i.low_watermark >= 4611686018427387904
                         AND NOT EXISTS (SELECT FROM mill.dead_letters AS d WHERE d.interval_id = i.interval_id AND d.state = 'requested')
                         AND NOT EXISTS (SELECT FROM mill.late_records AS l WHERE l.interval_id = i.interval_id AND l.state = 'requested')
                         AND NOT EXISTS (SELECT FROM mill.outbox AS o WHERE o.interval_id = i.interval_id)
                         AND NOT EXISTS (SELECT FROM mill.refused_messages AS m WHERE m.interval_id = i.interval_id)
                         AND NOT EXISTS (SELECT FROM mill.releases AS r WHERE r.interval_id = i.interval_id)),
                false)
  FROM mill.intervals AS i JOIN mill.computations AS c USING (computation_id)
 WHERE i.graph_id = %(graph_id)s AND c.name <> ALL (%(without)s);

-- name: append_events
-- Zero rows: nothing was sent.
INSERT INTO mill.events (graph_id, kind, detail)
SELECT %(graph_id)s, kind, detail FROM unnest(%(kinds)s, %(details)s::jsonb[]) AS e (kind, detail);

-- name: hint
-- Hints that there is something to read. Always one row.
SELECT pg_notify(%(channel)s, %(sender)s);

-- name: read_queue_usage
-- Reads how full the notification queue is. This also makes the server discard notifications that every listener has
-- read: otherwise a full queue stays full after the transaction that held it up has ended. Always one row.
SELECT pg_notification_queue_usage() AS usage;

-- name: state_sources
-- Records which sources are quiet. Zero rows: nothing has changed.
INSERT INTO mill.source_states AS s (interval_id, quiet)
SELECT interval_id, quiet <> 0 FROM unnest(%(intervals)s, %(quiets)s) AS e (interval_id, quiet)
    ON CONFLICT (interval_id) DO UPDATE SET quiet = excluded.quiet WHERE s.quiet <> excluded.quiet;

-- name: read_sources
-- Reads the watermark and state of all source partitions of a graph. Zero rows: the graph has no source.
SELECT i.interval_id, i.low_watermark, coalesce(s.quiet, false) AS quiet
  FROM mill.computations AS c
  JOIN mill.intervals AS i USING (computation_id)
  LEFT JOIN mill.source_states AS s USING (interval_id)
 WHERE c.graph_id = %(graph_id)s AND c.kind = 'injector'
 ORDER BY i.interval_id;
