-- name: register_worker
-- Registers a worker. Zero rows: it does not know the deployed version of the graph, or is of the other engine.
INSERT INTO mill.workers (worker_id, graph_id, graph_version, computations, engine, host, pid, lease_deadline, lease_s)
SELECT %(worker_id)s, g.graph_id, g.version, %(computations)s, g.engine, %(host)s, %(pid)s,
       clock_timestamp() + make_interval(secs => %(ttl_s)s), %(ttl_s)s
  FROM mill.graphs AS g
 WHERE g.graph_id = %(graph_id)s AND g.version = %(graph_version)s AND g.engine = %(engine)s
ON CONFLICT (worker_id) DO UPDATE
   SET graph_id = excluded.graph_id, graph_version = excluded.graph_version, computations = excluded.computations,
       engine = excluded.engine, host = excluded.host, pid = excluded.pid,
       lease_deadline = excluded.lease_deadline, lease_s = excluded.lease_s;

-- name: disown
-- Takes all intervals from a worker that registers. Zero rows: it owned nothing.
UPDATE mill.intervals AS i SET worker_id = NULL, sequencer = i.sequencer + 1
  FROM (SELECT interval_id FROM mill.intervals WHERE worker_id = %(worker_id)s
         ORDER BY interval_id FOR NO KEY UPDATE) AS mine
 WHERE i.interval_id = mine.interval_id;

-- name: forget_workers
-- Deletes workers that own nothing and whose lease expired more than an hour ago. Zero rows: there are none.
DELETE FROM mill.workers AS w
 WHERE w.lease_deadline < clock_timestamp() - interval '1 hour'
   AND NOT EXISTS (SELECT FROM mill.intervals AS i WHERE i.worker_id = w.worker_id);

-- name: record_backend
-- Records the backend that commits for a worker; runs on that connection. Zero rows: the worker is not registered.
UPDATE mill.workers SET backend_pid = a.pid, backend_start = a.backend_start
  FROM pg_stat_activity AS a
 WHERE worker_id = %(worker_id)s AND a.pid = pg_backend_pid();

-- name: this_backend
-- Reads the identity of this connection's backend. Always one row.
SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid();

-- name: is_at_work
-- Tells whether a backend works for its client instead of waiting for it. Zero rows: the backend does not exist.
SELECT state = 'active' AND coalesce(wait_event, '') NOT IN ('ClientRead', 'ClientWrite')
  FROM pg_stat_activity WHERE pid = %(backend_pid)s;

-- name: read_server
-- Reads the start time of this server and the database's number. They differ on another server (a promoted standby, a
-- copy, a restored backup), after a restart in the same directory, and in a database that was restored on this server
-- and renamed. Needs no rights. Always one row.
SELECT extract(epoch FROM pg_postmaster_start_time())::text || '/' || oid::text
  FROM pg_database WHERE datname = current_database();

-- name: renew_lease
-- Renews a lease, notes what the worker reports, and tells whether an operator has requested that the worker drains.
-- Zero rows: the lease has expired, or the worker is unknown.
UPDATE mill.workers AS w
   SET lease_deadline = clock_timestamp() + make_interval(secs => %(ttl_s)s), memory_bytes = %(memory_bytes)s,
       turn_p50_s = %(turn_p50_s)s, turn_p99_s = %(turn_p99_s)s, commit_p50_s = %(commit_p50_s)s,
       commit_p99_s = %(commit_p99_s)s
 WHERE w.worker_id = %(worker_id)s AND w.lease_deadline > clock_timestamp()
RETURNING EXISTS (SELECT FROM mill.drain_requests AS d WHERE d.worker_id = w.worker_id);

-- name: forget_worker
-- Zero rows: the worker is unknown.
DELETE FROM mill.workers WHERE worker_id = %(worker_id)s;

-- name: read_ownership
-- Reads live workers (interval_id null) and intervals (computations null) in one snapshot, with the graph's version.
SELECT w.worker_id, w.computations, NULL::bigint AS interval_id, true AS live, w.graph_version
  FROM mill.workers AS w
 WHERE w.graph_id = %(graph_id)s AND mill.alive(w.lease_deadline, w.lease_s)
UNION ALL
SELECT i.worker_id, NULL, i.interval_id, mill.alive(w.lease_deadline, w.lease_s), i.graph_version
  FROM mill.intervals AS i LEFT JOIN mill.workers AS w USING (worker_id)
 WHERE i.graph_id = %(graph_id)s
 ORDER BY interval_id;

-- name: claim_intervals
-- Claims unlocked intervals of the graph version that the worker knows, if its engine computes the graph: those without a live owner, and those that the
-- worker owns already (the answer to an earlier claim was lost). Zero rows: none is free, or the worker's lease has
-- expired.
UPDATE mill.intervals AS i SET worker_id = %(worker_id)s, sequencer = i.sequencer + 1
  FROM (SELECT h.interval_id FROM mill.intervals AS h
         WHERE h.interval_id = ANY (%(intervals)s)
           AND (h.worker_id = %(worker_id)s OR NOT mill.alive(h.worker_id))
         ORDER BY h.interval_id FOR NO KEY UPDATE SKIP LOCKED) AS free
 WHERE i.interval_id = free.interval_id AND mill.alive(%(worker_id)s)
   AND i.graph_version = (SELECT w.graph_version FROM mill.workers AS w JOIN mill.graphs AS g USING (graph_id, engine)
                           WHERE w.worker_id = %(worker_id)s)
RETURNING i.interval_id, i.sequencer;

-- name: read_engine
-- Reads what computes a generation. Zero rows: the graph has been dropped.
SELECT engine FROM mill.graphs WHERE graph_id = %(graph_id)s;

-- name: is_begun
-- Tells whether any interval of a graph has a commit. Always one row.
SELECT EXISTS (SELECT FROM mill.intervals WHERE graph_id = %(graph_id)s AND bundle > 0);

-- name: give_to_spark
-- Gives a generation that workers have not begun to Spark. Zero rows: they have.
UPDATE mill.graphs AS g SET engine = 'spark'
 WHERE g.graph_id = %(graph_id)s
   AND (g.engine = 'spark' OR NOT EXISTS (SELECT FROM mill.intervals AS i WHERE i.graph_id = g.graph_id AND i.bundle > 0))
RETURNING g.engine;

-- name: disown_graph
-- Takes all intervals of a graph from their owners. Waits for commits and claims in flight. Always at least one row.
UPDATE mill.intervals AS i SET worker_id = NULL, sequencer = i.sequencer + 1
  FROM (SELECT h.interval_id FROM mill.intervals AS h
         WHERE h.graph_id = %(graph_id)s ORDER BY h.interval_id FOR NO KEY UPDATE) AS held
 WHERE i.interval_id = held.interval_id;

-- name: count_held
-- Locks a graph's intervals and counts them, and those under these grants. Always one row.
WITH held AS MATERIALIZED (
    SELECT interval_id, sequencer FROM mill.intervals WHERE graph_id = %(graph_id)s ORDER BY interval_id FOR NO KEY UPDATE
)
SELECT count(*), count(g.interval_id)
  FROM held AS h LEFT JOIN unnest(%(intervals)s, %(sequencers)s) AS g (interval_id, sequencer)
    ON g.interval_id = h.interval_id AND g.sequencer = h.sequencer;

-- name: give_to_workers
-- Gives a generation to workers, and forgets Spark's drivers, which would count as workers until their leases expire.
-- Zero rows: no driver is registered.
WITH given AS (UPDATE mill.graphs SET engine = 'workers' WHERE graph_id = %(graph_id)s)
DELETE FROM mill.workers WHERE graph_id = %(graph_id)s AND engine = 'spark';

-- name: seize_intervals
-- Takes intervals over from their owners; waits for their commits in flight. Zero rows: the worker's lease has expired,
-- or it does not know the deployed version.
UPDATE mill.intervals AS i SET sequencer = 1 + i.sequencer, worker_id = %(worker_id)s
  FROM (SELECT h.interval_id FROM mill.intervals AS h
         WHERE h.interval_id = ANY (%(intervals)s) ORDER BY h.interval_id FOR NO KEY UPDATE) AS held
 WHERE i.interval_id = held.interval_id AND mill.alive(%(worker_id)s)
   AND i.graph_version = (SELECT k.graph_version FROM mill.workers AS k JOIN mill.graphs AS g USING (graph_id, engine)
                           WHERE k.worker_id = %(worker_id)s)
RETURNING i.interval_id, i.sequencer;

-- name: find_locked
-- Finds intervals without a live owner that a claim left out because they are locked. Zero rows: there are none.
SELECT interval_id FROM mill.intervals
 WHERE interval_id = ANY (%(intervals)s) AND mill.alive(%(claimer)s)
   AND (worker_id = %(claimer)s OR NOT mill.alive(worker_id));

-- name: wait_for_rows
-- Waits for the commits that lock these headers. Fails with 55P03 when they take too long.
SELECT interval_id FROM mill.intervals WHERE interval_id = ANY (%(intervals)s) ORDER BY interval_id FOR NO KEY UPDATE;

-- name: terminate_owners
-- Ends the transactions in which expired owners of these intervals are frozen. Zero rows: there is no such backend.
SELECT pg_terminate_backend(a.pid)
  FROM mill.workers AS w
  JOIN pg_stat_activity AS a ON a.pid = w.backend_pid AND a.backend_start = w.backend_start
 WHERE w.worker_id IN (SELECT i.worker_id FROM mill.intervals AS i WHERE i.interval_id = ANY (%(intervals)s))
   AND NOT mill.alive(w.worker_id) AND a.xact_start IS NOT NULL;

-- name: find_expired
-- Finds owners whose lease has expired; one that is frozen inside a commit is among them. Zero rows: there are none.
SELECT w.host, w.pid, w.backend_pid FROM mill.workers AS w
 WHERE w.graph_id = %(graph_id)s AND NOT mill.alive(w.worker_id)
   AND EXISTS (SELECT FROM mill.intervals AS i WHERE i.worker_id = w.worker_id) ORDER BY w.lease_deadline DESC;

-- name: terminate_backends
-- Ends connections that this process has lost. Zero rows: they have ended already.
SELECT pg_terminate_backend(a.pid)
  FROM unnest(%(pids)s, %(starts)s) AS lost (pid, started)
  JOIN pg_stat_activity AS a ON a.pid = lost.pid AND a.backend_start = lost.started;

-- name: release_intervals
-- Zero rows: none of the grants was current.
UPDATE mill.intervals AS i SET worker_id = NULL, sequencer = i.sequencer + 1
  FROM (SELECT h.interval_id FROM mill.intervals AS h
          JOIN unnest(%(intervals)s, %(sequencers)s) AS g (interval_id, sequencer)
            ON g.interval_id = h.interval_id AND g.sequencer = h.sequencer
         WHERE h.worker_id = %(worker_id)s
         ORDER BY h.interval_id FOR NO KEY UPDATE OF h) AS mine
 WHERE i.interval_id = mine.interval_id;

-- name: raise_sequencers
-- Raises the sequencers of a worker's own grants; waits for a commit in flight. Zero rows: none of the grants is
-- current.
UPDATE mill.intervals AS i SET sequencer = i.sequencer + 1
  FROM (SELECT h.interval_id FROM mill.intervals AS h
          JOIN unnest(%(intervals)s, %(sequencers)s) AS g (interval_id, sequencer)
            ON g.interval_id = h.interval_id AND g.sequencer = h.sequencer
         WHERE h.worker_id = %(worker_id)s
         ORDER BY h.interval_id FOR NO KEY UPDATE OF h) AS mine
 WHERE i.interval_id = mine.interval_id
RETURNING i.interval_id, i.sequencer;

-- name: server_now
-- Reads the server's clock, µs since the epoch. Always one row.
SELECT mill.instant(clock_timestamp());
