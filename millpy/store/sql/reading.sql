-- What an owner reads, all in one snapshot (a REPEATABLE READ transaction that has locked mill.deltas first, so
-- that no slot is emptied under it).

-- name: lock_deltas
-- Keeps slots from being emptied until the end of the transaction. TRUNCATE is invisible to snapshots.
LOCK TABLE mill.deltas IN ACCESS SHARE MODE;

-- name: read_headers
-- Zero rows: no such interval.
SELECT interval_id, sequencer, bundle, folded_bundle, input_watermark, low_watermark, processing_floor,
       (SELECT count(*) FROM (SELECT FROM mill.keyed AS k WHERE k.interval_id = i.interval_id AND k.kind = 'state'
                               LIMIT %(state_rows_max)s::bigint + 1) AS counted) AS states
  FROM mill.intervals AS i WHERE interval_id = ANY (%(intervals)s);

-- name: read_cursors
-- Zero rows: these consumers have no producer.
SELECT consumer, producer, seq, watermark FROM mill.cursors WHERE consumer = ANY (%(intervals)s);

-- name: read_last_segments
-- Zero rows: nothing was ever written.
SELECT producer, subscription_id, seq FROM mill.last_segments WHERE producer = ANY (%(intervals)s);

-- name: read_deltas
-- Unfolded documents after a bundle, oldest first. Zero rows: everything is folded.
SELECT d.interval_id, d.bundle, d.document::text AS document
  FROM mill.intervals AS i
  JOIN unnest(%(intervals)s, %(afters)s) AS e (interval_id, after) ON e.interval_id = i.interval_id
  JOIN mill.deltas AS d ON d.interval_id = i.interval_id AND d.bundle > greatest(i.folded_bundle, e.after)
 ORDER BY d.interval_id, d.bundle;

-- name: read_keyed
-- Folded rows; `with_state` names the intervals whose state is read too. Zero rows: nothing is folded.
SELECT interval_id, kind, namespace, key, subkey, key_hash, fire_at, value
  FROM mill.keyed
 WHERE interval_id = ANY (%(intervals)s) AND kind <> 'state'
   AND kind IN ('timer', 'window', 'position', 'counter', 'parked', 'fleet')
UNION ALL
SELECT interval_id, kind, namespace, key, subkey, key_hash, fire_at, value
  FROM mill.keyed
 WHERE interval_id = ANY (%(with_state)s) AND kind = 'state';

-- name: read_folded_bundle
-- Zero rows: the grant is stale.
SELECT bundle, folded_bundle FROM mill.intervals WHERE interval_id = %(interval)s AND sequencer = %(sequencer)s;

-- name: load_state
-- Folded state of some keys. Zero rows: none is folded.
SELECT k.namespace, k.key, k.subkey, k.key_hash, k.fire_at, k.value
  FROM unnest(%(keys)s) AS asked (key)
  JOIN mill.keyed AS k
    ON k.interval_id = %(interval)s AND k.kind = 'state'
   AND hashtextextended(k.key, 0) = hashtextextended(asked.key COLLATE "C", 0)
   AND k.key = asked.key;

-- name: load_dedupe_runs
-- Runs that still matter by the latest dedupe clock, oldest first. Zero rows: nothing was seen within the horizon.
SELECT r.ids, r.times, r.expires_at, r.clock, r.whole
  FROM mill.dedupe_runs AS r
 WHERE r.interval_id = %(interval)s
   AND r.expires_at >= (SELECT max(l.clock) FROM mill.dedupe_runs AS l WHERE l.interval_id = %(interval)s)
   AND r.bundle >= coalesce((SELECT max(l.bundle) FROM mill.dedupe_runs AS l WHERE l.interval_id = %(interval)s AND l.whole), 0)
 ORDER BY r.bundle;
