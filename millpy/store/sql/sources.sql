-- name: report_sources
-- Stores whether source partitions are connected, if the worker owns them. A new owner that finds the broker away knows
-- no earlier time than its own first attempt, so the time of the owner before stays.
INSERT INTO mill.source_connections AS s (interval_id, worker_id, connected, since, why, attempts, address)
SELECT n.interval_id, i.worker_id, n.connected, mill.moment(n.since), n.why, n.attempts, n.address
  FROM unnest(%(intervals)s::bigint[], %(connected)s::boolean[], %(since)s::bigint[], %(reasons)s::text[],
              %(attempts)s::bigint[], %(addresses)s::text[]) AS n (interval_id, connected, since, why, attempts, address)
  JOIN mill.intervals AS i ON i.interval_id = n.interval_id AND i.worker_id = %(worker_id)s
ON CONFLICT (interval_id) DO UPDATE
   SET since = CASE WHEN s.connected OR excluded.connected THEN excluded.since ELSE least(s.since, excluded.since) END,
       worker_id = excluded.worker_id, connected = excluded.connected, why = excluded.why,
       attempts = excluded.attempts, address = excluded.address, reported_at = clock_timestamp();

-- name: source_addresses
-- Reads where the live owners of source partitions are reached. Zero rows: nowhere.
SELECT s.interval_id, s.address
  FROM mill.source_connections AS s
  JOIN mill.intervals AS i ON i.interval_id = s.interval_id AND i.worker_id = s.worker_id
  JOIN mill.workers AS w ON w.worker_id = i.worker_id AND mill.alive(w.lease_deadline, w.lease_s)
 WHERE s.interval_id = ANY (%(intervals)s::bigint[]) AND s.address <> '';

-- name: look_at_connections
-- Reads the sources with partitions whose live owners have no connection. Zero rows: all are connected.
SELECT s.graph, s.stream, count(*) AS partitions, min(s.connection_since) AT TIME ZONE 'UTC' AS since, sum(s.attempts)::bigint AS attempts,
       min(s.disconnected_because) AS why
  FROM millpy.sources AS s WHERE s.state = 'disconnected' GROUP BY s.graph, s.stream ORDER BY 1, 2;
